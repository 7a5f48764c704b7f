"""A picture below its formula; each term of the formula knows which controls (sliders) change it.

    sent = ["sent: ", term("2 (N − 1)/N", "ranks"), " × ", term("1 MB", "megabytes")]
    formula(chart, sent)                the picture below one or several lines of words and terms

When a control moves, `labs.kit.play` highlights the terms that the control changes.  In a saved notebook, no term is
highlighted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Term:
    """A term of a formula.

    controls: the controls that change the term, each the name of an argument of the function that draws the picture.
    """

    words: str
    controls: tuple[str, ...]


Line = Sequence[str | Term]


@dataclass(frozen=True)
class Captioned:
    """A picture below its formula, which is displayed as the last expression of a cell."""

    picture: object  # a picture that a function of `labs.kit.draw` returned
    lines: tuple[Line, ...]

    @property
    def html(self) -> str:
        return self.lit()

    def lit(self, control: str | None = None) -> str:
        """Return the formula and its picture as HTML; the terms that `control` changes are highlighted."""
        lines = "".join(f"<div>{''.join(spoken(part, control) for part in line)}</div>" for line in self.lines)
        return f'<div style="line-height:1.6">{lines}</div>{self.picture.html}'

    def __repr__(self) -> str:
        lines = ["".join(part if isinstance(part, str) else part.words for part in line) for line in self.lines]
        return "\n".join([*lines, repr(self.picture)])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}


def term(words: str, *controls: str) -> Term:
    """Return a term of a formula that changes with these controls (sliders)."""
    return Term(words, controls)


def formula(picture: object, *lines: Line) -> Captioned:
    """Return a picture below its formula, whose lines consist of words and terms."""
    return Captioned(picture, tuple(map(tuple, lines)))


def spoken(part: str | Term, control: str | None) -> str:
    """Return a part of a formula as HTML; a highlighted term is underlined, so that colour is not the only sign."""
    if isinstance(part, str):
        return escape(part)
    words = escape(part.words)
    return f"<mark><u>{words}</u></mark>" if control in part.controls else words
