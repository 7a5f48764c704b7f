"""Answers to unshard_and_reshard (06): the parameters of a group in one collective, and their memory back."""

from math import prod

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from labs import collectives
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


def fill_blocks(blocks, pieces):
    for block, piece in zip(blocks, pieces, strict=False):
        block.copy_(piece[: block.numel()].view(block.shape))


# ---- right -----------------------------------------------------------------------------------------------


def reshard(fulls):
    for full in fulls:
        full.untyped_storage().resize_(0)


def by_its_data(fulls):
    for full in reversed(fulls):
        full.data.untyped_storage().resize_(0)


@answers.right(line=LINE.format("1 collective", "2.06"), blind=True)
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


@answers.right(line=LINE.format("1 collective", "2.75"), given=lambda fn: (fn, by_its_data))
def row_for_row(shards, fulls):
    """Each rank's rows to their places, without the padding."""
    sizes = sizes_of(fulls)
    padded = [pad(s.flatten(), (0, n - s.numel())) for s, n in zip(shards, sizes, strict=True)]
    row = torch.cat(padded).to(fulls[0].dtype)
    table = row.new_empty(dist.get_world_size() * len(row))
    all_gather(table, row)
    for full, pieces in zip(fulls, table.view(-1, len(row)).split(sizes, 1), strict=True):
        fill_blocks(room(full).split(rows_of(full)), pieces)


@answers.right(line=LINE.format("6 messages", "2.06"))
def by_a_ring(shards, fulls):
    rank, ranks, sizes = dist.get_rank(), dist.get_world_size(), sizes_of(fulls)
    table = torch.zeros(ranks, sum(sizes), dtype=fulls[0].dtype)
    table[rank] = side_by_side(shards, sizes, table.dtype)
    collectives.all_gather(table.view(-1))
    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):
        fill(full, pieces)


def elements_by_rank(fulls):
    """Of each parameter: the last ranks have fewer, or none."""
    ranks = dist.get_world_size()
    return [
        [max(0, min(size, full.numel() - rank * size)) for full, size in zip(fulls, sizes_of(fulls), strict=True)]
        for rank in range(ranks)
    ]


def fill_from_ranks(fulls, rows):
    by_rank = [row.split(of_rank) for row, of_rank in zip(rows, elements_by_rank(fulls), strict=True)]
    for full, pieces in zip(fulls, zip(*by_rank, strict=True), strict=True):
        fill(full, torch.cat(pieces))


@answers.right(line=LINE.format("1 collective", "2.31"))
def without_padding(shards, fulls):
    """The rows alone, to everybody: a rank that has none sends nothing."""
    ranks, lengths = dist.get_world_size(), [sum(of_rank) for of_rank in elements_by_rank(fulls)]
    row = torch.cat([shard.flatten() for shard in shards]).to(fulls[0].dtype)
    rows = row.new_empty(sum(lengths))
    dist.all_to_all_single(rows, row.repeat(ranks), lengths, [len(row)] * ranks)
    fill_from_ranks(fulls, rows.split(lengths))


@answers.right(line=LINE.format("6 messages", "2.06"))
def by_sends_and_receives(shards, fulls):
    rank, sizes = dist.get_rank(), elements_by_rank(fulls)
    row = torch.cat([shard.flatten() for shard in shards]).to(fulls[0].dtype)
    rows = [row if other == rank else row.new_empty(sum(of_rank)) for other, of_rank in enumerate(sizes)]
    others = [other for other in range(len(rows)) if other != rank]
    works = [dist.isend(row, other) for other in others if len(row)]
    works += [dist.irecv(rows[other], other) for other in others if len(rows[other])]
    for work in works:
        work.wait()
    fill_from_ranks(fulls, rows)


@answers.right(blind=True, given=lambda fn: (fn, by_its_data))
def us_strided(shards, fulls):
    """Gathered in place; the padded pieces are a strided view of the buffer."""
    ranks, rank, sizes = dist.get_world_size(), dist.get_rank(), sizes_of(fulls)
    total, offset = sum(sizes), 0
    buffer = fulls[0].new_zeros(ranks * total)
    mine = buffer[rank * total : (rank + 1) * total]
    mine.copy_(side_by_side(shards, sizes, mine.dtype))
    all_gather(buffer, mine)
    for full, n in zip(fulls, sizes, strict=True):
        flat = room(full).view(-1)
        whole = full.numel() // n if n else 0
        view = torch.as_strided(buffer, (ranks, n), (total, 1), offset)
        flat[: whole * n].view(whole, n).copy_(view[:whole])
        if n and full.numel() > whole * n:
            flat[whole * n :].copy_(view[whole, : full.numel() - whole * n])
        offset += n
    buffer.untyped_storage().resize_(0)


@answers.right(blind=True)
def us_async(shards, fulls):
    sizes = sizes_of(fulls)
    mine = fulls[0].new_zeros(sum(sizes))
    places = [place[: shard.numel()] for place, shard in zip(mine.split(sizes), shards, strict=True)]
    torch._foreach_copy_(places, [shard.detach().reshape(-1) for shard in shards])
    table = mine.new_empty(dist.get_world_size(), len(mine))
    work = all_gather(table.view(-1), mine, async_op=True)
    rooms = [room(full) for full in fulls]
    work.wait()
    del mine
    for full, pieces in zip(rooms, table.split(sizes, 1), strict=True):
        fill_blocks(full.split(max(rows_of(full), 1)), pieces)


@answers.right(blind=True)
def us_cat(shards, fulls):
    """The rest of each is filled, row for row."""
    sizes, at = sizes_of(fulls), 0
    mine = side_by_side(shards, sizes, fulls[0].dtype)
    table = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather(table, mine)
    for full, n in zip(fulls, sizes, strict=True):
        rest = room(full).view(-1)
        for row in table.view(-1, len(mine)):
            size = min(n, len(rest))
            rest[:size] = row[at : at + size]
            rest = rest[size:]
        at += n


# ---- wrong: what travels ---------------------------------------------------------------------------------

SIZES = "sizes = sizes_of(fulls)"
DTYPE = "fulls[0].dtype"
SENT = "all_gather(table.view(-1), row)"
SPLIT = "table.split(sizes, 1)"
FILL = "fill(full, pieces)"
LOOP = "    for full, pieces in zip(fulls, table.split(sizes, 1), strict=True):\n        fill(full, pieces)\n"
GATHERED = {}
KEPT = []

spoil = answers.slips(unshard)
spoil("gathered in the wrong dtype", {DTYPE: "shards[0].dtype"}, blind=True)
spoil("rounded on the way", {DTYPE: "torch.float16"})
spoil("the pieces of several parameters are mixed up",
    {SPLIT: "table.view(-1).split([size * dist.get_world_size() for size in sizes])",
     ", strict=True": ""}, blind=True)
spoil("one's own shard everywhere", {SENT: "table[:] = row"})
spoil("rows in the wrong order", {SPLIT: "table.roll(-1, 0).split(sizes, 1)"})
spoil("an all-reduce where a part is enough",
    {SENT: "table.zero_()[dist.get_rank()] = row\n    dist.all_reduce(table)"}, blind=True)
spoil("too many bytes",
    {SIZES: "sizes = [max(sizes_of(fulls))] * len(fulls)",
     FILL: "fill(full, pieces[:, : sizes_of([full])[0]])"}, blind=True)
spoil("nobody waited", {"new_empty": "new_zeros", SENT: "all_gather(table.view(-1), row, async_op=True)"})
spoil("a barrier", {SIZES: f"dist.barrier()\n    {SIZES}"}, blind=True)
spoil("",
    {SIZES: "sizes = [shard.numel() for shard in shards]",
     FILL: "room(full).copy_(pieces.reshape(full.shape))"}, blind=True, alone=True)
spoil("",
    {SIZES: "if not any(shard.numel() for shard in shards):\n"
         f"        [room(full) for full in fulls]\n        return\n    {SIZES}"}, blind=True, alone=True)
spoil("", {SIZES: "sizes = [rows_of(full) * full.shape[1] for full in fulls]"}, blind=True, alone=True)


@answers.wrong("a collective for each parameter", blind=True)
def usw_one_each(shards, fulls):
    for shard, full in zip(shards, fulls, strict=True):
        unshard([shard], [full])


@answers.wrong("padding among the numbers", blind=True)
def usw_pad_front(shards, fulls):
    """This rank's rows at the end of their place."""
    n = sizes_of(fulls)
    unshard([pad(s.flatten(), (size - s.numel(), 0)) for s, size in zip(shards, n, strict=True)], fulls)


# ---- wrong: where it goes --------------------------------------------------------------------------------

spoil("full has other memory", {FILL: "full.data = pieces.flatten()[: full.numel()].clone().view(full.shape)"},
    blind=True)
spoil("storage of another size",
    {FILL: f"{FILL}\n        full.untyped_storage().resize_(pieces.numel() * full.itemsize)"})
spoil("storage of another size",
    {FILL: f"{FILL}\n        full.untyped_storage().resize_(max(4 * full.numel(), full.nbytes))"}, blind=True)
spoil("full copies are kept",
    {LOOP: "    wholes = [pieces.flatten() for pieces in table.split(sizes, 1)]\n"
         "    for full, whole in zip(fulls, wholes, strict=True):\n        fill(full, whole)\n"}, blind=True)
spoil("a rank died", {FILL: "full.copy_(pieces.flatten()[: full.numel()].view(full.shape))"}, alone=True)
spoil("",
    {FILL:
         "full.untyped_storage().resize_(full.numel())\n        fill_blocks(full.data.split(rows_of(full)), pieces)"},
    blind=True, alone=True)
TOO_EVEN = "fill_blocks(room(full).tensor_split(dist.get_world_size()), pieces)"
spoil("rows in the wrong order", {FILL: TOO_EVEN}, blind=True, alone=True)
spoil("rows in the wrong order",
    {FILL: "room(full).zero_()\n        step = len(full) // dist.get_world_size()\n"
         "        fill_blocks([full.data[r * step : (r + 1) * step] for r in range(len(pieces))], pieces)"},
    blind=True)

# ---- wrong: what is left ---------------------------------------------------------------------------------

spoil("something is kept from the call", {SENT: f"KEPT.append(table)\n    {SENT}"}, blind=True)


@answers.wrong("the parameters of the step before", blind=True)
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
after("the shard has changed", "shard.untyped_storage().resize_(0)")
after("the shard has changed", "shard.data = shard.data.to(full.dtype)", blind=True)
after("the shard has changed", "shard.data.copy_(full.data[dist.get_rank() * rows_of(full) :][: len(shard)])",
    blind=True)

# ---- wrong: reshard --------------------------------------------------------------------------------------

FREED = "full.untyped_storage().resize_(0)"
NEVER = "full parameters are never freed"

resharded = answers.slips(reshard, given=lambda fn: (unshard, fn))
resharded("full has other memory",
    {FREED:
         "empty = torch.empty_like(full)\n        empty.untyped_storage().resize_(0)\n        full.data = empty"})
resharded(NEVER, {FREED: "pass"}, blind=True)
resharded(NEVER, {FREED: "full.data.zero_()"}, blind=True)
resharded(NEVER, {FREED: "full.data = torch.empty_like(full)"})
resharded("", {FREED: "full.data = full.data.new_empty(0)"}, blind=True)
resharded(NEVER, {"in fulls": "in fulls[:1]"}, blind=True)
resharded(NEVER, {FREED: f"if full.dim() > 1:\n            {FREED}"}, blind=True)
resharded("a barrier", {"    for full in fulls": "    dist.barrier()\n    for full in fulls"}, blind=True)
