"""Questions on earlier notebooks, different ones at each run; a learner answers aloud before unfolding the answer.

    ask("04")    three questions on the notebooks before 04, at least one of them on the notebook just before it
    ten()        ten questions, on as many different notebooks as possible

The questions come from recall.md beside this file: below the number of each notebook, every question is a heading, and
the text below this heading is the answer.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import cycle, islice
from pathlib import Path

__all__ = ["ask", "ten"]

BANK = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Question:
    notebook: str  # the number of the notebook: "04", "07b"
    question: str
    answer: str

    @property
    def html(self) -> str:
        """The question with its folded answer, as HTML whose class lets tools/nbval.cfg skip it in comparisons."""
        return (
            f'<details class="recall" style="margin: 0.4em 0"><summary>{code(self.question)}</summary>\n'
            f"<p>{code(self.answer)} (Notebook {self.notebook})</p></details>"
        )


@dataclass(frozen=True, repr=False)
class Questions:
    """Questions that a notebook cell shows with folded answers; their plain text has no answers."""

    chosen: tuple[Question, ...]

    def __repr__(self) -> str:
        return "\n".join(f"? {each.question} (notebook {each.notebook})" for each in self.chosen)

    def _repr_html_(self) -> str:
        return "\n".join(each.html for each in self.chosen)


def ask(notebook: str, seed: int | None = None) -> Questions:
    """Return three questions on the notebooks before `notebook`: "01", "02", ...

    Raises ValueError for the first notebook, and for a notebook without questions in recall.md.
    """
    books = list(bank())
    if notebook not in books[1:]:
        raise ValueError(f"there are no questions before {notebook!r}: ask for one of {', '.join(books[1:])}")
    *earlier, last = books[: books.index(notebook)]
    chance = random.Random(seed)
    return draw([last, *chance.sample(earlier, len(earlier))], 3, chance)


def ten(seed: int | None = None) -> Questions:
    """Return ten questions on the whole course, in the order of its notebooks."""
    chance = random.Random(seed)
    found = draw(chance.sample(list(bank()), len(bank())), 10, chance)
    return Questions(tuple(sorted(found.chosen, key=lambda each: each.notebook)))


def draw(books: Sequence[str], count: int, chance: random.Random) -> Questions:
    """Choose `count` questions at random, one from each of the notebooks `books` in turn, and none of them twice."""
    piles = {book: chance.sample(bank()[book], len(bank()[book])) for book in books}
    return Questions(tuple(piles[book].pop() for book in islice(cycle(books), count)))


@cache
def bank() -> dict[str, list[Question]]:
    """Return {notebook: its questions}, in the order of the course."""
    _, *parts = re.split(r"^## ", BANK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    numbers = [part.partition("\n")[0] for part in parts]
    return {number: rows(number, part) for number, part in zip(numbers, parts, strict=True)}


def rows(notebook: str, part: str) -> list[Question]:
    """Return the questions of a notebook; part: the text of recall.md below the notebook's heading."""
    _, *entries = re.split(r"^### ", part, flags=re.MULTILINE)
    return [Question(notebook, *(" ".join(text.split()) for text in entry.split("\n", 1))) for entry in entries]


def code(text: str) -> str:
    """Return text as HTML, in which words between backticks are set as code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(text))
