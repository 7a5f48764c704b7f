"""One process in place of all ranks: what they would say to each other is not said.

a collective         a fake process group sends nothing, and what others would have brought is what this rank has
a comparison         labs.agree compares nothing: here alone is that switched off, for all who compare
a wait               is over at once
PyTorch's own        DDP does not compare and copy parameters as it begins
a pipeline           its neighbours' shapes are told: `crossing` is a micro-batch of what crosses each cut
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d

from labs import agree
from labs.kit.dry.device import NAME, register
from labs.kit.watch import tap
from labs.pp.messages import Mail, Receive, cut_of

receive = Mail.receive


@contextmanager
def alone(rank: int, ranks: int) -> Iterator[None]:
    tap.install()
    register()
    if NAME not in (devices := dist.Backend.backend_capability["fake"]):
        devices.append(NAME)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=dist.HashStore())
    try:
        with ExitStack() as stack:
            # Whoever listens to this process's job would take these calls for calls of that.
            stack.enter_context(patch.object(tap, "listeners", [Done()]))
            make_group = inspect.unwrap(distributed_c10d._new_group_with_tag)
            stack.enter_context(patch.object(distributed_c10d, "_new_group_with_tag", make_group))
            stack.enter_context(patch.object(agree, "alone", True))
            stack.enter_context(patch.object(dist, "all_gather_object", all_gather_object))
            for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
                stack.enter_context(patch.object(torch_ddp, name, nothing))
            yield
    finally:
        dist.destroy_process_group()


class Done(tap.Listener):
    """DDP asks the work of an all-reduce for what came of it, which a fake one does not have."""

    def handed(self, call: tap.Call, work: dist.Work) -> dist.Work:
        if call.op != "all_reduce":
            return work
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([*call.outputs])
        return _create_work_from_future(future)


def all_gather_object(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
    values[:] = [value] * len(values)


def nothing(*args: Any, **kwargs: Any) -> None: ...


@contextmanager
def neighbours(crossing: Tensor) -> Iterator[None]:
    """A pipeline's, ours or PyTorch's, who say as it begins what will come."""
    # Not at the head of the file: its import takes a second.
    from torch.distributed.pipelining import stage
    from torch.distributed.pipelining._utils import (
        _StageBackwardMeta,
        _StageForwardMeta,
        extract_tensor_metas,
    )

    def ours(mail: Mail, step: Receive) -> None:
        mail.agreed.setdefault(cut_of(step.message), (crossing.dtype, crossing.shape))
        receive(mail, step)

    def theirs(its: stage.PipelineStage, source: int) -> _StageBackwardMeta | _StageForwardMeta:
        kind = _StageForwardMeta if source < its.stage_index else _StageBackwardMeta
        return kind(extract_tensor_metas((crossing.detach().requires_grad_(kind is _StageForwardMeta),)))

    def they_ask_for_shapes(its: stage.PipelineStage, received_result: Tensor | None = None) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cpu")

    with ExitStack() as stack:
        stack.enter_context(patch.object(Mail, "receive", ours))
        stack.enter_context(patch.object(stage.PipelineStage, "_recv_meta", theirs))
        stack.enter_context(patch.object(stage.PipelineStage, "_send_meta", nothing))
        stack.enter_context(patch.object(stage.PipelineStage, "_warmup_backward_result", they_ask_for_shapes))
        yield
