"""Answers to the exercise of notebook 00."""

from functools import partial

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("mean_on_rank_0")
LINE = "3 messages on 4 ranks; the least possible is 3. It held "


@answers.right(line=LINE, blind=True)
def mean(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


@answers.right(line=LINE, blind=True)
def posted_at_once(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.isend(x, dst=0).wait()
        return None
    rows = x.new_empty((ranks, *x.shape))
    rows[0] = x
    works = [dist.irecv(rows[other], src=other) for other in range(1, ranks)]
    for work in works:
        work.wait()
    return rows.mean(0)


@answers.right(line=LINE, blind=True)
def stacked(x):
    if dist.get_rank():
        return dist.send(x, dst=0)
    rows = [x] + [torch.empty_like(x) for _ in range(dist.get_world_size() - 1)]
    for other, theirs in enumerate(rows):
        if other:
            dist.recv(theirs, src=other)
    return torch.stack(rows).mean(dim=0)


@answers.right(line=LINE)
def passed_on(x):
    """A chain: each adds its own to what the next rank has told it; as many messages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    if rank + 1 < ranks:
        dist.recv(total, src=rank + 1)
        total += x
    if rank > 0:
        return dist.send(total, dst=rank - 1)
    return total / ranks


right = partial(answers.vary, mean, line=LINE, long=True, blind=True)
# A running mean, the last rank first
right({"range(1, ranks)": "reversed(range(1, ranks))",
    "total += theirs": "total += (theirs - total) / (ranks - other + 1)", "total / ranks": "total"})
right({"x.clone()": "x.clone().double()", "total / ranks": "(total / ranks).to(x.dtype)"})
right({"x.clone()": "x / ranks", "total += theirs": "total += theirs / ranks", "return total / ranks": "return total"})

# ---- what is returned ------------------------------------------------------------------------------------

spoil = partial(answers.spoil, mean)
blind = partial(spoil, blind=True)
WHOLE = "return total / ranks"

spoil("nothing is returned", {WHOLE: "total /= ranks"})
spoil("not a tensor", {WHOLE: "return (total / ranks).tolist()"})
spoil("not a tensor", {WHOLE: "return rank", "return None": "return rank"})
spoil("another shape", {"total, theirs = x.clone()": "rows, theirs = [x]",
    "total += theirs": "rows.append(theirs.clone())", WHOLE: "return torch.stack(rows) / ranks"})
blind("another shape", {WHOLE: "return (total / ranks).mean()"})
blind("right only in one dimension", {"x, dst": "x.view(-1), dst", WHOLE: "return (total / ranks).view(-1)"})
spoil("the dtype changed", {WHOLE: "return (total / ranks).double()"})
blind("something is returned where nothing is due", {"return None": "return x"})
spoil("another rank has the mean", {"if rank:": "if rank < ranks - 1:", "dst=0": "dst=ranks - 1",
    "range(1, ranks)": "range(ranks - 1)"})

# ---- wrong numbers ---------------------------------------------------------------------------------------

blind("summed instead of averaged", {WHOLE: "return total"})
spoil("divided by the wrong number", {WHOLE: "return total / max(1, ranks - 1)"})
blind("right only on four ranks", {WHOLE: "return total / 4"})
spoil("rank 0 is left out", {"x.clone()": "torch.zeros_like(x)"})
blind("rank 0 is left out", {"x.clone()": "torch.zeros_like(x)", WHOLE: "return total / (ranks - 1)"})
spoil("a rank is left out", {"total += theirs": "total += theirs * (other != 2)"})
spoil("counted twice", {"x.clone()": "2 * x"})
blind("some ranks count more than others", {"total += theirs": "total = (total + theirs) / 2", WHOLE: "return total"})
spoil("only one of the other ranks counts", {"torch.empty_like": "torch.zeros_like",
    "        total += ": "    total += "})
spoil("only one of the other ranks counts", {"total, theirs = x.clone()": "rows, theirs = [x]",
    "total += theirs": "rows.append(theirs)", WHOLE: "return sum(rows) / ranks"})
blind("only one of the other ranks counts", {"for other in range(1, ranks):\n        dist.recv(theirs, src=other)":
    "for work in [dist.irecv(theirs, src=other) for other in range(1, ranks)]:\n        work.wait()\n"
    "    for _ in range(1, ranks):"}, long=True)  # all into one buffer
blind("rounded on the way", {"x, dst": "x.bfloat16(), dst",
    "torch.empty_like(x)": "torch.empty(x.shape, dtype=torch.bfloat16)"})
spoil("rounded on the way", {"    rank, ranks": "    dtype, x = x.dtype, x.bfloat16()\n    rank, ranks",
    WHOLE: "return (total / ranks).to(dtype)"})
blind("the dtype changed", {"x.clone()": "torch.zeros(x.shape) + x.float()"})  # added up in float32
blind("not the same dtype on every rank", {"torch.empty_like(x)": "torch.empty(x.shape)"}, alone=True)
blind("right only in one dimension", {"total, theirs = x.clone()": "rows, theirs = [x]",
    "total += theirs": "rows.append(theirs.clone())", WHOLE: "return torch.cat(rows).view(ranks, *x.shape).mean(0)"})


@answers.wrong("rank 0 hears nobody")
def only_its_own(x):
    return x / dist.get_world_size() if dist.get_rank() == 0 else None


@answers.wrong("rank 0 hears nobody", long=True)
def its_own_for_everybody(x):
    return x.clone() if dist.get_rank() == 0 else None


@answers.wrong("right only in the first call")
def adds_to_what_was_there(x, sums={}):  # noqa: B006
    if (found := mean(x)) is None:
        return None
    before, sums[x.shape] = sums.get(x.shape, torch.zeros_like(x)), found
    return found + before.to(x.dtype)


# ---- when, and how often ---------------------------------------------------------------------------------

answers.spoil(posted_at_once, "a receive that nobody waited for", {"new_empty": "new_zeros",
    "        work.wait()": "        pass"}, alone=True)
spoil("a send that nobody waited for", {"dist.send": "dist.isend"})


@answers.wrong("a built-in collective", blind=True)
def by_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if dist.get_rank() == 0 else None


answers.spoil(by_all_reduce, "a built-in collective", {"all_reduce(total)": "reduce(total, dst=0)"}, long=True)


@answers.wrong("a built-in collective", long=True)
def by_gather(x):
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, rows, dst=0)
    return sum(rows) / len(rows) if rows else None


blind("a built-in collective", {"    rank, ranks": "    dist.barrier()\n    rank, ranks"})
blind("from whoever comes first", {"src=other": "src=None"}, alone=True)
MORE = "more messages than needed"
blind(MORE, {"return None": "dist.recv(torch.empty_like(x), src=0)\n        return None",
    WHOLE: "for other in range(1, ranks):\n        dist.send(total / ranks, dst=other)\n    " + WHOLE})
blind("more messages than needed", {"dist.send": "dist.send(torch.tensor([x.numel()]), dst=0)\n        dist.send",
    "        dist.recv": "        dist.recv(torch.empty(1, dtype=torch.int64), src=other)\n        dist.recv"})
spoil(MORE,
    {"dist.send": "for element in x.view(-1)[:8]:\n            dist.send(element.view(1), dst=0)\n        dist.send",
    "        dist.recv":
    "        for _ in range(min(8, x.numel())):\n            dist.recv(x.new_empty(1), src=other)\n"
    "        dist.recv"}, long=True)
blind("more messages than needed", {"dist.send(x, dst=0)": "[dist.send(row, dst=0) for row in x]",
    "dist.recv(theirs, src=other)": "[dist.recv(row, src=other) for row in theirs]"}, alone=True, long=True)
spoil("a different dtype travels", {"    rank, ranks": "    dtype, x = x.dtype, x.double()\n    rank, ranks",
    WHOLE: "return (total / ranks).to(dtype)"})
MISSING = "one side of a message or a collective is missing"
spoil(MISSING, {WHOLE: "dist.recv(theirs, src=1)\n    " + WHOLE}, alone=True, long=True)
blind(MISSING, {"range(1, ranks)": "range(1, ranks - 1)"}, alone=True, long=True)
spoil("there is no such rank", {"range(1, ranks)": "range(1, ranks + 1)"}, alone=True)
spoil("right only on more than two ranks", {"range(1, ranks)": "(1, 2, 3)[: max(2, ranks - 1)]"}, alone=True, long=True)

# ---- what is left ----------------------------------------------------------------------------------------

blind("what was given has changed", {"x.clone()": "x"})
blind("what was given has changed", {"    if rank:": "    x /= ranks\n    if rank:", WHOLE: "return total"}, long=True)
spoil("what was given has changed", {"torch.empty_like(x)": "x"}, long=True)
blind("right only on several ranks", {WHOLE: WHOLE + " if ranks > 1 else x"})
spoil("full copies are kept", {"total, theirs": "kept, total, theirs",
    "x.clone()": "[x.clone() for _ in range(3 * ranks)], x.clone()"})
spoil("kept out of torch's sight",
    {"    rank, ranks": "    copies = [x.float().numpy().copy() for _ in range(8)]\n    rank, ranks"})
spoil("something is left behind", {"    rank, ranks": "    torch.set_grad_enabled(False)\n    rank, ranks"},
    alone=True, long=True)


@answers.wrong("a later call writes into what this one returned", blind=True)
def always_in_the_same_tensor(x, kept={}):  # noqa: B006
    """A new one for each shape; the next call of this shape overwrites what this one returned."""
    if (found := mean(x)) is None:
        return None
    return kept.setdefault((x.shape, x.dtype), found).copy_(found)


@answers.wrong("something is kept from every call")
def keeps_all(x, log=[]):  # noqa: B006
    log.append(x.clone())
    return mean(x)
