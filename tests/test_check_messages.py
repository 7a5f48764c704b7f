"""The check of notebook 00 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (a list, means that are added, messages that
are posted).  Wrong: tests/wrong_answers/messages.py.
"""

import torch
import torch.distributed as dist

from labs.kit import check
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.messages import by_all_reduce, everybody, mean_on_rank_0, summed

NAME = "mean_on_rank_0"


def with_a_list(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    pieces = [x] + [torch.empty_like(x) for _ in range(1, ranks)]
    for other, piece in enumerate(pieces[1:], 1):
        dist.recv(piece, src=other)
    return torch.stack(pieces).mean(0)


def all_posted_at_once(x):
    rank, ranks = everybody()
    if rank > 0:
        dist.isend(x, dst=0).wait()
        return None
    pieces = [torch.empty_like(x) for _ in range(1, ranks)]
    works = [dist.irecv(piece, src=other) for other, piece in enumerate(pieces, 1)]
    for work in works:
        work.wait()
    return sum(pieces, x.clone()) / ranks


def last_rank_first(x):
    rank, ranks = everybody()
    if rank == 0:
        mean, theirs = x / ranks, torch.empty_like(x)
        for other in reversed(range(1, ranks)):
            dist.recv(theirs, src=other)
            mean += theirs / ranks
        return mean
    dist.send(x, dst=0)


def passed_on(x):
    """A chain: each adds its own to what the next rank has told it; as many messages."""
    rank, ranks = everybody()
    total = x.clone()
    if rank + 1 < ranks:
        dist.recv(total, src=rank + 1)
        total += x
    if rank > 0:
        return dist.send(total, dst=rank - 1)
    return total / ranks


RIGHT = [passed_on, mean_on_rank_0, with_a_list, all_posted_at_once, last_rank_first]
LINE = "✓ mean_on_rank_0: 3 messages on 4 ranks; the least possible is 3. It held "


def test_right_answers_are_accepted():
    for fn, answer in zip(RIGHT, together([(NAME, (fn,), False) for fn in RIGHT]), strict=True):
        assert answer.ok is True and str(answer).startswith(LINE), f"{fn.__name__}: {answer}"


def test_wrong_answers_are_called_by_their_names():
    assert sum(answer.check == NAME for answer in ANSWERS) >= 30
    assert let_past(NAME) == ""


def test_an_untouched_stub_is_not_yet():
    def stub(x):
        raise NotImplementedError("your turn")

    assert check.mean_on_rank_0(stub).ok is None


def test_a_buffer_of_another_dtype(capfd):
    """The dtype is named, and what gloo says when it aborts is not shown beside it."""

    def fn(x):
        rank, ranks = everybody()
        if rank > 0:
            return dist.send(x, dst=0)
        total, theirs = x.clone(), torch.zeros(x.shape)
        for other in range(1, ranks):
            dist.recv(theirs, src=other)
            total += theirs
        return total / ranks

    answer = check.mean_on_rank_0(fn)
    assert answer.mistake == "not the same dtype on every rank"
    assert "do not agree on the dtype of a message: rank 0 called recv float32[" in answer.text
    assert "gloo" not in capfd.readouterr().out + str(answer)


def test_the_words():
    summed_up, built_in = together([(NAME, (summed,), False), (NAME, (by_all_reduce,), False)])
    assert "rank 0 element 0 is" in summed_up.text and "rank 3's 4 times" in summed_up.text
    assert "dist's own all_reduce" in built_in.text
