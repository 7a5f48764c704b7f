"""Answers on paper to notebook 02: how long an all-reduce takes, as a ring and as a tree; what rings send."""

import math

from labs.exercises.collectives.tree_seconds import TREE
from tests.answers import Exercise

# fmt: off
trees = Exercise("tree_seconds")
TEN = "right on all 10 examples"

# ---- tree_seconds: right ---------------------------------------------------------------------------------


@trees.right(line=TEN)
def tree(size, ranks, latency, bandwidth):
    rounds = 2 * math.ceil(math.log2(ranks))
    return rounds * latency + rounds * size / bandwidth


UP = "math.ceil(math.log2(ranks))"

trees.vary(tree, {UP: "(ranks - 1).bit_length()"})

# ---- tree_seconds: wrong ---------------------------------------------------------------------------------

trees.instead(TREE)
