"""The change from one placement to another: one collective for each pair, and the bytes that it sends.

The table is for a tensor of n bytes on an axis of N ranks; `MOVES` prints the table, and the functions of this file
carry it out:

    from           to             collective        each rank sends
    Shard(i)       Replicate()    all_gather        (N-1)/N n
    Partial()      Replicate()    all_reduce        2 (N-1)/N n
    Partial()      Shard(j)       reduce_scatter    (N-1)/N n
    Shard(i)       Shard(j)       all_to_all        (N-1)/N² n
    Replicate()    Shard(j)       -                 0: each cuts its piece out
    Replicate()    Partial()      -                 0: the first keeps the numbers, the others zeros

    plan            returns the moves along all axes of a mesh, one axis at a time, as a list of `PlannedMove`
    sent            returns the number of elements that a plan sends
    redistribute    carries out the plan on this rank's block

The collectives need equal pieces, which an uneven cut does not give.  So pieces are padded before a collective, the
padding is sent, too, and the result is cut to its size.

If two axes cut the same dim, the later axis cuts the pieces of the earlier one.  So cuts are undone from the last axis
of the mesh to the first, and made from the first to the last.  The plan of a redistribution is the same as torch's,
step by step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from labs import group as groups
from labs.dtensor.placement import Partial, Placement, Replicate, Shard, Spec, longest_piece, piece
from labs.mesh import Mesh


@dataclass(frozen=True)
class Line:
    """A line of ranks along an axis of a mesh, and the shape of the block that they hold together."""

    shape: tuple[int, ...]
    ranks: int
    rank: int
    group: ProcessGroup | None = None

    def longest(self, dim: int) -> int:
        return longest_piece(self.shape[dim], self.ranks)

    def numel(self, *cut: int) -> int:
        """Return the number of elements of one rank's piece of the block, with these dims cut and padded."""
        return prod(self.longest(dim) if dim in cut else size for dim, size in enumerate(self.shape))


# ---- the moves, each on this rank's block ----------------------------------------------------------------


def all_gather(local: Tensor, line: Line, source: Shard, target: Replicate) -> Tensor:
    mine = padded(local, source.dim, line.longest(source.dim)).contiguous()
    pieces = mine.new_empty(line.ranks, *mine.shape)
    groups.all_gather(pieces.view(-1), mine.view(-1), group=line.group)
    return side_by_side(pieces, source.dim, line)


def all_reduce(local: Tensor, line: Line, source: Partial, target: Replicate) -> Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=line.group)
    return total


def reduce_scatter(local: Tensor, line: Line, source: Partial, target: Shard) -> Tensor:
    pieces = in_pieces(local, target.dim, line)
    mine = groups.reduce_scatter(pieces.view(-1), line.group).view(pieces.shape[1:])
    return own(mine, target.dim, line)


def all_to_all(local: Tensor, line: Line, source: Shard, target: Shard) -> Tensor:
    pieces = in_pieces(padded(local, source.dim, line.longest(source.dim)), target.dim, line)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received.view(-1), pieces.view(-1), group=line.group)
    return own(side_by_side(received, source.dim, line), target.dim, line)


def cut(local: Tensor, line: Line, source: Replicate, target: Shard) -> Tensor:
    start, size = piece(line.shape[target.dim], line.ranks, line.rank)
    return local.narrow(target.dim, start, size).clone(memory_format=torch.contiguous_format)


def keep_once(local: Tensor, line: Line, source: Replicate, target: Partial) -> Tensor:
    return local.clone() if line.rank == 0 else torch.zeros_like(local)


def distribute(local: Tensor, line: Line, placement: Placement, source: int | None) -> Tensor:
    """Distribute a whole tensor along one axis of a mesh, and return this rank's part.

    source: place of the rank whose tensor is distributed, or None if each rank takes its part of its own tensor
    """
    if isinstance(placement, Shard) and source is not None:
        pieces = in_pieces(local, placement.dim, line)
        mine = torch.empty_like(pieces[0])
        dist.scatter(mine, list(pieces) if line.rank == source else None, group=line.group, group_src=source)
        return own(mine, placement.dim, line)
    if isinstance(placement, Shard):
        return cut(local, line, Replicate(), placement)
    if source is not None:
        local = local.clone(memory_format=torch.contiguous_format)
        dist.broadcast(local, group=line.group, group_src=source)
    return keep_once(local, line, Replicate(), placement) if placement.is_partial() else local


# ---- the table -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A row of the table of moves: each rank calls `move`, which sends `sent(line, source, target)` elements."""

    source: str
    target: str
    move: Callable[..., Tensor]
    formula: str
    sent: Callable[..., int]

    @property
    def collective(self) -> str | None:
        return None if self.formula.startswith("0") else self.move.__name__


class Table(dict[tuple[type, type], Move]):
    def __repr__(self) -> str:
        rows = [(row.source, row.target, row.collective or "-", row.formula) for row in self.values()]
        head = ("from", "to", "collective", "each rank sends")
        return "\n".join(f"{a:14} {b:14} {c:17} {d}" for a, b, c, d in (head, *rows))


def gathered(line: Line, source: Shard, target: Replicate) -> int:
    return (line.ranks - 1) * line.numel(source.dim)


def reduced(line: Line, source: Partial, target: Replicate) -> int:
    """Count the elements that a rank sends in a ring all-reduce: all pieces twice, except for two pieces, sent once.

    The pieces of a ring all-reduce are those of the flat tensor, cut as evenly as possible.
    """
    size, longer = divmod(line.numel(), line.ranks)
    return 2 * line.numel() - sum(size + ((line.rank + i) % line.ranks < longer) for i in (0, 1))


def scattered(line: Line, source: Partial, target: Shard) -> int:
    return (line.ranks - 1) * line.numel(target.dim)


def exchanged(line: Line, source: Shard, target: Shard) -> int:
    return (line.ranks - 1) * line.numel(source.dim, target.dim)


def nothing(line: Line, source: Placement, target: Placement) -> int:
    return 0


MOVES = Table(
    {
        (Shard, Replicate): Move("Shard(i)", "Replicate()", all_gather, "(N-1)/N n", gathered),
        (Partial, Replicate): Move("Partial()", "Replicate()", all_reduce, "2 (N-1)/N n", reduced),
        (Partial, Shard): Move("Partial()", "Shard(j)", reduce_scatter, "(N-1)/N n", scattered),
        (Shard, Shard): Move("Shard(i)", "Shard(j)", all_to_all, "(N-1)/N² n", exchanged),
        (Replicate, Shard): Move("Replicate()", "Shard(j)", cut, "0: each cuts its piece out", nothing),
        (Replicate, Partial): Move(
            "Replicate()", "Partial()", keep_once, "0: the first keeps the numbers, the others zeros", nothing
        ),
    }
)


# ---- moves along all axes of a mesh ----------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedMove:
    """A step of a redistribution's plan: along one axis, given by its number, from one placement to another."""

    axis: int
    source: Placement
    target: Placement

    @property
    def move(self) -> Move:
        if (type(self.source), type(self.target)) not in MOVES:
            raise RuntimeError(f"no move makes {self.target!r} of {self.source!r}: redistribute to Replicate() first")
        return MOVES[type(self.source), type(self.target)]

    def __repr__(self) -> str:
        return f"axis {self.axis}: {self.source!r} → {self.target!r}, {self.move.collective or 'nothing sent'}"


def plan(spec: Spec, target: Sequence[Placement]) -> list[PlannedMove]:
    """Return the steps from a spec's placements to the target's; an axis of one rank needs no step."""
    now, steps = list(spec.placements), []

    def go(axis: int, placement: Placement) -> None:
        if now[axis] != placement:
            steps.append(PlannedMove(axis, now[axis], placement))
            now[axis] = placement

    if any(placement.is_shard() for placement in now):
        for axis in reversed(range(len(now))):
            go(axis, target[axis] if fits(now, target, axis) else Replicate())
    for axis, placement in enumerate(target):
        go(axis, placement)
    return [step for step in steps if spec.mesh[step.axis] > 1]


def fits(now: Sequence[Placement], target: Sequence[Placement], axis: int) -> bool:
    """Return whether the axes before this one cut the dim of its target now as they will after the redistribution."""
    last = target[axis]
    return not isinstance(last, Shard) or all(
        p.is_shard(last.dim) == q.is_shard(last.dim) for p, q in zip(now[:axis], target[:axis], strict=True)
    )


def walk(spec: Spec, target: Sequence[Placement], coordinate: Sequence[int]) -> list[tuple[PlannedMove, Line]]:
    """Return each step of the plan, with the line of ranks in which the rank at this place of the mesh takes part."""
    now, lines = list(spec.placements), []
    for step in plan(spec, target):
        now[step.axis] = Replicate()
        block = spec.but(now).block(coordinate)
        lines.append((step, Line(block.shape, spec.mesh[step.axis], coordinate[step.axis])))
        now[step.axis] = step.target
    return lines


def sent(spec: Spec, target: Sequence[Placement], coordinate: Sequence[int]) -> int:
    """Return the number of elements that the rank at this place of the mesh sends, including padding."""
    return sum(step.move.sent(line, step.source, step.target) for step, line in walk(spec, target, coordinate))


def redistribute(local: Tensor, spec: Spec, target: Sequence[Placement], mesh: Mesh) -> Tensor:
    """Return this rank's block in the tensor's new placements, or `local` itself if the placements are the same."""
    if spec.placements == tuple(target):
        return local
    for step, line in walk(spec, target, mesh.get_coordinate()):
        line = replace(line, group=mesh.get_group(step.axis))
        local = step.move.move(local, line, step.source, step.target)
    return local


# ---- pieces of one size ----------------------------------------------------------------------------------


def padded(local: Tensor, dim: int, size: int) -> Tensor:
    """Pad a dim of `local` to a size; return `local` itself, not a copy as torch's pad does, if it has that size."""
    more = size - local.shape[dim]
    return pad(local, [0, 0] * (local.ndim - dim - 1) + [0, more]) if more else local


def in_pieces(x: Tensor, dim: int, line: Line) -> Tensor:
    """Cut a tensor along a dim into N equal pieces, with padding at the end, and return [N, *piece]."""
    sizes = line.ranks, line.longest(dim)
    return padded(x, dim, prod(sizes)).unflatten(dim, sizes).movedim(dim, 0).contiguous()


def side_by_side(pieces: Tensor, dim: int, line: Line) -> Tensor:
    """Join N pieces, [N, *piece], along a dim, and drop the padding."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, line.shape[dim]).contiguous()


def own(mine: Tensor, dim: int, line: Line) -> Tensor:
    """Return this rank's piece of a padded tensor, without the padding."""
    return mine.narrow(dim, 0, piece(line.shape[dim], line.ranks, line.rank)[1]).contiguous()
