"""Answers to bring_back (12b): results return to their tokens, and are weighed and added up."""

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("bring_back")
LINE = "you sent 1.00 × the results for other ranks; the least possible is 1.00 ×"


@answers.right(line=LINE)
def placed(results, order, sends, receives, weights, group=None):
    back = results.new_empty(sum(sends), results.shape[1])
    dist.all_to_all_single(back, results, sends, receives, group=group)
    rows = torch.empty_like(back)
    rows[order] = back
    products = weights.unsqueeze(-1) * rows.view(*weights.shape, results.shape[1])
    return products.sum(1)


@answers.right(line=LINE)
def by_messages(results, order, sends, receives, weights, group=None):
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    outgoing = [part.contiguous() for part in results.split(receives)]
    found = [results.new_empty(n, results.shape[1]) for n in sends]
    found[me] = outgoing[me]
    works = [dist.isend(outgoing[r], group=group, group_dst=r) for r in range(ranks) if r != me and len(outgoing[r])]
    works += [dist.irecv(found[r], group=group, group_src=r) for r in range(ranks) if r != me and len(found[r])]
    for work in works:
        work.wait()
    rows = torch.cat(found)[order.argsort()].view(*weights.shape, results.shape[1])
    y = results.new_zeros(len(weights), results.shape[1])
    for k in range(weights.shape[1]):
        y += weights[:, k : k + 1] * rows[:, k]
    return y


# ---- wrong -----------------------------------------------------------------------------------------------

spoil = answers.slips(placed)
PLACED, LAST = "rows[order] = back", "return products.sum(1)"
WEIGHED = "weights.unsqueeze(-1) * rows.view(*weights.shape, results.shape[1])"

spoil("the sort is not undone", PLACED, "rows[:] = back")
spoil("sorted again, and not back", PLACED, "rows[:] = back[order]")
spoil("the results are not weighed", WEIGHED, "rows.view(*weights.shape, results.shape[1])")
spoil("the weights of other rows", PLACED, "rows[order] = back * weights.flatten().unsqueeze(1)",
      WEIGHED, "rows.view(*weights.shape, results.shape[1])")
spoil("averaged over the k", LAST, "return products.mean(1)")
spoil("sends and receives are not exchanged", "back, results, sends, receives", "back, results, receives, sends",
      alone=True)
spoil("right only on the group of all ranks", "sends, receives, group=group)", "sends, receives)", alone=True)
spoil("right only where every rank has tokens", "results.shape[1])\n    return", "-1)\n    return", alone=True)
spoil("what was given has changed", PLACED, f"weights *= 1.5\n    {PLACED}", LAST, "return products.sum(1) / 1.5")
spoil("what was given has changed", "products = weights.unsqueeze(-1)", "products = weights.unsqueeze_(-1)",
      "rows.view(*weights.shape, results.shape[1])", "rows.view(*weights.shape[:2], results.shape[1])")


@answers.wrong("not added in the order of the experts' numbers")
def as_they_come(results, order, sends, receives, weights, group=None):
    back = results.new_empty(sum(sends), results.shape[1])
    dist.all_to_all_single(back, results, sends, receives, group=group)
    y = results.new_zeros(len(weights), results.shape[1])
    return y.index_add(0, order // weights.shape[1], back * weights.flatten()[order].unsqueeze(1))


@answers.wrong("every rank gets all results")
def all_to_all_of_them(results, order, sends, receives, weights, group=None):
    me, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = [torch.empty(ranks, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor(receives), group=group)
    most = int(max(size.sum() for size in sizes))
    padded = results.new_zeros(most, results.shape[1])
    padded[: len(results)] = results
    found = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(found, padded, group=group)
    parts = [found[r][: int(sizes[r].sum())].split(sizes[r].tolist())[me] for r in range(ranks)]
    rows = torch.cat(parts)[order.argsort()].view(*weights.shape, results.shape[1])
    return (weights.unsqueeze(-1) * rows).sum(1)
