"""Answers to two_dimensions (11): a linear layer that is split along tp and sharded along dp."""

import torch
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter
from tests.answers import Exercise

# fmt: off
answers = Exercise("two_dimensions")
LINE = "on 2 × 2 ranks you sent 1.00 × the least possible"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def by_collectives(x, piece, dy, mesh):
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    weight = piece.new_empty(mesh.size("dp") * len(piece), piece.shape[1])
    all_gather(weight, piece, group=dp)
    y = x @ weight
    dist.all_reduce(y, group=tp)
    gradient = x.T @ dy
    mine = reduce_scatter(gradient.flatten(), dp).view(piece.shape)
    return y, mine / mesh.size("dp")


@answers.right(line=LINE)
def in_another_order(x, piece, dy, mesh):
    dp, ranks = mesh["dp"].get_group(), mesh["dp"].size()
    mine = reduce_scatter((x.T @ (dy / ranks)).reshape(-1), dp)
    parts = [torch.empty_like(piece) for _ in range(ranks)]
    dist.all_gather(parts, piece, group=dp)
    y = sum(a @ b for a, b in zip(x.chunk(ranks, 1), parts, strict=True))
    dist.all_reduce(y, group=mesh["tp"].get_group(), async_op=True).wait()
    return [y, mine.view_as(piece)]


# ---- wrong -----------------------------------------------------------------------------------------------

ADDED, SCATTERED = "dist.all_reduce(y, group=tp)", "mine = reduce_scatter(gradient.flatten(), dp).view(piece.shape)"
RETURNED, MINE = 'return y, mine / mesh.size("dp")', 'mine = gradient.chunk(mesh.size("dp"))[mesh.get_local_rank("dp")]'
GATHERED = "all_gather(weight, piece, group=dp)"


def spoil(mistake, *changes, **options):
    pairs = dict(zip(changes[::2], changes[1::2], strict=True))
    answers.spoil(by_collectives, mistake, {old: new.replace("\n", "\n    ") for old, new in pairs.items()}, **options)


spoil("y is only a summand", ADDED, "pass")
spoil("y is added up over the data's ranks", ADDED, "dist.all_reduce(y)")
spoil("the gradient is not averaged over the data's ranks", SCATTERED, MINE, RETURNED, "return y, mine")
spoil("dy is added up along tp", "gradient = x.T @ dy", "dist.all_reduce(dy, group=tp)\ngradient = x.T @ dy")
spoil("the whole gradient is reduced", SCATTERED, f"dist.all_reduce(gradient, group=dp)\n{MINE}")
spoil("more than this part is gathered", GATHERED,
    f"everything = piece.new_empty(mesh.size() * piece.numel())\nall_gather(everything, piece.flatten())\n{GATHERED}")
spoil("the gradient of more than the piece", RETURNED, "return y, gradient")
spoil("not a pair", RETURNED, "return y")
