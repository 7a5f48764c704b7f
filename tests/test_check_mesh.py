"""The checks of notebook 05 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (by indexing a grid, by reduces and exchanges of
uneven pieces, by trying all orders on paper).  Wrong: tests/wrong_answers/mesh.py.
"""

import pytest
import torch
import torch.distributed as dist

from labs.dtensor import Partial, Shard
from labs.dtensor.redistribute import Line, reduce_scatter
from labs.kit import check
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.mesh import only_cut, partial_to_shard

CHECKS = ("partial_to_shard",)

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


RIGHT = [
    *(("partial_to_shard", fn) for fn in (partial_to_shard, by_the_course, by_reduces, by_an_uneven_exchange)),
]
LINES = {
    "partial_to_shard": ("✓ partial_to_shard: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×"),
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
