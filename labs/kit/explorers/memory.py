"""The memory explorer's picture: what each rank holds, by kind and by stage, beside the cards that people have.

    picture({}, **BEGIN)                DDP and the stages of ZeRO, as `labs.cost` predicts them, and nobody else
    cards(held, fits, caption)          the same, of any numbers

`labs.kit.play.memory` puts controls above it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from labs import cost
from labs.kit.drawing.palette import KINDS, MUTED, NAMES, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.model import PRESETS

Bytes = Mapping[str, float]  # by kind
GB = 10**9
CARDS = (24, 40, 80, 141)  # GB of memory, as of an RTX 4090, an A100, an H100 and an H200
STAGES = {"DDP": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
LONG, HIGH = 420, 36  # pixels: of the longest bar, and from one bar to the next
NOTE = "Each kind at its most; the stem, and the number: the most of all at one moment. GB: 10⁹ bytes. »: longer."

# What can be set, to what (a slider, or where it is a mapping, a menu), and where it begins.
CONTROLS: dict[str, Sequence | Mapping] = {
    "model": {name: name for name in PRESETS},
    "precision": {name: name for name in cost.PIE},
    "ranks": tuple(2**k for k in range(13)),
    "batch": (1, 2, 3, 4, 6, 8, 12, 16, 32),
    "context": tuple(2**k for k in range(6, 18)),
    "recompute": {name: name for name in cost.RECOMPUTE},
    "offload": {"nothing": "nothing", "optimizer state": "optimizer state"},
}
BEGIN = {"model": "llama3-8b", "precision": "mixed", "ranks": 64, "batch": 1, "context": 8192}
BEGIN |= {"recompute": "none", "offload": "nothing"}


def picture(measured: Mapping[str, Bytes], model: str, ranks: int, **settings: Any) -> Drawing:
    """Bars of DDP and the three stages at these settings, by the names of CONTROLS, and of what was `measured`."""
    batch, context, offload = settings["batch"], settings["context"], settings["offload"] != "nothing"
    config = replace(PRESETS[model], context=context)
    job = cost.Job(config, batch, ranks, precision=settings["precision"], recompute=settings["recompute"])
    held = {name: vars(cost.per_rank(job, stage, offload)) for name, stage in STAGES.items()}
    fits = {
        name: {card: cost.smallest_ranks(job, stage, card * GB, offload) for card in CARDS}
        for name, stage in STAGES.items()
    }
    parameters = count(sum(cost.parameter_sizes(config)))
    caption = f"{model}, {parameters} parameters, on {ranks} ranks, each with {batch} × {context:,} tokens"
    return cards(held | dict(measured), fits, caption)


def cards(held: Mapping[str, Bytes], fits: Mapping[str, Mapping[int, int | None]], caption: str) -> Drawing:
    """A bar for each name, with a line for each card; and a table of the smallest numbers of ranks.

    held: bytes by kind, each at its most, and "peak", the most of all at one moment, which is marked.  fits: for some
    of the names, by card (GB), on how many ranks the peak fits; None for no number.  The scale ends behind the largest
    card; what is longer fills it, its kinds in proportion.
    """
    peaks = {name: kinds["peak"] for name, kinds in held.items()}
    stacks = {name: {kind: kinds.get(kind, 0) for kind in KINDS} for name, kinds in held.items()}
    longest = max(sum(kinds.values()) for kinds in stacks.values())
    scale = LONG / (1.25 * GB * max(CARDS) if longest > 2 * GB else 1.05 * longest)
    left, top, bottom = 24 + max(width_of(name, 13) for name in held), 88, 88 + HIGH * len(held)
    table = left + LONG + 92
    lines = [f"{name}: {size(peaks[name])}" + (f", fits {said(fits[name])}" if name in fits else "") for name in held]
    canvas = Canvas(table + 66 * len(CARDS) + 8, bottom + 70, caption, "; ".join(lines) + ".")
    canvas.text(16, 22, caption, anchor="start", weight="bold")
    canvas.text(table, 50, "smallest number of ranks that fits", size=12, anchor="start", fill=MUTED)
    for column, card in enumerate(CARDS):
        x = left + scale * card * GB
        if x < left + LONG:
            canvas.text(x, 66, card, size=12, fill=MUTED)
            canvas.line((x, 76), (x, bottom), stroke=MUTED, dash="4 3")
        canvas.text(table + 66 * column + 28, 72, f"{card} GB", size=12.5, weight="bold")
    for row, (name, kinds) in enumerate(stacks.items()):
        y = top + HIGH * row
        canvas.text(left - 10, y + 12, name, anchor="end")
        end = bar(canvas, left, y, kinds, peaks[name], scale)
        canvas.rect(end + 4, y + 2, width_of(size(peaks[name]), 13), 20, stroke="none")  # over the cards' lines
        canvas.text(end + 8, y + 12, size(peaks[name]), anchor="start")
        for column, ranks in enumerate(fits.get(name, {}).values()):
            canvas.text(table + 66 * column + 28, y + 12, ranks or "none")
    legend(canvas, left, bottom + 22, [kind for kind in KINDS if any(kinds[kind] for kinds in stacks.values())])
    canvas.text(16, bottom + 50, NOTE, size=12, anchor="start", fill=MUTED)
    return canvas.drawing("\n".join([caption, *lines]))


def bar(canvas: Canvas, left: float, y: float, kinds: Bytes, peak: float, scale: float) -> float:
    """The kinds side by side, and a stem on the peak; returns where it ends.  What is too long has » for its end."""
    x, end = left, left + LONG
    fits = min(1.0, LONG / (scale * sum(kinds.values())))
    for kind, held in kinds.items():
        long = fits * scale * held
        if long > 0:
            canvas.rect(x, y, long, 24, fill=KINDS[kind], radius=0)
            if long > width_of(kind, 12) + 4:
                canvas.text(x + long / 2, y + 12, kind, size=12, fill=ink(KINDS[kind]))
        x += long
    if fits < 1:
        canvas.text(end + 1, y + 12, "»", size=15, anchor="start")
        return end + 8
    mark = left + scale * peak
    canvas.line((mark, y - 7), (mark, y), line=3)
    return max(x, mark)


def legend(canvas: Canvas, x: float, y: float, kinds: list[str]) -> None:
    for kind in kinds:
        canvas.rect(x, y - 8, 16, 16, fill=KINDS[kind])
        canvas.text(x + 22, y, NAMES[kind], size=12, anchor="start", fill=MUTED)
        x += 40 + width_of(NAMES[kind], 12)


def said(by_card: Mapping[int, int | None]) -> str:
    return ", ".join(f"{card} GB on {ranks or 'no number of'} ranks" for card, ranks in by_card.items())


def size(held: float) -> str:
    """Decimal, as cards and papers have it: "1.88 GB"."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6}
    name = next((name for name, unit in units.items() if held >= unit), "kB")
    return f"{held / units.get(name, 1e3):.3g} {name}"


def count(parameters: int) -> str:
    """ "8.03 billion", "205,376"."""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters:,}"
