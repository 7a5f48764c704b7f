"""A picture that a cell shows with its alternative text, even in a notebook that is not trusted.

JupyterLab shows no SVG output of an untrusted notebook, and drops the alternative text of a PNG output.  So a picture
is an HTML `<img>` with a data URI and an alternative text, which every notebook shows; it also shrinks with the window.
"""

from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Picture:
    """An image that is displayed as the last expression of a cell.

    data: the bytes of the image file, SVG or PNG.
    text: the text that a plain terminal shows instead of the image.
    alt: the text for a reader who cannot see the image.
    width, height: the size of the image in pixels.
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
        """Write the picture to a file, as SVG or PNG."""
        Path(path).write_bytes(self.data)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


class Drawing(Picture):
    """A drawing from data, as SVG: equal data gives equal bytes, which a notebook test compares."""

    mime = "image/svg+xml"

    @property
    def svg(self) -> str:
        return self.data.decode()


class Figure(Picture):
    """A figure of measurements, as PNG: a notebook test compares only the text beside the image."""

    mime = "image/png"
