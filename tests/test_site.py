"""Tests of the site: a notebook's page, links, navigation, and, at night, every page in a real browser."""

import random
import shutil
import subprocess
import tarfile
from urllib.parse import unquote

import nbformat
import pytest
from playwright.sync_api import expect

from bench.site import MOVE
from tests.test_browser import chromium
from tools import explorers
from tools.site import pages
from tools.site.pages import ROOT, Site

EXPLORERS = {name: (statements, path) for name, statements, path in explorers.sources()}
AXE = "axe-core@4.14.1"  # npm's name of the checker of accessibility
SERIOUS = """async rules => (await axe.run({preload: false, resultTypes: ["violations"], ...rules})).violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => each.id + ": " + each.nodes[0].html)"""
SHIFTS = """window.shifts = 0;
new PerformanceObserver(list => list.getEntries().forEach(each => { window.shifts += each.value }))
    .observe({type: "layout-shift", buffered: true});"""
SHIFTED = """() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))
    .then(() => Math.round(100 * shifts) / 100)"""
SEEN = """() => ({
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    unseen: [...document.images].filter(each => !each.alt || !each.naturalWidth).map(each => each.src),
})"""


def read(name):
    return nbformat.read(ROOT / f"{name}.ipynb", as_version=4)


def test_an_exercise_shows_its_stub_then_its_folded_answer_then_what_it_printed(tmp_path):
    solved, learners = read("solutions/03_ddp"), {cell.id: cell.source for cell in read("notebooks/03_ddp").cells}
    cells = pages.page(read("solutions/03_ddp"), Site(tmp_path), "03_ddp").cells
    places = {cell.id: place for place, cell in enumerate(cells)}
    exercises = [cell for cell in solved.cells if cell.source != learners[cell.id]]
    assert len(exercises) >= 4
    for cell in exercises:
        stub, answer, printed = cells[places[cell.id] :][:3]
        assert stub.source == learners[cell.id] and not stub.outputs
        assert answer.source.startswith("<details><summary>") and "SOLUTION" not in answer.source
        whole = "\n".join(line for line in cell.source.splitlines() if "SOLUTION" not in line)
        assert whole in answer.source and whole != stub.source
        assert printed.outputs == cell.outputs and "remove-input" in printed.metadata.tags
    unchanged = [cell for cell in solved.cells if cell.cell_type == "code" and cell not in exercises]
    playing = [cell for cell in unchanged if pages.has_explorer(cell)]
    assert all(cells[places[cell.id]].outputs == cell.outputs for cell in unchanged if cell not in playing)
    assert len(playing) == 2
    for cell in playing:
        stored, shown = (each.outputs[-1].data["text/html"] for each in (cell, cells[places[cell.id]]))
        assert stored in shown and '<input type="range"' in shown


def test_a_link_leads_to_the_page_of_its_file(tmp_path):
    site = Site(tmp_path)
    text = "[a](../labs/ddp.py) [b](03_ddp.ipynb#native) [c](https://pytorch.org) [d](../README.md) [e](../labs/zero)"
    linked = site.relink(
        text + '\n<img alt="two\nlines" src="../images/job.svg">\n```\n[f](g)\n```\n', "solutions/00.ipynb", "00.ipynb"
    )
    assert "two lines" in linked and linked.split() == [
        *("[a](labs/ddp.py.md)", "[b](03_ddp.ipynb#native)", "[c](https://pytorch.org)", "[d](index.md)"),
        *(
            "[e](labs/zero/__init__.py.md)",
            "<img",
            'alt="two',
            'lines"',
            'src="images/job.svg">',
            "```",
            "[f](g)",
            "```",
        ),
    ]
    site.write_linked()
    assert (ROOT / "labs/ddp.py").read_text().strip() in (tmp_path / "labs/ddp.py.md").read_text()
    assert (tmp_path / "images/job.svg").exists() and (tmp_path / "labs/zero/__init__.py.md").exists()


def test_every_notebook_stands_in_the_navigation():
    names = [path.stem for path in (ROOT / "solutions").glob("*.ipynb")]
    navigation = pages.navigation(names, [])
    assert [name for name in names if navigation.count(f"<{name}>") != 1] == []


def test_every_explorer_is_stored():
    stored = list(pages.EXPLORERS.iterdir())
    assert {path.stem for path in stored} == EXPLORERS.keys(), "run `make images`"
    assert sum(path.stat().st_size for path in stored) < 10e6


@pytest.mark.parametrize("name", [name for name, (made, _) in EXPLORERS.items() if not explorers.is_measured(made)])
def test_the_stored_pictures_of_an_explorer_are_those_that_it_draws(name):
    """Compare two random points; pictures of recordings differ from run to run."""
    seed = random.randrange(10**6)
    grid = explorers.Grid(name, explorers.make(*EXPLORERS[name]))
    wrong = explorers.wrong_at(pages.EXPLORERS / f"{name}.js", grid, 2, random.Random(seed))
    assert not wrong, f"{name} draws another picture at {wrong} (seed {seed}): run `make images`"


def test_an_explorer_plays_on_a_page_without_a_kernel(tmp_path):
    """Move a slider by the keyboard, and a menu: the explorer's picture is shown, with the changed terms marked."""
    name = "01_one_device_1"
    stored, page_file = pages.EXPLORERS / f"{name}.js", tmp_path / "page.html"
    shutil.copy(ROOT / "tools/site/static/explorer.js", tmp_path)
    (tmp_path / "explorers").mkdir()
    shutil.copy(stored, tmp_path / "explorers")
    html = pages.player(name, pages.stored_explorer(stored), "still")
    page_file.write_text(f'<meta charset="utf-8">{html}<script src="explorer.js"></script>', encoding="utf-8")
    made = explorers.make(*EXPLORERS[name])
    with chromium() as browser:
        page = browser.new_page()
        page.goto(page_file.as_uri())
        page.get_by_label("sequences at once").press("ArrowRight")
        page.get_by_label("precision").select_option("mixed precision")
        expect(page.locator(".stage mark")).to_have_text(["2 + 2 + 12", "5.9 MiB"])
        expect(page.locator("output").first).to_have_text("2")
        shown = page.locator(".stage img").get_attribute("src")
    drawn = made.picture(**{**made.settings, "batch": 2, "precision": "mixed"}).picture
    assert unquote(shown.removeprefix("data:image/svg+xml,")) == drawn.svg


@pytest.mark.soak
def test_every_page_is_whole_in_a_browser(tmp_path):
    """Open each page from the disk at three widths, then look at it in the light and in the dark, with folds open."""
    subprocess.run(["make", "site"], cwd=ROOT, check=True)
    subprocess.run(["npm", "pack", AXE], cwd=tmp_path, check=True)
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        axe = package.extractfile("package/axe.min.js").read().decode()
    site, wrong = ROOT / "build/site", []
    with chromium() as browser:
        page = browser.new_page(reduced_motion="reduce")
        page.add_init_script(SHIFTS)
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda sent: wrong.append(sent.url) if sent.url.startswith("http") else None)
        for file in sorted(site.rglob("*.html")):
            for width in (390, 1024, 1400):
                page.set_viewport_size({"width": width, "height": 1000})
                page.goto(file.as_uri())
                shifted = page.evaluate(SHIFTED)
                page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                if (seen := page.evaluate(SEEN) | {"shifted": shifted}) != {"wider": 0, "unseen": [], "shifted": 0}:
                    wrong.append(f"{file.relative_to(site)}, {width} pixels wide: {seen}")
            page.evaluate(MOVE, 1)
            page.evaluate(axe)
            for scheme, rules in {"light": {}, "dark": {"runOnly": ["color-contrast"]}}.items():
                page.emulate_media(color_scheme=scheme)
                found = page.evaluate(SERIOUS, rules)
                wrong += [f"{file.relative_to(site)}, {scheme}: {sentence}" for sentence in found]
    assert wrong == []
