"""Clipping by the global norm: the length of all gradients as one vector, on whichever ranks its elements are.

Let g be the vector of the gradients of all parameters that are trained.  If g is longer than `max_norm`, g is scaled to
that length, and keeps its direction.  Source: Pascanu, Mikolov and Bengio 2013, arXiv 1211.5063, section 3.2.

    g  <-  g min(1, max_norm / |g|)             |g|² = the sum of all squares

A sum of squares over all elements is a sum over ranks, too.  So with sharded gradients, every rank adds up the squares
of its own shards, and the ranks all-reduce *one number*.  Then every rank scales its shards by the same factor.

                            gradients are                 groups        all-reduced, for each group
    one device, labs.ddp    replicated: the mean on all   ()            nothing; a sum would be wrong
    labs.zero               sharded over all ranks        (None,)       one float64
    labs.fsdp, two axes     sharded along one of them     (that one's,) one float64
    labs.tp                 some split, some whole        use its own clip_gradients
    labs.pp                 each on its stage's rank,     use its own clip_gradients
                            a tied one on two
    labs.parallel           all of the above              use its own clip_gradients

The classic mistake is to clip each shard by its own norm.  The shards of a vector are shorter than the vector, some
more than others, so each shard would be scaled by a different factor, and the vector would lose its direction.
`nn.utils.clip_grad_norm_(zero.shards)` makes this mistake, and the next step raises an error.  Under stages 1 and 2 of
ZeRO, `nn.utils.clip_grad_norm_(model.parameters())` clips gradients that are not averaged yet, or no gradients at all,
without an error.

    zero.sync()
    norm = clip_gradients(zero.shards, max_norm=1.0, groups=(None,))
    zero.step()
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def clip_gradients(
    parameters: Tensor | Iterable[Tensor], max_norm: float, groups: Sequence[ProcessGroup | None] = ()
) -> Tensor:
    """Scale all gradients, in place, so that their global norm is at most `max_norm`; return the norm before (0-dim).

    parameters: this rank's parameters, or its shards; a `.grad` that is None or empty counts as zeros.
    max_norm: the largest norm that is not clipped; with inf, the norm is only measured.
    groups: the process groups over which the parameters are sharded, None for all ranks.  Every rank of these groups
        must call this function.  Leave `groups` out for gradients that are DTensors, which know their groups.

    If the norm is inf or nan, the gradients are spoiled, as in torch: look at the norm before the step.

    Raises ValueError if `max_norm` is not above 0, or if `groups` are not those over which the DTensors are sharded.
    """
    if groups is None or isinstance(groups, ProcessGroup):
        raise TypeError(
            f"groups is {groups}: give a sequence, (None,) for all ranks, or () for gradients that are not sharded"
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if known := [groups_of(p.grad) for p in parameters if hasattr(p.grad, "placements")]:
        groups = require_groups(known, groups, len(known) == sum(p.grad is not None for p in parameters))
    norm = global_norm(parameters, groups)
    shorten(parameters, norm, max_norm)
    return norm


def groups_of(gradient: Any) -> list[ProcessGroup]:
    """Return the groups over which a DTensor, ours or PyTorch's, is sharded."""
    mesh = gradient.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if mesh.size(axis) > 1 and not placement.is_replicate()
    ]


def require_groups(
    known: list[list[ProcessGroup]], given: Sequence[ProcessGroup | None], are_all: bool
) -> Sequence[ProcessGroup]:
    """Return the groups over which every gradient is sharded.

    Raises ValueError if gradients are sharded over different groups, or over other groups than those in `given`.
    """
    ranks = [{frozenset(dist.get_process_group_ranks(group)) for group in groups} for groups in known]
    if not are_all or any(other != ranks[0] for other in ranks):
        raise ValueError(
            "some gradients are sharded over other groups than the rest: clip them with labs.tp.clip_gradients or "
            "Parallel.clip_gradients, or take the global_norm of each kind and scale all gradients by the total"
        )
    others = {frozenset(dist.get_process_group_ranks(group)) for group in given}
    if given and {group for group in others if len(group) > 1} != ranks[0]:
        wanted = ", ".join(str(sorted(group)) for group in ranks[0]) or "no ranks"
        raise ValueError(f"groups= are not those of the gradients, which are sharded over ranks {wanted}: leave it out")
    return known[0]


def shorten(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place, so that their global norm, which is `norm` now, becomes at most `max_norm`."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}: give a length above 0 (or inf, only to measure)")
    # A norm of 0 does no harm: 1e-6 is added, as in torch.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def global_norm(
    parameters: Sequence[Tensor],
    groups: Sequence[ProcessGroup | None] = (),
    copies: Mapping[Tensor, int] = MappingProxyType({}),
) -> Tensor:
    """Return the length of the gradients of all ranks in `groups` as one vector: float64, 0-dim, equal on all of them.

    copies: `{parameter: number of these ranks that hold the same gradient}`, 1 if it is missing; the gradient counts
        once, however many ranks hold it.
    """
    # The total is float64 on every rank, whatever a rank holds: an all-reduce needs one dtype.
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
    for p in parameters:
        if p.grad is not None:
            # The gradient's own dtype would not do: bfloat16 has 8 bits, and squares of float16 overflow from 256 on.
            own = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad  # ours and PyTorch's DTensors
            total += torch.linalg.vector_norm(
                own, dtype=torch.promote_types(own.dtype, torch.float64)
            ) ** 2 / copies.get(p, 1)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()
