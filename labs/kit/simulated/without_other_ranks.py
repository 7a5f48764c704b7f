"""A process that runs the code of one rank without the other ranks, for a dry run.

a collective         uses PyTorch's fake process group, which sends nothing; all ranks' tensors count as equal
a comparison         between ranks (labs.agree) compares nothing; only this file switches labs.agree off
a wait               ends at once
PyTorch's own        DDP does not compare and copy parameters as it starts; FSDP does not create other ranks' chunks
a pipeline           takes the dtype and shape of messages from the caller: see `neighbours`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as torch_fsdp
import torch.nn.parallel.distributed as torch_ddp
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, _create_work_from_future
from torch.distributed import distributed_c10d
from torch.distributed.tensor import debug

from labs import agree, group
from labs.kit.simulated.device import NAME, register
from labs.kit.training import training_step
from labs.kit.watch import c10d_tap
from labs.pp import batches
from labs.pp.batches import GivenBatches
from labs.pp.messages import MOST_DIMS, Mail, Receive, cut_of

receive = Mail.receive
COALESCED = "allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"
KERNELS = torch.library.Library("c10d", "IMPL")


@cache
def coalesce() -> None:
    """Register fake kernels for the collectives of PyTorch's coalescing manager; PyTorch has fakes of all others."""
    for name in COALESCED:
        KERNELS.impl(name, at_once, "Meta")


def at_once(*args: Any) -> Any:
    return FakeWork().boxed()


@contextmanager
def alone(rank: int, ranks: int) -> Iterator[None]:
    c10d_tap.install()
    register()
    coalesce()
    if NAME not in (devices := dist.Backend.backend_capability["fake"]):
        devices.append(NAME)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=dist.HashStore())
    try:
        with unheard():
            yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # this cache holds names of groups, which a next dry run reuses


@contextmanager
def unheard() -> Iterator[None]:
    """Patch everything that would wait for the other ranks of a fake process group, or compare values with them."""
    with ExitStack() as stack:
        # If this process is a rank of a job, the job's listeners must not see the collectives of the dry run.
        stack.enter_context(patch.object(c10d_tap, "listeners", [Done()]))
        make_group = inspect.unwrap(distributed_c10d._new_group_with_tag)
        stack.enter_context(patch.object(distributed_c10d, "_new_group_with_tag", make_group))
        stack.enter_context(patch.object(agree, "alone", True))
        stack.enter_context(patch.object(GivenBatches, "agreed", size_here))
        for module in (batches, training_step):  # fake targets have no numbers: none counts as ignored
            stack.enter_context(patch.object(module, "counted", Tensor.numel))
        stack.enter_context(patch.object(dist, "all_gather_object", all_gather_object))
        stack.enter_context(patch.object(group, "sum_parts", added_up))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(torch_ddp, name, nothing))
        stack.enter_context(patch.object(torch_fsdp, "_chunk_with_empty", Chunks))
        yield


class Done(c10d_tap.Listener):
    """A listener that replaces the Work of each collective by a Work that is complete.

    The Work keeps the collective's tensors alive, as a backend's Work does.  The Work of an all-reduce keeps its
    outputs.
    """

    def handed(self, call: c10d_tap.IssuedCall, work: dist.Work) -> dist.Work:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([*call.outputs] if call.op == "all_reduce" else [*call.inputs, *call.outputs])
        return _create_work_from_future(future)


class Chunks:
    """A tensor in `count` chunks along a dim, each created when it is read: of thousands, only one is ever read."""

    def __init__(self, whole: Tensor, count: int, dim: int) -> None:
        self.whole, self.dim, self.most = whole, dim, -(-whole.size(dim) // count)

    def __getitem__(self, number: int) -> Tensor:
        left = self.whole.size(self.dim) - number * self.most
        if left <= 0:
            return self.whole.new_empty(0)
        return self.whole.narrow(self.dim, number * self.most, min(self.most, left))


def added_up(parts: Tensor, ranks: int) -> Tensor:
    """Return a tensor of the shape of the sum of all ranks' parts, without a loop over thousands of parts."""
    return parts.new_empty(parts.numel() // ranks)


def all_gather_object(values: list[Any], value: Any, *others: Any, **options: Any) -> None:
    values[:] = [value] * len(values)


def size_here(batches: GivenBatches, x: Tensor | None, y: Tensor | None, look: Callable[[], Any]) -> int:
    look()
    if x is None and y is None:
        raise ValueError(
            "neither x nor y is given, and in a dry run no other rank tells how large the batch is: give one of them, "
            "torch.empty(8, 64, device='meta') if this rank reads none"
        )
    return len(y if x is None else x)


def nothing(*args: Any, **kwargs: Any) -> None: ...


@contextmanager
def neighbours(crossing: Tensor) -> Iterator[None]:
    """Stand in for a rank's neighbours in a pipeline, ours or PyTorch's, during a dry run.

    crossing: a meta tensor with the dtype and shape of every message between stages.

    with neighbours(torch.empty(2, 64, 128, device="meta")):
        pipeline.forward_backward(x, y)
    """
    with our_neighbours(crossing), torchs_neighbours(crossing):
        yield


@contextmanager
def our_neighbours(crossing: Tensor) -> Iterator[None]:
    """Stand in for a rank's neighbours in a pipeline of labs.pp, whose messages have `crossing`'s dtype and shape."""

    def announced(mail: Mail, step: Receive) -> None:
        if (cut := cut_of(step.message)) not in mail.agreed:
            description = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=mail.device)
            # In a dry run, the description of a message has no numbers, but the neighbour's send of it needs this recv.
            dist.recv(description, group=mail.group, group_src=step.source)
            mail.agreed[cut] = crossing.dtype, crossing.shape
        receive(mail, step)

    with patch.object(Mail, "receive", announced):
        yield


@contextmanager
def torchs_neighbours(crossing: Tensor) -> Iterator[None]:
    """Stand in for a rank's neighbours in PyTorch's pipelines, whose messages have `crossing`'s dtype and shape."""
    # Importing torch.distributed.pipelining takes a second, so this import is not at the head of the file.
    from torch.distributed.pipelining import _utils
    from torch.distributed.pipelining.stage import PipelineStage

    def announced(its: PipelineStage, source: int) -> Any:
        forward = source < its.stage_index
        meta = _utils._StageForwardMeta if forward else _utils._StageBackwardMeta
        return meta(_utils.extract_tensor_metas((crossing.detach().requires_grad_(forward),)))

    def they_ask_for_shapes(its: PipelineStage, received_result: Tensor | None = None) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cpu")

    answers = {"_recv_meta": announced, "_send_meta": nothing}
    if hasattr(PipelineStage, "_warmup_backward_result"):  # up to PyTorch 2.14
        answers["_warmup_backward_result"] = they_ask_for_shapes
    with patch.multiple(PipelineStage, **answers), nobody_votes():
        yield


@contextmanager
def nobody_votes() -> Iterator[None]:
    """Let each stage ask its neighbours for shapes without a vote of all ranks, which PyTorch holds from 2.15 on."""
    from torch.distributed.pipelining import schedules, stage

    def ask_for_shapes(its: Any, stages: Sequence[Any], *_: Any, **__: Any) -> None:
        for each in stages:
            each._inference_mode = stage.InferenceMode.DYNAMIC

    if not hasattr(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state"):
        yield
        return
    with patch.object(schedules._PipelineSchedule, "_initialize_pipeline_distributed_state", ask_for_shapes):
        yield
