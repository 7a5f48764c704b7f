"""Tests of the tracks: what is left out is folded, nothing is removed, and the plans fit their hours."""

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import notebooks, rules, teaching, tracks

NOTEBOOKS = {source.stem: notebooks.learner(notebooks.read(source)) for source in notebooks.sources(notebooks.ROOT)}
MINUTES = {"afternoon": 60, "day": 155, "days": 335, "term": 270}  # of a session, at most


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write the four tracks, and return their folders by name."""
    folders = {track: tmp_path_factory.mktemp("course") / track for track in tracks.TRACKS}
    for track, folder in folders.items():
        tracks.write(track, folder)
    return folders


def opened(folder):
    return {path.stem: notebooks.nbformat.read(path, as_version=4) for path in (folder / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("track", tracks.TRACKS)
def test_a_track_runs_every_cell_of_its_notebooks_in_their_order(written, track):
    for name, notebook in opened(written[track]).items():
        code = [cell.source for cell in notebooks.code_cells(notebook)]
        assert code == [cell.source for cell in notebooks.code_cells(NOTEBOOKS[name])]
        assert list(rules.broken(notebook, written[track] / "notebooks")) == []


@pytest.mark.parametrize("track", tracks.TRACKS)
def test_every_heading_that_a_track_names_is_in_its_notebook(track):
    always = set()
    for names in tracks.sessions(track).values():
        for name, left_out in names.items():
            found = [part.source.lstrip("# ") for cell in NOTEBOOKS[name].cells for part in tracks.parts(cell)]
            there = {heading for heading in left_out if any(text.startswith(heading) for text in found)}
            always |= there
            assert {*left_out} - there <= {*tracks.TRACKS[track]["always"]}, name
    assert {*tracks.TRACKS[track]["always"]} <= always


@pytest.mark.parametrize("track", tracks.TRACKS)
def test_a_session_fits_its_hours(track):
    folded = {name: teaching.kept(each) for name, each in tracks.folded(track).items()}
    for session, names in tracks.sessions(track).items():
        assert sum(teaching.length(folded[name]) for name in names) <= MINUTES[track], session


def test_a_section_is_folded_to_the_next_heading_of_its_level():
    cells = tracks.fold(
        new_notebook(
            cells=[
                new_markdown_cell("# a\n\nkept\n\n## b (5 minutes)\n\nfolded"),
                new_code_cell("x = 1", metadata={"tags": ["subject"]}),
                new_markdown_cell("### c"),
                new_markdown_cell("folded, too\n\n## d"),
                new_code_cell("print(x)"),
            ]
        ),
        ["b"],
    ).cells
    left_out = ["## b (5 minutes)", "folded", "x = 1", "### c", "folded, too"]
    assert [cell.source for cell in cells if tracks.is_left_out(cell)] == left_out
    assert [cell.source for cell in cells if not tracks.is_left_out(cell)] == ["# a\n\nkept", "## d", "print(x)"]
    assert cells[1].source == "## b (5 minutes)" and cells[1].metadata["jp-MarkdownHeadingCollapsed"]
    assert cells[3].metadata["tags"] == ["subject", "left-out"]


def test_the_minutes_that_a_class_has_noted_stay():
    path = teaching.FOLDER / "day.md"
    text = path.read_text(encoding="utf-8")
    tables = text.split(teaching.BEGIN)[1].split(teaching.END)[0].strip()
    row = next(line for line in text.splitlines() if line.startswith("| [03 DDP]"))
    noted = text.replace(row, row.replace("| |", "| 70, 65 |", 1))
    assert noted != text and teaching.printed(noted, tables) == noted


def test_what_cannot_be_written_is_refused(capsys, monkeypatch, tmp_path):
    assert tracks.main("night") == 2
    monkeypatch.setattr(tracks, "ROOT", tmp_path)
    (tmp_path / "tracks/day/notebooks").mkdir(parents=True)
    assert tracks.main("day") == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "TRACK=night is no track: there are afternoon, day, days, term"
    assert "is there, perhaps with somebody's answers: rename it or remove it first" in told[1]


@pytest.mark.soak
def test_the_notebooks_of_an_afternoon_run_to_their_end(written):
    for notebook in opened(written["afternoon"]).values():
        folder = str(written["afternoon"] / "notebooks")
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
