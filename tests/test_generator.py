"""Tests of the generator with small sources written here, and the two notebooks expected from each."""

import base64
import json
import re
import runpy
import sys

import nbformat
import pytest

from tools import notebooks, rules

SOURCE = '''\
# %% [markdown]
# # A title
#
# Some prose.

# %%
import os


# %%
def double(number):
    """Twice the number."""
    ### BEGIN SOLUTION
    result = 2 * number
    return result
    ### END SOLUTION


# %% tags=["raises-exception"]
{}["missing"]

# %%
print(f"{os.getpid() / 1000:.3f} s, 24 bytes")
'''


@pytest.fixture
def course(tmp_path):
    """Make a course of one notebook, and return a function that (over)writes its source."""
    (tmp_path / "solutions").mkdir()

    def write(text=SOURCE):
        (tmp_path / "solutions/03_small.py").write_text(text)
        return tmp_path

    write()
    return write


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the course of one notebook once."""
    root = tmp_path_factory.mktemp("built")
    (root / "solutions").mkdir()
    (root / "solutions/03_small.py").write_text(SOURCE)
    assert notebooks.build([], root=root) == []
    return root


def texts(root):
    return [path.read_text() for path in sorted(root.glob("*/*.ipynb"))]


def test_the_solution_is_executed_and_the_learners_notebook_is_open(built):
    """Check that another build changes nothing: the process id differs, but is printed as a time, which the rules
    ignore.
    """
    solved = nbformat.read(built / "solutions/03_small.ipynb", as_version=4)
    unsolved = nbformat.read(built / "notebooks/03_small.ipynb", as_version=4)
    assert [cell.id for cell in solved.cells] == [cell.id for cell in unsolved.cells]
    assert "result = 2 * number" in solved.cells[2].source
    assert unsolved.cells[2].source == (
        'def double(number):\n    """Twice the number."""\n    raise NotImplementedError("your turn")'
    )
    assert solved.cells[3].outputs[0].ename == "KeyError"
    assert solved.cells[4].outputs[0].text.endswith(" s, 24 bytes\n")
    assert not any(cell.get("outputs") for cell in unsolved.cells)
    assert notebooks.check(built) == []
    before = texts(built)
    assert notebooks.build(["03"], root=built) == []
    assert texts(built) == before


MEASURED = """\
# %%
import os
from labs.kit.drawing.picture import Figure

run = 10_000_000 + os.getpid()
print("{words}")

# %%
Figure(str(run).encode(), "Figure()", f"{{run}} at its most", 1, 1)

# %%
print(f"{{run / 1000:.3f}} s")
"""


def runs_in(path):
    """Return the process ids in the pictures, their alternative texts, and the texts of a notebook."""
    cells = notebooks.code_cells(nbformat.read(path, as_version=4))
    image = cells[1].outputs[0].data["text/html"]
    picture = base64.b64decode(re.search(r"base64,([^\"]*)", image)[1]).decode()
    return {picture, re.search(r"(\d+) at", image)[1], cells[2].outputs[0].text.split()[0].replace(".", "")}


def test_texts_and_pictures_come_from_one_run(course):
    """Check that a changed word replaces all outputs of the run before, and that noise and prose replace none."""
    root = course(MEASURED.format(words="4 ranks"))
    path = root / "solutions/03_small.ipynb"
    assert notebooks.build([], root=root) == []
    first, before = runs_in(path), texts(root)
    assert len(first) == 1
    assert notebooks.build([], root=root) == [] and texts(root) == before
    course("# %% [markdown]\n# Prose.\n\n" + MEASURED.format(words="4 ranks") + "\n# %% [markdown]\n# More.\n")
    assert notebooks.build([], root=root) == [] and texts(root) != before
    assert runs_in(path) == first
    course(MEASURED.format(words="8 ranks"))
    assert notebooks.build([], root=root) == []
    assert len(runs_in(path)) == 1 and runs_in(path) != first


def test_editing_one_cell_changes_one_id(course):
    before = notebooks.read(course() / "solutions/03_small.py")
    after = notebooks.read(course(SOURCE.replace("import os", "import os  # !")) / "solutions/03_small.py")
    changed = [old.id != new.id for old, new in zip(before.cells, after.cells, strict=True)]
    assert changed == [False, True, False, False, False]


def test_equal_cells_have_different_ids(course):
    cells = notebooks.read(course("# %%\n1\n\n# %%\n1\n") / "solutions/03_small.py").cells
    assert cells[0].id != cells[1].id


def test_what_a_learner_edited_is_left_alone(built, capsys):
    path = built / "notebooks/03_small.ipynb"
    mine = json.loads(path.read_text())
    mine["cells"][2]["source"] = ["def double(number):\n", "    return number + number"]
    path.write_text(json.dumps(mine))
    (refused,) = notebooks.build([], root=built)
    assert "03_small.ipynb was edited and is left alone" in refused
    assert json.loads(path.read_text()) == mine
    assert any("does not say what its source says" in sentence for sentence in notebooks.check(built))
    assert notebooks.build([], force=True, root=built) == []
    assert notebooks.check(built) == []


def test_a_notebook_from_elsewhere_is_left_alone(course):
    root = course("# %%\n1\n")
    path = root / "notebooks/03_small.ipynb"
    notebooks.write(nbformat.v4.new_notebook(), path)
    before = path.read_text()
    assert len(notebooks.build([], root=root)) == 1
    assert path.read_text() == before


def test_a_changed_source_is_noticed_and_running_a_notebook_is_not_editing_it(course):
    root = course("# %%\n1\n")
    assert [sentence.split(";")[0] for sentence in notebooks.check(root)] == [
        "solutions/03_small.ipynb is not built",
        "notebooks/03_small.ipynb is not built",
    ]
    notebooks.build([], root=root)
    assert notebooks.check(root) == []
    path = root / "notebooks/03_small.ipynb"
    run = nbformat.read(path, as_version=4)
    run.cells[0].outputs = [nbformat.v4.new_output("execute_result", data={"text/plain": "1"})]
    notebooks.write(run, path)
    assert not notebooks.edited(path)
    course("# %%\n2\n")
    assert [sentence.split(";")[0] for sentence in notebooks.check(root)] == [
        "solutions/03_small.ipynb does not say what its source says",
        "notebooks/03_small.ipynb does not say what its source says",
        "notebooks/03_small.ipynb has outputs",
    ]
    (root / "solutions/03_small.py").unlink()
    assert notebooks.check(root) == ["solutions/03_small.ipynb has no source 03_small.py"]


def test_a_cell_that_fails_is_reported_and_nothing_is_written(course):
    root = course("# %%\n1 / 0\n")
    (sentence,) = notebooks.build([], root=root)
    assert "03_small.py fails" in sentence and "ZeroDivisionError" in sentence
    assert not (root / "solutions/03_small.ipynb").exists()


def test_a_widget_leaves_its_picture_only(course):
    root = course(
        "# %%\nfrom IPython.display import display\n\n"
        'display({"text/plain": "slider", "image/svg+xml": "<svg/>",\n'
        '         "application/vnd.jupyter.widget-view+json": {"model_id": "1"}}, raw=True)\n'
    )
    notebooks.build([], root=root)
    solved = nbformat.read(root / "solutions/03_small.ipynb", as_version=4)
    assert set(solved.cells[0].outputs[0].data) == {"text/plain", "image/svg+xml"}
    assert solved.metadata == notebooks.METADATA


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    ### BEGIN SOLUTION\n    return 1",
        "def f():\n    return 1\n    ### END SOLUTION",
        "def f():\n    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n    ### END SOLUTION",
        "### BEGIN SOLUTION\nx = 1\n### END SOLUTION",
    ],
)
def test_marks_go_in_pairs_inside_a_function(source):
    with pytest.raises(notebooks.SourceError):
        notebooks.cut_answers(source)


def test_a_guess_is_left_to_the_learner():
    assert notebooks.cut_answers("guess = 16  # your number\nother = 16") == "guess = None  # your number\nother = 16"
    assert notebooks.cut_answers('line = {"stage": 2}  # your line') == "line = None  # your line"
    assert notebooks.cut_answers("guess = 3  # your number, × D") == "guess = None  # your number, × D"


def test_an_unknown_name_is_reported(course):
    with pytest.raises(notebooks.SourceError, match="there is no 07 in solutions/; there are 03_small"):
        notebooks.build(["07"], root=course())


def test_a_number_names_one_notebook(course):
    root = course("# %%\n1\n")
    (root / "solutions/03b_more.py").write_text("# %%\n2\n")
    for name, found in {"03": "03_small", "03_small": "03_small", "03b": "03b_more"}.items():
        assert [source.stem for source in notebooks.sources(root, [name])] == [found]
    assert [source.stem for source in notebooks.sources(root)] == ["03_small", "03b_more"]


@pytest.mark.filterwarnings("ignore:'tools.notebooks' found in sys.modules")
def test_the_command_line_ends_with_a_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tools.notebooks", "build", "no-such-notebook"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tools.notebooks", run_name="__main__")
    assert ended.value.code == 1
    assert "there is no no-such-notebook in solutions/" in capsys.readouterr().err


# ---- the rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (nbformat.v4.new_code_cell("\n".join(f"x{n} = {n}" for n in range(15))), "15 lines of code"),
        (nbformat.v4.new_code_cell("x = 1\nx;"), "semicolon"),
        (nbformat.v4.new_code_cell("x = " + "1 + " * 23 + "1"), "97 columns"),
        (nbformat.v4.new_markdown_cell("see [the next](04_gone.ipynb)"), "'04_gone.ipynb' leads nowhere"),
        (nbformat.v4.new_markdown_cell("<details><summary>Why?</summary>"), "<details> stands 1 × and </details> 0 ×"),
        (nbformat.v4.new_markdown_cell("![](here.svg)"), "'here.svg' has no alternative text"),
        (nbformat.v4.new_markdown_cell('<img src="here.svg">'), "'here.svg' has no alternative text"),
        (nbformat.v4.new_markdown_cell('<img src="gone.svg" alt="a ring">'), "'gone.svg' leads nowhere"),
        (
            nbformat.v4.new_code_cell(
                "f()", outputs=[nbformat.v4.new_output("stream", name="stderr", text="UserWarning")]
            ),
            "prints a warning",
        ),
    ],
)
def test_a_broken_rule_is_reported(tmp_path, cell, message):
    (tmp_path / "here.svg").touch()
    (sentence,) = rules.broken(nbformat.v4.new_notebook(cells=[cell]), tmp_path)
    assert message in sentence


@pytest.mark.parametrize(
    "cell",
    [
        nbformat.v4.new_code_cell('def f():\n    """' + "words\n" * 30 + '"""\n\n    # why\n    return 1'),
        nbformat.v4.new_code_cell("x = " + "1 + " * 22 + "1234"),
        nbformat.v4.new_code_cell("%%bash\nls;"),
        nbformat.v4.new_markdown_cell("[here](here.svg), [there](https://x.org/y), [below](#below)"),
        nbformat.v4.new_markdown_cell("![a ring](here.svg)\n\n```\n[not a link](nowhere)\n```"),
    ],
)
def test_a_valid_cell_breaks_no_rule(tmp_path, cell):
    (tmp_path / "here.svg").touch()
    assert rules.broken(nbformat.v4.new_notebook(cells=[cell]), tmp_path) == []
