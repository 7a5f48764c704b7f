"""A generator: from one source it builds the notebook with answers and the notebook to learn from.

    solutions/NN_name.py     percent format: what people write and review
        │  read: cells, with ids made from their content, so that a rebuild changes only lines that must change
        │  execute: every cell, in order
        │  settle: if the outputs differ from the last ones only where tools/nbval.cfg allows it, all of them stay;
        │          otherwise all are new, so that texts and pictures of a notebook come from one run
        ▼
    solutions/NN_name.ipynb  executed: what nbval compares
        │  learner: answers cut out, outputs cleared
        ▼
    notebooks/NN_name.ipynb  what the learner opens; never overwritten once edited

In the root of the repository:

    python -m tools.notebooks build [03 07b ...] [--force]
    python -m tools.notebooks check
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns

from tools import rules
from tools.answers import SourceError, cut_answers, digest

ROOT = Path(__file__).resolve().parent.parent
NOISE = get_sanitize_patterns((ROOT / "tools/nbval.cfg").read_text(encoding="utf-8"))


METADATA = {  # the metadata that JupyterLab saves, with tools/jupyter
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

# A live widget needs its kernel. The picture that it leaves beside this stays, and is not compared.
LIVE_WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = ("image/png", "image/jpeg")


# ---- read -----------------------------------------------------------------------------------------------


def read(source: Path) -> NotebookNode:
    """Return the solved notebook of a percent-format source, not yet executed."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.source = cell.source.strip("\n")
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    give_ids(notebook, source.stem)
    return notebook


def give_ids(notebook: NotebookNode, name: str) -> None:
    """Give each cell an id made from its content, so that editing one cell changes no other cell's id."""
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        key = hashlib.sha256(f"{name}\0{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
        cell["id"] = f"{key}-{seen[key]}" if seen[key] else key
        seen[key] += 1


# ---- execute and settle ---------------------------------------------------------------------------------


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell in `folder`, as nbval does. Raises CellExecutionError at the first that fails."""
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            output.get("data", {}).pop(LIVE_WIDGET, None)


def settle(notebook: NotebookNode, previous: NotebookNode) -> None:
    """Keep all previous outputs if the same code gave them and the new ones differ only in noise."""
    cells, before = code_cells(notebook), code_cells(previous)
    if [(cell.id, without_noise(cell.outputs)) for cell in cells] == [
        (cell.id, without_noise(cell.outputs)) for cell in before
    ]:
        for cell, old in zip(cells, before, strict=True):
            cell.outputs, cell.execution_count = old.outputs, old.execution_count


def without_noise(value: object) -> object:
    """Return outputs as nbval compares them: with its rules applied to every text, without pictures and tracebacks."""
    if isinstance(value, str):
        for pattern, replacement in NOISE:
            value = re.sub(pattern, replacement, value)
    elif isinstance(value, dict):
        left_out = ("traceback", "execution_count", *PICTURES)
        value = {key: without_noise(item) for key, item in value.items() if key not in left_out}
    elif isinstance(value, list):
        value = [without_noise(item) for item in value]
    return value


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# ---- the learner's notebook -----------------------------------------------------------------------------


def learner(solved: NotebookNode) -> NotebookNode:
    """Return the same notebook with answers cut out and outputs cleared; its metadata remember what it was made as."""
    notebook = nbformat.from_dict(solved)
    for cell in code_cells(notebook):
        cell.source = cut_answers(cell.source)
        cell.outputs, cell.execution_count = [], None
    notebook.metadata["labs"] = {"made_as": digest(notebook.cells)}
    return notebook


def edited(path: Path) -> bool:
    """Return whether a learner's notebook differs from what was built."""
    notebook = nbformat.read(path, as_version=4)
    return notebook.metadata.get("labs", {}).get("made_as") != digest(notebook.cells)


# ---- the two commands -----------------------------------------------------------------------------------


def build(names: list[str], force: bool = False, root: Path = ROOT) -> list[str]:
    """Build both notebooks of the sources that `names` lists, by number or in full (all, if none is given).

    Returns the reasons why some were not built, one sentence each.
    """
    refused = []
    for source in sources(root, names):
        print(f"{source.stem} ...", flush=True)
        solution, target = source.with_suffix(".ipynb"), root / "notebooks" / f"{source.stem}.ipynb"
        solved = read(source)
        unsolved = learner(solved)
        if target.exists() and not force and edited(target):
            refused.append(f"{target.relative_to(root)} was edited and is left alone; FORCE=1 overwrites it")
        else:
            write(unsolved, target)
        try:
            execute(solved, source.parent)
        except CellExecutionError as error:
            refused.append(f"{source.relative_to(root)} fails:\n{error}")
            continue
        if solution.exists():
            settle(solved, nbformat.read(solution, as_version=4))
        write(solved, solution)
    return refused


def check(root: Path = ROOT) -> list[str]:
    """Return the problems of the committed notebooks, one sentence each; nothing is executed."""
    wrong = []
    for source in sources(root):
        solved = read(source)
        unsolved = learner(solved)
        for wanted, path in (
            (solved, source.with_suffix(".ipynb")),
            (unsolved, root / "notebooks" / f"{source.stem}.ipynb"),
        ):
            where, remedy = path.relative_to(root), f"run `make notebooks N={source.stem}`"
            if not path.exists():
                wrong.append(f"{where} is not built; {remedy}")
                continue
            found = nbformat.read(path, as_version=4)
            if content(found) != content(wanted):
                wrong.append(f"{where} does not say what its source says; {remedy}")
            if wanted is solved and not all(cell.execution_count for cell in code_cells(found)):
                wrong.append(f"{where} has cells that were not executed")
            if wanted is unsolved and any(cell.outputs for cell in code_cells(found)):
                wrong.append(f"{where} has outputs; the learner's notebook ships without")
            wrong += [f"{where}: {sentence}" for sentence in rules.broken(found, path.parent)]
    known = {source.stem for source in sources(root)}
    extra = {path.stem for path in (root / "solutions").glob("*.ipynb")} - known
    return wrong + [f"solutions/{name}.ipynb has no source {name}.py" for name in sorted(extra)]


def content(notebook: NotebookNode) -> list[tuple]:
    return [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]


def sources(root: Path, names: list[str] = ()) -> list[Path]:
    found = sorted((root / "solutions").glob("[0-9]*.py"))
    for name in names:
        if not any(is_named(source, name) for source in found):
            raise SourceError(f"there is no {name} in solutions/; there are {', '.join(s.stem for s in found)}")
    return [source for source in found if not names or any(is_named(source, name) for name in names)]


def is_named(source: Path, name: str) -> bool:
    """Return whether `name` is the source's number or full name: 07 is 07_memory, and not 07b_offload."""
    return f"{source.stem}_".startswith(f"{name}_")


def write(notebook: NotebookNode, path: Path) -> None:
    nbformat.validate(notebook)
    path.parent.mkdir(exist_ok=True)
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="execute the sources and write both notebooks of each")
    building.add_argument("names", nargs="*", help="a notebook's number, like 03 or 07b; all, if none")
    building.add_argument("--force", action="store_true", help="overwrite learner notebooks that were edited")
    commands.add_parser("check", help="compare the committed notebooks with their sources; runs nothing")
    chosen = parser.parse_args(arguments)
    try:
        wrong = build(chosen.names, chosen.force) if chosen.command == "build" else check()
    except SourceError as error:
        wrong = [str(error)]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
