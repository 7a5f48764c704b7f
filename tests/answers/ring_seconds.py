"""Answers on paper to notebook 02: how long an all-reduce takes, as a ring and as a tree; what rings send."""

import itertools  # noqa: F401  (exchanged words name it)
import math
from fractions import Fraction  # noqa: F401  (as above)

import numpy as np  # noqa: F401  (as above)
import torch  # noqa: F401  (as above)

from labs import cost
from labs.exercises.collectives.ring_seconds import RING
from labs.exercises.collectives.tree_seconds import TREE
from tests.answers import Exercise

# fmt: off
rings, trees, sendings = Exercise("ring_seconds"), Exercise("tree_seconds"), Exercise("sent_by_rings")
TEN = "right on all 10 examples"

# ---- ring_seconds: right ---------------------------------------------------------------------------------


@rings.right(line=TEN, blind=True)
def ring(size, ranks, latency, bandwidth):
    rounds = 2 * (ranks - 1)
    piece = size / ranks
    return rounds * latency + rounds * piece / bandwidth


TWICE, PIECE, LATENCY, BYTES = "2 * (ranks - 1)", "size / ranks", "rounds * latency", "rounds * piece / bandwidth"
TOTAL = f"{LATENCY} + {BYTES}"
EACH = "latency + piece / bandwidth"

rings.vary(ring, {TOTAL: f"rounds * ({EACH})"}, line=TEN, blind=True)
rings.vary(ring, {TOTAL: f"sum(({EACH} for _ in range(rounds)), 0.0)"}, line=TEN, blind=True)
rings.vary(ring,
    {f"rounds = {TWICE}": "if ranks == 1:\n        return 0",
     f"return {TOTAL}": f"half = (ranks - 1) * ({EACH})\n    return half + half"}, blind=True)
rings.vary(ring, {BYTES: "(2 * size - 2 * piece) / bandwidth"}, blind=True)
rings.vary(ring, {PIECE: "torch.tensor(size / ranks, dtype=torch.float64)"}, line=TEN)
rings.right(line=TEN)(cost.ring_seconds)

# ---- ring_seconds: wrong ---------------------------------------------------------------------------------

rings.spoil(ring, "only the first half of the ring", {TWICE: "ranks - 1"}, blind=True)
rings.spoil(ring, "whole tensors travel", {PIECE: "size"}, blind=True)
rings.spoil(ring, "N rounds, and not N − 1", {TWICE: "2 * ranks"}, blind=True)
rings.spoil(ring, "nothing is returned", {f"return {TOTAL}": TOTAL})
rings.spoil(ring, "a different kind of answer", {" + ": ", "})
rings.spoil(ring, "", {PIECE: "size // ranks"}, blind=True)
rings.spoil(ring, "", {PIECE: "2 * size / ranks"}, blind=True)
rings.spoil(ring, "", {PIECE: "8 * size / ranks"})
rings.spoil(ring, "", {LATENCY: "(ranks > 1) * latency"}, blind=True)
rings.spoil(ring, "", {LATENCY: "rounds / ranks * latency"}, blind=True)
rings.spoil(ring, "", {LATENCY: "2 * math.log2(ranks) * latency"}, blind=True)
rings.spoil(ring, "", {LATENCY: "2 * min(ranks - 1, size) * latency"}, blind=True)
rings.spoil(ring, "", {TOTAL: f"{TOTAL} if size else 0.0"}, blind=True)
rings.spoil(ring, "", {TWICE: "2 * ranks - 1 if ranks > 1 else 0"}, blind=True)

# ---- tree_seconds: right ---------------------------------------------------------------------------------


@trees.right(line=TEN, blind=True)
def tree(size, ranks, latency, bandwidth):
    rounds = 2 * math.ceil(math.log2(ranks))
    return rounds * latency + rounds * size / bandwidth


UP = "math.ceil(math.log2(ranks))"
WHOLE = "rounds * size / bandwidth"

trees.vary(tree, {UP: "(ranks - 1).bit_length()"}, blind=True)
trees.vary(tree, {UP: "next(k for k in itertools.count() if 2**k >= ranks)"}, blind=True)
trees.vary(tree, {UP: "np.float64(len(bin(ranks - 1)) - 2 if ranks > 1 else 0)"}, line=TEN)
trees.right(line=TEN)(cost.tree_seconds)


@trees.right(line=TEN, blind=True)
def tree_loop(size, ranks, latency, bandwidth):
    seconds, distance = 0.0, 1
    while distance < ranks:
        seconds += 2 * (latency + size / bandwidth)
        distance *= 2
    return seconds


@trees.right(blind=True)
def tree_recursive(size, ranks, latency, bandwidth):
    if ranks <= 1:
        return 0
    return 2 * latency + 2 * size / bandwidth + tree_recursive(size, (ranks + 1) // 2, latency, bandwidth)


# ---- tree_seconds: wrong ---------------------------------------------------------------------------------

trees.spoil(tree, "the way back is left out", {f"2 * {UP}": UP}, blind=True)
trees.spoil(tree, "the rounds are not rounded up", {UP: "math.log2(ranks)"}, blind=True)
trees.spoil(tree, "the rounds are not rounded up", {UP: "int(math.log2(ranks))"}, blind=True)
trees.spoil(tree, "one round too many", {UP: "ranks.bit_length()"}, blind=True)
trees.spoil(tree, "a round for each rank, and not for each doubling", {UP: "(ranks - 1)"}, blind=True)
trees.spoil(tree, "pieces travel as in a ring, and not whole tensors",
    {WHOLE: "rounds * size / ranks / bandwidth"}, blind=True)
trees.spoil(tree, "nothing is returned", {f"return {LATENCY} + {WHOLE}": f"{LATENCY} + {WHOLE}"})
trees.spoil(tree, "", {WHOLE: "2 * (ranks > 1) * size / bandwidth"}, blind=True)
trees.spoil(tree, "", {WHOLE: "2 * sum((k + 1) * size / bandwidth for k in range(rounds // 2))"}, blind=True)
trees.spoil(tree, "", {UP: "math.ceil(math.log(ranks))"}, blind=True)
trees.spoil(tree, "", {UP: "round(math.log2(ranks))"}, blind=True)
trees.spoil(tree, "", {f"2 * {UP}": "math.ceil(2 * math.log2(ranks))"})
trees.spoil(tree, "", {UP: "int(math.log2(ranks)) + 4 * (ranks.bit_count() > 1)"}, blind=True)
trees.spoil(tree, "", {f"2 * {UP}": "int(math.log2(ranks)) + 2 * (ranks.bit_count() > 1)"})  # recursive doubling
trees.wrong()(cost.ring_seconds)

# ---- sent_by_rings: right --------------------------------------------------------------------------------

SIX = "right on all 6 examples"


@sendings.right(line=SIX, blind=True)
def sent(ranks):
    part = (ranks - 1) / ranks
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": 2 * part, "all_to_all": part}


PART, SUM, GATHERED, DEALT = "(ranks - 1) / ranks", "2 * part", '"all_gather": part', '"all_to_all": part'
FIRST = '"reduce_scatter": part, '

sendings.vary(sent, {PART: "Fraction(ranks - 1, ranks)"}, line=SIX, blind=True)
sendings.vary(sent, {PART: "1 - 1 / ranks", SUM: "2 - 2 / ranks"}, blind=True)
sendings.vary(
    sent,
    {PART: "sum(1 / ranks for _ in range(1, ranks))", SUM: "part + part", FIRST: "", DEALT: f"{DEALT}, {FIRST}"},
    blind=True,
)
sendings.vary(sent,
    {PART: "ranks - 1",
     "return ": "pieces = ",
     "}": "}\n    return {name: n / ranks for name, n in pieces.items()}"}, blind=True)

# ---- sent_by_rings: wrong --------------------------------------------------------------------------------

sendings.spoil(sent, "all_reduce once instead of twice", {SUM: "part"}, blind=True)
sendings.spoil(sent, "(N − 1) tensors instead of pieces", {PART: "ranks - 1"}, blind=True)
sendings.spoil(sent, "N pieces, and not N − 1", {PART: "1"}, blind=True)
sendings.spoil(sent, "a different kind of answer", {f", {DEALT}": ""})
sendings.spoil(sent, "a different kind of answer", {"return {": "return [*{", "}": "}.values()]"})
sendings.spoil(sent, "", {SUM: "2"})
sendings.spoil(sent, "", {PART: "ranks - 1", SUM: "part"})
sendings.spoil(sent, "", {PART: "(ranks - 1) // ranks"}, blind=True)
sendings.spoil(sent, "", {PART: "ranks / (ranks - 1)"}, blind=True)
sendings.spoil(sent, "", {PART: "1 / ranks"}, blind=True)
sendings.spoil(sent, "", {PART: "2 * (ranks - 1) / ranks", SUM: "part"}, blind=True)
sendings.spoil(sent, "", {PART: "3 / 4"}, blind=True)
sendings.spoil(sent, "", {DEALT: '"all_to_all": 1'}, blind=True)
sendings.spoil(sent, "", {DEALT: '"all_to_all": ranks - 1'}, blind=True)
sendings.spoil(sent, "", {DEALT: '"all_to_all": 2 * part'}, blind=True)
sendings.spoil(sent, "", {GATHERED: '"all_gather": ranks - 1'}, blind=True)

rings.instead(RING)
trees.instead(TREE)
