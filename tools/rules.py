"""The rules that every notebook of the course follows, beyond running.

    short cells      at most CODE_LINES lines of code in a cell (docstrings, comments and blank lines apart)
    narrow cells     a line of a code cell has at most COLUMNS, or JupyterLab in a window of 1,024 pixels cuts it off
    no silencing ;   nbval shows what the semicolon hides, so the output would differ
    live links       a relative link leads to a file that exists
    alternative text every image in prose describes what it shows
    no warnings      a solved notebook prints no warning

Each broken rule is reported in one sentence.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from nbformat import NotebookNode

CODE_LINES = 14
COLUMNS = 96
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)[^)]*\)")
HTML_IMAGE = re.compile(r"<img\b[^>]*>")
ATTRIBUTE = re.compile(r"""\b(alt|src)=["']([^"']*)["']""")


def broken(notebook: NotebookNode, folder: Path) -> list[str]:
    """Return the rules that a notebook in `folder` breaks, one sentence each, which quotes the place."""
    sentences: list[str] = []
    for cell in notebook.cells:
        start = cell.source.strip().split("\n")[0][:60]
        if cell.cell_type == "markdown":
            found = broken_prose(cell.source, folder)
        else:
            found = [*broken_code(cell.source), *broken_outputs(cell.outputs)]
        sentences += [f"{sentence} (in the cell {start!r})" for sentence in found]
    return sentences


def broken_code(source: str) -> Iterator[str]:
    if source.startswith(("%", "!")):
        return
    lines = code_lines(source)
    if lines > CODE_LINES:
        yield f"{lines} lines of code; a cell has at most {CODE_LINES}"
    for line in source.splitlines():
        if len(line) > COLUMNS:
            yield f"{len(line)} columns, {line.strip()[:40]!r}; a line in a code cell has at most {COLUMNS}"
    if source.rstrip().endswith(";"):
        yield "a semicolon at the end hides the result in JupyterLab only; write `_ = ...`"


def code_lines(source: str) -> int:
    """Count the lines that hold code: not blank, not a comment, not part of a docstring."""
    quiet, lines = docstring_lines(source), enumerate(source.splitlines(), 1)
    return sum(1 for n, line in lines if line.strip() and not line.strip().startswith("#") and n not in quiet)


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of a cell's lines that belong to a string that stands by itself."""
    quiet: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            quiet.update(range(node.lineno, node.end_lineno + 1))
    return quiet


def broken_outputs(outputs: list[NotebookNode]) -> Iterator[str]:
    for output in outputs:
        if output.get("name") == "stderr" and "Warning" in output.text:
            yield f"prints a warning: {output.text.strip()[:120]!r}"


def broken_prose(text: str, folder: Path) -> Iterator[str]:
    """Yield the broken links, open folds, and images without alternative text in Markdown that lies in `folder`."""
    text = FENCE.sub("", text)
    if (opened := text.count("<details>")) != (closed := text.count("</details>")):
        yield f"<details> stands {opened} × and </details> {closed} ×: a fold that is not closed hides what follows"
    images = [dict(ATTRIBUTE.findall(tag)) for tag in HTML_IMAGE.findall(text)]
    images += [{"alt": words, "src": target} for mark, words, target in LINK.findall(text) if mark]
    for image in images:
        if not image.get("alt", "").strip():
            yield f"the image {image.get('src')!r} has no alternative text"
    targets = [target for _, _, target in LINK.findall(text)] + [image.get("src", "") for image in images]
    for target in dict.fromkeys(targets):
        path = unquote(target.split("#")[0])
        if path and not re.match(r"[a-z]+:", path) and not (folder / path).exists():
            yield f"the link {target!r} leads nowhere"
