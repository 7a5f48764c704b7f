"""Answers to count_rows (12b): the rows that a rank sends and receives, by rank."""

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("count_rows")
LINE = "a rank sent 24 bytes at most; 8 bytes for each expert elsewhere are 56"


@answers.right(line=LINE)
def counted(chosen, rank_of, group=None):
    ranks = dist.get_world_size(group)
    sends = torch.tensor(rank_of)[chosen.flatten()].bincount(minlength=ranks)
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends, group=group)
    return sends.tolist(), receives.tolist()


@answers.right(line="a rank sent 56 bytes at most")
def by_expert(chosen, rank_of, group=None):
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    of_rank = [[e for e, rank in enumerate(rank_of) if rank == r] for r in range(ranks)]
    to = [torch.tensor([(chosen == e).sum() for e in own], dtype=torch.int64) for own in of_rank]
    came = torch.zeros(ranks * len(of_rank[me]), dtype=torch.int64)
    dist.all_to_all_single(came, torch.cat(to), [len(of_rank[me])] * ranks, [len(own) for own in of_rank], group=group)
    return [each.sum() for each in to], came.view(ranks, -1).sum(1).tolist()


@answers.right
def by_messages(chosen, rank_of, group=None):
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    sends = [sum(rank_of[e] == rank for e in chosen.flatten().tolist()) for rank in range(ranks)]
    found = [torch.tensor([n]) for n in sends]
    others = [r for r in range(ranks) if r != me]
    going = [torch.tensor([n]) for n in sends]
    works = [dist.isend(going[r], group=group, group_dst=r) for r in others]
    works += [dist.irecv(found[r], group=group, group_src=r) for r in others]
    for work in works:
        work.wait()
    return sends, [int(n) for n in found]


# ---- wrong -----------------------------------------------------------------------------------------------

spoil = answers.slips(counted)
SENT = "torch.tensor(rank_of)[chosen.flatten()].bincount(minlength=ranks)"
END = "return sends.tolist(), receives.tolist()"
ASKED = "dist.all_to_all_single(receives, sends, group=group)"
EMPTY = "receives = torch.empty_like(sends)"

spoil("sends and receives are swapped", END, "return receives.tolist(), sends.tolist()")
spoil("receives are guessed, and not exchanged", ASKED, "receives.copy_(sends)")
spoil("one's own rows are left out", EMPTY, f"sends[dist.get_rank(group)] = 0\n    {EMPTY}")
spoil("a token with two experts on a rank is counted once", SENT,
      "torch.stack([(torch.tensor(rank_of)[chosen] == r).any(-1).sum() for r in range(ranks)])")
spoil("counted by expert, and not by rank", END, "return chosen.flatten().bincount(minlength=len(rank_of)), receives")
spoil("every rank is told all counts", ASKED,
      "told = [torch.empty_like(sends) for _ in range(ranks)]\n    dist.all_gather(told, sends, group=group)\n    "
      "receives = torch.stack(told)[:, dist.get_rank(group)]")
spoil("right only where experts lie side by side", "torch.tensor(rank_of)[chosen.flatten()]",
      "torch.tensor(sorted(rank_of))[chosen.flatten()]")
spoil("right only where every rank gets rows", "(minlength=ranks)", "()", alone=True)
spoil("right only on the group of all ranks", ASKED, "dist.all_to_all_single(receives, sends)", alone=True)
spoil("tensors, and not lists", END, "return sends, receives")
spoil("right only for few rows", EMPTY, "sends = sends.to(torch.uint8)\n    " + EMPTY)
