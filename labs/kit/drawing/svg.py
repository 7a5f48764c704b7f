"""A small canvas for drawings from data: the same data gives the same bytes on every machine.

    canvas = Canvas(400, 200, "title", "a description for a reader who cannot see the picture")
    canvas.rect(...); canvas.text(...); canvas.line(...); canvas.arrow(...)
    canvas.drawing()  ->  Drawing, which draws itself as the last expression of a cell

Coordinates are in pixels from the top left corner.  Every drawing has a white background, so that it looks the same on
light and dark pages.  A drawing has no ids, scripts, style sheets or fonts to load, so that it can be shown many times
on one page, as a file, and as an image.

The SVG is written by hand.  The package drawsvg writes floats with all their digits, of which the last differ between
machines, and draws arrow heads as markers with ids; this file would not be shorter with drawsvg.
"""

import math
from html import escape

from labs.kit.drawing.palette import INK, PAPER
from labs.kit.drawing.picture import Drawing

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
Point = tuple[float, float]


class Canvas:
    """An SVG drawing as a list of shapes, to which methods add; `title` and `description` are its alternative text."""

    def __init__(self, width: float, height: float, title: str, description: str):
        self.width, self.height, self.title, self.description = width, height, title, description
        self.shapes: list[str] = []

    def rect(self, x, y, width, height, fill=PAPER, stroke=INK, radius=3.0, line=1.0, dash="") -> None:
        self._add(
            "rect",
            x=x, y=y, width=max(0, width), height=height, rx=radius,
            fill=fill, stroke=stroke, stroke_width=line, stroke_dasharray=dash,
        )  # fmt: skip

    def circle(self, x, y, radius, fill=PAPER, stroke=INK, line=1.0) -> None:
        self._add("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke, stroke_width=line)

    def text(self, x, y, words, size=13.0, anchor="middle", weight="", fill=INK, style="") -> None:
        """Draw one line of text; `y` is the middle of its height, and `anchor` is "start", "middle" or "end"."""
        if words == "":
            return
        attributes = dict(x=x, y=y + 0.35 * size, font_size=size, text_anchor=anchor)
        self._add("text", escape(str(words)), **attributes, font_weight=weight, font_style=style, fill=fill)

    def lines(self, x, y, words: list[str], size=13.0, leading=1.35, **style) -> None:
        """Draw several lines of text below each other, the first line at `y`."""
        for number, line in enumerate(words):
            self.text(x, y + number * leading * size, line, size, **style)

    def line(self, *points: Point, stroke=INK, line=1.0, dash="") -> None:
        path = "M" + " L".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add("path", d=path, fill="none", stroke=stroke, stroke_width=line, stroke_dasharray=dash)

    def area(self, *points: Point, fill, stroke=INK, line=1.0) -> None:
        path = "M" + " L".join(f"{number(x)},{number(y)}" for x, y in points) + " Z"
        self._add("path", d=path, fill=fill, stroke=stroke, stroke_width=line, stroke_linejoin="round")

    def arrow(self, start: Point, end: Point, bend=0.0, stroke=INK, line=2.0, head=8.0, at=0.5) -> Point:
        """Draw an arrow from `start` to `end`, and return the point at the fraction `at` of its length.

        bend: how far the arrow bows to its left, as a fraction of its length.

        The arrow head is a triangle, not an SVG marker: markers need ids, and two drawings on one page may share an id.
        """
        (x0, y0), (x1, y1) = start, end
        control = ((x0 + x1) / 2 + bend * (y1 - y0), (y0 + y1) / 2 - bend * (x1 - x0))
        angle = math.atan2(y1 - control[1], x1 - control[0])
        neck = (x1 - 0.8 * head * math.cos(angle), y1 - 0.8 * head * math.sin(angle))
        path = f"M{number(x0)},{number(y0)} Q" + " ".join(number(v) for v in (*control, *neck))
        self._add("path", d=path, fill="none", stroke=stroke, stroke_width=line)
        wings = [(x1 - head * math.cos(angle + a), y1 - head * math.sin(angle + a)) for a in (0.45, -0.45)]
        self.area(end, *wings, fill=stroke, stroke="none")
        weights, points = ((1 - at) ** 2, 2 * at * (1 - at), at**2), (start, control, end)
        x, y = (sum(w * p[i] for w, p in zip(weights, points, strict=True)) for i in (0, 1))
        return x, y

    def drawing(self, text: str = "") -> Drawing:
        """Return the finished drawing; `text` is for plain terminals, the title and description when left out."""
        width, height = number(self.width), number(self.height)
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
        words = f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>"
        card = '<rect width="100%" height="100%" rx="8" fill="#FFFFFF"/>'
        svg = "\n".join([head, words, card, *self.shapes, "</svg>\n"])
        alt = " ".join(f"{self.title}. {self.description}".split())
        return Drawing(
            svg.encode(), text or f"{self.title}\n{self.description}", alt, round(self.width), round(self.height)
        )

    def _add(self, tag: str, content: str = "", **attributes) -> None:
        pairs = (
            f'{key.replace("_", "-")}="{value if isinstance(value, str) else number(value)}"'
            for key, value in attributes.items()
            if value != ""
        )
        self.shapes.append(f"<{tag} {' '.join(pairs)}" + (f">{content}</{tag}>" if content else "/>"))


def number(value: float) -> str:
    """Return a coordinate as text with one decimal at most.

    Two machines' sines may differ in the last digit.  A tiny shift before rounding gives the same text on both
    machines.
    """
    return f"{round(value + 1e-6, 1) + 0.0:g}" if abs(value) < 1e5 else f"{value:.0f}"


def width_of(words: str, size: float) -> float:
    """Return an estimate of the width of a line of text in pixels, wide enough for all usual fonts."""
    return 0.63 * size * len(words)
