"""A picture under the formula that it shows, whose terms know which controls move them.

    sent = ["sent: ", term("2 (N − 1)/N", "ranks"), " × ", term("1 MB", "megabytes")]
    formula(chart, sent)                the picture under one line of words and terms, or under several

`labs.kit.play` lights the terms that the control moved last has changed.  A saved notebook has
none of them lit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Term:
    """A part of a formula; controls: what moves it, by the names of the picture's arguments."""

    words: str
    controls: tuple[str, ...]


Line = Sequence[str | Term]


@dataclass(frozen=True)
class Captioned:
    """A picture with its formula, as a cell shows them."""

    picture: object  # anything of `labs.kit.draw`
    lines: tuple[Line, ...]

    @property
    def html(self) -> str:
        return self.lit()

    def lit(self, control: str | None = None) -> str:
        """In HTML, the terms lit that this control moves."""
        lines = "".join(f"<div>{''.join(spoken(part, control) for part in line)}</div>" for line in self.lines)
        return f'<div style="line-height:1.6">{lines}</div>{self.picture.html}'

    def __repr__(self) -> str:
        lines = ["".join(part if isinstance(part, str) else part.words for part in line) for line in self.lines]
        return "\n".join([*lines, repr(self.picture)])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}


def term(words: str, *controls: str) -> Term:
    """A part of a formula, and the names of the controls that move it."""
    return Term(words, controls)


def formula(picture: object, *lines: Line) -> Captioned:
    """The picture under its formula: lines of words and terms."""
    return Captioned(picture, tuple(map(tuple, lines)))


def spoken(part: str | Term, control: str | None) -> str:
    """Underlined, too, so that colour does not carry it alone."""
    if isinstance(part, str):
        return escape(part)
    words = escape(part.words)
    return f"<mark><u>{words}</u></mark>" if control in part.controls else words
