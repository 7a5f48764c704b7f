"""The film of a propagation: a mesh axis travels along the letters of products, from the given layouts to all others.

    film = Film(graph, {"dp": 2, "tp": 2}, given, names)
    film.picture(3)         the layouts after three changes; the last frame has the collectives of each product
    film.still()            the changes below one another, and the last frame, for a page without a slider

The changes are those that labs.gspmd.propagation makes, in its order.  `labs.kit.play.propagation` adds a slider.
"""

from collections.abc import Mapping, Sequence

from labs.dtensor.placement import Placement, Shard
from labs.gspmd.lowering import lower
from labs.gspmd.propagation import along_one, propagate
from labs.gspmd.tracing import Graph, Operation, Value
from labs.kit.drawing.cut_products import COLOURS, HIGH, WIDE, matrix
from labs.kit.drawing.palette import INK, MUTED, PAPER, RANKS, SOFT
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

TOP, ROW, LEFT = 88, 74, (96, 216, 336)
Given = Mapping[Value, Sequence[Placement]]


class Watched(dict):
    """A dictionary of known placements that lists each new one."""

    def __init__(self, known: Mapping[Value, Placement]) -> None:
        super().__init__(known)
        self.changes: list[tuple[Value, Placement]] = []

    def __ior__(self, news):
        self.changes += news.items()
        return super().__ior__(news)

    def setdefault(self, value, placement=None):
        if value not in self:
            self |= {value: placement}
        return self[value]


class Film:
    """The frames of a propagation.

    names: {value: its name in the picture}.
    beside: a sentence below the last frame, such as what XLA sends in these layouts.
    """

    def __init__(
        self, graph: Graph, sizes: Mapping[str, int], given: Given, names: Mapping[Value, str], beside: str = ""
    ) -> None:
        self.graph, self.axes, self.names, self.beside = graph, tuple(sizes), names, beside
        mesh = tuple(sizes.values())
        layouts = propagate(graph, mesh, given)
        self.program = lower(graph, layouts)
        self.given = {(value, axis): p for value, ps in given.items() for axis, p in enumerate(ps)}
        self.changes: list[tuple[tuple[Value, int], Placement]] = []
        for axis in range(len(mesh)):
            known = Watched({value: placements[axis] for value, placements in given.items()})
            along_one(graph, known, mesh, {value: spec.placements[:axis] for value, spec in layouts.items()})
            self.changes += [((value, axis), placement) for value, placement in known.changes]

    @property
    def frames(self) -> int:
        """Return the number of frames: the given layouts, one frame for each change, and the collectives."""
        return len(self.changes) + 2

    def heading(self, frame: int) -> str:
        if frame == 0:
            return "The layouts that were given. Dashed frames: the layout along an axis is not known yet."
        if frame > len(self.changes):
            return f"All layouts are known. Each rank sends {self.program.sent:,} bytes."
        (value, axis), placement = self.changes[frame - 1]
        name, along = self.names[value], self.axes[axis]
        if not isinstance(placement, Shard):
            return f"{along}: no cut reaches {name}, so {name} is {placement!r}."
        known = {**self.given, **dict(self.changes[: frame - 1])}
        for operation in self.graph.operations:
            own = dict(zip(operation.values, operation.dims, strict=True))
            letter = own[value][placement.dim] if value in own else ""
            others = [(dims, known.get((v, axis))) for v, dims in own.items()]
            if letter and any(isinstance(p, Shard) and dims[p.dim] == letter for dims, p in others):
                return f"{along} passes along {letter} of {operation.letters}: dim {placement.dim} of {name} is cut."
        raise AssertionError(f"no product has passed {placement!r} on to {name}")

    def still(self) -> Drawing:
        """Draw the film for a page: each change in a product that has it, below one another, and the last frame."""
        last, top = self.picture(self.frames - 1), 70
        below = top + ROW * len(self.changes)
        words = " ".join(self.heading(frame) for frame in range(1, self.frames - 1))
        canvas = Canvas(780, below + last.height, "Change by change", f"{words} {last.alt}")
        canvas.text(16, 22, "Change by change: the tinted matrix is the one that was worked out.", 13, "start", "bold")
        self.legend(canvas, 46)
        for frame in range(1, len(self.changes) + 1):
            value = self.changes[frame - 1][0][0]
            products = [each for each in self.graph.operations if value in each.values]
            product = next((each for each in products if value in each.outputs), products[0])
            y = top + ROW * (frame - 1)
            canvas.text(16, y + HIGH / 2, f"{frame}. {product.letters}", 12, "start", fill=MUTED)
            self.row(canvas, y, product, {**self.given, **dict(self.changes[:frame])}, value)
            canvas.text(450, y + HIGH / 2, self.heading(frame).rstrip("."), 12, "start")
        canvas.shapes += [f'<g transform="translate(0 {below})">', *last.svg.splitlines()[4:-1], "</g>"]
        return canvas.drawing()

    def legend(self, canvas: Canvas, y: float) -> None:
        for number, axis in enumerate(self.axes):
            canvas.line((16 + 150 * number, y), (40 + 150 * number, y), stroke=COLOURS[number], line=4)
            canvas.text(48 + 150 * number, y, f"cut along {axis}", 12, "start")

    def picture(self, frame: int) -> Drawing:
        """Draw each product with the layouts that are known after so many changes."""
        known = {**self.given, **dict(self.changes[:frame])}
        new = self.changes[frame - 1][0][0] if 0 < frame <= len(self.changes) else None
        title, operations = self.heading(frame), self.graph.operations
        sent = "; ".join(self.collectives(number) for number in range(len(operations)))
        words = f"{len(operations)} products." + (
            f" Collectives, product by product: {sent}. {self.beside}".rstrip() if self.is_last(frame) else ""
        )
        foot = TOP + ROW * len(operations)
        canvas = Canvas(780, foot + (30 if self.beside else 0), title, words)
        if self.is_last(frame):
            canvas.text(16, foot + 6, self.beside, anchor="start", weight="bold")
        canvas.text(16, 22, title, anchor="start", weight="bold")
        self.legend(canvas, 50)
        canvas.text(450, 50, "collectives of the product", 12, "start", fill=MUTED)
        for number, operation in enumerate(operations):
            y = TOP + ROW * number
            canvas.text(16, y + HIGH / 2, operation.letters, 12, "start", fill=MUTED)
            self.row(canvas, y, operation, known, new)
            canvas.text(450, y + HIGH / 2, self.collectives(number) if self.is_last(frame) else "?", 12, "start")
        return canvas.drawing()

    def row(self, canvas: Canvas, y: float, operation: Operation, known: dict, new: Value | None) -> None:
        for x, value, sign in zip(LEFT, operation.values, ("×", "=", ""), strict=True):
            placements = [known.get((value, axis)) for axis in range(len(self.axes))]
            fill = RANKS[4] if value == new else PAPER if None not in placements else SOFT
            matrix(canvas, x, y, self.names[value], placements, fill, value == new)
            canvas.text(x + WIDE + 18, y + HIGH / 2, sign, 16, fill=INK)

    def is_last(self, frame: int) -> bool:
        return frame == self.frames - 1

    def collectives(self, number: int) -> str:
        step = self.program.steps[number]
        moves = [move for move in (*step.before, *step.after) if move.collectives]
        words = ", ".join(f"{' + '.join(m.collectives)} of {self.names[m.value]}" for m in moves)
        return words.replace("_", "-") or "none"
