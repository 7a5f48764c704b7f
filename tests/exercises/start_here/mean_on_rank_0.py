"""Answers to the exercise of notebook 00."""

from functools import partial

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("mean_on_rank_0")
LINE = "3 messages on 4 ranks; the least possible is 3. It held "


@answers.right(line=LINE)
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


@answers.right(line=LINE)
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


# ---- what is returned ------------------------------------------------------------------------------------

spoil = partial(answers.spoil, mean)
WHOLE = "return total / ranks"

spoil("nothing is returned", {WHOLE: "total /= ranks"})
spoil("not a tensor", {WHOLE: "return (total / ranks).tolist()"})
spoil("the dtype changed", {WHOLE: "return (total / ranks).double()"})
spoil("something is returned where nothing is due", {"return None": "return x"})

# ---- wrong numbers ---------------------------------------------------------------------------------------

spoil("divided by the wrong number", {WHOLE: "return total / max(1, ranks - 1)"})
spoil("right only on four ranks", {WHOLE: "return total / 4"})
spoil("rank 0 is left out", {"x.clone()": "torch.zeros_like(x)"})
spoil("a rank is left out", {"total += theirs": "total += theirs * (other != 2)"})
spoil("counted twice", {"x.clone()": "2 * x"})
spoil("some ranks count more than others", {"total += theirs": "total = (total + theirs) / 2", WHOLE: "return total"})
spoil("only one of the other ranks counts", {"torch.empty_like": "torch.zeros_like",
    "        total += ": "    total += "})
spoil("not the same dtype on every rank", {"torch.empty_like(x)": "torch.empty(x.shape)"}, alone=True)


@answers.wrong("rank 0 hears nobody")
def only_its_own(x):
    return x / dist.get_world_size() if dist.get_rank() == 0 else None


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


@answers.wrong("a built-in collective")
def by_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if dist.get_rank() == 0 else None
spoil("from whoever comes first", {"src=other": "src=None"}, alone=True)
spoil("a different dtype travels", {"    rank, ranks": "    dtype, x = x.dtype, x.double()\n    rank, ranks",
    WHOLE: "return (total / ranks).to(dtype)"})
MISSING = "one side of a message or a collective is missing"
spoil(MISSING, {WHOLE: "dist.recv(theirs, src=1)\n    " + WHOLE}, alone=True)
spoil("there is no such rank", {"range(1, ranks)": "range(1, ranks + 1)"}, alone=True)
spoil("right only on more than two ranks", {"range(1, ranks)": "(1, 2, 3)[: max(2, ranks - 1)]"}, alone=True)

# ---- what is left ----------------------------------------------------------------------------------------

spoil("what was given has changed", {"x.clone()": "x"})
spoil("right only on several ranks", {WHOLE: WHOLE + " if ranks > 1 else x"})
spoil("kept out of torch's sight",
    {"    rank, ranks": "    copies = [x.float().numpy().copy() for _ in range(8)]\n    rank, ranks"})
spoil("something is left behind", {"    rank, ranks": "    torch.set_grad_enabled(False)\n    rank, ranks"},
    alone=True)


@answers.wrong("something is kept from every call")
def keeps_all(x, log=[]):  # noqa: B006
    log.append(x.clone())
    return mean(x)
