"""Tests of labs.unaveraged against the same training in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.ddp import Overlapped
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh


def step_of_a_layer_and_a_loss(wrap, average):
    """Wrap a layer, but not the weights of its loss, and return these weights after the steps."""
    torch.manual_seed(0)
    layer, loss = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    layer, rank, ranks = wrap(layer), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD([*layer.parameters(), *loss.parameters()], lr=0.1)
    for x in torch.tensor([[1.0, 2.0], [3.0, 1.0]]).double() if ranks == 1 else [1.0 + rank, 3.0 - 2 * rank]:
        for each in x.reshape(-1) if ranks == 1 else [x]:
            (loss(layer(torch.full((1, 4), float(each)).double())).square().sum() * ranks / 2).backward()
        if isinstance(layer, Overlapped):
            layer.sync()
        for p in loss.parameters() if average else ():
            dist.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    return loss.weight.tolist()


def test_a_parameter_that_is_stepped_but_not_averaged_is_refused():
    def wrapped_in_turn():
        ways = [Overlapped, lambda layer: fully_shard(layer, mesh=Mesh((2,), ("dp",)))]
        for wrap in ways:
            with pytest.raises(RuntimeError, match="parameter 2 of the optimizer is none of those whose gradients are"):
                step_of_a_layer_and_a_loss(wrap, average=False)
        return [step_of_a_layer_and_a_loss(wrap, average=True) for wrap in ways]

    [expected] = run(lambda: step_of_a_layer_and_a_loss(nn.Identity().__call__, average=True), ranks=1)
    for found in run(wrapped_in_turn, ranks=2):
        for weights in found:
            assert torch.allclose(torch.tensor(weights), torch.tensor(expected), atol=1e-12)
