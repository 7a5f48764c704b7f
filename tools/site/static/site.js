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

// So can the buttons that open the navigation on a narrow screen.
for (const button of document.querySelectorAll(".nav-overlay-icon, .toc-overlay-icon")) {
  button.role = "button";
  button.ariaLabel = document.getElementById(button.htmlFor).ariaLabel;
  button.tabIndex = 0;
  button.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    button.click();
  });
}

// A page that is opened from the disk must not fetch others, so a search lists the pages that it found without excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
