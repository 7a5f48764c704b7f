"""Answers to mesh_sizes (15): the sizes of tp, pp and dp that a cluster can run a model with."""

from itertools import product

from labs.exercises.plan_a_run.mesh_sizes import MISTAKES
from labs.kit import check
from tests.answers import Exercise

answers = Exercise("mesh_sizes")
answers.right(check.mesh_sizes.expected, line="right on all 7 examples")


@answers.right
def by_loops(gpus, node, heads, layers, batch):
    found = []
    for tp in range(1, min(node, gpus) + 1):
        for pp in range(1, layers + 1):
            dp, rest = divmod(gpus, tp * pp)
            if rest or heads % tp or batch % dp:
                continue
            if batch // dp >= pp:
                found.append((tp, pp, dp))
    return found


@answers.right
def by_product(gpus, node, heads, layers, batch):
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    meshes = [(t, p, d) for t, p, d in product(sizes, repeat=3) if t * p * d == gpus]
    return sorted(
        [t, p, d]
        for t, p, d in meshes
        if t <= node and heads % t == 0 and p <= layers and batch % (d * 1) == 0 and batch // d >= p
    )


spoil = answers.slips(by_loops)
spoil("not sorted, or not each once", "return found", "return found[::-1]")
spoil("", "range(1, layers + 1)", "range(2, layers + 1)")

answers.instead(MISTAKES)
