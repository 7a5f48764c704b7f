"""Answers on paper to notebook 02: how long an all-reduce takes, as a ring and as a tree; what rings send."""

import itertools  # noqa: F401  (exchanged words name it)
import math
from fractions import Fraction  # noqa: F401  (as above)

import numpy as np  # noqa: F401  (as above)
import torch  # noqa: F401  (as above)

from tests.answers import Exercise

# fmt: off
trees = Exercise("tree_seconds")
TEN = "right on all 10 examples"

# ---- tree_seconds: right ---------------------------------------------------------------------------------


@trees.right(line=TEN, blind=True)
def tree(size, ranks, latency, bandwidth):
    rounds = 2 * math.ceil(math.log2(ranks))
    return rounds * latency + rounds * size / bandwidth


UP = "math.ceil(math.log2(ranks))"
WHOLE = "rounds * size / bandwidth"

trees.vary(tree, {UP: "(ranks - 1).bit_length()"}, blind=True)
# ---- tree_seconds: wrong ---------------------------------------------------------------------------------

trees.spoil(tree, "the way back is left out", {f"2 * {UP}": UP}, blind=True)
trees.spoil(tree, "the rounds are not rounded up", {UP: "math.log2(ranks)"}, blind=True)
trees.spoil(tree, "one round too many", {UP: "ranks.bit_length()"}, blind=True)
trees.spoil(tree, "a round for each rank, and not for each doubling", {UP: "(ranks - 1)"}, blind=True)
trees.spoil(tree, "pieces travel as in a ring, and not whole tensors",
    {WHOLE: "rounds * size / ranks / bandwidth"}, blind=True)


# ---- sent_by_rings: wrong --------------------------------------------------------------------------------
