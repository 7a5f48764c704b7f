"""expert_scale: an expert's gradient, which has come from all ranks, divided by the number of its copies."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn, mean_of
from labs.mesh import Mesh
from labs.moe.exchange import AllToAll

SIZE, EXPERTS, EACH = 10, 2, 3  # rows of each expert on each rank


def faulty(dense: Sequence[Tensor], experts: Sequence[Tensor], copies: dist.ProcessGroup) -> None:
    for p in dense:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    for p in experts:
        dist.all_reduce(p.grad, group=copies)
        p.grad /= dist.get_world_size(copies)


def right(dense: Sequence[Tensor], experts: Sequence[Tensor], copies: dist.ProcessGroup) -> None:
    for p in dense:
        dist.all_reduce(p.grad)
    for p in experts:
        dist.all_reduce(p.grad, group=copies)
    for p in (*dense, *experts):
        p.grad /= dist.get_world_size()


def parameters(seed: int) -> tuple[nn.Parameter, list[nn.Parameter]]:
    """Return a dense weight, and all experts."""
    dense, *experts = (nn.Parameter(drawn((SIZE,), seed, number)) for number in range(1 + EXPERTS))
    return dense, experts


def rows_of(seed: int, rank: int, dense: Tensor) -> Tensor:
    """Return a rank's rows, sorted by their expert."""
    return drawn((EXPERTS * EACH, SIZE), seed, rank) * dense


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    mesh, (dense, experts) = Mesh((RANKS // EXPERTS, EXPERTS), ("copies", "ep")), parameters(seed)
    halves, sizes = [nn.Parameter(half) for half in experts[mesh.get_local_rank("ep")].chunk(2)], EXPERTS * [EACH]
    arrived = AllToAll.apply(rows_of(seed, dist.get_rank(), dense), sizes, sizes, mesh.get_group("ep"))
    AllToAll.apply((arrived * torch.cat(halves)).tanh(), sizes, sizes, mesh.get_group("ep")).square().mean().backward()
    fn([dense], halves, mesh.get_group("copies"))
    return {"gradient": torch.cat([half.grad for half in halves]), "dense": dense.grad}


def parts(seed: int, rank: int) -> list[list[Tensor]]:
    return [[gradients(seed, source)[1 + rank % EXPERTS]] for source in range(RANKS)]


def gradients(seed: int, rank: int) -> list[Tensor]:
    """Return the gradients of a rank's loss: the dense weight's, and each expert's."""
    dense, experts = parameters(seed)
    pieces = rows_of(seed, rank, dense).chunk(EXPERTS)
    torch.cat([(x * e).tanh() for x, e in zip(pieces, experts, strict=True)]).square().mean().backward()
    return [p.grad for p in (dense, *experts)]


def alone(seed: int) -> list[dict[str, Tensor]]:
    dense = mean_of([[gradients(seed, rank)[0]] for rank in range(RANKS)])
    return [{"gradient": mean_of(parts(seed, rank)), "dense": dense} for rank in range(RANKS)]


# fmt: off
expert_scale = clinic(
    "a", faulty, right, job, alone, number=7, parts=parts, tells={"numbers", "gradients"},
    asks="`fn(dense, experts, copies)`, which makes each .grad that of the mean of all ranks' losses; copies: the "
         "process group of the ranks that hold copies of the same experts",
    threads=("deepspeedai/DeepSpeed/issues/5618 closed 2024-06-05", "deepspeedai/DeepSpeed/issues/6545 open 2024-09-17",
             "deepspeedai/DeepSpeed/pull/6546 merged 2024-09-17"),
    mistake="divided by the copies, and not by all ranks",
    question="Each rank's loss is a mean over its own tokens. Of how many losses is an expert's gradient the sum?",
)
# fmt: on
