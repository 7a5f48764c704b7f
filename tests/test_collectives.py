"""Tests of labs.collectives against torch.distributed's own, and of its traffic against the table in its docstring.

Values: the same tensors go through `torch.distributed` and must come out equal.  They are small integers in every
dtype, so that the order of summation does not matter.  Traffic: a counter wrapped around the sends, which knows
nothing of the algorithms, against formulas written out here with `tensor_split`'s sizes.
"""

import time
from collections import Counter
from math import ceil, log2

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from labs import collectives as ours
from labs.kit.launch import run
from tests.depth import deepen

WORLDS = [1, 2, 3, 4, 5]
SIZES = [0, 1, 3, 7, 64]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def local(size, dtype=torch.float32, rank=None, seed=0):
    """Return a rank's input: small integers, different on every rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 2 if dtype is torch.bool else 4, (size,), generator=generator).to(dtype)


def same(mine, reference, what):
    assert torch.equal(mine, reference), f"{what}: rank {dist.get_rank()} has {mine}, not {reference}"


class SendCounter:
    """A counter of the elements and messages given to `isend`, on their way through `batch_isend_irecv`."""

    def __enter__(self):
        self.elements, self.messages, self.batch = 0, 0, dist.batch_isend_irecv
        dist.batch_isend_irecv = self.count
        return self

    def __exit__(self, *error):
        dist.batch_isend_irecv = self.batch

    def count(self, posts):
        sends = [post.tensor.numel() for post in posts if post.op is dist.isend]
        self.elements += sum(sends)
        self.messages += len(sends)
        return self.batch(posts)


# ---- values ----------------------------------------------------------------------------------------------


PRODUCT = [(size, dtype) for size in SIZES for dtype in DTYPES]
CROSS = [(size, dtype) for size, dtype in PRODUCT if size == 7 or dtype is torch.float32]


def every_collective(group=None, cases=CROSS):
    """Compare every collective with torch's, within `group`, over sizes and dtypes, ops and roots."""
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    rank, ranks = dist.get_rank(group), len(members)
    for size, dtype in cases:
        moved(size, dtype, group, members)
        for op in OPS:
            if dtype is not torch.bool or op in (ReduceOp.MIN, ReduceOp.MAX):
                reduced(size, dtype, op, group, members, rank, ranks)
    return True


def moved(size, dtype, group, members):
    rank, ranks = dist.get_rank(group), len(members)
    for root in members:
        x = local(size, dtype)
        ours.broadcast(x, src=root, group=group)
        same(x, local(size, dtype, rank=root), f"broadcast from {root}")

    full = local(size, dtype, rank=99)
    x = torch.zeros_like(full)
    x.tensor_split(ranks)[rank].copy_(full.tensor_split(ranks)[rank])
    ours.all_gather(x, group)
    same(x, full, "all_gather")

    sizes = [[(size + 2 * i + j) % 5 for j in range(ranks)] for i in range(ranks)]  # [from][to]
    inputs = [torch.full((sizes[rank][j],), (rank + j) % 2).to(dtype) for j in range(ranks)]
    outputs = [torch.empty(sizes[i][rank], dtype=dtype) for i in range(ranks)]
    ours.all_to_all(outputs, inputs, group)
    for i, output in enumerate(outputs):
        same(output, torch.full((sizes[i][rank],), (i + rank) % 2).to(dtype), f"all_to_all from {i}")


def reduced(size, dtype, op, group, members, rank, ranks):
    reference = local(size, dtype)
    dist.all_reduce(reference, op, group=group)
    for all_reduce in (ours.all_reduce, ours.all_reduce_doubling):
        x = local(size, dtype)
        all_reduce(x, op, group)
        same(x, reference, f"{all_reduce.__name__} {op}")

    piece = ours.reduce_scatter(local(size, dtype), op, group)
    same(piece, reference.tensor_split(ranks)[rank], f"reduce_scatter {op}")

    root = members[size % ranks]
    x = local(size, dtype)
    ours.reduce(x, root, op, group)
    if dist.get_rank() == root:
        same(x, reference, f"reduce to {root} {op}")


in_all_cases = pytest.mark.parametrize("cases", [CROSS, *deepen(PRODUCT)], ids=["cross", "product"])


@in_all_cases
@pytest.mark.parametrize("ranks", WORLDS)
def test_values_equal_torchs(ranks, cases):
    assert run(every_collective, None, cases, ranks=ranks) == [True] * ranks


@in_all_cases
def test_values_within_a_subgroup(cases):
    def in_subgroups():
        groups = [dist.new_group(members) for members in ([0, 2, 4], [1, 3])]
        return every_collective(groups[dist.get_rank() % 2], cases)

    assert all(run(in_subgroups, ranks=5))


def test_shapes_stay_and_every_rank_gets_the_same_bits():
    def body():
        x = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
        doubled = x.clone()
        ours.all_reduce(x)
        ours.all_reduce_doubling(doubled)
        return x, doubled

    for name, results in zip(["ring", "doubling"], zip(*run(body, ranks=5), strict=True), strict=True):
        assert all(torch.equal(x, results[0]) and x.shape == (3, 5, 2) for x in results), name


def test_rank_0_is_the_root_unless_another_is_named():
    def body():
        x, total = torch.full((3,), dist.get_rank() + 1), torch.full((3,), dist.get_rank() + 1)
        ours.broadcast(x)
        ours.reduce(total)
        return x[0].item(), total[0].item()

    results = run(body, ranks=3)
    assert [first for first, _ in results] == [1, 1, 1] and results[0][1] == 6


def test_all_reduce_beside_the_caller():
    def body():
        xs = [torch.full((1000,), float(dist.get_rank() + i)) for i in range(5)]
        works = [ours.all_reduce(x, async_op=True) for x in xs]
        for work in works:
            work.wait()
        return [x.unique().tolist() for x in xs]

    assert run(body, ranks=3) == [[[3.0 + 3 * i] for i in range(5)]] * 3


def test_nobody_leaves_a_barrier_before_everybody_has_come():
    def body():
        time.sleep(0.1 * dist.get_rank())
        came = time.monotonic()  # all processes share this clock, which nobody sets
        ours.barrier()
        return came, time.monotonic()

    for ranks in (1, 3, 4):
        results = run(body, ranks=ranks)
        assert min(left for _, left in results) >= max(came for came, _ in results)


# ---- traffic ---------------------------------------------------------------------------------------------


def traffic(size):
    """Return (elements, messages) sent by this rank in each collective on `size` elements."""
    x, ranks = torch.zeros(size), dist.get_world_size()
    matrix = [torch.zeros(len(piece)) for piece in x.tensor_split(ranks)]
    mine = len(matrix[dist.get_rank()])
    calls = {
        "broadcast": lambda: ours.broadcast(x, src=ranks - 1),
        "reduce": lambda: ours.reduce(x, dst=ranks - 1),
        "reduce_scatter": lambda: ours.reduce_scatter(x),
        "all_gather": lambda: ours.all_gather(x),
        "all_reduce": lambda: ours.all_reduce(x),
        "all_reduce_doubling": lambda: ours.all_reduce_doubling(x),
        "all_to_all": lambda: ours.all_to_all([torch.zeros(mine) for _ in range(ranks)], matrix),
        "barrier": ours.barrier,
    }
    counts = {}
    for name, call in calls.items():
        with SendCounter() as counter:
            call()
        counts[name] = counter.elements, counter.messages
    return counts


@pytest.mark.parametrize("ranks", WORLDS)
def test_every_rank_sends_exactly_what_theory_says(ranks):
    def body():
        return {size: traffic(size) for size in SIZES}

    results = run(body, ranks=ranks)
    power = 2 ** int(log2(ranks))
    for size in SIZES:
        c = [len(piece) for piece in torch.zeros(size).tensor_split(ranks)]
        sent = Counter()
        for r in range(ranks):
            counts = {name: elements for name, (elements, _) in results[r][size].items()}
            after = c[(r + 1) % ranks]
            assert counts["reduce_scatter"] == size - c[r]
            assert counts["all_gather"] == size - after
            assert counts["all_reduce"] == 2 * size - c[r] - after
            assert counts["all_to_all"] == size - c[r]
            assert counts["reduce"] == (0 if r == ranks - 1 else size)
            assert counts["barrier"] == ceil(log2(ranks))
            paired = size * int(log2(power)) if r < power else size
            told = size if r < ranks - power else 0
            assert counts["all_reduce_doubling"] == paired + told
            sent.update(counts)
        assert sent["broadcast"] == sent["reduce"] == (ranks - 1) * size
        assert sent["all_reduce"] == 2 * (ranks - 1) * size
        root = results[ranks - 1][size]["broadcast"][0]
        assert root == ceil(log2(ranks)) * size


def test_no_message_is_sent_for_nothing():
    results = run(traffic, 3, ranks=5)
    pieces = [1, 1, 1, 0, 0]
    for r in range(5):
        scattered = sum(pieces) - pieces[r]
        gathered = sum(pieces) - pieces[(r + 1) % 5]
        assert results[r]["all_reduce"] == (scattered + gathered, scattered + gathered)
    assert all(run(traffic, 0, ranks=3)[r]["all_reduce"] == (0, 0) for r in range(3))


# ---- bad input -------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    def body():
        with pytest.raises(ValueError, match=r"shape \(3, 2\) is not contiguous: call .contiguous\(\)"):
            ours.all_reduce(torch.zeros(2, 3).T)
        with pytest.raises(ValueError, match="2 outputs and 2 inputs, not 1 and 2"):
            ours.all_to_all([torch.zeros(1)], [torch.zeros(1)] * 2)
        with pytest.raises(ValueError, match=r"cannot reduce with .*BAND"):
            ours.all_reduce(torch.zeros(2), ReduceOp.BAND)
        alone = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="rank 1 is not a member"):
                ours.broadcast(torch.zeros(2), group=alone)

    run(body, ranks=2)
