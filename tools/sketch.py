"""The one way in which the pictures of the notebooks' prose are drawn: the kit's canvas, with a style for each kind of
words.
"""

from labs.kit.drawing.palette import MUTED, PAPER, ink
from labs.kit.drawing.svg import Canvas

GONE = {"fill": PAPER, "stroke": "#B0B5BC", "dash": "3 3"}  # a box for what is not here
SENT = "#A84800"  # KINDS["comm"], dark enough for words


class Sketch(Canvas):
    """A canvas with titles, notes and boxes of words."""

    def column(self, x, y, words) -> None:
        """Draw the name of a column, with its middle at `x`."""
        self.text(x, y, words, size=15, weight="bold")

    def heading(self, x, y, words, size=14) -> None:
        self.text(x, y, words, size=size, weight="bold", anchor="start")

    def note(self, x, y, words: str | list[str]) -> None:
        """Draw one line of small, pale words, or several."""
        self.lines(x, y, [words] if isinstance(words, str) else words, size=12.5, anchor="start", fill=MUTED)

    def box(self, x, y, width, height, words="", fill=PAPER, size=13.0, **style) -> None:
        """Draw a box, with words in its middle."""
        self.rect(x, y, width, height, fill=fill, **style)
        self.text(x + width / 2, y + height / 2, words, size=size, fill=ink(fill))
