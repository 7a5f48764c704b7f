"""Wrong answers to the exercise of notebook 00, and the right one that some of them begin with."""

import numpy
import torch
import torch.distributed as dist

from tests.wrong_answers.answers import wrong


def everybody():
    return dist.get_rank(), dist.get_world_size()


def mean_on_rank_0(x):
    rank, ranks = everybody()
    if rank > 0:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


CHECK = "mean_on_rank_0"

# ---- what is returned ------------------------------------------------------------------------------------


@wrong(CHECK, "nothing is returned")
def prints_it(x):
    mean_on_rank_0(x)


@wrong(CHECK, "not a tensor")
def as_a_list(x):
    mean = mean_on_rank_0(x)
    return mean if mean is None else mean.tolist()


@wrong(CHECK, "not a tensor")
def returns_its_number(x):
    mean_on_rank_0(x)
    return dist.get_rank()


@wrong(CHECK, "another shape")
def stacked_and_never_reduced(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    pieces = [x, *(torch.empty_like(x) for _ in range(1, ranks))]
    for other in range(1, ranks):
        dist.recv(pieces[other], src=other)
    return torch.stack(pieces) / ranks


@wrong(CHECK, "right only in one dimension")
def flattened(x):
    mean = mean_on_rank_0(x)
    return mean if mean is None else mean.flatten()


@wrong(CHECK, "the dtype changed")
def in_float64(x):
    mean = mean_on_rank_0(x)
    return mean if mean is None else mean.double()


@wrong(CHECK, "something is returned where nothing is due")
def everybody_returns(x):
    mean = mean_on_rank_0(x)
    return x if mean is None else mean


@wrong(CHECK, "another rank has the mean")
def on_the_last_rank(x):
    rank, ranks = everybody()
    if rank < ranks - 1:
        dist.send(x, dst=ranks - 1)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(ranks - 1):
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


# ---- wrong numbers ---------------------------------------------------------------------------------------


def with_total(finish, start=lambda x: x.clone(), skip=()):
    """The right one, but for how the sum begins, whom it skips, and what is made of it."""

    def fn(x):
        rank, ranks = everybody()
        if rank > 0:
            dist.send(x, dst=0)
            return None
        total, theirs = start(x), torch.empty_like(x)
        for other in range(1, ranks):
            dist.recv(theirs, src=other)
            if other not in skip:
                total += theirs
        return finish(total, ranks)

    return fn


@wrong(CHECK, "summed instead of averaged")
def summed(x):
    return with_total(lambda total, ranks: total)(x)


@wrong(CHECK, "divided by the wrong number")
def divided_by_the_others(x):
    return with_total(lambda total, ranks: total / max(1, ranks - 1))(x)


@wrong(CHECK, "right only on four ranks")
def divided_by_four(x):
    return with_total(lambda total, ranks: total / 4)(x)


@wrong(CHECK, "rank 0 is left out")
def without_its_own(x):
    return with_total(lambda total, ranks: total / ranks, start=torch.zeros_like)(x)


@wrong(CHECK, "rank 0 is left out")
def mean_of_the_others(x):
    return with_total(lambda total, ranks: total / max(1, ranks - 1), start=torch.zeros_like)(x)


@wrong(CHECK, "a rank is left out")
def one_rank_is_skipped(x):
    return with_total(lambda total, ranks: total / ranks, skip=(2,))(x)


@wrong(CHECK, "counted twice")
def its_own_twice(x):
    return with_total(lambda total, ranks: total / ranks, start=lambda x: 2 * x)(x)


@wrong(CHECK, "some ranks count more than others")
def halved_at_each_message(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total = (total + theirs) / 2
    return total


@wrong(CHECK, "only one of the other ranks counts")
def added_after_the_loop(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    theirs = torch.zeros_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
    return (x + theirs) / ranks


@wrong(CHECK, "only one of the other ranks counts")
def one_buffer_in_a_list(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    theirs, all_of_them = torch.empty_like(x), [x]
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        all_of_them.append(theirs)
    return sum(all_of_them) / ranks


@wrong(CHECK, "rank 0 hears nobody")
def only_its_own(x):
    return x / dist.get_world_size() if dist.get_rank() == 0 else None


@wrong(CHECK, "rank 0 hears nobody")
def its_own_for_everybody(x):
    return x.clone() if dist.get_rank() == 0 else None


@wrong(CHECK, "rounded on the way")
def through_bfloat16(x):
    mean = mean_on_rank_0(x.bfloat16())
    return mean if mean is None else mean.to(x.dtype)


@wrong(CHECK, "right only in the first call")
def adds_to_what_was_there(x):
    mean = mean_on_rank_0(x)
    if mean is None:
        return None
    before = adds_to_what_was_there.__dict__.setdefault("sums", {}).get(x.shape, torch.zeros_like(x))
    adds_to_what_was_there.sums[x.shape] = mean
    return mean + before.to(x.dtype)


# ---- when, and how often ---------------------------------------------------------------------------------


@wrong(CHECK, "a receive that nobody waited for", alone=True)
def does_not_wait_for_what_it_receives(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    pieces = [x, *(torch.zeros_like(x) for _ in range(1, ranks))]
    for other in range(1, ranks):
        dist.irecv(pieces[other], src=other)
    return sum(pieces) / ranks


@wrong(CHECK, "a send that nobody waited for")
def does_not_wait_for_what_it_sends(x):
    if dist.get_rank() > 0:
        dist.isend(x, dst=0)
        return None
    return mean_on_rank_0(x)


@wrong(CHECK, "a built-in collective")
def by_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size() if dist.get_rank() == 0 else None


@wrong(CHECK, "a built-in collective")
def by_reduce(x):
    total = x.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size() if dist.get_rank() == 0 else None


@wrong(CHECK, "a built-in collective")
def by_gather(x):
    rank, ranks = everybody()
    pieces = [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None
    dist.gather(x, pieces, dst=0)
    return sum(pieces) / ranks if rank == 0 else None


@wrong(CHECK, "from whoever comes first", alone=True)
def from_anybody(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for _ in range(1, ranks):
        dist.recv(theirs)
        total += theirs
    return total / ranks


@wrong(CHECK, "more messages than needed")
def answers_everybody(x):
    rank, ranks = everybody()
    if rank > 0:
        dist.send(x, dst=0)
        dist.recv(torch.empty_like(x), src=0)
        return None
    mean = mean_on_rank_0(x)
    for other in range(1, ranks):
        dist.send(mean, dst=other)
    return mean


@wrong(CHECK, "more messages than needed")
def one_element_at_a_time(x):
    rank, ranks = everybody()
    if rank > 0:
        for element in x.view(-1)[:8]:
            dist.send(element.view(1), dst=0)
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        for _ in range(min(8, x.numel())):
            dist.recv(torch.empty(1, dtype=x.dtype), src=other)
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


@wrong(CHECK, "a different dtype travels")
def in_eight_bytes(x):
    mean = mean_on_rank_0(x.double())
    return mean if mean is None else mean.to(x.dtype)


@wrong(CHECK, "one side of a message or a collective is missing", alone=True, listed=False)
def waits_for_itself(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total += theirs
    dist.recv(theirs, src=1)
    return total / ranks


@wrong(CHECK, "there is no such rank", alone=True)
def one_rank_too_many(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks + 1):
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


@wrong(CHECK, "right only on more than two ranks", alone=True, listed=False)
def always_three_others(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total, theirs = x.clone(), torch.empty_like(x)
    for other in (1, 2, 3)[: max(2, ranks - 1)]:
        dist.recv(theirs, src=other)
        total += theirs
    return total / ranks


# ---- what is left ----------------------------------------------------------------------------------------


@wrong(CHECK, "what was given has changed")
def added_up_in_x(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    theirs = torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        x += theirs
    return x / ranks


@wrong(CHECK, "what was given has changed")
def received_in_x(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    total = x.clone()
    for other in range(1, ranks):
        dist.recv(x, src=other)
        total += x
    return total / ranks


@wrong(CHECK, "a later call writes into what this one returned")
def always_in_the_same_tensor(x):
    """A new one for each shape; the next call of this shape overwrites what this one returned."""
    mean = mean_on_rank_0(x)
    if mean is None:
        return None
    kept = always_in_the_same_tensor.__dict__.setdefault("kept", {})
    return kept.setdefault((x.shape, x.dtype), mean).copy_(mean)


@wrong(CHECK, "right only on several ranks")
def alone_it_returns_x(x):
    return mean_on_rank_0(x) if dist.get_world_size() > 1 else x


@wrong(CHECK, "something is kept from every call")
def keeps_all(x):
    mean_on_rank_0.__dict__.setdefault("log", []).append(x.clone())
    return mean_on_rank_0(x)


@wrong(CHECK, "something is left behind", alone=True, listed=False)
def leaves_grad_mode_off(x):
    torch.set_grad_enabled(False)
    return mean_on_rank_0(x)


@wrong(CHECK, "full copies are kept")
def copies_of_copies(x):
    rank, ranks = everybody()
    if rank > 0:
        return dist.send(x, dst=0)
    pieces = [x.clone() for _ in range(3 * ranks)]
    for other in range(1, ranks):
        dist.recv(pieces[other], src=other)
    return sum(pieces[:ranks]) / ranks


@wrong(CHECK, "kept out of torch's sight")
def many_copies_in_numpy(x):
    copies = [x.float().numpy().copy() for _ in range(8)]
    assert isinstance(copies[0], numpy.ndarray)
    return mean_on_rank_0(x)
