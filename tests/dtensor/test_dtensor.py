"""Tests of labs.dtensor in trainings: numbers equal one process's, gradients pass in and out as in torch, errors say
why.
"""

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torchs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labs import dtensor as ours
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.mesh import Mesh
from tests.dtensor.common import NAMES, placements, weights

LINEAR = ((6, 4), (5, 4), (5,))

# ---- training --------------------------------------------------------------------------------------------


def test_a_parameter_is_converted_copied_saved_and_loaded_as_others_are():
    def body():
        mesh = Mesh((2,), ("tp",))
        layer = nn.Linear(2, 3, bias=False)
        layer.weight = nn.Parameter(ours.distribute_tensor(layer.weight.detach(), mesh, [ours.Shard(0)]))
        before = layer.weight.full_tensor().detach()
        twin = deepcopy(layer)
        assert twin.weight.device_mesh is mesh and twin.weight._local_tensor is not layer.weight._local_tensor
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(twin.weight.full_tensor(), before)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin.weight.full_tensor(), 2 * before)
        twin.to(torch.float64)
        assert isinstance(twin.weight, nn.Parameter) and isinstance(twin.weight, ours.DTensor)
        assert twin.weight.dtype == twin.weight.to_local().dtype == torch.float64
        assert "as [Shard(0)] on Mesh(tp=2)" in repr(twin.weight)

    run(body, ranks=2)


# ---- random numbers --------------------------------------------------------------------------------------

DRAWS = [(lie, alike) for lie in ("RR", "0R", "R1", "01", "00", "PR") for alike in (True, False)]


def seeded(alike):
    torch.manual_seed(7 if alike else dist.get_rank())


def ones(lib, mesh, lie):
    return lib.distribute_tensor(torch.ones(8, 500), mesh, placements(lib, lie), src_data_rank=None)


def test_copies_draw_the_same_and_other_pieces_other_numbers():
    def body():
        mesh, masks = Mesh((2, 2), NAMES), []
        for lie, alike in DRAWS:
            seeded(alike)
            x = ones(ours, mesh, lie)
            mark("step")
            y = F.dropout(x, 0.25)
            mark("end")
            assert y.placements == x.placements
            masks.append(y.full_tensor() if "P" in lie else y.to_local())
        return masks

    result = run(body, ranks=4, record="communication")
    for step, (lie, _) in enumerate(DRAWS):
        places = [[p for p, axis in zip(divmod(rank, 2), lie, strict=True) if axis in "01"] for rank in range(4)]
        masks = [rank[step] for rank in result]
        for rank, mask in enumerate(masks):
            assert set(mask.unique().tolist()) == {0, (torch.tensor(1.0) / 0.75).item()}
            assert 0.19 < (mask == 0).float().mean() < 0.31
            for other in range(rank):
                assert torch.equal(mask, masks[other]) == (places[rank] == places[other]), (lie, rank, other)
            assert result.recording.counts(rank, step).total() == 2 - len(places[rank])


def test_torchs_dropout_on_cpus_draws_by_each_ranks_seed_alone():
    """Check that pieces draw equal numbers if ranks are seeded alike, and copies differ if not; nothing is sent."""

    def body():
        warnings.simplefilter("ignore")  # PyTorch warns that random numbers may not be supported
        mesh, masks = init_device_mesh("cpu", (2,)), []
        for lie in "R0":
            for alike in (True, False):
                seeded(alike)
                masks.append(F.dropout(ones(torchs, mesh, lie), 0.25).to_local())
        return masks

    result = run(body, ranks=2)
    assert [torch.equal(a, b) for a, b in zip(*result, strict=True)] == [True, False, True, False]


def test_a_dropout_is_the_same_in_backward_and_when_computed_again():
    def body():
        mesh = Mesh((2,), ("tp",))
        drop = [partial(F.dropout, p=0.5), lambda x: torch.native_dropout(x, 0.5, True)[0]]
        drop += [partial(checkpoint, f, use_reentrant=False) for f in drop]
        for lie in "01RP":
            for f in drop:
                seeded(False)
                x = ones(ours, mesh, lie).requires_grad_()
                y = f(x * 3)
                (y * 2).sum().backward()
                assert torch.equal(x.grad.full_tensor(), 2 * y.full_tensor().detach())
            assert torch.native_dropout(x, 0.5, False)[0].full_tensor().equal(x.full_tensor())
            assert torch.native_dropout(x, 1.0, True)[0].full_tensor().count_nonzero() == 0
        weight = ones(ours, mesh, "0")
        nn.init.normal_(weight, std=0.02)
        assert 0.015 < weight.full_tensor().std() < 0.025 and F.dropout(weight, training=False) is weight
        generator = torch.Generator().manual_seed(3)
        first, then, again = (
            weight.uniform_(generator=g).full_tensor() for g in (generator, generator, torch.Generator().manual_seed(3))
        )
        assert torch.equal(first, again) and not torch.equal(first, then)

    run(body, ranks=2)


# ---- gradients that pass in and out ----------------------------------------------------------------------


def test_gradients_pass_in_and_out_as_torchs_do():
    def body():
        results = []
        for lib, mesh in ((ours, Mesh((2,), ("tp",))), (torchs, init_device_mesh("cpu", (2,)))):
            rank = mesh.get_local_rank()
            seen = []
            for lie in "01RP":
                local = torch.full((2, 4), rank + 1.0, requires_grad=True)
                x = lib.DTensor.from_local(local, mesh, placements(lib, lie))
                y = (x * x if lie != "P" else x * 3).redistribute(placements=[lib.Replicate()])
                (y.to_local() * weights(y).float()).sum().backward()
                seen.append(local.grad)
            whole = torch.ones(2, 4, requires_grad=True)  # the gradient is that of the pieces that were used
            cut = lib.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [lib.Shard(0)])
            product = lib.DTensor.from_local(whole, mesh, [lib.Replicate()]) * cut
            product.redistribute(placements=[lib.Replicate()]).to_local().sum().backward()
            seen.append(whole.grad)
            for lie in "RP":
                a = lib.distribute_tensor(torch.ones(3), mesh, [lib.Replicate()]).requires_grad_()
                (a.to_local(grad_placements=placements(lib, lie)) * (1 + rank)).sum().backward()
                seen.append(a.grad.full_tensor() if lie == "P" else a.grad.to_local())
            results.append(seen)
        for mine, torch_ in zip(*results, strict=True):
            assert torch.equal(mine, torch_)

    run(body, ranks=2)


def test_a_redistribution_is_differentiable_twice():
    def body():
        a = ours.distribute_tensor(torch.arange(3.0), Mesh((2,), ("tp",)), [ours.Shard(0)]).requires_grad_()
        (g,) = torch.autograd.grad((a.redistribute(placements=[ours.Replicate()]) ** 3).sum(), a, create_graph=True)
        g.sum().backward()
        assert a.grad.full_tensor().tolist() == [0, 6, 12]

    run(body, ranks=2)


def test_odd_tensors():
    def body():
        mesh = Mesh((1, 2), ("dp", "tp"))
        part = mesh["tp"]
        rank = part.get_local_rank()
        number = ours.distribute_tensor(torch.tensor(3.0), part, [ours.Partial()])
        assert (number * 2 + torch.tensor(1.0)).item() == 7 and bool(number.full_tensor() == 3)
        assert (1 - number).full_tensor() == -2
        # the first rank's values count
        mine = ours.distribute_tensor(torch.arange(5.0) * (1 + rank), part, [ours.Shard(-1)])
        assert mine.full_tensor().tolist() == [0, 1, 2, 3, 4] and mine.placements == (ours.Shard(0),)
        mine = ours.distribute_tensor(torch.arange(2.0) + rank, part, [ours.Shard(0)], src_data_rank=1)
        assert mine.full_tensor().tolist() == [1, 2]
        empty = ours.distribute_tensor(torch.ones(1, 3), part, [ours.Shard(0)])
        assert empty.to_local().shape == (1 - rank, 3) and empty.sum().item() == 3 and empty.relu().sum().item() == 3
        turned = ours.DTensor.from_local(torch.ones(4, 6).t(), part, [ours.Shard(0)])
        assert turned.redistribute(placements=[ours.Shard(1)]).to_local().shape == (12, 2)
        uneven = ours.DTensor.from_local(torch.ones(3 - rank, 2), part, [ours.Shard(0)], shape=(5, 2))
        assert uneven.full_tensor().shape == (5, 2)
        on_both = ours.distribute_tensor(torch.arange(4.0), mesh, [ours.Shard(0), ours.Shard(0)])
        assert on_both.to_local().tolist() == [2.0 * rank, 2.0 * rank + 1]
        with torch.no_grad():
            assert on_both.to_local() is on_both._local_tensor
        across = ours.DTensor.from_local(torch.arange(15.0).view(3, 5).t(), part, [ours.Shard(0)])
        assert across.stride() == (1, 10) and across.contiguous().to_local().view(-1)[:3].tolist() == [0, 5, 10]
        assert ours.DTensor.from_local(torch.ones(2, 3), part, [ours.Shard(0)], stride=(1, 4)).stride() == (1, 4)
        number = ours.distribute_tensor(torch.ones(4), part, [ours.Shard(0)]).sum()
        assert number.sum(0).item() == number.mean(-1).item() == number.sum(0, keepdim=True).item() == 4
        same = ours.DTensor.from_local(torch.ones(3), part, [ours.Replicate()], run_check=True)
        assert same.redistribute(placements=[ours.Shard(0)], async_op=False).full_tensor().sum() == 3
        whole = torch.tensor([[1.6, 2.6], [0.0, 1.0]])
        half = ours.distribute_tensor(whole, part, [ours.Shard(0)]).sum(0)  # Partial(): 1.6 and 0.0, 2.6 and 1.0
        assert half.to(torch.int64).full_tensor().tolist() == [1, 3]  # rounding is not linear

    run(body, ranks=2)


# ---- bad input -------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_said_on_every_rank_before_anything_moves():
    def body():
        mesh = Mesh((2,), ("tp",))
        R, S0, P = ours.Replicate(), ours.Shard(0), ours.Partial()
        x = ours.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [S0])
        p = ours.distribute_tensor(torch.tensor(3.0), mesh, [P])
        halves = nn.Parameter(ours.distribute_tensor(torch.ones(3, 2), mesh, [P]))
        halves.grad = x.detach()
        wide = ours.distribute_tensor(torch.ones(3, 2), mesh, [ours.Shard(1)], src_data_rank=None)
        tokens = ours.distribute_tensor(torch.tensor([0, 9]), mesh, [R])
        elsewhere = ours.distribute_tensor(torch.ones(3, 2), Mesh((2,), ("dp",)), [S0])
        computed = torch.ones(2).requires_grad_() * 2
        to = partial(ours.DTensor.redistribute, x)
        mark("step")
        for ask, error, sentence in [
            (lambda: x + torch.ones(3, 2), RuntimeError, "add of a DTensor and a plain tensor of shape (3, 2): make a"),
            (lambda: x + elsewhere, RuntimeError, "different meshes, Mesh(tp=2) and Mesh(dp=2)"),
            (lambda: x @ x, RuntimeError, "same reduction dim"),
            (lambda: x.sort(), NotImplementedError, "sort has no rule (its inputs: [Shard(0)]): do it on whole"),
            (lambda: torch.stack([x, x]), NotImplementedError, "no rule (its inputs: [Shard(0)], [Shard(0)]): do it"),
            (lambda: torch.cat([x, torch.ones(3, 2)]), RuntimeError, "cat of a DTensor and a plain tensor of shape"),
            (lambda: F.rms_norm(wide, (2,)), RuntimeError, "add_, in place (by itself, or within another fun"),
            (
                lambda: torch.add(x, x, out=p),
                ValueError,
                "out has shape (), and the result (3, 2): give an out of that",
            ),
            (
                lambda: torch.add(x, x, out=x.t()),
                ValueError,
                "out has shape (2, 3), and the result (3, 2)",
            ),
            (lambda: torch.sort(x, out=(x, x)), NotImplementedError, "sort"),
            (lambda: x.div(2, rounding_mode="floor"), NotImplementedError, "aten.div.Tensor_mode has no rule"),
            (lambda: x.view(torch.int32), NotImplementedError, "aten.view.dtype has no rule"),
            (
                lambda: p.fill_(3.0),
                RuntimeError,
                "such as F.rms_norm), cannot write its result to a tensor placed as [Partial()]",
            ),
            (
                lambda: p.add_(1.0),
                RuntimeError,
                "redistribute it, or what it was computed from, to [Replicate()] first",
            ),
            (lambda: to(placements=[ours.Shard(2)]), IndexError, "a tensor has the dims 0 to 1"),
            (lambda: to(placements=[P]), RuntimeError, "only operations make summands"),
            (lambda: to(placements=[R, R]), ValueError, "a mesh of 1 axes needs 1"),
            (lambda: to(), RuntimeError, "redistribute to what"),
            (
                lambda: to(placements=[R], async_op=True),
                RuntimeError,
                "(async_op=True): a redistribution waits for what",
            ),
            (lambda: to(elsewhere.device_mesh, [R]), RuntimeError, "redistribution stays on its mesh"),
            (lambda: ours.distribute_tensor(x, mesh, [R]), ValueError, "placed as [Shard(0)] already: redistribute it"),
            (lambda: ours.distribute_tensor(computed, mesh, [R]), RuntimeError, "takes a leaf"),
            (lambda: ours.distribute_tensor(torch.tensor(1.0), mesh, [S0]), IndexError, "of 0 dims cannot be cut"),
            (
                lambda: ours.DTensor.from_local(torch.ones(9, 2), mesh, [S0], shape=(5, 2)),
                ValueError,
                "of shape (9, 2)",
            ),
            (lambda: F.embedding(tokens, x), IndexError, "an embedding of 3 rows has no row 9"),
            (
                torch.optim.SGD([halves], 0.1, fused=True).step,
                RuntimeError,
                "_fused_sgd_ needs parameters and their state in equal pl",
            ),
            (lambda: torch.stack([x] * 9), NotImplementedError, "[Shard(0)] and 5 more): do it on whole"),
        ]:
            with pytest.raises(error) as refused:
                ask()
            assert sentence in str(refused.value)
        mark("end")

    def uneven():
        local = torch.ones(3 - dist.get_rank(), 2)
        ours.DTensor.from_local(local, Mesh((2,), ("tp",)), [ours.Shard(0)], run_check=True)

    with pytest.raises(RankError, match=r"rank 0's of \(6, 2\), torch.float32, rank 1's of \(4, 2\), torch.float32"):
        run(uneven, ranks=2)

    def others_numbers():
        local = torch.full((3,), float(dist.get_rank()))
        ours.DTensor.from_local(local, Mesh((2,), ("tp",)), [ours.Replicate()], run_check=True)

    with pytest.raises(
        RankError, match=r"ranks 0 and 1 of 2 failed: .*checksum.* numbers differ, distribute_tensor takes"
    ):
        run(others_numbers, ranks=2)
    recording = run(body, ranks=2, record="communication").recording
    assert recording.select(0, 0) == recording.select(1, 0) == []
