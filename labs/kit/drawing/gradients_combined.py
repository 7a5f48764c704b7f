"""A drawing of how the ranks of 2 × 2 × 2 combine the gradients of each kind of parameter: mean, sum, or not at all.

who_combines({"pp": 2, "dp": 2, "tp": 2}, combine)

What is combined along each axis is found by running `combine` on a mesh that only notes the axes along which a group
was asked for; so the drawing cannot say anything else than the code.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from labs.kit.drawing.palette import KINDS, MUTED, RANKS, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

KINDS_OF_PARAMETERS = {  # {kind: (an example, what tells ranks along tp apart, whether ranks along pp differ)}
    "split": ("a query matrix", ("left columns", "right columns"), True),
    "whole": ("a norm's weight", ("all of it", "all of it"), True),
    "summand": ("a norm's weight, sequences split", ("of tokens 0–15", "of tokens 16–31"), True),
    "tied": ("an embedding that is also the head", ("words 0–127", "words 128–255"), False),
}
MEAN, SUM, SAME = KINDS["P"], KINDS["comm"], MUTED
WIDE, TALL, GAP, PANEL, HIGH = 116, 42, 32, 690, 218


def who_combines(sizes: Mapping[str, int], combine: Callable[[Any, str, Any], Any]) -> Drawing:
    """Draw, for each kind of parameter, what each of eight ranks has, and along which axes gradients are combined.

    sizes: the sizes of "pp", "dp" and "tp", each 2.
    combine: a function (gradient, kind, mesh), as in notebook 11.
    """
    added = {kind: axes_added(combine, kind, sizes) for kind in KINDS_OF_PARAMETERS}
    words = ". ".join(
        f"{kind}: {', '.join(f'{how} along {axis}' for axis, how in added[kind].items())}" for kind in added
    )
    canvas = Canvas(PANEL, 4 * HIGH + 90, "Gradients on 2 × 2 × 2 ranks: mean, sum, or nothing", words)
    for number, (kind, how) in enumerate(added.items()):
        panel(canvas, 16, 22 + number * HIGH, kind, how)
    y = 4 * HIGH + 44
    legend = (("mean", "other sequences: average"), ("Σ", "a part of the sum: add up"), ("=", "already the same"))
    for number, (sign, meaning) in enumerate(legend):
        badge(canvas, 40 + 240 * number, y, sign)
        canvas.text(70 + 240 * number, y, meaning, anchor="start")
    canvas.text(16, y + 28, "no sign, other tint: another parameter", anchor="start", fill=MUTED)
    return canvas.drawing()


def axes_added(combine: Callable[..., Any], kind: str, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return {axis: "mean" or "sum"} for the axes along which `combine` adds up a gradient of this kind.

    Without an answer to the exercise, there are none.
    """
    asked: list[str] = []
    gradient = torch.ones(())
    mesh = SimpleNamespace(get_group=lambda axis: axis, size=sizes.get)
    with (
        suppress(NotImplementedError),
        patch.object(dist, "all_reduce", lambda tensor, op=None, group=None, async_op=False: asked.append(group)),
    ):
        combine(gradient, kind, mesh)
    divided = round(1 / gradient.item())
    return {axis: "mean" if axis == "dp" and divided == sizes["dp"] else "sum" for axis in asked}


def panel(canvas: Canvas, x0: float, y0: float, kind: str, how: Mapping[str, str]) -> None:
    example, sides, differs = KINDS_OF_PARAMETERS[kind]
    canvas.text(x0, y0, f'"{kind}"', 15, "start", "bold")
    canvas.text(x0 + width_of(kind, 15) + 40, y0, example, 13, "start", fill=MUTED)
    stage, top = 2 * WIDE + GAP, y0 + 58

    def left(pp: int, tp: int) -> float:
        return x0 + 70 + pp * (stage + 44) + tp * (WIDE + GAP)

    for dp in (0, 1):
        canvas.text(x0, top + dp * (TALL + GAP) + TALL / 2, f"dp {dp}", 13.5, "start", "bold")
        for pp in (0, 1):
            for tp in (0, 1):
                x, y = left(pp, tp), top + dp * (TALL + GAP)
                tint = RANKS[2 * pp * differs + tp * (sides[0] != sides[1] and kind != "summand")]
                canvas.rect(x, y, WIDE, TALL, fill=tint)
                part = f"layer {pp}" if differs else ("embedding", "head")[pp]
                canvas.lines(x + WIDE / 2, y + 12, [part, sides[tp]], 13, leading=1.3)
            if kind == "whole" or "tp" in how:
                badge(
                    canvas,
                    left(pp, 0) + WIDE + GAP / 2,
                    top + dp * (TALL + GAP) + TALL / 2,
                    "Σ" if "tp" in how else "=",
                )
    for pp in (0, 1):
        canvas.text(left(pp, 0) + stage / 2, y0 + 22, f"pp {pp}", 13.5, weight="bold")
        for tp in (0, 1):
            canvas.text(left(pp, tp) + WIDE / 2, y0 + 46, f"tp {tp}", 13, fill=MUTED)
            if "dp" in how:
                badge(canvas, left(pp, tp) + WIDE / 2, top + TALL + GAP / 2, "mean" if how["dp"] == "mean" else "Σ")
    for tp, lift in ((0, 20), (1, 40)) if "pp" in how else ():
        y, start, end = top + 2 * TALL + GAP, left(0, tp) + WIDE / 2, left(1, tp) + WIDE / 2
        canvas.line((start, y), (start, y + lift), (end, y + lift), (end, y), stroke=SUM, line=2)
        badge(canvas, (start + end) / 2, y + lift, "Σ")


def badge(canvas: Canvas, x: float, y: float, sign: str) -> None:
    colour, width = {"mean": MEAN, "Σ": SUM, "=": SAME}[sign], 46 if sign == "mean" else 24
    canvas.rect(x - width / 2, y - 10, width, 20, fill=colour, stroke=colour, radius=10)
    canvas.text(x, y, sign, 12.5, weight="bold", fill=ink(colour))
