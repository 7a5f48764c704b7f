"""Answers on paper to notebook 04: what a rank holds in each stage, and when each stage sends."""

from tests.answers import Exercise

# fmt: off
answers = Exercise("held_per_rank")
LINE = "right on all 13 examples"

# ---- held_per_rank: right --------------------------------------------------------------------------------


@answers.right(line=LINE)
def held(stage, layers, ranks, size):
    whole = sum(layers) if stage == 0 else sum(-(-n // ranks) * ranks for n in layers)
    part = whole // ranks
    P, G, S = (b * (part if stage >= first else whole) for b, first in zip(size, (3, 2, 1), strict=True))
    return P, G, S


DDP, PADDED, PART = "sum(layers) if stage == 0 else ", "-(-n // ranks) * ranks", "whole // ranks"
WHOLE = f"{DDP}sum({PADDED} for n in layers)"
CUT = "stage >= first"

answers.vary(held, {PADDED: "n + -n % ranks"})
# ---- held_per_rank: wrong --------------------------------------------------------------------------------

instead = answers.slips(held)
instead("the padding is left out", {WHOLE: "sum(layers)", PART: "whole / ranks"})
instead("all layers are padded as one, and not each by itself",
    {f"sum({PADDED} for n in layers)": "-(-sum(layers) // ranks) * ranks"})
instead("padding where none is needed", {PADDED: "(n // ranks + 1) * ranks"})
instead("padding under DDP, where none is needed", {DDP: ""})
instead("a stage leaves the earlier ones' kinds whole", {CUT: "stage == first"})
instead("P is cut first, not S", {"(3, 2, 1)": "(1, 2, 3)"})
instead("elements, and not bytes", {"b * ": ""})
instead("what all ranks hold together, and not one of them", {"b * ": "ranks * b * "})
