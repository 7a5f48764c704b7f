"""A drawing of a tensor-parallel plan on its model: which rank holds which part of a weight, and the collectives.

    plan(gpt_plan(config), GPT(config), ranks=4)

The drawing is a table with a row for each pattern of module names in the plan; a line above the rows of a layer has
the part of their names that they share.  A weight W is drawn as in x @ W, with
its input features from top to bottom and its output features from left to right: a part of its columns is an upright
stripe, and a part of its rows is a flat stripe.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import wrap
from typing import Any

from torch import nn

from labs.dtensor import Partial, Placement, Replicate
from labs.kit.drawing.palette import INK, MUTED, RANKS, SOFT
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.tp import ColwiseParallel, LossParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.parameter_cuts import Cut
from labs.tp.styles import Style, border

WIDE, HIGH, LOW, APART, TOP = 64, 56, 30, 10, 60  # pixels: width and height of a weight, other rows, gap, header
BREAK = 14  # characters in a line of the columns of what is sent
RULE, SENT = "#D0D4D9", "#A84800"  # colours: the lines between rows, and the names of collectives
BORDERS = {  # {function of labs.tp.conjugate: (its collective in forward, its collective in backward)}
    "copy": ("", "all-reduce"),
    "reduce": ("all-reduce", ""),
    "gather": ("all-gather", "reduce-scatter"),
    "scatter": ("reduce-scatter", "all-gather"),
    "join": ("all-gather", ""),
    "split": ("", "all-gather"),
}
GRADIENTS = "all-reduce of gradients"  # the collective that sums the gradients of a replicated parameter
HEAD = ("submodule", "weight", "style", "comes in", "goes out", "sends forward", "sends backward")


@dataclass(frozen=True)
class PatternRow:
    """A row of the table of a tensor-parallel plan: one pattern of module names.

    name: the pattern of module names.
    style: the parallel style that the plan gives to modules of this pattern.
    modules: the number of modules that match the pattern.
    weight: the shape of the first module's weight.
    cut: how the weight is split over the ranks; None for a replicated weight.
    enters, leaves: words for the module's input and output.
    forward, backward: the names of the collectives in the forward and in the backward.
    """

    name: str
    style: Style
    modules: int = 0
    weight: tuple[int, ...] = ()
    cut: Cut | None = None
    enters: str = ""
    leaves: str = ""
    forward: str = ""
    backward: str = ""

    @property
    def height(self) -> int:
        return HIGH if self.cut else LOW

    @property
    def words(self) -> tuple[str, ...]:
        return type(self.style).__name__, self.enters, self.leaves, self.forward or "–", self.backward or "–"

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(f'{h} {w}' for h, w in zip(HEAD[2:], self.words, strict=True) if w)}"


def plan(plan: Mapping[str, Style], model: nn.Module, ranks: int = 4) -> Drawing:
    """Draw the table of a tensor-parallel plan that splits a model over `ranks` ranks.

    Raises ValueError if the plan does not fit the model.
    """
    found = rows(plan, model, ranks)
    lefts = columns(found)
    title = f"A plan for {ranks} ranks"
    heads = {found[number].name: shared for number, shared in shared_names(found)}
    tall = TOP + sum(row.height + APART for row in found) + (LOW + APART) * len(heads)
    canvas = Canvas(lefts[-1], tall + 30, title, " ".join(f"{row}." for row in found))
    canvas.text(16, 20, title, anchor="start", weight="bold")
    for x, words in zip(lefts, HEAD, strict=False):
        canvas.text(x, 44, words, size=12, anchor="start", fill=MUTED)
    y = TOP
    for row in found:
        canvas.line((16, y - APART / 2), (lefts[-1] - 16, y - APART / 2), stroke=RULE)
        if row.name in heads:
            canvas.text(16, y + LOW / 2, heads[row.name], anchor="start", fill=MUTED)
            y += LOW + APART
        picture(canvas, lefts[1], y, row, ranks)
        for x, words, column in zip(lefts, cells(row), HEAD, strict=False):
            fill = SENT if column.startswith("sends") and words != "–" else INK
            written, inside = lines(words, column), column == HEAD[0] and "*." in row.name
            place = x + APART * inside, y + row.height / 2 - 8 * (len(written) - 1)
            canvas.lines(*place, written, leading=1.2, anchor="start", fill=fill)
        y += row.height + APART
    key = "A number in a weight: the rank that has this part of it. Grey: every rank has all of it."
    canvas.text(16, tall + 12, key, size=12, anchor="start", fill=MUTED)
    return canvas.drawing("\n".join([title, *map(str, found)]))


# ---- what the plan says ----------------------------------------------------------------------------------


def rows(plan: Mapping[str, Style], model: nn.Module, ranks: int) -> list[PatternRow]:
    """Return a table row for each pattern of a plan, in the order in which the model has the modules."""
    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    fits = {pattern: Plan({pattern: style}).rows(model) for pattern, style in plan.items()}
    blocks = {name for pattern, style in plan.items() if isinstance(style, PrepareModuleInput)
              for name, _, _ in fits[pattern]}  # fmt: skip
    found = []
    for pattern in sorted(plan, key=lambda pattern: place[fits[pattern][0][0]]):
        name, module, style = fits[pattern][0]
        cut = style.cuts(name, module, ranks).get("weight")
        weight = getattr(module, "weight", None)
        shape = () if weight is None else tuple(weight.shape)
        row = crossing(PatternRow(pattern, style, len(fits[pattern]), shape, cut), module, in_block(name, blocks))
        shared = f"{GRADIENTS}, {cut.copies} ranks" if cut and cut.copies > 1 else ""
        found.append(replace(row, backward=" and ".join(filter(None, (row.backward, shared)))))
    return found


def shared_names(found: list[PatternRow]) -> Iterator[tuple[int, str]]:
    """Yield (number of a row, the beginning of its name up to a `*.`), where the beginning is not the last row's."""
    before = ""
    for number, row in enumerate(found):
        shared = row.name[: row.name.rfind("*.") + 2] if "*." in row.name else ""
        if shared and shared != before:
            yield number, shared
        before = shared


def in_block(name: str, blocks: set[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def crossing(row: PatternRow, module: nn.Module, inside: bool) -> PatternRow:
    """Return a table row completed with the module's input, its output and its collectives.

    inside: whether the module is in a block whose input is already prepared, in another row (PrepareModuleInput).
    """
    style: Any = row.style
    match style:
        case PrepareModuleInput():
            enter = name_of(style.input_layouts, Replicate())
            return sent(replace(row, enters=x(style.input_layouts)), enter)
        case ColwiseParallel():
            enter = "" if inside else name_of(style.input_layouts, Replicate())
            row = replace(row, enters="x, whole" if inside else x(style.input_layouts), leaves="features")
            if style.output_layouts.is_replicate():
                return sent(replace(row, leaves="x, whole"), enter, "join")
            return sent(row, enter)
        case RowwiseParallel():
            leave = name_of(Partial(), style.output_layouts)
            split = style.input_layouts.is_replicate() and isinstance(module, nn.Linear)
            enters = "tokens" if isinstance(module, nn.Embedding) else "x, whole" if split else "features"
            return sent(replace(row, enters=enters, leaves=x(style.output_layouts)), "split" if split else "", leave)
        case SequenceParallel():
            return replace(row, enters="x, a shard", leaves="x, a shard", backward=GRADIENTS if row.weight else "")
        case LossParallel():
            return replace(row, enters="logits, a part", leaves="the loss", forward="3 numbers per token")
    return row


def name_of(source: Placement, target: Placement) -> str:
    """Return the name of the function of labs.tp.conjugate that turns one placement of an activation into another."""
    return border(source, target, None).func.__name__


def sent(row: PatternRow, *borders: str) -> PatternRow:
    ways = [BORDERS[name] for name in borders if name]
    forward, backward = (" and ".join(way[i] for way in ways if way[i]) for i in (0, 1))
    return replace(row, forward=forward, backward=backward)


def x(layout: Placement) -> str:
    return "x, whole" if layout.is_replicate() else "x, a shard"


# ---- how it is drawn -------------------------------------------------------------------------------------


def cells(row: PatternRow) -> tuple[str, ...]:
    """Return a row's words, one entry per column of HEAD; the weight's entry is empty, since the weight is drawn."""
    name = row.name.rpartition("*.")[2]
    name = f"{name} ({row.modules})" if row.modules > 1 else name
    return name, "", *row.words


def columns(found: list[PatternRow]) -> list[float]:
    """Return the x at which each column of the table begins, and the x of the drawing's right edge."""
    widths = [
        max(width_of(head, 12), *(width_of(words, 13) for row in found for words in lines(cells(row)[number], head)))
        for number, head in enumerate(HEAD)
    ]
    widths[1] = WIDE + APART
    return list(accumulate((8 + width for width in widths), initial=16))


def lines(words: str, head: str) -> list[str]:
    """Return the lines of a cell: the columns of what is sent have short ones."""
    return wrap(words, BREAK) if head.startswith("sends") else [words]


def picture(canvas: Canvas, left: float, top: float, row: PatternRow, ranks: int) -> None:
    """Draw the weight of a table row, split as the plan says; draw nothing for a module without a weight."""
    if not row.weight:
        return
    if row.cut is None:
        canvas.rect(left, top + LOW / 2 - 6, WIDE, 12, fill=SOFT, radius=0)
        return
    outputs_across = isinstance(row.style, ColwiseParallel)
    size, long = row.weight[row.cut.dim], WIDE if outputs_across else HIGH
    for first in range(0, ranks, row.cut.copies):
        start, stop = (long * edge[first] / size for edge in (row.cut.starts, row.cut.stops))
        box = (left + start, top, stop - start, HIGH) if outputs_across else (left, top + start, WIDE, stop - start)
        canvas.rect(*box, fill=RANKS[first % len(RANKS)], radius=0)
        label = " ".join(map(str, range(first, first + row.cut.copies)))
        if box[2] >= width_of(label, 10) and box[3] >= 12:
            canvas.text(box[0] + box[2] / 2, box[1] + box[3] / 2, label, size=10)
