// A box that scrolls can be reached by the keyboard.
function reach() {
  for (const box of document.querySelectorAll("article pre, article .output, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true); // a fold that was opened
