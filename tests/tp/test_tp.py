"""Tests of labs.tp against the same model on one process, and PyTorch's parallelize_module with the same plan."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from labs import native
from labs.ddp import Overlapped
from labs.dtensor import Replicate, Shard
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT
from labs.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    clip_gradients,
    full_parameters,
    gpt_plan,
    parallelize,
)
from labs.tp.parameter_cuts import Queries
from labs.zero import Zero
from tests.depth import deepen
from tests.models import OtherTransformer
from tests.tp.common import SMALL, batch, largest_difference, tp_mesh

SHAPES = {
    "odd vocabulary and hidden width": SMALL,
    "tied": replace(SMALL, tied=True),
    "one layer, as many kv_heads as heads": replace(SMALL, depth=1, kv_heads=6),
}
FEWER = replace(SMALL, heads=4, kv_heads=2, vocab=5)  # 4 ranks: kv_heads on two each, a rank without a word

# ---- numbers ---------------------------------------------------------------------------------------------


def against_one_process(shapes):
    """Return the largest difference of losses and gradients over two micro-batches, by shape and plan."""
    off = {}
    for (name, config), sequence in product(shapes.items(), (False, True)):
        reference = GPT(config).double()
        model = parallelize(GPT(config).double(), tp_mesh(), gpt_plan(config, sequence))
        differences = []
        for seed in range(2):
            x, y = batch(config.vocab, 12, seed)
            losses = [each(x, y) for each in (model, reference)]
            for loss in losses:
                loss.backward()
            differences.append(abs(losses[0].item() - losses[1].item()))
        off[name, sequence] = max(*differences, largest_difference(model, reference))
        whole = full_parameters(model)
        assert all(torch.equal(whole[name], p) for name, p in reference.named_parameters())
        if not sequence:
            assert torch.allclose(model(x), reference(x), atol=1e-12)
    return off


@pytest.mark.parametrize("ranks", [3, 4, *deepen(1, 2)])
def test_one_process_has_the_same_loss_and_gradients(ranks):
    for off in run(against_one_process, SHAPES if ranks < 4 else {"fewer kv_heads than ranks": FEWER}, ranks=ranks):
        assert max(off.values()) < 1e-12, off


def other_plan(sequence):
    x = Shard(1) if sequence else Replicate()
    plan = {
        "wte": RowwiseParallel(output_layouts=x),
        "wpe": RowwiseParallel(output_layouts=x),
        "h.*.attn": PrepareModuleInput(input_layouts=x),
        "h.*.attn.w[qkv]": ColwiseParallel(heads=Queries(4, 4)),
        "h.*.attn.wo": RowwiseParallel(output_layouts=x, heads=Queries(4, 4)),
        "h.*.mlp.fc_in": ColwiseParallel(input_layouts=x),
        "h.*.mlp.fc_out": RowwiseParallel(output_layouts=x),
        "lm_head": ColwiseParallel(input_layouts=x, output_layouts=Replicate()),
    }
    norms = ("h.*.ln_1", "h.*.ln_2", "ln_f") if sequence else ()
    return plan | {norm: SequenceParallel() for norm in norms}


def brought():
    off = []
    for sequence in (False, True):
        torch.manual_seed(0)
        reference = OtherTransformer().double()
        torch.manual_seed(0)
        model = parallelize(OtherTransformer().double(), tp_mesh(), other_plan(sequence))
        x, _ = batch(24)
        outputs = [each(x) for each in (model, reference)]
        for output in outputs:
            output.square().mean().backward()
        off += [(outputs[0] - outputs[1]).abs().max().item(), largest_difference(model, reference)]
    return max(off)


@pytest.mark.parametrize("ranks", [2, *deepen(4)])
def test_a_model_under_other_names_with_biases(ranks):
    assert max(run(brought, ranks=ranks)) < 1e-12


# ---- a grid of ranks -------------------------------------------------------------------------------------


def on_a_grid():
    """Run tp 2, and fsdp over the other two ranks: losses and gradients of half of the batch each, averaged."""
    mesh, off = Mesh((2, 2), ("dp", "tp")), []
    for sequence in (False, True):
        reference, model = (GPT(SMALL).double() for _ in range(2))
        parallelize(model, mesh["tp"], gpt_plan(SMALL, sequence))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        x, y = batch(23, 12)
        y = y.abs() % 23
        model(*(each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y))).backward()
        reference(x, y).backward()
        cuts = model.tensor_parallel.cuts
        for name, p in reference.named_parameters():
            own = model.get_parameter(name).grad.full_tensor()
            part = cuts[name].part(p.grad, mesh.get_local_rank("tp")) if name in cuts else p.grad
            off.append((own - part).abs().max().item())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for p in reference.parameters():
                p -= 0.1 * p.grad
        whole = full_parameters(model)
        off += [(whole[name] - p).abs().max().item() for name, p in reference.named_parameters()]
    return max(off)


def test_fsdp_continues_top():
    assert max(run(on_a_grid, ranks=4)) < 1e-12


def others_on_a_grid():
    """Take two steps on a grid, and compare the loss with one process's, which has read the same two batches."""
    mesh, off = Mesh((2, 2), ("dp", "tp")), []
    x, y = batch(23, 12)
    y = y.abs() % 23
    mine = [each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y)]
    for way in (zero_3, overlapped, sharded):
        config = replace(SMALL, hidden=1, vocab=1) if way is sharded else SMALL  # leaves nothing to some ranks
        model, reference = GPT(config).double(), GPT(config).double()
        step = way(parallelize(model, mesh["tp"], gpt_plan(config, True)), mesh["dp"])
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        for _ in range(3):
            losses = model(*(each % config.vocab for each in mine)), reference(x % config.vocab, y % config.vocab)
            total = losses[0].detach().clone()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            off.append(abs(total.item() / 2 - losses[1].item()))
            plain.zero_grad()
            for loss in losses:
                loss.backward()
            step()
            plain.step()
    return max(off)


def zero_3(model, mesh):
    return Zero(model, 3, lambda shards: torch.optim.SGD(shards, 0.1), group=mesh.get_group()).step


def overlapped(model, mesh):
    copies, optimizer = Overlapped(model, group=mesh.get_group()), torch.optim.SGD(model.parameters(), 0.1)

    def step():
        copies.sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(model, mesh):
    optimizer = torch.optim.SGD(fully_shard(model, mesh=mesh).parameters(), 0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_other_ways_of_data_parallelism_go_on_top():
    assert max(run(others_on_a_grid, ranks=4)) < 1e-12


def clipped():
    """Compare the norm and all clipped gradients, with heads that two ranks share, and on a grid."""
    off, (x, y) = [], batch(23, 12)
    y = y.abs() % 23
    for mesh, config in ((tp_mesh(), replace(FEWER, vocab=23)), (Mesh((2, 2), ("dp", "tp")), SMALL)):
        model, reference = GPT(config).double(), GPT(config).double()
        parallelize(model, mesh["tp"], gpt_plan(config, True))
        groups, mine = (), (x, y)
        if mesh.ndim == 2:
            fully_shard(model, mesh=mesh["dp"])
            groups, mine = (mesh.get_group("dp"),), [each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y)]
        model(*mine).backward()
        reference(x, y).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        off.append(abs(clip_gradients(model, 0.01, groups) - expected).item())
        cuts, rank = model.tensor_parallel.cuts, mesh.get_local_rank("tp")
        for name, p in reference.named_parameters():
            own = model.get_parameter(name).grad
            own = own.full_tensor() if mesh.ndim == 2 else own
            off.append((own - (cuts[name].part(p.grad, rank) if name in cuts else p.grad)).abs().max().item())
    return max(off)


def test_gradients_are_clipped_by_the_norm_of_one_process():
    assert max(run(clipped, ranks=4)) < 1e-12


# ---- bytes -----------------------------------------------------------------------------------------------


def steps(config, sequence, side):
    mesh, plan, model = tp_mesh(), gpt_plan(config, sequence), GPT(config)
    if side == "ours":
        parallelize(model, mesh, plan)
    else:
        native.tp(model, native.device_mesh(mesh), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(config.vocab)
    for _ in range(2):
        mark("step")
        with loss_parallel():
            model(x, y.abs() % config.vocab).backward()
        optimizer.step()
        optimizer.zero_grad()
    mark("end")


EVEN = replace(SMALL, vocab=24, heads=4, kv_heads=4, hidden=40)


@pytest.mark.parametrize("ranks", [2, *deepen(4)])
def test_as_many_collectives_and_bytes_as_pytorch_issues(ranks):
    """Check all but two: torch sends the loss's two sums one by one.

    Its reduce-scatter is our all-to-all (labs.group).
    """
    ways = [(sequence, side) for sequence in (False, True) for side in ("ours", "torch")]
    seen = run(lambda: [steps(EVEN, *way) for way in ways], ranks=ranks, record="communication").recording
    for rank, sequence in product(range(ranks), (False, True)):
        ours, theirs = (
            Counter(
                (event.op.replace("all_to_all", "reduce_scatter"), event.sent)
                for event in seen.select(rank, 2 * ways.index((sequence, side)) + 1)
            )
            for side in ("ours", "torch")
        )
        more, fewer = theirs - ours, ours - theirs
        assert (more.total(), fewer.total()) == (2, 1)
        assert sum(n * sent for (_, sent), n in more.items()) == sum(n * sent for (_, sent), n in fewer.items())
