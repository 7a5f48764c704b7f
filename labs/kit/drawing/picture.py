"""A picture that a cell shows with its alternative text, even in a notebook that is not trusted.

JupyterLab shows no SVG of an untrusted notebook, and drops the alternative text of a PNG.  So text/html has both as
data URIs in an `<img>`, which also shrinks with the window.
"""

from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Picture:
    """An image that draws itself as the last expression of a cell.

    data: the bytes of the file.
    text: the words that a plain terminal shows.
    alt: the words for a reader who cannot see the picture.
    width, height: pixels.
    """

    data: bytes
    text: str
    alt: str
    width: int
    height: int
    mime: ClassVar[str]

    @property
    def html(self) -> str:
        source = f"data:{self.mime};base64,{b64encode(self.data).decode()}"
        size = f'width="{self.width}" height="{self.height}" style="max-width:100%;height:auto"'
        return f'<img alt="{escape(self.alt)}" {size} src="{source}">'

    def save(self, path: str | Path) -> None:
        """Write the picture to a file."""
        Path(path).write_bytes(self.data)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


class Drawing(Picture):
    """A drawing from data, as SVG: the same data gives the same bytes, and a notebook test compares them."""

    mime = "image/svg+xml"

    @property
    def svg(self) -> str:
        return self.data.decode()


class Figure(Picture):
    """A figure of measurements, as PNG: a notebook test compares only the text beside it."""

    mime = "image/png"
