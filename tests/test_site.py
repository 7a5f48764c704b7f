"""Tests of the site: a notebook's page, links, navigation, and, at night, every page in a real browser."""

import os
import shutil
import subprocess
import tarfile
import tempfile

import nbformat
import pytest
from playwright.sync_api import sync_playwright

from labs.kit.commands.doctor import GET_BROWSER, find_browser
from tests.test_browser import ARGUMENTS
from tools.site import pages
from tools.site.pages import ROOT, Site

AXE = "axe-core@4.14.1"  # npm's name of the checker of accessibility
SERIOUS = """async () => (await axe.run({preload: false})).violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => each.id + ": " + each.nodes[0].html)"""
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
    assert all(cells[places[cell.id]].outputs == cell.outputs for cell in unchanged)


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


@pytest.mark.soak
def test_every_page_is_whole_in_a_browser(tmp_path):
    """Open each page from the file system, in the light and in the dark, with all folds open, at three widths."""
    if not (path := find_browser()) or not shutil.which("npm"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs npm and a browser. {GET_BROWSER}")
    subprocess.run(["make", "site"], cwd=ROOT, check=True)
    subprocess.run(["npm", "pack", AXE], cwd=tmp_path, check=True)
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        axe = package.extractfile("package/axe.min.js").read().decode()
    site, wrong = ROOT / "build/site", []
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short,  # for the browser's socket
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=path, args=ARGUMENTS, env={**os.environ, "HOME": short, "TMPDIR": short}
        ) as browser,
    ):
        page = browser.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda sent: wrong.append(sent.url) if sent.url.startswith("http") else None)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for file in sorted(site.rglob("*.html")):
                page.goto(file.as_uri())
                page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                for width in (1400, 1024, 390):
                    page.set_viewport_size({"width": width, "height": 1000})
                    seen = page.evaluate(SEEN)
                    if seen != {"wider": 0, "unseen": []}:
                        wrong.append(f"{file.name}, {width} pixels wide, {scheme}: {seen}")
                page.evaluate(axe)
                wrong += [f"{file.name}, {scheme}: {sentence}" for sentence in page.evaluate(SERIOUS)]
    assert wrong == []
