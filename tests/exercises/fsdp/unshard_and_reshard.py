"""Answers to unshard_and_reshard (06): the parameters of a group in one collective, and their memory back."""

from math import prod

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from labs.group import all_gather
from tests.answers import Exercise

# fmt: off
answers = Exercise("unshard_and_reshard", lambda fn: (fn, reshard))
LINE = (
    "you sent 0.75 × the group in {}; the least possible is 0.75 × in 1. You held {} × "
    "it meanwhile, where the table and the full tensors make 2.00 ×, and 0.00 × afterwards"
)


def rows_of(full):
    return -(-len(full) // dist.get_world_size())


def sizes_of(fulls):
    """Elements of a piece of each, padded."""
    return [rows_of(full) * prod(full.shape[1:]) for full in fulls]


def side_by_side(shards, sizes, dtype):
    row = torch.zeros(sum(sizes), dtype=dtype)
    for shard, place in zip(shards, row.split(sizes), strict=True):
        place[: shard.numel()] = shard.flatten()
    return row


def room(full):
    full.untyped_storage().resize_(full.nbytes)
    return full.data


def fill(full, numbers):
    room(full).copy_(numbers.flatten()[: full.numel()].view(full.shape))


# ---- right -----------------------------------------------------------------------------------------------


def reshard(fulls):
    for full in fulls:
        full.untyped_storage().resize_(0)


@answers.right(line=LINE.format("1 collective", "2.06"))
def unshard(shards, fulls):
    sizes = sizes_of(fulls)
    row = side_by_side(shards, sizes, fulls[0].dtype)
    table = row.new_empty(dist.get_world_size(), len(row))
    all_gather(table.view(-1), row)
    del row
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


@answers.right(line=LINE.format("1 collective", "2.31"))
def with_lists(shards, fulls):
    row = side_by_side(shards, sizes_of(fulls), fulls[0].dtype)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row, async_op=True).wait()
    for number, full in enumerate(fulls):
        fill(full, torch.cat([row.split(sizes_of(fulls))[number] for row in rows]))


# ---- wrong: what travels ---------------------------------------------------------------------------------

SIZES = "sizes = sizes_of(fulls)"
DTYPE = "fulls[0].dtype"
SENT = "all_gather(table.view(-1), row)"
SPLIT = "table.split(sizes, 1)"
FILL = "fill(full, pieces)"
LOOP = "    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):\n        fill(full, pieces)\n"
GATHERED = {}

spoil = answers.slips(unshard)
spoil("gathered in the wrong dtype", {DTYPE: "shards[0].dtype"})
spoil("the pieces of several parameters are mixed up",
    {SPLIT: "table.view(-1).split([size * dist.get_world_size() for size in sizes])",
     ", strict=True": ""})
spoil("one's own shard everywhere", {SENT: "table[:] = row"})
spoil("rows in the wrong order", {SPLIT: "table.roll(-1, 0).split(sizes, 1)"})
spoil("a barrier", {SIZES: f"dist.barrier()\n    {SIZES}"})


@answers.wrong("a collective for each parameter")
def usw_one_each(shards, fulls):
    for shard, full in zip(shards, fulls, strict=True):
        unshard([shard], [full])


@answers.wrong("padding among the numbers")
def usw_pad_front(shards, fulls):
    """Pad each shard in front, so that this rank's rows stand at the end of their place."""
    n = sizes_of(fulls)
    unshard([pad(s.flatten(), (size - s.numel(), 0)) for s, size in zip(shards, n, strict=True)], fulls)


# ---- wrong: where it goes --------------------------------------------------------------------------------

spoil("full has other memory", {FILL: "full.data = pieces.flatten()[: full.numel()].clone().view(full.shape)"})
spoil("storage of another size",
    {FILL: f"{FILL}\n        full.untyped_storage().resize_(pieces.numel() * full.itemsize)"})
spoil("a rank died", {FILL: "full.copy_(pieces.flatten()[: full.numel()].view(full.shape))"}, alone=True)

# ---- wrong: what is left ---------------------------------------------------------------------------------


@answers.wrong("the parameters of the step before")
def usw_first_time(shards, fulls):
    key = tuple(id(full) for full in fulls)
    if key in GATHERED:
        for full, kept in zip(fulls, GATHERED[key], strict=True):
            fill(full, kept)
        return
    unshard(shards, fulls)
    GATHERED[key] = [full.detach().clone() for full in fulls]


def after(mistake, words, **options):
    spoil(
        mistake, {LOOP: f"{LOOP}    for shard, full in zip(shards, fulls, strict=True):\n        {words}\n"}, **options
    )


after("the shard has changed", "shard.zero_()")

# ---- wrong: reshard --------------------------------------------------------------------------------------

FREED = "full.untyped_storage().resize_(0)"
NEVER = "full parameters are never freed"

resharded = answers.slips(reshard, given=lambda fn: (unshard, fn))
resharded(NEVER, {FREED: "pass"})
