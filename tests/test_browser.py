"""Tests of what a person sees: a real Chromium opens the JupyterLab that `make learn` starts.

The notebooks are copies in a temporary folder, as shipped.  JupyterLab has a home of its own, and the port and token
that it chose itself.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import expect, sync_playwright

from labs.kit import draw
from labs.kit.commands.doctor import GET_BROWSER, find_browser
from tests.depth import deepen
from tools import learn, notebooks, tracks

SECONDS = 1000  # Playwright counts in milliseconds
ARGUMENTS = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
ARGUMENTS += ["--disable-sync", "--disable-quic", *(["--no-sandbox"] if os.geteuid() == 0 else [])]

PICTURES = {
    "drawing": lambda: draw.messages([(0, 0, 1, 0), (1, 1, 2, 0)], 3),
    "wide drawing": lambda: draw.step([(0, 0, 1, 17)], 2, 1),
    "figure": lambda: draw.curves({"one device": [5.5, 4.0], "DDP": [5.5, 4.0]}),
}
SHOWN = """image => {
    const style = getComputedStyle(image.parentElement);
    return {alt: image.alt, loaded: image.complete && image.naturalWidth > 0,
            width: image.clientWidth, height: image.clientHeight,
            room: image.parentElement.clientWidth - parseInt(style.paddingLeft) - parseInt(style.paddingRight)};
}"""
TRUST = "() => window.jupyterapp.shell.currentWidget.content.widgets.some(cell => cell.model.trusted)"
SAVE = """async () => {
    const context = window.jupyterapp.shell.currentWidget.context;
    await context.ready;
    await context.save();
}"""

RUN_ALL = """() => {
    window.labs = "busy";
    window.jupyterapp.commands.execute("notebook:run-all-cells").then(
        () => { window.labs = "done" }, error => { window.labs = "failed: " + error });
}"""
CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model)
    .filter(model => model.type === "code")
    .map(model => ({source: model.sharedModel.source, count: model.executionCount,
                    tags: model.getMetadata("tags") || [],
                    errors: model.outputs.toJSON().filter(output => output.output_type === "error")
                                                  .map(output => output.ename + ": " + output.evalue)}))"""
# JupyterLab's promise ends at the first error, though a cell tagged raises-exception lets the others run on.
ENDED = f"""() => {{
    const cells = ({CELLS})();
    const failed = cell => cell.errors.length && !cell.tags.includes("raises-exception");
    return cells.every(cell => cell.count) || cells.some(failed);
}}"""
# Only one notebook is open at a time. The next one takes over its kernel, since starting another takes longer than most
# tests.
OPEN = """async path => {
    const open = [...window.jupyterapp.shell.widgets("main")];
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.model;
    open.forEach(widget => widget.dispose());
    await window.jupyterapp.commands.execute("docmanager:open", {path, kernel});
}"""
HIDDEN = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .filter(widget => widget.isHidden).map(widget => widget.model.sharedModel.source)"""
KERNEL = """async () => {
    const session = window.jupyterapp.shell.currentWidget.sessionContext;
    await session.ready;
    await session.session.kernel.info;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab over a copy of the notebooks, and return its address, token and folder."""
    folder, home = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("home")
    for name in ("notebooks", "solutions"):
        shutil.copytree(learn.ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.py", ".ipynb_checkpoints"))
    places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
    environment = learn.settings({**os.environ, "HOME": str(home), "JUPYTERLAB_SETTINGS_DIR": str(home / "settings")})
    environment |= {f"JUPYTER_{name}": str(home / place) for name, place in places.items()}
    environment |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    command = learn.command({}, sys.platform, root=os.geteuid() == 0, folder=folder)
    command += ["--expose-app-in-browser"]
    with (
        closing(taken(8888)),
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server,
    ):
        try:
            yield folder, printed_address(server)
        finally:
            server.terminate()
            server.communicate(timeout=300)


def taken(port: int) -> socket.socket:
    """Make sure that a port is in use, by us or by somebody else."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
        holder.listen()
    except OSError:
        pass  # somebody else has it, which is as good
    return holder


def printed_address(server: subprocess.Popen) -> re.Match:
    """Return the address that `make learn` prints where there is no display."""
    said = []
    for line in server.stderr:
        said.append(line)
        if address := re.search(
            r"http://127\.0\.0\.1:(?P<port>\d+)/lab/tree/(?P<path>\S+)\?token=(?P<token>\w+)", line
        ):
            return address
    raise AssertionError("JupyterLab ended without printing an address:\n" + "".join(said))


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@contextmanager
def chromium():
    """Yield a browser; skip the test where there is none, but not in CI."""
    path = find_browser()
    if path is None:
        reason = f"no Chromium or Chrome found, so no browser test runs. {GET_BROWSER}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with (
        # the path of the browser's socket must be short
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short,
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=path, args=ARGUMENTS, env={"HOME": short, **os.environ, "TMPDIR": short}
        ) as browser,
    ):
        yield browser


@pytest.fixture(scope="module")
def page(lab, browser):
    """Open the printed address."""
    _, address = lab
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    page.set_default_timeout(60 * SECONDS)
    page.goto(address[0])
    wait_for_notebook(page)
    return page


def wait_for_notebook(page) -> None:
    """Wait for a notebook, with a kernel."""
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook")
    page.evaluate(KERNEL)


def open_notebook(page, path: str) -> None:
    page.evaluate(OPEN, path)
    wait_for_notebook(page)


def run_all(page) -> list[dict]:
    """Run every cell, and return the code cells, each with its errors."""
    page.evaluate(RUN_ALL)
    page.wait_for_function("() => window.labs !== 'busy'", timeout=240 * SECONDS)
    assert page.evaluate("() => window.labs") == "done"
    page.wait_for_function(ENDED, timeout=240 * SECONDS)
    return page.evaluate(CELLS)


def assert_ran(cells: list[dict]) -> None:
    for cell in cells:
        assert not cell["errors"] or "raises-exception" in cell["tags"], f"{cell['errors']} in {cell['source']}"
        assert cell["count"], f"not run: {cell['source']}"


def move_first_slider(page) -> None:
    """Press an arrow key on the first slider, and see the picture beside it change."""
    widget = page.locator(".jp-OutputArea-output", has=page.locator(".noUi-handle")).first
    widget.scroll_into_view_if_needed()
    picture = widget.locator(".widget-html-content").first
    before = picture.inner_html()
    assert "<svg" in before or "<img" in before
    widget.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(picture).not_to_have_js_property("innerHTML", before, timeout=300 * SECONDS)


def test_the_printed_address_opens_the_first_notebook_whose_cells_run_and_whose_slider_moves(lab, page):
    _, address = lab
    assert address["port"] != "8888", "that port was taken"
    assert address["path"] == learn.FIRST
    assert page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path") == learn.FIRST
    assert_ran(run_all(page))
    move_first_slider(page)
    assert page.locator(".Toastify__toast").all_inner_texts() == [], "nothing covers the page"


def test_what_a_track_leaves_out_is_folded_and_runs(lab, page):
    folder, _ = lab
    texts = ["# A", "## Left out", "x = 1", "## Kept", "print(x)"]
    cells = [new_markdown_cell(text) if text[0] == "#" else new_code_cell(text) for text in texts]
    notebook = tracks.fold(new_notebook(cells=cells, metadata=notebooks.METADATA), ["Left out"])
    nbformat.write(notebook, folder / "notebooks/track.ipynb")
    open_notebook(page, "notebooks/track.ipynb")
    page.wait_for_function(f"() => ({HIDDEN})().length")
    assert_ran(run_all(page))
    assert page.evaluate(HIDDEN) == ["x = 1"]


def with_outputs(*outputs: dict) -> nbformat.NotebookNode:
    """Return a notebook as somebody else ran it: a cell for each of the outputs that are stored in it."""
    cells = [
        nbformat.v4.new_code_cell(
            f"picture({number})",
            execution_count=number,
            outputs=[nbformat.v4.new_output("execute_result", data=data, execution_count=number)],
        )
        for number, data in enumerate(outputs, 1)
    ]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebooks.METADATA)


@pytest.mark.parametrize("width", [1400, 1024])
def test_a_notebook_that_nobody_trusts_shows_its_pictures_in_any_window(lab, page, width):
    """Check that each has its alternative text, fits the room beside the sidebar, and is not distorted."""
    folder, _ = lab
    pictures = [picture() for picture in PICTURES.values()]
    notebooks.write(with_outputs(*(picture._repr_mimebundle_() for picture in pictures)), folder / "pictures.ipynb")
    page.set_viewport_size({"width": width, "height": 1400})
    open_notebook(page, "pictures.ipynb")
    assert not page.evaluate(TRUST)
    images = page.locator(".jp-OutputArea-output img")
    expect(images).to_have_count(len(pictures))
    for image, picture in zip(images.all(), pictures, strict=True):
        image.scroll_into_view_if_needed()
        shown = image.evaluate(SHOWN)
        assert shown["alt"] == picture.alt
        assert shown["loaded"]
        assert 100 < shown["width"] == min(picture.width, shown["room"])
        assert shown["height"] == pytest.approx(shown["width"] * picture.height / picture.width, abs=1)


NOTEBOOKS = sorted(path.stem for path in learn.ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("name", [*NOTEBOOKS[:2], *deepen(*NOTEBOOKS[2:])])
def test_opening_and_saving_a_notebook_changes_nothing(lab, page, name):
    saved_as_it_was(lab, page, f"notebooks/{name}.ipynb")


def test_opening_and_saving_stored_outputs_changes_nothing(lab, page):
    saved_as_it_was(lab, page, "solutions/02_collectives.ipynb")


def saved_as_it_was(lab, page, path: str) -> None:
    folder, _ = lab
    shutil.copy(learn.ROOT / path, folder / path)
    before = (folder / path).read_text(encoding="utf-8")
    open_notebook(page, path)
    page.evaluate(SAVE)
    after = (folder / path).read_text(encoding="utf-8")
    assert after.splitlines() == before.splitlines()
    assert after == before
    assert (folder / path).stat().st_mtime > (learn.ROOT / path).stat().st_mtime, "it was saved"
