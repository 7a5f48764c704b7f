// An explorer on a page: when a control moves, its picture is looked up among those that tools/explorers.py has stored.
window.explorers = {}; // each file of explorers/ calls explorers[its name](what it stores)
const folder = new URL("explorers/", document.currentScript.src);

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(stream).text()).split("\0");
}

async function load(name) {
  const data = await new Promise((resolve, reject) => {
    window.explorers[name] = resolve;
    const script = document.createElement("script"); // which a page may load from the disk, unlike other files
    script.src = new URL(`${name}.js`, folder);
    script.onerror = () => reject(new Error(`${script.src} could not be loaded`));
    document.head.append(script);
  });
  return { ...data, elements: await inflate(data.elements), pictures: await inflate(data.pictures) };
}

// Return the HTML of a picture: a letter stands for an element, and an SVG for the address of an image.
function picture(stored, at) {
  const place = (letter) => letter.codePointAt(0) - (letter.codePointAt(0) < 0xd800 ? 1 : 0x801);
  const html = [...stored.pictures[at]].map((letter) => stored.elements[place(letter)]).join("");
  return html.replace(/\x01([^\x02]*)\x02/g, (_, svg) => `data:image/svg+xml,${encodeURIComponent(svg)}`);
}

function play(explorer) {
  const [form, stage] = [explorer.querySelector("form"), explorer.querySelector(".stage")];
  const inputs = [...form.querySelectorAll("input, select")];
  let loading, latest;
  const count = (input) => (input.options ? input.options.length : Number(input.max) + 1);
  const ready = () => (loading ??= load(explorer.dataset.name));

  function read(input) {
    if (input.options) return;
    input.ariaValueText = JSON.parse(input.dataset.values)[input.value];
    input.nextElementSibling.textContent = input.ariaValueText;
  }

  async function draw(moved) {
    const turn = (latest = {});
    read(moved);
    try {
      const stored = await ready();
      for (const [name, values] of Object.entries(stored.follow[moved.name] ?? {})) {
        form.elements[name].value = values[moved.value];
        read(form.elements[name]);
      }
      const next = document.createElement("div");
      next.innerHTML = picture(stored, inputs.reduce((at, input) => at * count(input) + Number(input.value), 0));
      for (const term of next.querySelectorAll("[data-of]")) {
        if (term.dataset.of.split(" ").includes(moved.name)) term.innerHTML = `<mark><u>${term.innerHTML}</u></mark>`;
      }
      await Promise.all([...next.querySelectorAll("img")].map((image) => image.decode()));
      if (turn === latest) stage.replaceChildren(...next.childNodes); // unless a control has moved again
    } catch (error) {
      stage.textContent = error.message;
    }
  }

  form.addEventListener("input", (event) => draw(event.target));
  form.addEventListener("submit", (event) => event.preventDefault());
  new IntersectionObserver((seen, observer) => {
    if (!seen.some((each) => each.isIntersecting)) return;
    observer.disconnect();
    ready().catch(() => {}); // draw says it
  }, { rootMargin: "600px" }).observe(explorer);

  const [button, film] = [form.querySelector("button"), inputs[0]];
  if (!button) return;
  let timer;
  function run(start) {
    clearInterval(timer);
    button.textContent = start ? "Pause" : "Play";
    timer = start && setInterval(next, Number(button.dataset.pause));
  }
  function next() {
    film.value = Number(film.value) + 1;
    draw(film);
    if (film.value === film.max) run(false);
  }
  button.addEventListener("click", () => {
    if (button.textContent === "Pause") return run(false);
    if (film.value === film.max) film.value = 0;
    draw(film);
    run(true);
  });
}

document.querySelectorAll(".explorer").forEach(play);
