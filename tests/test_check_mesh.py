"""The checks of notebook 05 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (by indexing a grid, by reduces and exchanges of
uneven pieces, by trying all orders on paper).  Wrong: tests/wrong_answers/mesh.py.
"""

from itertools import permutations
from math import prod

import pytest
import torch
import torch.distributed as dist

from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.redistribute import Line, Step, reduce_scatter
from labs.kit import check
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.mesh import only_cut, order_of_axes, partial_to_shard

CHECKS = ("partial_to_shard", "order_of_axes")

# ---- right answers ---------------------------------------------------------------------------------------


def by_the_course(summand, dim, group=None):
    line = Line(tuple(summand.shape), dist.get_world_size(group), dist.get_rank(group), group)
    return reduce_scatter(summand, line, Partial(), Shard(dim))


def chunks(summand, dim, ranks):
    pieces = [piece.contiguous() for piece in summand.chunk(ranks, dim)]
    return pieces + [summand.narrow(dim, 0, 0).contiguous()] * (ranks - len(pieces))


def by_reduces(summand, dim, group=None):
    pieces = [piece.clone() for piece in chunks(summand, dim, dist.get_world_size(group))]
    for index, piece in enumerate(pieces):
        if piece.numel():
            dist.reduce(piece, group=group, group_dst=index)
    return pieces[dist.get_rank(group)]


def by_an_uneven_exchange(summand, dim, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    theirs = chunks(summand, dim, ranks)
    mine = [torch.empty_like(theirs[rank]) for _ in range(ranks)]
    received = torch.empty(ranks * theirs[rank].numel(), dtype=summand.dtype)
    dist.all_to_all_single(
        received,
        torch.cat([piece.flatten() for piece in theirs]),
        [piece.numel() for piece in mine],
        [piece.numel() for piece in theirs],
        group=group,
    )
    return received.view(ranks, *theirs[rank].shape).sum(0, dtype=summand.dtype)


def by_trying_all(spec, target):
    """Elements that the first rank sends, in each order."""

    def sent(order):
        now, total = list(spec.placements), 0
        for axis in order:
            if now[axis] != target[axis]:
                step = Step(axis, now[axis], target[axis])
                now[axis] = Replicate()
                line = Line(spec.but(now).block([0] * len(spec.mesh)).shape, spec.mesh[axis], 0)
                total += step.move.sent(line, step.source, step.target)
                now[axis] = target[axis]
        return total

    return min(permutations(range(len(target))), key=sent)


def by_how_the_block_grows(spec, target):
    def grows(axis):
        block = spec.but([p if b == axis else Replicate() for b, p in enumerate(target)]).block([0] * len(target))
        before = spec.but([p if b == axis else Replicate() for b, p in enumerate(spec.placements)])
        was = prod(before.block([0] * len(target)).shape)
        return prod(block.shape) / max(1, was), spec.placements[axis].is_partial()

    return torch.tensor(sorted(range(len(target)), key=grows))


def only_what_changes(spec, target):
    return [axis for axis in order_of_axes(spec, target) if spec.placements[axis] != target[axis]]


RIGHT = [
    *(("partial_to_shard", fn) for fn in (partial_to_shard, by_the_course, by_reduces, by_an_uneven_exchange)),
    *(("order_of_axes", fn) for fn in (order_of_axes, by_trying_all, by_how_the_block_grows, only_what_changes)),
]
LINES = {
    "partial_to_shard": ("✓ partial_to_shard: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"),
    "order_of_axes": (
        "✓ order_of_axes: from (Partial(), Replicate()) to (Replicate(), Shard(0)) a rank sends 0.50 × the tensor; in "
        "the other order it is 1.00 ×"
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    answers = [fn for check_of, fn in RIGHT if check_of == name]
    for fn, answer in zip(answers, together([(name, (fn,), False) for fn in answers]), strict=True):
        assert answer.ok is True and str(answer) == LINES[name], f"{fn.__name__}: {answer}"


# ---- not yet, and wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args, **options):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(stub)
    assert answer.ok is None
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name and answer.listed for answer in ANSWERS) >= 8
    assert let_past(name) == ""


def test_the_same_seed_gives_the_same_answer():
    first, again, other = (check.partial_to_shard(only_cut, seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.text != other.text
