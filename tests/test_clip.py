"""Tests of labs.clip against torch.nn.utils.clip_grad_norm_ on one process that holds every gradient whole.

The sharded side cuts the same gradients for its ranks in any way; no other rank holds what one rank holds of them.
"""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import ddp
from labs.clip import clip_gradients
from labs.kit.launch import run
from labs.kit.record import mark

SHAPES = [(7, 5), (1,), (13,), (), (0, 3), (2, 3, 4)]


def with_gradients(dtype=torch.float32, scale=1.0):
    """Return parameters of awkward shapes, of which the fourth has no gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for i, p in enumerate(parameters):
        p.grad = None if i == 3 else (scale * torch.randn(p.shape, generator=generator)).to(dtype)
    return parameters


def gradients(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def flat(parameters):
    return torch.cat([gradient.flatten() for gradient in gradients(parameters)])


def one_process(max_norm, dtype=torch.float32, scale=1.0, change=lambda vector: None):
    """Return torch's norm, and the gradients after clipping, as one vector."""
    vector = flat(with_gradients(dtype, scale))
    change(vector)
    p = nn.Parameter(torch.zeros_like(vector))
    p.grad = vector
    norm = nn.utils.clip_grad_norm_(p, max_norm)
    return norm, p.grad


def shard(vector, ranks, rank, cuts=None):
    """Return this rank's part of a vector, as two parameters. cuts: where the vector is cut."""
    cuts = cuts or [round(len(vector) * r / ranks) for r in range(ranks + 1)]
    begin, end = list(pairwise(cuts))[rank]
    parts = [nn.Parameter(torch.zeros_like(part)) for part in vector[begin:end].tensor_split(2)]
    for p, gradient in zip(parts, vector[begin:end].clone().tensor_split(2), strict=True):
        p.grad = gradient
    return parts


def clip_sharded(max_norm, dtype=torch.float32, scale=1.0, change=lambda vector: None, cuts=None, clip=clip_gradients):
    """Clip on every rank, and return the norm, and this rank's shard of the clipped gradients."""
    vector = flat(with_gradients(dtype, scale))
    change(vector)
    mine = shard(vector, dist.get_world_size(), dist.get_rank(), cuts)
    norm = clip(mine, max_norm, groups=(None,))
    return norm, flat(mine)


# ---- one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicated(max_norm, dtype):
    ours, theirs = with_gradients(dtype), with_gradients(dtype)
    norm = clip_gradients(iter(ours), max_norm)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs, max_norm).item(), rel=1e-6)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)
    assert ours[3].grad is None


def test_gradients_that_are_short_enough_keep_every_bit():
    ours = with_gradients()
    clip_gradients(ours, 100.0)
    torch.testing.assert_close(gradients(ours), gradients(with_gradients()), rtol=0, atol=0)


def test_one_parameter_instead_of_a_list():
    p = with_gradients()[0]
    clip_gradients(p, 0.5)
    assert p.grad.norm().item() == pytest.approx(0.5, rel=1e-5)


def test_nothing_to_clip():
    assert clip_gradients([], 1.0) == 0
    assert clip_gradients([nn.Parameter(torch.ones(3))], 1.0) == 0
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    assert clip_gradients([p], 1.0) == 0
    assert p.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_measured_in_float32(dtype):
    ours = with_gradients(dtype, scale=300.0)  # 300² is beyond float16
    exact = flat(ours).double().norm().item()
    clipped = flat(ours).double() / exact
    assert clip_gradients(ours, 1.0).item() == pytest.approx(exact, rel=1e-6)
    assert {gradient.dtype for gradient in gradients(ours)} == {dtype}
    torch.testing.assert_close(flat(ours).double(), clipped, rtol=2**-8, atol=2**-24)  # one rounding each, no more


def test_parameters_of_several_types():
    ours = [*with_gradients(torch.bfloat16), *with_gradients(torch.float64)]
    exact = torch.cat([gradient.flatten().double() for gradient in gradients(ours)]).norm().item()
    assert clip_gradients(ours, 1.0).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients(dtype):
    ours, theirs = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
    ours.grad, theirs.grad = (torch.tensor([3 + 4j, 0, -12j], dtype=dtype) for _ in range(2))
    norm = clip_gradients(ours, 1.0)
    assert norm.dtype == torch.float64 and norm.item() == 13
    nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(ours.grad, theirs.grad)


# ---- sharded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded(ranks):
    def body():
        return [clip_sharded(max_norm, dtype) for max_norm in (0.1, 1e6) for dtype in (torch.float32, torch.float64)]

    expected = [one_process(max_norm, dtype) for max_norm in (0.1, 1e6) for dtype in (torch.float32, torch.float64)]
    results = run(body, ranks=ranks)
    for case, (norm, whole) in enumerate(expected):
        assert len({result[case][0].item() for result in results}) == 1, "the ranks disagree"
        assert results[0][case][0].item() == pytest.approx(norm.item(), rel=1e-6)
        joined = torch.cat([result[case][1] for result in results])
        torch.testing.assert_close(joined, whole, rtol=1e-6, atol=0)


def per_shard(parameters, max_norm, groups):
    """Clip without asking the other ranks: the classic mistake."""
    return clip_gradients(parameters, max_norm)


@pytest.mark.parametrize("clip", [clip_gradients, per_shard])
def test_clipping_each_shard_by_its_own_norm_would_be_seen(clip):
    def change(vector):
        """Make rank 0's part 100 times as long as rank 1's; rank 2 has nothing at all."""
        vector[:40] *= 100

    total = len(flat(with_gradients()))
    cuts = [0, 40, total, total]
    _, whole = one_process(1.0, change=change)
    results = run(lambda: clip_sharded(1.0, change=change, cuts=cuts, clip=clip), ranks=3)
    assert [len(mine) for _, mine in results] == [40, total - 40, 0]
    equal = torch.allclose(torch.cat([mine for _, mine in results]), whole, rtol=1e-6, atol=0)
    assert equal == (clip is clip_gradients)


def test_bfloat16_shards():
    # torch rounds the norm itself to bfloat16, and so is no reference here.
    def body():
        return clip_sharded(1.0, torch.bfloat16)

    whole = flat(with_gradients(torch.bfloat16))
    results = run(body, ranks=3)
    joined = torch.cat([mine for _, mine in results])
    exact = whole.double().norm()
    assert all(norm.item() == pytest.approx(exact.item(), rel=1e-6) for norm, _ in results)
    assert joined.dtype == torch.bfloat16
    torch.testing.assert_close(joined.double(), whole.double() / exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_go_through_as_in_torch(value):
    def change(vector):
        vector[3] = value

    norm, whole = one_process(1.0, change=change)
    results = run(lambda: clip_sharded(1.0, change=change), ranks=2)
    for mine, _ in results:
        torch.testing.assert_close(mine.float(), norm, equal_nan=True)
    torch.testing.assert_close(torch.cat([mine for _, mine in results]), whole, equal_nan=True)


def test_a_rank_without_any_gradient_takes_part():
    def body():
        p = nn.Parameter(torch.zeros(4))
        if dist.get_rank() == 1:
            p.grad = torch.full((4,), 2.0)
        return clip_gradients([p] if dist.get_rank() else [], 1.0, groups=(None,)).item(), p.grad

    (a, none), (b, clipped) = run(body, ranks=2)
    assert a == b == 4.0
    assert none is None
    torch.testing.assert_close(clipped, torch.full((4,), 0.5), rtol=1e-6, atol=0)


def test_a_grid_is_two_groups():
    def body():
        """Clip on four ranks, two by two, each with a quarter: sum over rows, then over columns."""
        rows, columns = (
            [dist.new_group([0, 1]), dist.new_group([2, 3])],
            [dist.new_group([0, 2]), dist.new_group([1, 3])],
        )
        rank = dist.get_rank()
        mine = shard(flat(with_gradients()), 4, rank)
        return clip_gradients(mine, 0.5, groups=(rows[rank // 2], columns[rank % 2])), flat(mine)

    norm, whole = one_process(0.5)
    results = run(body, ranks=4)
    assert all(mine.item() == pytest.approx(norm.item(), rel=1e-6) for mine, _ in results)
    torch.testing.assert_close(torch.cat([mine for _, mine in results]), whole, rtol=1e-6, atol=0)


def test_replicated_gradients_send_nothing_and_sharded_ones_8_bytes():
    def body(groups):
        mark("step")
        parameters = with_gradients()
        clip_gradients(parameters, 1.0, groups=groups)
        mark("end")

    assert run(body, (), ranks=2, record="communication").recording.counts(0, 0) == {}
    recording = run(body, (None,), ranks=2, record="communication").recording
    assert recording.counts(0, 0) == {"all_reduce": 1}
    assert recording.sent(0, 0) == 8


def test_beside_ddp_every_rank_clips_alike():
    def body():
        torch.manual_seed(0)
        model = ddp.Overlapped(nn.Linear(5, 3))
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
        model.sync()
        norm = clip_gradients(model.parameters(), 0.25)
        return norm, [p.grad for p in model.parameters()]

    (norm, first), (_, second) = run(body, ranks=2)
    assert norm > 0.25
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert torch.cat([gradient.flatten() for gradient in first]).norm().item() == pytest.approx(0.25, rel=1e-5)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_max_norm_must_be_positive(max_norm):
    with pytest.raises(ValueError, match=f"max_norm is {max_norm}: give a length above 0"):
        clip_gradients(with_gradients(), max_norm)


def test_groups_must_be_a_sequence():
    with pytest.raises(TypeError, match=r"groups is None: give a sequence, \(None,\) for all ranks"):
        clip_gradients(with_gradients(), 1.0, groups=None)
