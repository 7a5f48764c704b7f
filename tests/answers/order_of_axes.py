"""Answers to order_of_axes (05): from one layout to another, along which axis first?"""

from itertools import permutations
from math import prod

import torch
import torch.distributed as dist  # noqa: F401  (exchanged words name it)
import torch.distributed.tensor as torch_tensor  # noqa: F401  (exchanged words name it)

from labs.dtensor import Replicate
from tests.answers import Exercise

answers = Exercise("order_of_axes")
LINE = (
    "from (Partial(), Replicate()) to (Replicate(), Shard(0)) a rank sends 0.50 × the tensor; in the other order it is "
    "1.00 ×"
)


def step(now, then, ranks, block):
    """(elements sent, elements of the block then)"""
    if now == then:
        return 0, block
    if now.is_replicate():
        return 0, block / ranks
    if now.is_partial():
        half = (ranks - 1) / ranks * block
        return (half, block / ranks) if then.is_shard() else (2 * half, block)
    return ((ranks - 1) / ranks * block, block) if then.is_shard() else ((ranks - 1) * block, block * ranks)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def by_rule(spec, target):
    def late(axis):
        now, then = spec.placements[axis], target[axis]
        if then.is_shard() and not now.is_shard():
            return 1 if now.is_partial() else 0
        return 3 if now.is_shard() and then.is_replicate() else 2

    return sorted(range(len(target)), key=late)


@answers.right(blind=True)
def oa_lists(spec, target):
    free, smaller, same, larger = [], [], [], []
    for axis, (now, then) in enumerate(zip(spec.placements, target, strict=True)):
        if now.is_replicate() and then.is_shard():
            free.append(axis)
        elif now.is_partial() and then.is_shard():
            smaller.append(axis)
        elif now.is_shard() and not then.is_shard():
            larger.append(axis)
        else:
            same.append(axis)
    return free + smaller + same + larger


@answers.right(blind=True)
def by_trying_all(spec, target):
    def cost(order):
        cut = [ranks for placement, ranks in zip(spec.placements, spec.mesh, strict=True) if placement.is_shard()]
        block, total = prod(spec.shape) / prod(cut), 0
        for axis in order:
            sent, block = step(spec.placements[axis], target[axis], spec.mesh[axis], block)
            total += sent
        return total

    return list(min(permutations(range(len(target))), key=cost))


answers.vary(
    by_trying_all,
    {"list(min(permutations(range(len(target))), key=cost))": "min(permutations(range(len(target))), key=cost)"},
    line=LINE,
)


@answers.right(blind=True)
def oa_with_padding(spec, target):
    """Tries all orders, with the true sizes of blocks."""

    def elements(spec):
        return prod(spec.block([0] * len(spec.mesh)).shape)

    def sent(order):
        now, total = spec, 0
        for axis in order:
            old, new, ranks = now.placements[axis], target[axis], spec.mesh[axis]
            after = now.but([*now.placements[:axis], new, *now.placements[axis + 1 :]])
            if old.is_partial() and new.is_shard():
                total += (ranks - 1) * elements(after)
            else:
                total += step(old, new, ranks, elements(now))[0]
            now = after
        return total

    return list(min(permutations(range(len(target))), key=sent))


@answers.right(blind=True)
def oa_table(spec, target):
    def kind(p):
        return "S" if p.is_shard() else "R" if p.is_replicate() else "P"

    when = {"RS": 0.0, "PS": 1.0, "PR": 2.5, "SS": 2.0, "RR": 9.0, "PP": 9.0, "SR": 3.0}
    return [a for _, a in sorted((when[kind(spec.placements[a]) + kind(then)], a) for a, then in enumerate(target))]


@answers.right(line=LINE)
def by_how_the_block_grows(spec, target):
    def elements(placement, axis):
        alone = [placement if other == axis else Replicate() for other in range(len(target))]
        return prod(spec.but(alone).block([0] * len(target)).shape)

    def grows(axis):
        was = spec.placements[axis]
        return elements(target[axis], axis) / max(1, elements(was, axis)), was.is_partial()

    return torch.tensor(sorted(range(len(target)), key=grows))


# ---- wrong: by another rule ------------------------------------------------------------------------------

CUT = "1 if now.is_partial() else 0"
REST = "3 if now.is_shard() and then.is_replicate() else 2"
IF = "if then.is_shard() and not now.is_shard():"
RULE = f"{IF}\n            return {CUT}\n        return {REST}"
SORTED = "return sorted(range(len(target)), key=late)"
CHANGED = "[axis for axis, now in enumerate(spec.placements) if now != target[axis]]"
LATE, REDUCED, GATHERED = "cut too late", "reduce-scattered too late", "gathered first"


def by(mistake, key, **options):
    """Sorted by something else."""
    answers.spoil(by_rule, mistake, {RULE: f"return {key}"}, **options)


def returned(mistake, order, **options):
    answers.spoil(by_rule, mistake, {SORTED: f"order = sorted(range(len(target)), key=late)\n    {order}"}, **options)


answers.vary(by_rule, {RULE: "return now.is_shard() - then.is_shard(), now.is_partial()"}, blind=True)
answers.vary(by_rule, {"range(len(target))": CHANGED}, line=LINE)
by(LATE, "axis", blind=True)
by(LATE, "-axis", blind=True)
by(LATE, "-spec.mesh[axis]", blind=True, long=True)
by(LATE, "0 if then.is_shard() else 1", blind=True, long=True)
by(LATE, "0 if now.is_partial() else 1 if then.is_shard() else 2", blind=True, long=True)
by(LATE, "now.is_shard() - then.is_shard()", blind=True, long=True)
by(LATE, "-step(now, then, spec.mesh[axis], 1.0)[0]", blind=True, long=True)
by(LATE, "step(now, then, spec.mesh[axis], 1.0)[1]", blind=True, long=True)
spoil = answers.slips(by_rule)
spoil(LATE, CUT, "0 if now.is_partial() else 1", blind=True, long=True)
returned(LATE, "return order[::-1]", blind=True, long=True)
spoil(
    LATE,  # PyTorch's classes: no placement is one of them
    RULE,
    "if isinstance(then, torch_tensor.Shard):\n"
    "            return 0 if isinstance(now, torch_tensor.Replicate) else 1\n"
    "        return 3 if isinstance(now, torch_tensor.Shard) else 2",
    blind=True,
    long=True,
)
by(REDUCED, "0 if now.is_replicate() else 1 if now.is_partial() else 2", blind=True)
by(
    REDUCED,
    "(0 if now.is_replicate() else 1 if now.is_shard() else 2) if then.is_shard() else 4 if now.is_shard() else 3",
    blind=True,
)
spoil(
    REDUCED,
    {IF: "if then.is_shard(0) and not now.is_shard(0):", REST: "3 if now.is_shard(0) and not then.is_shard(0) else 2"},
    blind=True,
    long=True,
)
CUTS, GATHERS = "now.is_replicate() and then.is_shard()", "now.is_shard() and then.is_replicate()"
by(
    REDUCED,
    f"not ({CUTS}), {GATHERS}, not (now.is_partial() and then.is_replicate())",
    long=True,
)
by(GATHERED, "step(now, then, spec.mesh[axis], 1.0)[0]", blind=True)
spoil(GATHERED, REST, "2", blind=True)
spoil(GATHERED, REST, f"-1 if {GATHERS} else 2", long=True)
spoil(GATHERED, REST, f"2 if {GATHERS} else 3", long=True)
by(
    GATHERED,
    "(4 if then.is_shard() else 3) if now.is_shard() else (1 if now.is_partial() else 0) if then.is_shard() else 2",
    blind=True,
    long=True,
)
by(
    GATHERED,
    "3 if now.is_partial() and then.is_replicate() else 1 + now.is_shard() - then.is_shard() + 0.5 * now.is_partial()",
    blind=True,
    long=True,
)
by(GATHERED, "not now.is_shard(), then.is_replicate()", long=True)
by("", "(0 if now.is_replicate() else 1) if then.is_shard() else 3 if now.is_shard() else 2")
spoil("", f"return {CUT}", f"return ({CUT}) / spec.mesh.size(axis)", blind=True, alone=True)

# ---- wrong: what is returned -----------------------------------------------------------------------------

returned("right only on two axes", "return [order.index(axis) for axis in range(len(target))]", blind=True)
returned("right only on two axes", "return [axis for axis in order if axis < 2] + [*range(2, len(target))]", blind=True)
returned("not every axis once", "return order[:1]")
returned("not every axis once", "return order * 2")
returned("not a list of axes", 'return ["ab"[axis] for axis in order[:2]]')
returned("nothing is returned", "pass")
returned("not the same on every rank", "return order if dist.get_rank() % 2 else order[::-1]")
