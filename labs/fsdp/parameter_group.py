"""Sharded parameters that travel together: one all-gather for a layer's, one reduce-scatter for their gradients.

A collective sends a table with a row for each rank.  The row holds the rank's piece of each parameter, padded to the
length of the longest piece:

                      weight [5, 3]      bias [3]         2 ranks: pieces of 3 and 2 rows, of 2 elements and 1
    rank 0            9 elements         2
    rank 1            6, padding 3       1, padding 1

The pieces of one parameter do not lie side by side in the table, so they are copied from there to `full`.  That copy is
the price at which each parameter keeps its name, its shape, its dtype, and its own state in the optimizer.

Gradients are sent back in such a table.  It has a place for every parameter that is trained, even if this rank did not
use it, since another rank may have.  A missing gradient is sent as -0.0: adding it changes nothing, and a sum of -0.0
shows that no rank had one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup

from labs.agree import compare, everybodys
from labs.fsdp.sharded_parameter import MixedPrecisionPolicy, ShardedParameter
from labs.group import all_gather, divisor_before, free, start_reduce_scatter
from labs.mesh import Mesh


class ParameterGroup:
    """The parameters of one layer: gathered by one all-gather, and their gradients averaged by one reduce-scatter.

    mesh: its last axis shards; the one before it, if there is one, replicates.
    smaller: a group that gathers the larger pieces that `keep` has kept, if there are any.
    """

    def __init__(
        self,
        parameters: list[ShardedParameter],
        mesh: Mesh,
        policy: MixedPrecisionPolicy,
        smaller: ProcessGroup | None = None,
    ):
        self.parameters, self.policy, self.smaller = parameters, policy, smaller
        self.group, self.ranks, self.rank = mesh.get_group(-1), mesh.size(-1), mesh.get_local_rank(-1)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.divisor: float = mesh.size()  # the sum of gradients is divided by it
        self.sync, self.reshard_after_backward = True, True
        self.next_in_forward: list[ParameterGroup] | None = None
        self.next_in_backward: list[ParameterGroup] | None = None
        self.gathered, self.taken = False, ()  # `taken`: the shards' versions as they were gathered
        self.in_use = False  # a forward of its modules is running
        self.idle = False  # gathered for a forward without gradients, which has ended
        self.arriving: tuple[Tensor, dist.Work] | None = None
        self.kept: Tensor | None = None  # a larger piece, from which a smaller group gathers in backward
        self.trained = [p.name for p in parameters if p.shard.requires_grad]  # names that are the same on all ranks

    # ---- parameters --------------------------------------------------------------------------------------

    def unshard(self) -> None:
        with torch.inference_mode(False):
            self.gather()
            self.arrive()
            self.show()
        self.idle = False

    def gather(self) -> None:
        """Start the all-gather of the pieces, unless they are gathered or in flight; `arrive` waits for it.

        Pieces that were gathered before the shards were written to are dropped, and gathered again.
        """
        if self.taken != self.shard_versions():
            self.drop()
            self.kept = None
        if self.gathered or self.arriving or not self.parameters:
            return
        if self.kept is not None:
            table = self.kept.new_empty(dist.get_world_size(self.smaller), len(self.kept))
            group, mine = self.smaller, self.kept
            self.kept = None
        else:
            first = self.parameters[0]
            table = torch.empty(self.ranks, self.width, dtype=first.dtype, device=first.device)
            group, mine = self.group, self.side_by_side(table[self.rank])
        self.arriving = table, all_gather(table.view(-1), mine, group=group, async_op=True)

    @property
    def width(self) -> int:
        return sum(p.n for p in self.parameters)

    def side_by_side(self, row: Tensor) -> Tensor:
        """Fill this rank's row, [width], with its pieces, each padded; return the row."""
        self.taken = self.shard_versions()
        for p, place in zip(self.parameters, row.split([p.n for p in self.parameters]), strict=True):
            own = p.local.flatten()
            place[: len(own)] = own
        return row

    def require_unchanged(self) -> None:
        for p in self.parameters:
            p.require_unchanged()

    def is_stale(self) -> bool:
        """Return whether shards were written to since they were gathered, as by an optimizer or by loading.

        A write through .data or NumPy changes no version, so the numbers are compared, too.  Raises RuntimeError for
        such a write if the module is still in use: it shows its full parameters, or a backward has yet to run.
        """
        if self.taken != self.shard_versions():
            return True
        changed = [p for p in self.parameters if self.gathered and not p.is_current()]
        if changed and not self.idle:
            changed[0].refuse_write()
        return bool(changed)

    def follow(self) -> bool:
        """Return whether other parameters are trained than in the last forward.

        Raises RuntimeError, on every rank, if ranks train different parameters.
        """
        trained = [p.name for p in self.parameters if p.shard.requires_grad]
        if trained == self.trained:
            return False
        self.require_same(trained, "ranks train different parameters: {}; freeze and unfreeze the same ones everywhere")
        self.trained = trained
        return True

    def require_same(self, mine: Any, text: str) -> None:
        """Raise RuntimeError, on every rank that has a part or a copy of these parameters, if `mine` differs on one."""
        found = self.everybodys(mine)
        compare(found, lambda *they: text.format("rank {} {}, rank {} {}".format(*they)), RuntimeError)

    def everybodys(self, mine: Any) -> dict[int, Any]:
        found = everybodys(mine, self.group)
        for others in everybodys(found, self.replicas).values() if self.replicas else ():
            found |= others
        return found

    def shard_versions(self) -> tuple[tuple[int, int], ...]:
        return tuple(p.version for p in self.parameters)

    def arrive(self) -> None:
        """Wait for the all-gather, and copy the pieces to each parameter's `full`."""
        if not self.arriving:
            return
        table, work = self.arriving
        work.wait()
        pieces = self.ranks // len(table)  # the number of pieces of each parameter in one row
        for p, of_each in zip(self.parameters, table.split([pieces * p.n for p in self.parameters], 1), strict=True):
            p.arrive(of_each)
        free(table)
        self.gathered, self.arriving = True, None

    def keep(self) -> None:
        """Keep a larger piece of the parameters that are about to be dropped; `smaller` can gather them from these."""
        ranks, rank = dist.get_world_size(self.smaller), dist.get_rank(self.smaller)
        self.kept = torch.cat([p.whole.view(ranks, -1)[rank] for p in self.parameters])

    def drop(self) -> None:
        self.arrive()  # an all-gather may be in flight for a use that never came
        if self.gathered:
            for p in self.parameters:
                p.drop()
        self.gathered = False

    def drop_after_backward(self) -> None:
        if not self.in_use:
            self.hide()
            if self.reshard_after_backward:
                self.drop()

    def require_unwritten(self) -> None:
        if self.gathered:
            for p in self.parameters:
                p.require_unwritten()

    def show(self) -> None:
        for p in self.parameters:
            p.show()

    def hide(self) -> None:
        for p in self.parameters:
            p.hide()

    def uses(self) -> list[Tensor]:
        return [p.use for p in self.parameters if p.use is not None and p.use.requires_grad]

    # ---- gradients ---------------------------------------------------------------------------------------

    def gradients_due(self) -> int:
        """Return how many of these parameters get a gradient in the backward that is running."""
        nodes = [get_gradient_edge(p.full).node for p in self.parameters if p.full.requires_grad]
        return sum(map(torch._C._will_engine_execute_node, nodes))

    def accumulate(self) -> None:
        """Add the full gradients to those of earlier micro-batches, in `pending`."""
        for p in self.parameters:
            gradient, p.full.grad = p.full.grad, None
            if gradient is not None and p.shard.requires_grad:  # the parameter may have been frozen since the forward
                gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
                p.pending = gradient if p.pending is None else p.pending.add_(gradient)

    def reduce(self) -> "Reduction":
        """Start to reduce the full gradients, with those of earlier micro-batches."""
        return Reduction(self)

    def forget(self) -> None:
        """Drop the gathered parameters, and the full gradients."""
        self.drop()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for p in self.parameters:
            p.pending = None
            if hasattr(p, "full"):  # the first forward creates it
                p.full.grad = None


class Reduction:
    """The reduction of a group's full gradients to the gradients of its shards, in three steps.

    __init__ starts the reduce-scatter.  average_replicas waits for it, and starts the all-reduce over replicas.
    finish waits for that, and adds the means to the shards' gradients.
    """

    def __init__(self, group: ParameterGroup):
        group.accumulate()
        self.group = group
        self.due = [p for p in group.parameters if p.full.requires_grad or p.pending is not None]
        self.missing = {p for p in self.due if p.pending is None}
        self.widths = [p.n for p in self.due]
        dtype, device = group.policy.reduce_dtype or self.due[0].dtype, self.due[0].device
        self.table = torch.empty(group.ranks, sum(self.widths), dtype=dtype, device=device)
        self.before = divisor_before(dtype, group.divisor)
        for p, pieces in zip(self.due, self.table.split(self.widths, 1), strict=True):
            p.pack(pieces, self.before)
            p.pending = None
        self.part: Tensor | None = None  # this rank's part of the mean
        self.part_of_sum = start_reduce_scatter(self.table.view(-1), group.group)

    def average_replicas(self) -> None:
        """Wait for the reduce-scatter, and start the all-reduce, unless an earlier call did."""
        if self.part is not None:
            return
        self.part = self.part_of_sum().div_(self.group.divisor / self.before)
        free(self.table)
        replicas = self.group.replicas
        self.work = dist.all_reduce(self.part, group=replicas, async_op=True) if replicas else None

    def finish(self) -> None:
        if self.work:
            self.work.wait()
        for p, piece in zip(self.due, self.part.split(self.widths), strict=True):
            if not (p in self.missing and is_nothing(piece)):
                p.add(piece)


def is_nothing(piece: Tensor) -> bool:
    """Return whether the sum consists of -0.0 alone, so that no rank had a gradient."""
    return bool((piece.signbit() & (piece == 0)).all())
