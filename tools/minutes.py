"""The minutes that a notebook takes, estimated by one rule.

    words        200 per minute of prose, without code, alternative texts of pictures and addresses of links
    code cells   half a minute each, to run and to look at
    machine      two minutes
    exercises    as each states in its heading: `### Exercise 1: GPipe (10 minutes)`
    challenge    likewise: `## Beat it: the quickest sum on a slow wire (30 minutes)`

Sections headed "Optional" or "Beat it" are counted apart, and so are optional exercises, each with the code below it.

    python -m tools.minutes           print the table
    python -m tools.minutes write     write it into README.md and teaching/notebooks.md, and into each first cell
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from tools import notebooks

WORDS, CELL, MACHINE = 200, 0.5, 2.0  # words per minute; minutes; minutes
HEADING = re.compile(r"(#+) (.*?)(?: \((\d+) minutes\))?$")
UNREAD = re.compile(r"```.*?```|<img\b[^>]*>|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|<[^>]+>", re.DOTALL)
IN_README = re.compile(r"^(\| \[[^|]*\]\(notebooks/(\w+)\.ipynb\) \|)[^|]*\|", re.MULTILINE)
IN_TEACHING = re.compile(r"^(\| (\d\d\w?) [A-Z][^|]*\|)[^|]*\|", re.MULTILINE)
SENTENCE = re.compile(r"\*\*Minutes\*\*, by estimate: [^.]*\.")


@dataclass
class Minutes:
    """The minutes of what everybody reads and runs, of exercises, of optional parts with theirs, and of the
    challenge.
    """

    required: float = MACHINE
    exercises: float = 0.0
    optional: float = 0.0
    challenge: float = 0.0

    def __str__(self) -> str:
        parts = [f"{near(self.required)} without exercises"]
        parts += [f"{near(self.required + self.exercises)} with them"] if self.exercises else []
        parts += [f"{near(self.optional)} more for optional parts"] if near(self.optional) else []
        parts += [f"{near(self.challenge)} more for the challenge"] if self.challenge else []
        return ", ".join(parts)


def near(minutes: float) -> int:
    """Round to five minutes: the rule is no more precise than that."""
    return 5 * round(minutes / 5)


def minutes(notebook: NotebookNode) -> Minutes:
    """Apply the rule. Raises ValueError for an exercise or a challenge whose heading states no minutes."""
    found, section, part = Minutes(), "required", "required"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            add(found, part, CELL)
            continue
        part = section  # an exercise ends where the next text begins
        for line in UNREAD.sub(" ", cell.source).splitlines():
            if heading := HEADING.match(line):
                level, title, stated = heading.groups()
                part = part_of(title, "required" if len(level) < 3 else section)
                if len(level) < 3:
                    section = part
                if "xercise" in title or title.startswith("Beat it"):
                    if not stated:
                        raise ValueError(f"{title!r} states no minutes: let its heading end with, say, (10 minutes)")
                    add(found, "exercises" if part == "required" else part, int(stated))
            add(found, part, len(line.split()) / WORDS)
    return found


def part_of(title: str, before: str) -> str:
    """Return the part that a section with this title belongs to: its own, or that of the section around it."""
    if title.startswith("Beat it"):
        return "challenge"
    return "optional" if "ptional" in title else before


def add(found: Minutes, part: str, length: float) -> None:
    setattr(found, part, getattr(found, part) + length)


# ---- pages and notebooks ---------------------------------------------------------------------------------


def of_all(root: Path = notebooks.ROOT) -> dict[str, Minutes]:
    """Return the minutes of each notebook, by the stem of its source."""
    return {source.stem: minutes(notebooks.read(source)) for source in notebooks.sources(root)}


def in_readme(text: str, found: dict[str, Minutes]) -> str:
    """Return README's text with the estimates in the first column behind each notebook's name."""

    def cell(match: re.Match) -> str:
        each = found[match[2]]
        return f"{match[1]} {near(each.required)} to {near(each.required + each.exercises)} |"

    return IN_README.sub(cell, text)


def in_teaching(text: str, found: dict[str, Minutes]) -> str:
    """Return the text of teaching/notebooks.md with the estimates in the first column behind each notebook's name."""
    by_number = {stem.partition("_")[0]: each for stem, each in found.items()}
    return IN_TEACHING.sub(lambda match: f"{match[1]} {by_number[match[2]]} |", text)


def in_source(text: str, each: Minutes) -> str:
    """Return a notebook's source with the estimate in its first cell."""
    return SENTENCE.sub(f"**Minutes**, by estimate: {each}.", text, count=1)


def written(root: Path = notebooks.ROOT) -> dict[Path, str]:
    """Return what each file says with the estimates in it."""
    found = of_all(root)
    pages = {root / "README.md": in_readme, root / "teaching/notebooks.md": in_teaching}
    texts = {page: put(page.read_text(encoding="utf-8"), found) for page, put in pages.items()}
    for source in notebooks.sources(root):
        texts[source] = in_source(source.read_text(encoding="utf-8"), found[source.stem])
    return texts


def main(write: str = "") -> int:
    for stem, each in of_all().items():
        print(f"{stem:<22} {each}")
    if write:
        for path, text in written().items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
