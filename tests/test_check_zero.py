"""The checks of notebook 04 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it (sends and receives by hand, PyTorch's own
reduce-scatter, one reduce for each piece, calls that are waited for later).  Wrong: tests/wrong_answers/zero.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import clip, collectives
from labs.group import all_gather, reduce_scatter_single
from labs.kit import check
from labs.kit.checks.answer import Wrong
from labs.kit.checks.shards import hinted
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.zero import drop, forwards, gather, one_layer_back, partition, ready

CHECKS = {
    "partition_optimizer": 1,
    "gradient_ready": 1,
    "gather_and_drop": 2,
    "clip": 1,
    "stage_3": 1,
}  # and of how many functions


def place():
    return dist.get_rank(), dist.get_world_size()


# ---- the words ---------------------------------------------------------------------------------------------


def test_a_parameter_where_plain_tensors_are_wanted():
    """The shard, say: full.data may have been written already."""
    said = hinted(Wrong("RuntimeError: … is being modified inplace with grad mode enabled."))
    assert said.answer.mistake == "autograd sees the change" and "still a Parameter" in said.answer.question


# ---- right answers ---------------------------------------------------------------------------------------


def partition_with_a_copy(full, make):
    """The shard is memory of its own, as where it is of another dtype."""
    rank, ranks = place()
    n = full.numel() // ranks
    shard = nn.Parameter(full.detach()[rank * n : (rank + 1) * n].clone())
    optimizer = make([shard])

    def step():
        shard.grad = torch.empty_like(shard)
        reduce_scatter_single(shard.grad, full.grad)
        shard.grad /= ranks
        full.grad = None
        optimizer.step()
        dist.all_gather(list(full.data.chunk(ranks)), shard.data)

    return step


def partition_by_sends_and_receives(full, make):
    rank, ranks = place()
    n = full.numel() // ranks
    shard = full.detach().narrow(0, rank * n, n).requires_grad_()
    optimizer = make([shard])

    def step():
        collectives.reduce_scatter(full.grad)
        shard.grad = full.grad.narrow(0, rank * n, n) / ranks
        optimizer.step()
        collectives.all_gather(full.data)

    return step


def partition_and_wait_later(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.split(full.numel() // ranks)[rank])
    optimizer = make([shard])

    def step():
        parts = torch.empty_like(full.grad)
        dist.all_to_all_single(parts, full.grad, async_op=True).wait()
        shard.grad = parts.view(ranks, -1).mean(0)
        optimizer.step()
        optimizer.zero_grad()
        pieces = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(pieces, shard.data, async_op=True).wait()
        with torch.no_grad():
            full.copy_(torch.cat(pieces))

    return step


def partition_by_reduce_and_broadcast(full, make):
    rank, ranks = place()
    pieces = full.data.chunk(ranks)
    mine = nn.Parameter(pieces[rank])
    optimizer = make([mine])

    def step():
        for owner, gradient in enumerate(full.grad.chunk(ranks)):
            dist.reduce(gradient, owner)
        mine.grad = full.grad.chunk(ranks)[rank] / ranks
        optimizer.step()
        for owner, piece in enumerate(pieces):
            dist.broadcast(piece, owner)

    return step


def ready_by_torch(full, shard):
    mean = torch.empty_like(shard)
    reduce_scatter_single(mean, full.grad / dist.get_world_size())
    full.grad = None
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard)
    shard.grad += mean


def ready_by_sends_and_receives(full, shard):
    mine = collectives.reduce_scatter(full.grad) / dist.get_world_size()
    full.grad = None
    shard.grad = mine if shard.grad is None else shard.grad + mine


def ready_by_reduces(full, shard):
    rank, ranks = place()
    for owner, piece in enumerate(full.grad.split(shard.numel())):
        dist.reduce(piece, owner)
        if owner == rank:
            mean = piece.div(ranks)
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad.add_(mean)


def ready_and_wait_later(full, shard):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    works = [
        dist.gather(x, parts if i == dist.get_rank() else None, i, async_op=True) for i, x in enumerate(split(full))
    ]
    for work in works:
        work.wait()
    full.grad.untyped_storage().resize_(0)
    full.grad = None
    mean = torch.stack(parts).mean(0)
    shard.grad = mean if shard.grad is None else shard.grad + mean


def split(full):
    return full.grad.chunk(dist.get_world_size())


def gather_pieces(full, shard):
    full.untyped_storage().resize_(full.numel() * full.element_size())
    dist.all_gather(list(full.data.chunk(dist.get_world_size())), shard.detach().to(full.dtype))


def gather_by_a_ring(full, shard):
    rank, ranks = place()
    full.data.untyped_storage().resize_(full.nbytes)
    full.data.chunk(ranks)[rank].copy_(shard.data)
    collectives.all_gather(full.data)


def gather_by_broadcasts(full, shard):
    rank, _ = place()
    full.untyped_storage().resize_(full.nbytes)
    for owner, piece in enumerate(full.data.split(len(shard))):
        if owner == rank:
            piece.copy_(shard.data)
        dist.broadcast(piece, owner)


def gather_and_copy(full, shard):
    pieces = [torch.empty_like(shard, dtype=full.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard.data.to(full.dtype), async_op=True).wait()
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(torch.cat(pieces))


def gather_straight_into_it(full, shard):
    if full.untyped_storage().size() == 0:
        full.untyped_storage().resize_(full.nbytes)
    work = all_gather(full.data, shard.detach().to(full.dtype), async_op=True)
    work.wait()


def drop_by_its_data(full):
    full.data.untyped_storage().resize_(0)


def clip_as_the_course(shards, max_norm):
    return clip.clip_gradients(shards, max_norm, (None,))


def clip_with_numbers(shards, max_norm):
    squares = torch.tensor([sum((float((s.grad.float() ** 2).sum()) for s in shards if s.grad is not None), 0.0)])
    dist.all_reduce(squares)
    norm = squares.item() ** 0.5
    if norm > max_norm:
        for shard in shards:
            if shard.grad is not None:
                shard.grad *= max_norm / norm
    return norm


def clip_by_gathered_norms(shards, max_norm):
    gradients = [s.grad.float() for s in shards if s.grad is not None]
    mine = torch.nn.utils.get_total_norm(gradients).double().view(1)
    norms = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, mine)
    norm = torch.cat(norms).norm()
    torch.nn.utils.clip_grads_with_norm_(shards, max_norm, norm)
    return norm


def stage_3_from_a_list(layers, x, loss):
    """What is to be done, in a list."""
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    dy = loss(x)
    for layer in layers[::-1]:
        for event in ("gather", "backward", "reduce", "drop"):
            dy = getattr(layer, event)(dy) if event == "backward" else getattr(layer, event)() or dy
    for layer in layers:
        layer.update()


def stage_3_that_keeps_the_last(layers, x, loss):
    """Backward begins with the last layer: it need not be dropped before."""
    *others, last = layers
    x = forwards(others, x)
    last.gather()
    dy = last.backward(loss(last.forward(x)))
    last.drop()
    last.reduce()
    last.update()
    for layer in reversed(others):
        dy = one_layer_back(layer, dy)


LINES = {
    "partition_optimizer": (
        "✓ partition_optimizer: you hold {}, and sent 1.50 × the vector per step; "
        "the least possible is 0.25 × and 1.50 ×"
    ),
    "gradient_ready": (
        "✓ gradient_ready: besides the layer in flight you held {} × the gradients, and sent 0.75 × the gradients "
        "per rank and micro-batch; the least possible is 0.25 × and 0.75 ×"
    ),
    "gather_and_drop": (
        "✓ gather_and_drop: you held {} × a layer besides the shards, and sent 0.75 × a layer for each gather; "
        "the least possible is 1.00 × and 0.75 ×"
    ),
    "clip": "✓ clip: you sent {} bytes per rank at most, whatever the number of parameters; one number is enough",
    "stage_3": (
        "✓ stage_3: {} gathers and 5 reduce-scatters for 5 layers, and never more than one layer whole; "
        "with one layer at a time 9 gathers are the least possible"
    ),
}
STATE = "0.25 × the optimizer's state per rank"
COPIED = "0.38 × the optimizer's state per rank (a copy of the shard included)"
RIGHT = [
    ("partition_optimizer", STATE, [partition]),
    ("partition_optimizer", COPIED, [partition_with_a_copy]),
    ("partition_optimizer", STATE, [partition_by_sends_and_receives]),
    ("partition_optimizer", STATE, [partition_and_wait_later]),
    ("partition_optimizer", STATE, [partition_by_reduce_and_broadcast]),
    ("gradient_ready", "0.25", [ready]),
    ("gradient_ready", "0.25", [ready_by_torch]),
    ("gradient_ready", "0.25", [ready_by_sends_and_receives]),
    ("gradient_ready", "0.25", [ready_by_reduces]),
    ("gradient_ready", "0.25", [ready_and_wait_later]),
    ("gather_and_drop", "1.00", [gather, drop]),
    ("gather_and_drop", "1.00", [gather_pieces, drop_by_its_data]),
    ("gather_and_drop", "1.00", [gather_by_a_ring, drop]),
    ("gather_and_drop", "1.00", [gather_by_broadcasts, drop]),
    ("gather_and_drop", "1.00", [gather_and_copy, drop]),
    ("gather_and_drop", "1.00", [gather_straight_into_it, drop]),
    ("clip", "16", [clip_as_the_course]),
    ("clip", "8", [clip_with_numbers]),
    ("clip", "24", [clip_by_gathered_norms]),
    ("stage_3", "10", [stage_3_from_a_list]),
    ("stage_3", "9", [stage_3_that_keeps_the_last]),
]


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    answers = [(figure, fns) for check_of, figure, fns in RIGHT if check_of == name]
    said = together([(name, tuple(fns), False) for _, fns in answers])
    for (figure, fns), answer in zip(answers, said, strict=True):
        assert answer.ok is True and answer, f"{fns[0].__name__}: {answer}"
        assert str(answer) == LINES[name].format(figure)


# ---- not yet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(*[stub] * CHECKS[name])
    assert answer.ok is None and not answer
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


def test_a_stub_inside_of_step_is_not_yet():
    def fn(full, make):
        def step():
            raise NotImplementedError("your turn")

        return step

    assert check.partition_optimizer(fn).ok is None


def test_half_of_gather_and_drop_is_not_yet():
    def stub(full):
        raise NotImplementedError("your turn")

    assert check.gather_and_drop(gather, stub).ok is None


# ---- wrong answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name and answer.listed for answer in ANSWERS) >= 8
    assert let_past(name) == ""


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_that_were_written_without_looking(name):
    assert let_past(name, listed=False) == ""


# ---- what goes wrong in other ways -----------------------------------------------------------------------


def test_what_it_raises_is_told_with_its_line():
    def fn(full, shard):
        shard.grad += full.grad.chunk(dist.get_world_size())[dist.get_rank()]

    answer = check.gradient_ready(fn)
    assert answer.ok is False
    assert "TypeError" in answer.text and "shard.grad += full.grad.chunk" in answer.text


def test_a_hang_is_told_with_its_line():
    def fn(full, shard):
        if dist.get_rank() > 0:
            gather(full, shard)

    answer = check.gather_and_drop(fn, drop)
    assert answer.mistake in ("one side of a message or a collective is missing", "the ranks make different calls")
    assert "all_gather(full.data, shard.data.to(full.dtype))" in answer.text


@pytest.mark.parametrize("pair", [(gather, None), (3, drop)], ids=["no drop", "no gather"])
def test_something_that_is_no_function(pair):
    answer = check.gather_and_drop(*pair)
    assert answer.ok is False and "not a function" in answer.text


def test_the_same_seed_gives_the_same_answer():
    def fn(shards, max_norm):
        return max_norm

    first, again, other = (check.clip(fn, seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.text != other.text


def test_a_parameter_that_is_no_longer_trained():
    def fn(full, shard):
        ready(full, shard)
        full.requires_grad_(False)

    assert check.gradient_ready(fn).mistake == "requires_grad has changed"


def test_a_buffer_that_is_used_again_may_stay():
    """The budget has room for one layer in flight, also between the steps."""
    buffers = {}

    def fn(full, shard):
        parts = buffers.setdefault((full.numel(), full.dtype), torch.empty_like(full.grad))
        dist.all_to_all_single(parts, full.grad)
        full.grad = None
        mean = parts.view(dist.get_world_size(), -1).mean(0)
        shard.grad = mean if shard.grad is None else shard.grad.add_(mean)

    assert check.gradient_ready(fn).ok
