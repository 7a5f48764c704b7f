"""Parameters that are sharded one by one, and travel together.

    ShardedParameter    a DTensor, cut along its first dim, in the parameter's place; and `full`, all of it, which has
                        memory only while its layer computes, and then stands before the other
    ParameterGroup      those of one layer: one all-gather for all of them, one reduce-scatter for their gradients

What travels is a table with a row for each rank, and in it the rank's piece of each parameter, padded to the longest:

                      weight [5, 3]      bias [3]         2 ranks: pieces of 3 and 2 rows, of 2 elements and 1
    rank 0            9 elements         2
    rank 1            6, padding 3       1, padding 1

So a parameter's pieces do not lie side by side in it, and are copied from there to `full`.  That copy is what it costs
that each parameter keeps its name, its shape, its dtype, and its own place in the optimizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from labs.autograd import Moved, Versions, alias
from labs.dtensor import DTensor
from labs.group import all_gather, free, start_reduce_scatter
from labs.layers import Home
from labs.mesh import Mesh
from labs.placement import Replicate, Shard


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of gathered parameters, of reduced gradients, and of outputs; None leaves them as they are."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class OffloadPolicy:
    """Shards lie on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients, and so the optimizer, stay in the CPU's memory; only what is gathered does not."""

    pin_memory: bool = True


class ShardedParameter:
    """One parameter: `shard` for the optimizer, `full` for its layer.

    whole: [ranks, elements of a piece], the memory behind `full`; none while the parameter is dropped.
    """

    def __init__(self, homes: list[Home], p: nn.Parameter, mesh: Mesh, policy: MixedPrecisionPolicy, offload: Any):
        self.homes, self.name, self.shape = homes, homes[0].name, p.shape
        self.mesh, self.ranks, rank = mesh, mesh.size(-1), mesh.get_local_rank(-1)
        self.rows = max(1, -(-p.shape[0] // self.ranks))  # of a piece: one of padding, where there is nothing at all
        self.n = self.rows * p.shape[1:].numel()
        self.mine = slice(min(rank * self.rows, len(p)), min((rank + 1) * self.rows, len(p)))
        self.placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        to = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) and not p.is_meta else p.device
        own = p.detach()[self.mine].to(to, copy=True)
        self.shard = nn.Parameter(self.distributed(own), p.requires_grad)
        self.device, self.dtype, self.at_rest = p.device, policy.param_dtype or p.dtype, p.dtype
        self.pending: Tensor | None = None  # a gradient of earlier micro-batches, in reduce_dtype
        for module, attribute, _ in homes:
            module.register_parameter(attribute, self.shard)
        if not p.is_meta:
            Moved.mark(p, self.name, "make the optimizer after fully_shard")

    def settle(self) -> None:
        """Before the first forward: take the shard that stands in the module now, and make room for all of it."""
        module, attribute, _ = self.homes[0]
        if self.device.type == "meta":  # model.to_empty() has put others in their places
            self.shard, self.device = module._parameters[attribute], module._parameters[attribute].device
        self.require_unchanged()
        self.whole = torch.empty(self.ranks, self.n, dtype=self.dtype, device=self.device)
        full = self.whole.view(self.ranks * self.rows, *self.shape[1:])[: self.shape[0]]
        self.full = nn.Parameter(full, self.shard.requires_grad)
        self.versions = Versions(self.full)
        self.drop()

    def require_unchanged(self) -> None:
        module, attribute, _ = self.homes[0]
        now = module._parameters[attribute]
        if now.is_meta:
            raise RuntimeError(
                f"parameter {self.name!r} is on the meta device: model.to_empty(device=...) gives the shards memory, "
                "and then they need their numbers"
            )
        if now is not self.shard or now.dtype != self.at_rest:
            raise RuntimeError(
                f"parameter {self.name!r} was sharded as a DTensor of {self.at_rest}, and a {type(now).__name__} of "
                f"{now.dtype} stands there now: convert or replace parameters before fully_shard (or let mp_policy= "
                "say in which dtype to compute)"
            )

    def distributed(self, own: Tensor) -> DTensor:
        return DTensor.from_local(own, self.mesh, self.placements, shape=self.shape)

    @property
    def local(self) -> Tensor:
        """This rank's piece, without padding."""
        return self.shard.detach().to_local()

    def show(self) -> Tensor:
        """Let the layer find all of it: its gradient comes together in the tensor that is returned."""
        with torch.enable_grad():  # in backward, too: a recomputation needs what the forward had
            use = alias(self.full)
        for module, attribute, _ in self.homes:
            vars(module)[attribute] = use
        return use

    def arrive(self, pieces: Tensor) -> None:
        """From a table of fewer ranks, several of the pieces stand in each of its rows."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.view(pieces.shape).copy_(pieces)
        self.versions.allow()

    def drop(self) -> None:
        self.hide()
        free(self.whole)

    def hide(self) -> None:
        """Let the layer find the shard again."""
        for module, attribute, _ in self.homes:
            vars(module).pop(attribute, None)
        self.versions.forbid()

    def pack(self, gradient: Tensor, pieces: Tensor) -> None:
        """Lay a gradient of the parameter's shape into pieces: [ranks, n]."""
        complete = len(gradient) // self.rows
        pieces[:complete] = gradient[: complete * self.rows].reshape(complete, self.n)
        if complete < self.ranks:
            over = gradient[complete * self.rows :].flatten()
            pieces[complete, : len(over)] = over
            pieces[complete, len(over) :].zero_()
            pieces[complete + 1 :].zero_()

    def add(self, piece: Tensor) -> None:
        """This rank's piece of the mean gradient, padded."""
        own = piece.view(self.rows, *self.shape[1:])[: self.mine.stop - self.mine.start].to(self.local)
        if self.shard.grad is None:
            self.shard.grad = self.distributed(own)
        else:
            self.shard.grad.to_local().add_(own)


class ParameterGroup:
    """The parameters of one layer: gathered by one all-gather, and their gradients averaged by one reduce-scatter.

    mesh: its last axis shards; the one before it, if there is one, replicates.
    """

    def __init__(self, parameters: list[ShardedParameter], mesh: Mesh, policy: MixedPrecisionPolicy):
        self.parameters, self.policy = parameters, policy
        self.group, self.ranks, self.rank = mesh.get_group(-1), mesh.size(-1), mesh.get_local_rank(-1)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.copies = mesh.size() // self.ranks
        self.gathered, self.taken = False, ()  # `taken`: versions of the shards that were gathered
        self.arriving: tuple[Tensor, dist.Work] | None = None
        self.kept: Tensor | None = None  # between forward and backward, a larger piece: for a smaller group
        self.reducing: Callable[[], None] | None = None
        self.averaging: Callable[[], None] | None = None

    # ---- parameters --------------------------------------------------------------------------------------

    def gather(self, smaller: ProcessGroup | None = None) -> None:
        """Start to gather everybody's pieces, unless they are here or on their way; `arrive` waits for them."""
        if self.gathered or self.arriving or not self.parameters:
            return
        if self.kept is not None:
            table = self.kept.new_empty(dist.get_world_size(smaller), len(self.kept))
            group, mine = smaller, self.kept
            self.kept = None
        else:
            first = self.parameters[0]
            table = torch.empty(self.ranks, self.width, dtype=first.dtype, device=first.device)
            group, mine = self.group, self.pack(table[self.rank])
        self.arriving = table, all_gather(table.view(-1), mine, group=group, async_op=True)

    @property
    def width(self) -> int:
        return sum(p.n for p in self.parameters)

    def pack(self, row: Tensor) -> Tensor:
        """This rank's pieces side by side, each padded."""
        self.taken = self.versions()
        for p, place in zip(self.parameters, row.split([p.n for p in self.parameters]), strict=True):
            own = p.local.flatten()
            place[: len(own)] = own
            place[len(own) :].zero_()
        return row

    def require_current(self) -> None:
        """Forget what was gathered or kept before the optimizer's last step."""
        for p in self.parameters:
            p.require_unchanged()
        if self.taken != self.versions():
            self.drop()
            self.kept = None

    def versions(self) -> tuple[int, ...]:
        return tuple(p.shard._version for p in self.parameters)

    def arrive(self) -> None:
        """Wait until all of each parameter is here."""
        if not self.arriving:
            return
        table, work = self.arriving
        work.wait()
        pieces = self.ranks // len(table)  # to a row, of each parameter
        for p, of_each in zip(self.parameters, table.split([pieces * p.n for p in self.parameters], 1), strict=True):
            p.arrive(of_each)
        free(table)
        self.gathered, self.arriving = True, None

    def keep(self, smaller: ProcessGroup) -> None:
        """Of what is to be dropped, a larger piece, so that fewer ranks have all of it between them."""
        ranks, rank = dist.get_world_size(smaller), dist.get_rank(smaller)
        self.kept = torch.cat([p.whole.view(ranks, -1)[rank] for p in self.parameters])

    def drop(self) -> None:
        self.arrive()  # gathered, and never used
        if self.gathered:
            for p in self.parameters:
                p.drop()
        self.gathered = False

    def show(self) -> list[Tensor]:
        return [use for use in [p.show() for p in self.parameters] if use.requires_grad]

    # ---- gradients ---------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Keep whole gradients for a later micro-batch."""
        for p in self.parameters:
            gradient, p.full.grad = p.full.grad, None
            if gradient is not None:
                gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
                p.pending = gradient if p.pending is None else p.pending.add_(gradient)

    def reduce(self) -> None:
        """Start to make the shards' mean of whole gradients; `finish_reduce` and `finish_average` wait."""
        self.accumulate()
        due = [p for p in self.parameters if p.pending is not None]
        widths = [p.n for p in due]
        table = due[0].pending.new_empty(self.ranks, sum(widths))
        for p, pieces in zip(due, table.split(widths, 1), strict=True):
            p.pack(p.pending, pieces)
            p.pending = None
        part_of = start_reduce_scatter(table.view(-1), self.group)

        def over_shards() -> None:
            part = part_of().div_(self.ranks * self.copies)
            free(table)
            average = self.replicas and dist.all_reduce(part, group=self.replicas, async_op=True)

            def over_replicas() -> None:
                if average:
                    average.wait()
                for p, piece in zip(due, part.split(widths), strict=True):
                    p.add(piece)

            self.averaging = over_replicas

        self.reducing = over_shards

    def forget(self) -> None:
        """Drop all that is gathered, and whole gradients."""
        self.drop()
        self.averaging = None
        for p in self.parameters:
            p.full.grad = p.pending = None

    def finish_reduce(self) -> None:
        reducing, self.reducing = self.reducing, None
        if reducing:
            reducing()

    def finish_average(self) -> None:
        averaging, self.averaging = self.averaging, None
        if averaging:
            averaging()
