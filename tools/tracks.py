"""The course's tracks: the notebooks of an afternoon, a day, three days or a term, with what a class leaves out folded.

    python -m tools.tracks day        make track TRACK=day: write the folder tracks/day, which git ignores

teaching/tracks.toml lists for each track its sessions, for each session its notebooks, and for each notebook the
headings whose sections are left out, by the words with which they begin; `always` lists those of every notebook.
Nothing is removed: the cells of such a section have the tag `left-out`, and JupyterLab folds them under their heading.
They still run, so what follows finds all that it needs.

    tracks/day/notebooks/     the notebooks; kernels that run there note progress in tracks/day, as in a course
    tracks/day/images, ...    links to the course's folders, so that the notebooks' own links hold
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
TRACKS = tomllib.loads((ROOT / "teaching/tracks.toml").read_text(encoding="utf-8"))
BOARD = TRACKS.pop("board")  # {notebook: what a teacher draws}
HEADING = re.compile(r"(##+) (.*)")
BEFORE_A_HEADING = re.compile(r"^(?=##+ )", re.MULTILINE)
TO_A_NOTEBOOK = re.compile(r"\]\((\d\d\w*\.ipynb)")
LEFT_OUT = "left-out"
NOTE = """*This is the track "{}" of the course: what it leaves out is folded under its heading. First choose Run > Run
All Cells, which runs the folded cells, too, and leaves them folded; it takes about a minute. Then read on, write, and
run your cells again. Pass by a folded heading with a click on the next one: Shift+Enter would open it.*"""


def sessions(track: str) -> dict[str, dict[str, list[str]]]:
    """Return {session: {notebook: the beginnings of the headings that are left out}} of a track."""
    always = TRACKS[track]["always"]
    return {
        session: {name: headings + always for name, headings in notebooks.items()}
        for session, notebooks in TRACKS[track].items()
        if session != "always"
    }


def parts(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Yield the parts of a cell of prose, each of which begins with a heading; a code cell is one part."""
    texts = [cell.source] if cell.cell_type == "code" else filter(None, BEFORE_A_HEADING.split(cell.source))
    for number, text in enumerate(texts):
        part = nbformat.from_dict(cell)
        part.source, part.id = text.rstrip("\n"), f"{cell.id}-{number}" if number else cell.id
        yield part


def is_left_out(cell: NotebookNode) -> bool:
    return LEFT_OUT in cell.metadata.get("tags", [])


def fold(notebook: NotebookNode, left_out: list[str]) -> NotebookNode:
    """Return a notebook in which every section with a heading that begins so is folded.

    A section ends where the next heading of its level, or of one above, begins: JupyterLab folds it there, too.
    """
    cells, level = [], 0  # level: that of the heading under which cells are left out now, or 0
    for part in (part for cell in notebook.cells for part in parts(cell)):
        heading = part.cell_type == "markdown" and HEADING.match(part.source)
        if heading and (not level or len(heading[1]) <= level):
            level = len(heading[1]) if heading[2].startswith(tuple(left_out)) else 0
            if level:  # the heading stays visible, in a cell of its own
                text = part.source[heading.end() :].strip("\n")
                part.source = heading[0]
                part.metadata |= {"tags": [LEFT_OUT], "jp-MarkdownHeadingCollapsed": True}
                cells.append(part)
                part = nbformat.v4.new_markdown_cell(text, id=f"{part.id}-text")
        if level:
            part.metadata["tags"] = [*part.metadata.get("tags", []), LEFT_OUT]
        cells += [part] if part.source else []
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def folded(track: str) -> dict[str, NotebookNode]:
    """Return a track's notebooks by name, with what it leaves out folded."""
    return {
        name: fold(nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4), left_out)
        for notebooks in sessions(track).values()
        for name, left_out in notebooks.items()
    }


def write(track: str, folder: Path) -> None:
    """Write a track's folder. Raises FileExistsError if it is there: it may have somebody's answers."""
    (folder / "notebooks").mkdir(parents=True)
    for each in ("images", "labs", "scripts", "tests", "containers", "README.md", "CLUSTERS.md", "DEBUGGING.md"):
        (folder / each).symlink_to(os.path.relpath(ROOT / each, folder))
    there, others = folded(track), os.path.relpath(ROOT / "notebooks", folder / "notebooks")

    def link(found: re.Match) -> str:
        return found[0] if Path(found[1]).stem in there else f"]({others}/{found[1]}"

    for name, notebook in there.items():
        for cell in notebook.cells:
            cell.source = cell.source if cell.cell_type == "code" else TO_A_NOTEBOOK.sub(link, cell.source)
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(NOTE.format(track), id="track"))
        nbformat.write(notebook, folder / f"notebooks/{name}.ipynb")


def main(track: str = "") -> int:
    if track not in TRACKS:
        print(f"TRACK={track} is no track: there are {', '.join(TRACKS)}", file=sys.stderr)
        return 2
    folder = ROOT / "tracks" / track
    try:
        write(track, folder)
    except FileExistsError:
        print(f"{folder} is there, perhaps with somebody's answers: rename it or remove it first", file=sys.stderr)
        return 1
    print(f"{folder / 'notebooks'} has the notebooks of the track {track}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
