"""The site's explorers: the seconds from a move of a control until the page has drawn the new picture.

The browser opens every page that has an explorer from the disk, and each control moves to random values.
"""

import statistics
import subprocess
from pathlib import Path

from bench.figure import Figure
from tests.test_browser import chromium

SITE = Path(__file__).resolve().parent.parent / "build/site"
MOVE = """async count => {
    const taken = [];
    for (const explorer of document.querySelectorAll(".explorer")) {
        explorer.scrollIntoView();
        await new Promise(done => setTimeout(done, 1000));  // as long as a reader takes to see the controls
        const stage = explorer.querySelector(".stage");
        for (const input of [...explorer.querySelectorAll("input, select")].flatMap(each => Array(count).fill(each))) {
            const values = input.options?.length ?? Number(input.max) + 1;
            const drawn = new Promise(done => new MutationObserver(done).observe(stage, {childList: true}));
            const start = performance.now();
            input.value = (Number(input.value) + 1 + Math.floor((values - 1) * Math.random())) % values;
            input.dispatchEvent(new Event("input", {bubbles: true}));
            await drawn;
            await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
            taken.push((performance.now() - start) / 1000);
            if (!stage.querySelector("img, table")) throw new Error(stage.textContent);
        }
    }
    return taken;
}"""


def figures(quick: bool) -> list[Figure]:
    subprocess.run(["make", "site"], cwd=SITE.parents[1], check=True)
    pages = [page for page in sorted(SITE.glob("*.html")) if 'class="explorer"' in page.read_text(encoding="utf-8")]
    samples = []
    with chromium() as browser:
        page = browser.new_page()
        for each in pages:
            page.goto(each.as_uri())
            samples += page.evaluate(MOVE, 10 if quick else 20)
    rank = statistics.quantiles(samples, n=20, method="inclusive")
    return [
        Figure("site: a control's move, 95 % within", rank[-1], rank[4], rank[14], len(samples), "s", "at most 0.1")
    ]
