"""Answers to mesh_sizes (15): the sizes of tp, pp and dp that a cluster can run a model with."""

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


spoil = answers.slips(by_loops)
spoil("not sorted, or not each once", "return found", "return found[::-1]")

answers.instead(MISTAKES)
