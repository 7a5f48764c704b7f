"""Tests of the pretended device: operations that must fail there, that count as waits, and that pass.

The reference is what a GPU refuses, and what makes the host wait for it; that is known, and not measured here.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from labs import pp
from labs.group import all_gather, reduce_scatter_single
from labs.kit.launch import run
from labs.kit.simulated.as_rank import as_rank
from labs.kit.simulated.without_other_ranks import neighbours
from labs.memory.recompute import checkpoint
from labs.zero import Zero


def wrong_device() -> None:
    torch.ones(2) + torch.ones(2, device="cpu")


def too_large() -> None:
    torch.empty(2**70)


def too_large_together() -> None:
    torch.ones(2**40, 1) @ torch.ones(1, 2**40)


def value() -> None:
    torch.ones(2).sum().item()


def branch() -> None:
    if torch.ones(()):
        pass


def shape_by_values() -> None:
    torch.ones(2)[torch.ones(2) > 0]


def hook() -> None:
    def raises(gradient: torch.Tensor) -> None:
        raise KeyError("in a hook")

    x = torch.ones(2, requires_grad=True)
    (x * 2).register_hook(raises)
    product = x * 2
    product.register_hook(raises)
    product.sum().backward()


def old_loss() -> None:
    """Run a backward that the course's own hooks refuse, which is reported, too."""
    model = nn.Linear(2, 2)
    zero = Zero(model, 3, partial(torch.optim.SGD, lr=0.1))
    first, second = (model(torch.ones(1, 2)).sum() for _ in range(2))
    first.backward()
    zero.step()
    second.backward()


def pipeline() -> pp.Pipeline:
    stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    return pp.Pipeline(stages, pp.one_f_one_b(2, 2), F.mse_loss, dist.new_group([16, 17]))


def nobody_says_what_crosses() -> None:
    pipeline().forward_backward(None, torch.ones(4, 2))


def nobody_says_how_many() -> None:
    pipeline().forward_backward(None, None)


def nobody_tells_torch() -> None:
    torchs_pipeline().step(target=torch.ones(4, 2))


def torchs_pipeline() -> Any:
    from torch.distributed.pipelining import Schedule1F1B

    stage = PipelineStage(nn.Linear(2, 2), 1, 2, torch.device("gpu"), group=dist.new_group([16, 17]))
    return Schedule1F1B(stage, 2, F.mse_loss)


WITHIN = "run it within labs.kit.dry.neighbours(torch.empty(2, 64, 128, device='meta')), with the shape"
ASKS = "asks its neighbours in the pipeline what they will send, and in a dry run nobody answers: " + WITHIN


MISTAKES = {
    wrong_device: "FakeTensorDeviceMismatchError: Expected all tensors to be on the same device, but found at least "
    "two devices, gpu:0 and cpu!",
    too_large: "TooLarge: LINEtorch.empty(2**70) asks for a tensor of 2**63 bytes or more",
    too_large_together: "TooLarge: LINEtorch.ones(2**40, 1) @ torch.ones(1, 2**40) asks for a tensor",
    value: "NeedsNumbers: LINEtorch.ones(2).sum().item() asks for numbers",
    branch: "NeedsNumbers: LINEif torch.ones(()): asks for numbers",
    shape_by_values: "NeedsNumbers: LINEtorch.ones(2)[torch.ones(2) > 0] asks for numbers",
    hook: "KeyError: 'in a hook'",
    nobody_says_what_crosses: "NeedsNumbers: LINEpipeline().forward_backward(None, torch.ones(4, 2)) " + ASKS,
    nobody_says_how_many: "ValueError: neither x nor y is given, and in a dry run no other rank tells how large",
    nobody_tells_torch: "NeedsNumbers: LINEtorchs_pipeline().step(target=torch.ones(4, 2)) " + ASKS
    if hasattr(PipelineStage, "_warmup_backward_result")
    else "RuntimeError: Stage 1 requires dynamic shape inference, which is not supported with a fake process group.",
    old_loss: "RuntimeError: backward() of a loss from before step(): the parameters of its forward are gone",
}


def copies() -> None:
    torch.ones(2).cpu()


def fills() -> None:
    torch.empty(2, device="cpu").copy_(torch.ones(2))


def prints() -> None:
    str(torch.ones(2))


WAITS = {copies: "a copy to the host", fills: "a copy to the host", prints: "a tensor that is printed"}


def passes() -> None:
    """Do what does not wait: the host's own numbers, copies that nobody waits for, and a model that changes
    its dtype.
    """
    assert torch.arange(3, device="cpu").sum().item() == 3
    torch.ones(2).to("cpu", non_blocking=True)
    torch.ones(2, device="cpu").to("gpu")
    model = nn.Linear(2, 2).to(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16 and model.weight.device.type == "gpu"
    assert torch.accelerator.current_accelerator().type == "gpu" and torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    torch.manual_seed(3)
    with torch.random.fork_rng([0], device_type="gpu"):
        assert F.dropout(torch.rand(2)).device.type == "gpu"
    draws = torch.Generator("gpu").manual_seed(3)
    assert torch.randint(5, (2,), generator=draws).device.type == "gpu" and torch.Generator().initial_seed() > 0


def coalesces() -> None:
    short, long = torch.ones(2), torch.ones(2 * 1024)
    with dist._coalescing_manager():
        dist.all_reduce(short)
        dist.all_reduce(long)
    with dist._coalescing_manager():
        all_gather(long, short)
    with dist._coalescing_manager():
        reduce_scatter_single(short, long)


def pipelines() -> None:
    with neighbours(torch.empty(2, 2, device="meta")):
        pipeline().forward_backward(None, torch.ones(4, 2))
        torchs_pipeline().step(target=torch.ones(4, 2))


def autocasts() -> None:
    linear, norm, x = nn.Linear(4, 4), nn.LayerNorm(4), torch.ones(2, 4, requires_grad=True)
    with torch.autocast("gpu", torch.bfloat16):
        y = checkpoint(linear, x)
        assert (y.dtype, norm(y).dtype) == (torch.bfloat16, torch.float32)
        loss = F.cross_entropy(y, torch.zeros(2, dtype=torch.long))
        assert loss.dtype == torch.float32
    loss.backward()
    assert linear.weight.grad.dtype == x.grad.dtype == torch.float32
    assert linear(x).dtype == torch.float32


OPERATORS = (
    lambda x: x.t(),
    lambda x: x[1:, ::2],
    lambda x: x * 2.0,
    lambda x: x.int() * 1,
    lambda x: x.int() * 1.0,  # equal to the one before, except for its dtype
    lambda x: x.int() * True,
    lambda x: x.mul_(x),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch.add(x, x, out=x.new_empty(4, 6)),
    lambda x: x.transpose_(0, 1),
    lambda x: x.split([1, 3])[1],
    lambda x: x.max(0).indices,
    lambda x: torch.cat([x, x.t().contiguous().t()]),
    lambda x: x.detach(),
    lambda x: (x.untyped_storage().resize_(0), x.detach())[1],  # FSDP frees it in this way
    lambda x: x.to(torch.complex64).conj(),
)


def answers() -> None:
    """Check that asking a kernel and knowing the answer make no difference."""
    for number, operator in enumerate(OPERATORS):
        cpu, first, again = (told(operator, torch.ones(4, 6, device=device)) for device in ("cpu", "gpu", "gpu"))
        assert cpu == first == again, number


def told(operator: Callable, x: torch.Tensor) -> tuple:
    y = operator(x)
    memories = y.untyped_storage()._cdata == x.untyped_storage()._cdata, y.untyped_storage().nbytes()
    return y is x, *memories, y.storage_offset(), y.shape, y.stride(), y.dtype, y.is_conj(), x.shape


def splits_a_layer() -> None:
    """Split a layer as two ranks.

    DTensor caches what it finds out about an operator, with names of groups that differ for rank 3.
    """
    mesh = init_device_mesh("gpu", (2, 2), mesh_dim_names=("apart", "tp"))
    layer = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": RowwiseParallel()})
    layer(torch.ones(2, 2)).sum().backward()


PASSES = passes, coalesces, pipelines, autocasts, answers


def try_all(functions: list[Callable]) -> dict[str, tuple[str, list]]:
    """Return for each function the error that it raised, and what was waited for, by name."""
    dist.destroy_process_group()
    found = {}
    for function in functions:
        raised = ""
        with as_rank(17, 1024) as pretend:
            try:
                function()
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"
        found[function.__name__] = raised, pretend.reads
    for rank in (0, 3):
        with as_rank(rank, 4):
            splits_a_layer()
    return found


@pytest.fixture(scope="module")
def tried():
    return run(try_all, [*MISTAKES, *WAITS, *PASSES], ranks=1, device="cpu")[0]


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: function.__name__)
def test_what_a_gpu_would_not_let_pass_is_refused(tried, function):
    raised = re.sub(r"test_accelerator.py line \d+: ", "LINE", tried[function.__name__][0])
    assert raised.startswith(MISTAKES[function])


@pytest.mark.parametrize("function", WAITS, ids=lambda function: function.__name__)
def test_what_waits_for_the_device_is_counted_with_its_line(tried, function):
    raised, (read,) = tried[function.__name__]
    assert not raised and read.what == WAITS[function] and read.line.startswith("test_accelerator.py line ")


def test_what_waits_for_nothing_passes(tried):
    for function in PASSES:
        assert tried[function.__name__] == ("", [])
