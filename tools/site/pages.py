"""The sources of the site: Markdown and notebooks in which every link leads to another page.

A notebook's page    the stored solution; an exercise is three cells: its stub, its folded answer, and what it printed
README.md            index.md, with the columns of the course map as navigation
another .md file     a page, if a page links to it
any other file       a page that shows its text, if a page links to it
a folder             the page of its __init__.py, or one that lists its files

The file imports nothing that the site's environment lacks, so it reads the table of the course map as text.
"""

import ast
import json
import os
import posixpath
import re
import shutil
from html import escape
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.answers import cut_answers

ROOT = Path(__file__).resolve().parents[2]
EXPLORERS = ROOT / "images/explorers"
LINK = re.compile(
    r"""^\ *(`{3,}|~{3,}).*?^\ *\1           # a block of code, in which nothing is a link
      | (?P<before>\]\(|\b(?:src|href)=")(?P<target>[^)\s"]+)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
PICTURE = re.compile(r"!\[[^\]]*\]\(|<img\b[^>]*>")
LEXERS = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yml": "yaml", ".toml": "toml", ".lua": "lua"}
MARK = re.compile(r"^ *### (?:BEGIN|END) SOLUTION *\n?", re.MULTILINE)
ANSWER = "<details><summary>The course's answer</summary>\n\n```python\n{}\n```\n</details>"
HOW = """*What you see is a stored run. To run it yourself and to solve its exercises, open
`notebooks/{name}.ipynb`: the [front page](index.md#three-commands) says how.*"""
LAUNCH = """*Or run it on [Binder](https://mybinder.org/v2/gh/{at}/HEAD?urlpath=lab/tree/notebooks/{name}.ipynb), on
[Colab](https://colab.research.google.com/github/{at}/blob/HEAD/notebooks/{name}.ipynb), or in a
[codespace](https://codespaces.new/{at}): [what is known of these](index.md#run-it-without-installing).*"""
ORPHAN = "---\norphan: true\n---\n\n"


class Site:
    """The pages that have been written, and the files that they link to, which still have to become pages."""

    def __init__(self, folder: Path, root: Path = ROOT):
        self.folder, self.root = folder, root
        self.linked: list[str] = []

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def link(self, target: str, here: str, page: str) -> str:
        """Return the target that `page` has in place of one in the file `here`; note the file that it leads to."""
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        return posixpath.relpath(self.page_of(path), posixpath.dirname(page) or ".") + (f"#{anchor}" if anchor else "")

    def page_of(self, path: str) -> str:
        """Return the page of a file or folder of the repository."""
        if path in ("README.md", "solutions", "notebooks"):
            return "index.md"
        if re.fullmatch(r"(solutions|notebooks)/\w+\.ipynb", path):
            return posixpath.basename(path)
        if (self.root / path / "__init__.py").exists():
            path += "/__init__.py"
        if path not in self.linked:
            self.linked.append(path)
        if path.endswith((".md", ".svg")):
            return path
        return f"{path}/index.md" if (self.root / path).is_dir() else f"{path}.md"

    def relink(self, text: str, here: str, page: str) -> str:
        """Return Markdown of the file `here` with its links rewritten for `page`, those in blocks of code apart."""

        def new(found: re.Match) -> str:
            return found["before"] + self.link(found["target"], here, page) if found["target"] else found[0]

        # In a picture's description, MyST joins the lines without a space.
        return LINK.sub(new, PICTURE.sub(lambda found: " ".join(found[0].split()), text))

    def write_linked(self) -> None:
        """Write the page of each linked file, then of those that these link to."""
        for path in self.linked:  # which grows
            file = self.root / path
            if file.suffix == ".svg":
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.folder / path)
            elif file.suffix == ".md":
                orphan = "" if is_in_navigation(path) else ORPHAN
                self.write(path, orphan + self.relink(file.read_text(encoding="utf-8"), path, path))
            elif file.is_dir():
                page = f"{path}/index.md"
                files = sorted(each.name for each in file.iterdir() if each.is_file() and each.name[0] != ".")
                items = "\n".join(f"- [`{name}`]({self.link(name, f'{path}/', page)})" for name in files)
                self.write(page, f"{ORPHAN}# `{path}`\n\n{items}\n")
            else:
                text = file.read_text(encoding="utf-8").rstrip("\n")
                lexer = LEXERS.get(file.suffix, "text")
                self.write(f"{path}.md", f"{ORPHAN}# `{path}`\n\n``````{lexer}\n{text}\n``````\n")


# ---- notebooks -------------------------------------------------------------------------------------------


def page(solved: NotebookNode, site: Site, name: str) -> NotebookNode:
    """Return the page of a stored solution, solutions/<name>.ipynb."""
    cells, explorers = [], 0
    for cell in solved.cells:
        if cell.cell_type == "markdown":
            cell.source = site.relink(cell.source, f"solutions/{name}.ipynb", f"{name}.ipynb")
            cells.append(cell)
            continue
        for output in cell.outputs:
            if html := output.get("data", {}).get("text/html"):
                output.data["text/html"] = re.sub(r'(href="\w+)\.ipynb"', r'\1.html"', html)
        if has_explorer(cell):
            explorers += 1
            stored = stored_explorer(EXPLORERS / f"{name}_{explorers}.js")
            data = cell.outputs[-1].data
            data["text/html"] = player(f"{name}_{explorers}", stored, data["text/html"])
        cells += folded(cell)
    at = os.environ.get("GITHUB_REPOSITORY")  # owner/name, which GitHub tells the workflow that publishes the site
    how = HOW.format(name=name) + ("\n\n" + LAUNCH.format(name=name, at=at) if at else "")
    cells.insert(1, nbformat.v4.new_markdown_cell(how, id="how-to-run"))
    return nbformat.v4.new_notebook(cells=cells, metadata=solved.metadata)


def folded(cell: NotebookNode) -> list[NotebookNode]:
    """Return a code cell as it is, or, where learners have to write something, its stub, its answer and its output."""
    stub = cut_answers(cell.source)
    if stub == cell.source:
        return [cell]
    outputs = nbformat.from_dict(cell)
    outputs.metadata["tags"] = [*cell.metadata.get("tags", []), "remove-input"]
    answer = nbformat.v4.new_markdown_cell(ANSWER.format(MARK.sub("", cell.source).rstrip()), id=f"{cell.id}-a")
    outputs.id = f"{cell.id}-o"
    cell.source, cell.outputs = stub, []
    return [cell, answer, outputs]


# ---- explorers -------------------------------------------------------------------------------------------


def explorers_in(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that show an explorer: calls of a function of labs.kit.play."""
    return [each for each in statements if isinstance(each, ast.Expr) and ast.unparse(each).startswith("play.")]


def has_explorer(cell: NotebookNode) -> bool:
    return "play." in cell.source and bool(explorers_in(ast.parse(cell.source).body))


def stored_explorer(path: Path) -> dict:
    """Return what tools/explorers.py has written to a file: explorers["<name>"]({…})."""
    return json.loads(path.read_text(encoding="utf-8").partition("](")[2].rstrip().removesuffix(")"))


def player(name: str, stored: dict, still: str) -> str:
    """Return an explorer's controls as HTML, above the picture that the notebook has stored."""
    controls = "\n".join(map(control, stored["controls"]))
    if stored["play"]:
        controls = f'<button type="button" data-pause="{stored["play"]}">Play</button>\n{controls}'
    form = f'<form autocomplete="off" aria-label="controls">\n{controls}\n</form>'
    return f'<div class="explorer" data-name="{name}">\n{form}\n<div class="stage">{still}</div>\n</div>'


def control(told: dict) -> str:
    """Return a control as HTML: a slider, a menu, or, where there is only one value, that value."""
    label, values, begin = escape(told["label"]), told["values"], told["begin"]
    if len(values) == 1:
        return f"<span>{label}: {escape(values[0])}</span>"
    if told["kind"] == "menu":
        options = "".join(
            f'<option value="{number}"{" selected" * (number == begin)}>{escape(value)}</option>'
            for number, value in enumerate(values)
        )
        return f'<label>{label} <select name="{told["name"]}">{options}</select></label>'
    slider = f'type="range" name="{told["name"]}" min="0" max="{len(values) - 1}" value="{begin}"'
    spoken = f'aria-valuetext="{escape(values[begin])}" data-values="{escape(json.dumps(values))}"'
    output = f'style="min-width:{max(map(len, values))}ch"' if told["readout"] else "hidden"
    return f"<label>{label} <input {slider} {spoken}><output {output}>{escape(values[begin])}</output></label>"


# ---- the front -------------------------------------------------------------------------------------------


def course(root: Path = ROOT) -> dict[str, list[tuple[str, str, str]]]:
    """Return the table of the course map, {column: [(number, name, idea)]}, from tools/images.py."""
    tree = ast.parse((root / "tools/images.py").read_text(encoding="utf-8"))
    tables = [each.value for each in tree.body if isinstance(each, ast.Assign) and each.targets[0].id == "COURSE"]
    return ast.literal_eval(tables[0])


def is_in_navigation(path: str) -> bool:
    return path.endswith(".md") and posixpath.dirname(path) in ("", "teaching")


def navigation(notebooks: list[str], pages: list[str], root: Path = ROOT) -> str:
    """Return the tables of contents behind the front: the notebooks under their columns of the map, then pages."""
    there = {name.partition("_")[0]: name for name in notebooks}
    columns = {
        column: [f"{number} {title} <{there[number]}>" for number, title, _ in listed if number in there]
        for column, listed in course(root).items()
    }
    for column, folder in {"Besides": "", "For teachers": "teaching"}.items():
        columns[column] = [page.removesuffix(".md") for page in pages if posixpath.dirname(page) == folder]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {column}\n\n" + "\n".join(entries) + "\n```\n"
        for column, entries in columns.items()
        if entries
    )


def write_sources(folder: Path, root: Path = ROOT) -> None:
    """Write the sources of all pages to a folder that Sphinx reads."""
    site = Site(folder, root)
    names = sorted(path.stem for path in (root / "solutions").glob("*.ipynb"))
    for name in names:
        solved = nbformat.read(root / f"solutions/{name}.ipynb", as_version=4)
        site.write(f"{name}.ipynb", nbformat.writes(page(solved, site, name)))
    front = site.relink((root / "README.md").read_text(encoding="utf-8"), "README.md", "index.md")
    site.write_linked()
    besides = [path for path in site.linked if is_in_navigation(path)]
    site.write("index.md", front + navigation(names, besides, root))
