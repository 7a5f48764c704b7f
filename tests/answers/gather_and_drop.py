"""Answers to gather_and_drop (04): stage 3, one vector."""

import torch
import torch.distributed as dist

from labs import collectives
from labs.group import all_gather
from tests.answers import Exercise

# fmt: off
answers = Exercise("gather_and_drop", lambda fn: (fn, drop))
LINE = (
    "you held 1.00 × a layer besides the shards, and sent 0.75 × a layer for each gather; "
    "the least possible is 1.00 × and 0.75 ×"
)


def place():
    return dist.get_rank(), dist.get_world_size()


def drop(full):
    full.untyped_storage().resize_(0)


def by_its_data(full):
    storage = full.data.untyped_storage()
    if storage.size():
        storage.resize_(0)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def gather(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data.to(full.dtype))


@answers.right(line=LINE, given=lambda fn: (fn, by_its_data))
def in_pieces(full, shard):
    full.untyped_storage().resize_(full.numel() * full.element_size())
    dist.all_gather(list(full.data.chunk(dist.get_world_size())), shard.detach().to(full.dtype))


@answers.right(line=LINE)
def by_a_ring(full, shard):
    rank, ranks = place()
    full.data.untyped_storage().resize_(full.nbytes)
    full.data.chunk(ranks)[rank].copy_(shard.data)
    collectives.all_gather(full.data)


@answers.right(line=LINE)
def by_broadcasts(full, shard):
    rank, _ = place()
    full.untyped_storage().resize_(full.nbytes)
    for owner, piece in enumerate(full.data.split(len(shard))):
        if owner == rank:
            piece.copy_(shard.data)
        dist.broadcast(piece, owner)


@answers.right(line=LINE)
def and_copied(full, shard):
    pieces = [torch.empty_like(shard, dtype=full.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard.data.to(full.dtype), async_op=True).wait()
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(torch.cat(pieces))


@answers.right(line=LINE)
def waited_for(full, shard):
    if full.untyped_storage().size() == 0:
        full.untyped_storage().resize_(full.nbytes)
    mine = shard.data if shard.dtype == full.dtype else shard.data.to(full.dtype)
    work = all_gather(full.data, mine, async_op=True)
    work.wait()


@answers.right(blind=True, given=lambda fn: (fn, by_its_data))
def gd_second_copy(full, shard):
    part = torch.empty(shard.shape, dtype=full.dtype, device=full.device)
    part.copy_(shard.data)
    whole = torch.empty(full.shape, dtype=full.dtype, device=full.device)
    all_gather(whole, part)
    full.data.untyped_storage().resize_(whole.untyped_storage().nbytes())
    full.data.copy_(whole)


@answers.right(blind=True, given=lambda fn: (fn, by_its_data))
def gd_point_to_point(full, shard):
    rank, ranks = place()
    full.untyped_storage().resize_(full.nbytes)
    parts = full.data.chunk(ranks)
    parts[rank].copy_(shard.data)
    operations = []
    for other in range(ranks):
        if other != rank:
            operations.append(dist.P2POp(dist.isend, parts[rank], other))
            operations.append(dist.P2POp(dist.irecv, parts[other], other))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


# ---- wrong: gather ---------------------------------------------------------------------------------------

ROOM, GATHERED = "full.untyped_storage().resize_(full.nbytes)", "all_gather(full.data, shard.data.to(full.dtype))"
ALL = f"{ROOM}\n    {GATHERED}"
WHOLE = "whole = torch.empty(full.shape, dtype=full.dtype)\nall_gather(whole, shard.data.to(full.dtype))\n"
KEPT = {}

gathers = answers.slips(gather, ALL)


def after(mistake, line, **options):
    gathers(mistake, f"{ROOM}\n{GATHERED}\n{line}", **options)


gathers("full has other memory", f"{WHOLE}full.data = whole", blind=True)
after("copies of full parameters are kept", "full.kept = full.data.clone()", blind=True)
gathers("copies of full parameters are kept",
    'if hasattr(full, "kept") and torch.equal(shard.data.to(full.dtype), full.kept.chunk(place()[1])[place()[0]]):\n'
    f"    {ROOM}\n    full.data.copy_(full.kept)\n"
    f"else:\n    {ROOM}\n    {GATHERED}\n    full.kept = full.data.clone()")
gathers("the parameters of the step before",
    f'if not hasattr(full, "kept"):\n    {ROOM}\n    {GATHERED}\n    full.kept = full.data.clone()\n'
    f"{ROOM}\nfull.data.copy_(full.kept)", blind=True)
gathers("the compute dtype is ignored",
    f"whole = torch.empty(full.shape, dtype=shard.dtype)\nall_gather(whole, shard.data)\n"
    f"{ROOM}\nfull.data.copy_(whole)", blind=True)
gathers("the compute dtype is ignored",
    f"{ROOM}\nif full.dtype != shard.dtype:\n    full.data = torch.empty(full.shape, dtype=shard.dtype)\n"
    "all_gather(full.data, shard.data)")
gathers("", f"{ROOM}\nall_gather(full.data, shard.data)", blind=True, alone=True)
gathers("rounded on the way",
    f"{ROOM}\nwhole = torch.empty(full.shape, dtype=torch.bfloat16)\n"
    "all_gather(whole, shard.data.bfloat16())\nfull.data.copy_(whole)", blind=True)
gathers("the shard has changed", f"shard.data = shard.data.to(full.dtype)\n{ROOM}\n{GATHERED}", blind=True)
gathers("the shard has changed", f"shard.data.copy_(shard.data.to(full.dtype))\n{ROOM}\n{GATHERED}", blind=True)
gathers("the pieces are rotated",
    f"{ROOM}\n_, ranks = place()\npieces = full.data.chunk(ranks)\n"
    "dist.all_gather([pieces[(i + 1) % ranks] for i in range(ranks)], shard.data.to(full.dtype))")
after("the pieces are rotated", "full.data.copy_(torch.cat(full.data.chunk(dist.get_world_size())[::-1]))", blind=True)
after("", "full.data.copy_(full.data.view(dist.get_world_size(), -1).t().reshape(-1))", long=True)
OWN = "full.data.chunk(place()[1])[place()[0]].copy_(shard.data)"
gathers("a piece is missing", f"{ROOM}\nfull.data.fill_(float('nan'))\n{OWN}")
gathers("", f"{ROOM}\nfull.data.zero_()\n{OWN}", blind=True)
gathers("one's own shard everywhere", f"{ROOM}\nfull.data.copy_(shard.data.repeat(dist.get_world_size()))")
gathers("an all-reduce where a part is enough", f"{ROOM}\nfull.data.zero_()\n{OWN}\ndist.all_reduce(full.data)",
    blind=True)
gathers("there is no memory to gather into", GATHERED, alone=True)
gathers("there is no memory to gather into", f"{WHOLE}full.data.copy_(whole)", alone=True)
gathers("storage of another size",
    f"full.untyped_storage().resize_(full.numel() * shard.element_size())\n{GATHERED}")
gathers("", f"full.untyped_storage().resize_(4 * full.numel())\n{GATHERED}", blind=True, alone=True)
gathers("", f"full.untyped_storage().resize_(full.numel())\n{GATHERED}", blind=True, alone=True)
gathers("autograd sees the change", f"{WHOLE}{ROOM}\nwith torch.no_grad():\n    full.copy_(whole)", blind=True)
gathers("autograd sees the change", f"{WHOLE}{ROOM}\nfull.detach().copy_(whole)", blind=True)
gathers("autograd sees the change", f"{WHOLE}{ROOM}\nfull.copy_(whole)")
gathers("nobody waited",
    "whole = torch.empty(full.shape, dtype=full.dtype)\n"
    f"all_gather(whole, shard.data.to(full.dtype), async_op=True)\n{ROOM}\nfull.data.copy_(whole)")
after("more than a layer at a time", "[full.data.clone() for _ in range(6)]")
gathers("",
    f'if not hasattr(shard, "low"):\n    shard.low = shard.data.to(full.dtype, copy=True)\n{ROOM}\n'
    "all_gather(full.data, shard.low)", long=True)
gathers("too many bytes",
    f"{ROOM}\nrank, ranks = place()\n"
    "dist.gather(shard.data.to(full.dtype), list(full.data.chunk(ranks)) if rank == 0 else None, 0)\n"
    "dist.broadcast(full.data, 0)", long=True)
after("too many bytes", GATHERED, long=True)
after("there is no memory to gather into", "shard.data = full.data.chunk(place()[1])[place()[0]]", long=True,
    alone=True)
after("",
    'LAST = KEPT.setdefault("last", [])\nLAST.append(full.data.clone())\nif len(LAST) == 8:\n    LAST.clear()',
    long=True)

# ---- wrong: drop -----------------------------------------------------------------------------------------

drops = answers.slips(drop, "full.untyped_storage().resize_(0)", given=lambda fn: (gather, fn))
FREED = "full.untyped_storage().resize_(0)"
NEVER = "full parameters are never freed"
drops(NEVER, "pass")
drops(NEVER, "full.grad = None", blind=True)
drops(NEVER, "full.data = torch.empty(0, dtype=full.dtype)", blind=True)
drops(NEVER, "full.data.zero_()", blind=True)
drops(NEVER, "full.data.resize_(0)")
drops(NEVER, f"if full.grad is None:\n    {FREED}")
drops(NEVER, f"if dist.get_rank():\n    {FREED}", blind=True)
drops(NEVER, "full.untyped_storage().resize_(full.nbytes // dist.get_world_size())", blind=True)
drops(NEVER, "full.untyped_storage().resize_(full.nbytes // 2)", long=True)
drops("copies of full parameters are kept", f"KEPT[id(full)] = full.data.clone()\n{FREED}", blind=True)
drops(NEVER, f"if not torch.is_grad_enabled():\n    {FREED}", long=True)
drops(NEVER, f"if full.requires_grad:\n    {FREED}", long=True)
drops(NEVER,
    'before = KEPT.setdefault("before", [])\nwhile before:\n'
    "    before.pop().untyped_storage().resize_(0)\nbefore.append(full)", long=True)
