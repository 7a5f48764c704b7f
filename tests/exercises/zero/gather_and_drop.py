"""Answers to gather_and_drop (04): stage 3, one vector."""

import torch  # noqa: F401 (varied answers use it)
import torch.distributed as dist

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


# ---- wrong: gather ---------------------------------------------------------------------------------------

ROOM, GATHERED = "full.untyped_storage().resize_(full.nbytes)", "all_gather(full.data, shard.data.to(full.dtype))"
ALL = f"{ROOM}\n    {GATHERED}"
WHOLE = "whole = torch.empty(full.shape, dtype=full.dtype)\nall_gather(whole, shard.data.to(full.dtype))\n"

gathers = answers.slips(gather, ALL)


def after(mistake, line, **options):
    gathers(mistake, f"{ROOM}\n{GATHERED}\n{line}", **options)


gathers("full has other memory", f"{WHOLE}full.data = whole")
after("copies of full parameters are kept", "full.kept = full.data.clone()")
gathers("the parameters of the step before",
    f'if not hasattr(full, "kept"):\n    {ROOM}\n    {GATHERED}\n    full.kept = full.data.clone()\n'
    f"{ROOM}\nfull.data.copy_(full.kept)")
gathers("the compute dtype is ignored",
    f"whole = torch.empty(full.shape, dtype=shard.dtype)\nall_gather(whole, shard.data)\n"
    f"{ROOM}\nfull.data.copy_(whole)")
gathers("rounded on the way",
    f"{ROOM}\nwhole = torch.empty(full.shape, dtype=torch.bfloat16)\n"
    "all_gather(whole, shard.data.bfloat16())\nfull.data.copy_(whole)")
gathers("the shard has changed", f"shard.data = shard.data.to(full.dtype)\n{ROOM}\n{GATHERED}")
gathers("the pieces are rotated",
    f"{ROOM}\n_, ranks = place()\npieces = full.data.chunk(ranks)\n"
    "dist.all_gather([pieces[(i + 1) % ranks] for i in range(ranks)], shard.data.to(full.dtype))")
gathers("one's own shard everywhere", f"{ROOM}\nfull.data.copy_(shard.data.repeat(dist.get_world_size()))")
gathers("there is no memory to gather into", GATHERED, alone=True)
gathers("storage of another size",
    f"full.untyped_storage().resize_(full.numel() * shard.element_size())\n{GATHERED}")
gathers("autograd sees the change", f"{WHOLE}{ROOM}\nwith torch.no_grad():\n    full.copy_(whole)")
after("more than a layer at a time", "[full.data.clone() for _ in range(6)]")
gathers("too many bytes",
    f"{ROOM}\nrank, ranks = place()\n"
    "dist.gather(shard.data.to(full.dtype), list(full.data.chunk(ranks)) if rank == 0 else None, 0)\n"
    "dist.broadcast(full.data, 0)")

# ---- wrong: drop -----------------------------------------------------------------------------------------

drops = answers.slips(drop, "full.untyped_storage().resize_(0)", given=lambda fn: (gather, fn))
NEVER = "full parameters are never freed"
drops(NEVER, "pass")
