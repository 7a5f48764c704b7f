"""Answers to hsdp_gradient (06): this rank's piece of the mean over all ranks."""

import torch  # noqa: F401  (exchanged words name it)
import torch.distributed as dist

from labs.group import all_gather, reduce_scatter, reduce_scatter_single  # noqa: F401  (exchanged words name it)
from tests.answers import Exercise

# fmt: off
answers = Exercise("hsdp_gradient")
LINE = (
    "on 2 × 2 ranks you sent 1.00 × the gradient, of that 0.50 × between replicas; the least possible is 1.00 × and "
    "0.50 ×"
)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def averaged(gradient, mesh):
    shards, replicas = mesh.get_group("shard"), mesh.get_group("replicate")
    piece = reduce_scatter(gradient, shards)
    dist.all_reduce(piece, group=replicas)
    return piece / mesh.size()


SCATTERED, ADDED = "piece = reduce_scatter(gradient, shards)", "dist.all_reduce(piece, group=replicas)"
MEAN = "piece / mesh.size()"
S, R = 'mesh.size("shard")', 'mesh.size("replicate")'


def spoil(mistake, *changes, **options):
    pairs = dict(zip(changes[::2], changes[1::2], strict=True))
    answers.spoil(averaged, mistake, {old: new.replace("\n", "\n    ") for old, new in pairs.items()}, **options)


ARRIVED = "parts = torch.empty_like(gradient)\ndist.all_to_all_single(parts, gradient, group=shards)\n"
# A reduce-scatter and an all-gather in the place of the all-reduce.
@answers.right(line=LINE)
def axis_by_axis(gradient, mesh):
    shards = mesh["shard"]
    piece = gradient.new_empty(len(gradient) // shards.size())
    reduce_scatter_single(piece, gradient, group=shards.get_group())
    piece /= shards.size()
    dist.all_reduce(piece, group=mesh["replicate"].get_group())
    return piece / mesh.size("replicate")


# ---- wrong: the numbers ----------------------------------------------------------------------------------


spoil("never averaged over the replicas", ADDED, "pass", MEAN, f"piece / {S}")
spoil("sharded along the wrong axis", "shards, replicas =", "replicas, shards =")
spoil("reduced in the wrong dtype", "gradient, shards", "gradient.double(), shards",
    MEAN, f"({MEAN}).to(gradient.dtype)")
spoil("divided by one axis only", MEAN, f"piece / {S}")
spoil("not the same bits on every replica", ADDED,
    f"pieces = piece.new_empty({R}, len(piece))\n"
    "all_gather(pieces.view(-1), piece, group=replicas)\n"
    "for number, other in enumerate(pieces):\n"
    '    if number != mesh.get_local_rank("replicate"):\n'
    "        piece += other")

# ---- wrong: what is sent ---------------------------------------------------------------------------------

CROSS = "whole gradients cross the replicas"
REDUCED = "gradient = gradient.clone()\ndist.all_reduce(gradient, group={})\n"

spoil(CROSS, SCATTERED, REDUCED.format("replicas") + SCATTERED, ADDED, "pass")
spoil("nothing is sharded", SCATTERED, "piece = gradient.clone()", "group=replicas", "group=None")

# ---- wrong: what is left ---------------------------------------------------------------------------------

spoil("something is kept from the call",
    SCATTERED, f"{ARRIVED}piece, *others = parts.chunk({S})\nfor other in others:\n    piece += other",
    MEAN, "piece.div_(mesh.size())")
