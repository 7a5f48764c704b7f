"""Drawings of a DTensor: which rank of a mesh holds which block of the tensor.

Each rank is drawn as the outline of the whole tensor, in which the block that the rank holds is filled; equal blocks
have equal tints.  A block under Partial() is labelled +0, +1, ...: such a block is a summand, and the tensor is the
sum of all ranks' summands.  A DTensor x is drawn by blocks(x.spec, ("dp", "tp")).

    blocks(spec, names)                   one tensor on its mesh
    change(before, after, names, steps)   the same tensor before and after a redistribution, and the steps in between
"""

from collections.abc import Sequence
from itertools import product

from labs.dtensor.placement import Block, Spec
from labs.kit.drawing.palette import MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

WIDE, HIGH = 88, 74  # pixels that the outline of a tensor may take
CELL = (WIDE + 22, HIGH + 50)
MARGIN = 64  # pixels left of the blocks, for the labels of the first axis
Held = tuple[Block, int | None]  # a block, and the number of its summand, or None without Partial()


def blocks(spec: Spec, names: Sequence[str]) -> Drawing:
    """Draw the block of the tensor that each rank holds.

    names: the names of the mesh's axes, one or two.
    Raises ValueError for a tensor or a mesh that cannot be drawn flat.
    """
    require_flat(spec)
    wide, high = size(spec)
    title = headline(spec, names)
    canvas = Canvas(max(wide, width_of(title, 13)) + 24, high + 40 + noted([spec]), title, " ".join(sentences(spec)))
    canvas.text(16, 20, title, anchor="start", weight="bold")
    panel(canvas, 12, 36, spec, names)
    note(canvas, high + 46, [spec])
    return canvas.drawing("\n".join([title, *sentences(spec)]))


def change(before: Spec, after: Spec, names: Sequence[str], steps: Sequence[str]) -> Drawing:
    """Draw a tensor's blocks before and after a redistribution, side by side.

    steps: the lines of text below the blocks, one for each step of the redistribution.
    """
    require_flat(before)
    wide, high = size(before)
    wide = max(wide, *(width_of(headline(spec, names), 13) for spec in (before, after)))
    words = [*sentences(before), "Then:", *steps, *sentences(after)]
    width = max(2 * wide + 84, *(width_of(line, 13) + 32 for line in steps))
    tall = high + 54 + 20 * len(steps) + noted([before, after])
    canvas = Canvas(width, tall, f"{headline(before, names)}; then {placed(after, names)}", " ".join(words))
    for x, spec in ((12, before), (wide + 72, after)):
        canvas.text(x + 4, 20, headline(spec, names), anchor="start", weight="bold")
        panel(canvas, x, 36, spec, names)
    canvas.arrow((wide + 22, 36 + high / 2), (wide + 60, 36 + high / 2))
    for number, line in enumerate(steps):
        canvas.text(16, high + 50 + 20 * number, line, anchor="start")
    note(canvas, high + 56 + 20 * len(steps), [before, after])
    return canvas.drawing("\n".join([headline(before, names), *words]))


# ---- parts -----------------------------------------------------------------------------------------------


def grid(spec: Spec) -> tuple[int, int]:
    """Return the rows and columns of the mesh."""
    rows, columns = (1, *spec.mesh)[-2:]
    return rows, columns


def size(spec: Spec) -> tuple[int, int]:
    rows, columns = grid(spec)
    return MARGIN * (rows > 1) + CELL[0] * columns, 16 + CELL[1] * rows


def panel(canvas: Canvas, x: float, y: float, spec: Spec, names: Sequence[str]) -> None:
    """Draw the ranks as a grid, each with the block of the tensor that it holds."""
    rows, columns = grid(spec)
    tints: dict[Held, str] = {}
    left = x + MARGIN * (rows > 1)
    for rank, place in enumerate(product(*map(range, spec.mesh))):
        row, column = divmod(rank, columns)
        if row == 0:
            canvas.text(left + CELL[0] * column + WIDE / 2, y + 4, f"{names[-1]} {column}", size=11, fill=MUTED)
        if column == 0 and rows > 1:
            canvas.text(
                x + 4, y + 20 + CELL[1] * row + HIGH / 2, f"{names[0]} {row}", size=11, anchor="start", fill=MUTED
            )
        held = spec.block(place), summand(spec, place)
        tint = tints.setdefault(held, RANKS[len(tints) % len(RANKS)])
        tensor(canvas, left + CELL[0] * column, y + 18 + CELL[1] * row, spec.shape, held, tint, rank)


def summand(spec: Spec, place: Sequence[int]) -> int | None:
    """Return the number of the summand that the rank at this place of the mesh holds.

    Summands are counted along the mesh axes with Partial(); without such an axis, the function returns None.
    """
    number = None
    for placement, ranks, at in zip(spec.placements, spec.mesh, place, strict=True):
        if placement.is_partial():
            number = (number or 0) * ranks + at
    return number


def tensor(canvas: Canvas, x: float, y: float, whole: Sequence[int], held: Held, tint: str, rank: int) -> None:
    """Draw the outline of the whole tensor, the block that a rank holds, and below them the number of that rank."""
    block, number = held
    (high, wide), (top, left), (tall, broad) = (flat(shape) for shape in (whole, block.offset, block.shape))
    top = top if len(whole) > 1 else 0
    unit = min(WIDE / max(1, wide), HIGH / max(1, high), 18)
    x0, y0 = x + (WIDE - unit * wide) / 2, y + (HIGH - unit * high) / 2
    canvas.rect(x0, y0, unit * wide, unit * high, stroke=MUTED, radius=0, dash="3 2")
    if tall and broad:
        canvas.rect(x0 + unit * left, y0 + unit * top, unit * broad, unit * tall, fill=tint, radius=0)
        if number is not None:
            middle = x0 + unit * (left + broad / 2), y0 + unit * (top + tall / 2)
            canvas.text(*middle, f"+{number}", size=13, weight="bold")
    canvas.text(x + WIDE / 2, y + HIGH + 10, f"rank {rank}", size=11)
    canvas.text(x + WIDE / 2, y + HIGH + 24, shape_of(block), size=11, fill=MUTED)


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor of one or two dims."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def shape_of(block: Block) -> str:
    return " × ".join(map(str, block.shape)) if all(block.shape) else "empty"


def noted(specs: Sequence[Spec]) -> int:
    """Return the height in pixels of the note that explains summands, or 0 if no placement is Partial()."""
    return 20 * any(placement.is_partial() for spec in specs for placement in spec.placements)


def note(canvas: Canvas, y: float, specs: Sequence[Spec]) -> None:
    if noted(specs):
        canvas.text(16, y, "+0, +1, … summands: their sum is the tensor", size=11, anchor="start", fill=MUTED)


# ---- in words --------------------------------------------------------------------------------------------


def placed(spec: Spec, names: Sequence[str]) -> str:
    return ", ".join(f"{name}: {placement!r}" for name, placement in zip(names, spec.placements, strict=True))


def headline(spec: Spec, names: Sequence[str]) -> str:
    return f"{' × '.join(map(str, spec.shape))} as {placed(spec, names)}"


def sentences(spec: Spec) -> list[str]:
    """Return one sentence per rank, which names the slice of the tensor that the rank holds."""
    lines = []
    for rank, place in enumerate(product(*map(range, spec.mesh))):
        block, number = spec.block(place), summand(spec, place)
        parts = [f"{start}:{start + size}" for start, size in zip(block.offset, block.shape, strict=True)]
        held = f"[{', '.join(parts)}]" if all(block.shape) else "nothing"
        lines.append(f"Rank {rank} holds {'' if number is None else f'summand {number} of '}{held}.")
    return lines


def require_flat(spec: Spec) -> None:
    if len(spec.mesh) not in (1, 2) or len(spec.shape) not in (1, 2):
        raise ValueError(
            f"a tensor of {len(spec.shape)} dims on a mesh of {len(spec.mesh)} axes cannot be drawn flat: give a "
            "tensor of one or two dims on a mesh of one or two axes"
        )
