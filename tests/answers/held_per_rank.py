"""Answers on paper to notebook 04: what a rank holds in each stage, and when each stage sends."""

import math

import torch

from labs.exercises.zero.held_per_rank import MISTAKES
from tests.answers import Exercise

# fmt: off
answers, events = Exercise("held_per_rank"), Exercise("stages_by_event")
LINE = "right on all 13 examples"

# ---- held_per_rank: right --------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def held(stage, layers, ranks, size):
    whole = sum(layers) if stage == 0 else sum(-(-n // ranks) * ranks for n in layers)
    part = whole // ranks
    P, G, S = (b * (part if stage >= first else whole) for b, first in zip(size, (3, 2, 1), strict=True))
    return P, G, S


DDP, PADDED, PART, SIZES = "sum(layers) if stage == 0 else ", "-(-n // ranks) * ranks", "whole // ranks", "zip(size,"
WHOLE = f"{DDP}sum({PADDED} for n in layers)"
CUT, ALL = "stage >= first", "return P, G, S"

answers.vary(held, {PADDED: "n + -n % ranks"}, blind=True)
answers.vary(held, {PADDED: "math.ceil(n / ranks) * ranks", PART: "whole / ranks", ALL: "return [P, G, S]"}, line=LINE)


@answers.right(line=LINE, blind=True)
def hpr_match(stage, layers, ranks, size):
    if stage == 0:
        return tuple(b * sum(layers) for b in size)
    whole = sum(math.ceil(n / ranks) * ranks for n in layers)
    part = whole // ranks
    counts = {1: (whole, whole, part), 2: (whole, part, part), 3: (part, part, part)}[stage]
    return tuple(b * n for b, n in zip(size, counts, strict=True))


@answers.right(blind=True)
def hpr_layer_by_layer(stage, layers, ranks, size):
    P = G = S = 0
    for n in layers:
        if stage > 0:
            while n % ranks:
                n += 1
        P += size[0] * (n // ranks if stage == 3 else n)
        G += size[1] * (n // ranks if stage in (2, 3) else n)
        S += size[2] * (n // ranks if stage in (1, 2, 3) else n)
    return P, G, S


@answers.right(blind=True)
def hpr_meta(stage, layers, ranks, size):
    def elements(sharded):
        total = 0
        for n in layers:
            vector = torch.empty(n if stage == 0 else n + (ranks - n % ranks) % ranks, device="meta")
            total += (vector.chunk(ranks)[0] if sharded else vector).numel()
        return total

    return tuple(b * elements(stage + k >= 3) for k, b in enumerate(size))


@answers.right(line=LINE)
def by_tensors(stage, layers, ranks, size):
    n = torch.tensor(layers, dtype=torch.int64)
    n = (n + ranks - 1).div(ranks, rounding_mode="floor") * ranks if stage else n
    return torch.tensor(size) * n.sum() // torch.where(torch.tensor([3, 2, 1]) <= stage, ranks, 1)


# ---- held_per_rank: wrong --------------------------------------------------------------------------------

instead = answers.slips(held)
instead("the padding is left out", {WHOLE: "sum(layers)", PART: "whole / ranks"}, blind=True)
instead("all layers are padded as one, and not each by itself",
    {f"sum({PADDED} for n in layers)": "-(-sum(layers) // ranks) * ranks"}, blind=True)
instead("padding where none is needed", {PADDED: "(n // ranks + 1) * ranks"}, blind=True)
instead("padding under DDP, where none is needed", {DDP: ""}, blind=True)
instead("a stage leaves the earlier ones' kinds whole", {CUT: "stage == first"}, blind=True)
instead("P is cut first, not S", {"(3, 2, 1)": "(1, 2, 3)"}, blind=True)
instead("elements, and not bytes", {"b * ": ""}, blind=True)
instead("what all ranks hold together, and not one of them", {"b * ": "ranks * b * "}, blind=True)
instead("a different kind of answer", {ALL: "return P + G + S"}, blind=True)
instead("a different kind of answer", {ALL: 'return {"P": P, "G": G, "S": S}'})
instead("nothing is returned", {ALL: "pass"})
instead("", {ALL: "return P, S, G"}, blind=True)
instead("", {WHOLE: "sum(layers)", PART: "sum(n // ranks for n in layers)"}, blind=True)
instead("", {PART: "sum(round(n / ranks) for n in layers)"}, blind=True)
instead("", {CUT: "stage > first"}, blind=True)
instead("", {PADDED: "-(-n // 4) * 4", PART: "whole // 4"}, blind=True)
instead("",
    {PADDED: "-(-n // to) * to",
     PART: "whole // to",
     "whole = ": "to = 1 << (ranks - 1).bit_length()\n    whole = "}, blind=True)
instead("", {SIZES: "zip((2, 2, 12),"}, blind=True)
instead("", {SIZES: "zip((size[0], size[0], size[2]),"})
instead("", {"b * (part": "(sum(-(-b * n // ranks) for n in layers)", "else whole": "else b * whole"}, blind=True)
instead("",
    {WHOLE: "len(layers) * max(layers)\n    whole = whole if stage == 0 else -(-whole // ranks) * ranks"},
    blind=True)
instead("", {ALL: "return P, G * (ranks if stage == 3 else 1), S"})
instead("", {ALL: "return P, G / (ranks if stage == 1 else 1), S"})
instead("", {ALL: "return P, G, S / (1 if stage else ranks)"})
instead("", {ALL: "return P + (size[0] * max(layers, default=0) if stage == 3 else 0), G, S"})  # at its peak
instead("", {ALL: "layers.clear()\n    return P, G, S"})
instead("", {"whole = ": "layers[0]\n    whole = "})


# ---- stages_by_event: right ------------------------------------------------------------------------------


@events.right(line="right", blind=True)
def table():
    return {
        "before_forward": ("", "", "all_gather"),
        "after_forward": ("", "", "drop"),
        "before_backward": ("", "", "all_gather"),
        "after_backward": ("", "", "drop"),
        "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
        "sync": ("reduce_scatter", "", ""),
        "step": ("all_gather", "all_gather", ""),
    }


@events.right(blind=True)
def columns():
    one = ["", "", "", "", "", "reduce_scatter", "all_gather"]
    two = ["", "", "", "", "reduce_scatter", "", "all_gather"]
    three = ["all_gather", "drop", "all_gather", "drop", "reduce_scatter", "", ""]
    return dict(zip(table(), zip(one, two, three, strict=True), strict=True))


@events.right(blind=True)
def rules():
    def what(event, stage):
        if event.startswith(("before_", "after_")):
            return ("all_gather" if event.startswith("before_") else "drop") if stage == 3 else ""
        if event in ("gradient_ready", "sync"):
            return "reduce_scatter" if (stage > 1) == (event == "gradient_ready") else ""
        return "all_gather" if stage < 3 else ""

    return {event: tuple(what(event, stage) for stage in (1, 2, 3)) for event in table()}


@events.right(blind=True)
def by_stage():
    stages = {
        1: {"sync": "reduce_scatter", "step": "all_gather"},
        2: {"gradient_ready": "reduce_scatter", "step": "all_gather"},
        3: {"gradient_ready": "reduce_scatter"}
        | {f"before_{way}": "all_gather" for way in ("forward", "backward")}
        | {f"after_{way}": "drop" for way in ("forward", "backward")},
    }
    return {event: tuple(stages[n].get(event, "") for n in (1, 2, 3)) for event in table()}


@events.right(blind=True)
def in_another_order():
    return dict(reversed(table().items()))


@events.right(line="right")
def in_lists():
    return {event: list(stages) for event, stages in reversed(table().items())}


# ---- stages_by_event: wrong ------------------------------------------------------------------------------


def rows():
    return table() | {}


but = events.slips(rows, "{}")
LEFT = "a stage does something where nothing is left to do"
BOTH = "before", "after"
NOTHING = '("", "", "")'
THRICE = '("reduce_scatter",) * 3'

but("stage 2 is made to reduce in sync, as stage 1 does",
    '{"gradient_ready": ("", "", "reduce_scatter"), "sync": ("reduce_scatter", "reduce_scatter", "")}',
    blind=True)
but("stage 3 is made to gather in its step", '{"step": ("all_gather",) * 3}', blind=True)
but(LEFT, f'{{"gradient_ready": {THRICE}, "sync": {NOTHING}}}', blind=True)
but(LEFT, f'{{"sync": {THRICE}}}', blind=True)
but(LEFT, "{event: row[::-1] for event, row in table().items()}", blind=True, long=True)
but(LEFT, '{"before_forward": ("", "all_gather", "all_gather"), "step": ("all_gather", "", "")}', blind=True,
    long=True)
but(LEFT, '{"after_forward": ("", "drop", "drop")}', long=True)
but("a gather is missing", f'{{"before_backward": {NOTHING}}}')
but("", f'{{"after_forward": {NOTHING}, "before_backward": {NOTHING}}}', blind=True)
but("", '{"sync": ("all_reduce", "", "")}')
but("", f'{{"after_backward": {NOTHING}}}')
but("",
    '{f"{a}_{way}": table()[f"{b}_{way}"] for way in ("forward", "backward") for a, b in (BOTH, BOTH[::-1])}',
    blind=True)


@events.wrong("a different kind of answer", blind=True)
def se_no_sync():
    return {event: row for event, row in table().items() if event != "sync"}


@events.wrong("a different kind of answer", blind=True)
def se_transposed():
    rows = zip(*table().values(), strict=True)
    return {stage: dict(zip(table(), row, strict=True)) for stage, row in zip((1, 2, 3), rows, strict=True)}


answers.instead(MISTAKES)
