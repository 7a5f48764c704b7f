import functools
import itertools
import math
import operator
from fractions import Fraction

import torch
import torch.distributed as dist

from labs.collectives import exchange

RIGHT, WRONG = {}, {}


def right(exercise):
    return lambda answer: RIGHT.setdefault(exercise, []).append((answer.__name__, answer)) or answer


def wrong(exercise):
    return lambda answer: WRONG.setdefault(exercise, []).append((answer.__name__, answer)) or answer


# ================================================================ mean_on_rank_0


@right("mean_on_rank_0")
def mean_plain(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for peer in range(1, ranks):
        dist.recv(theirs, src=peer)
        total += theirs
    return total / ranks


@right("mean_on_rank_0")
def mean_posted_stack(x):
    # all receives posted at once, each into a row of its own
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.isend(x, dst=0).wait()
        return None
    rows = x.new_empty((ranks, *x.shape))
    rows[0] = x
    works = [dist.irecv(rows[peer], src=peer) for peer in range(1, ranks)]
    for work in works:
        work.wait()
    return rows.mean(0)


@right("mean_on_rank_0")
def mean_running(x):
    # a running mean, the last rank first
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(x, 0)
        return
    mean, theirs = x.clone(), torch.empty_like(x)
    for count, peer in enumerate(reversed(range(1, ranks)), 2):
        dist.recv(theirs, peer)
        mean += (theirs - mean) / count
    return mean


@right("mean_on_rank_0")
def mean_in_double(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x.detach(), dst=0)
        return None
    total = x.detach().to(torch.float64, copy=True)
    for peer in range(1, ranks):
        theirs = torch.zeros_like(x)
        dist.recv(theirs, src=peer)
        total += theirs.double()
    return (total / ranks).to(x.dtype)


@right("mean_on_rank_0")
def mean_list_of_all(x):
    if dist.get_rank():
        return dist.send(x, dst=0)
    alls = [x] + [torch.empty_like(x) for _ in range(dist.get_world_size() - 1)]
    for peer, theirs in enumerate(alls):
        if peer:
            dist.recv(theirs, src=peer)
    return torch.stack(alls).mean(dim=0)


@right("mean_on_rank_0")
def mean_weighted(x):
    # each divided first, summed afterwards
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
    else:
        mean, theirs = x / ranks, torch.empty_like(x)
        for peer in range(1, ranks):
            dist.recv(theirs, src=peer)
            mean.add_(theirs / ranks)
        return mean


def _others(x):
    """Rank 0: what the others sent."""
    for peer in range(1, dist.get_world_size()):
        theirs = torch.empty_like(x)
        dist.recv(theirs, src=peer)
        yield theirs


@wrong("mean_on_rank_0")
def mean_changes_x(x):
    # rank 0's own x becomes the sum
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    for theirs in _others(x):
        x += theirs
    return x / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_senders_change_x(x):
    # every rank divides its x in place before it goes
    x /= dist.get_world_size()
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    return x + sum(_others(x))


@wrong("mean_on_rank_0")
def mean_is_sum(x):
    # forgets to divide, from 2 ranks on
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    total = x.clone()
    for theirs in _others(x):
        total += theirs
    return total


@wrong("mean_on_rank_0")
def mean_without_own(x):
    # the mean of the others: rank 0's x is not in it; nan on one rank
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    total = torch.zeros_like(x)
    for theirs in _others(x):
        total += theirs
    return total / (dist.get_world_size() - 1)


@wrong("mean_on_rank_0")
def mean_others_get_x(x):
    # the others return their own x, and not None
    if dist.get_rank():
        dist.send(x, dst=0)
        return x
    return (x + sum(_others(x))) / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_four_ranks(x):
    # 4 ranks are built in
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    return (x + sum(_others(x))) / 4


@wrong("mean_on_rank_0")
def mean_float32_buffer(x):
    # receives into float32, whatever x is: float64 and two-byte types do not fit
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty(x.shape)
    for peer in range(1, dist.get_world_size()):
        dist.recv(theirs, src=peer)
        total += theirs
    return total / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_float32_total(x):
    # the total is float32: for float64 the digits are gone (and the dtype is another)
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    total = torch.zeros(x.shape)
    total += x
    for theirs in _others(x):
        total += theirs
    return total / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_sent_as_bfloat16(x):
    # saves bytes on the way, and with them the digits
    if dist.get_rank():
        dist.send(x.bfloat16(), dst=0)
        return None
    total, low = x.clone(), torch.empty(x.shape, dtype=torch.bfloat16)
    for peer in range(1, dist.get_world_size()):
        dist.recv(low, src=peer)
        total += low.to(x.dtype)
    return total / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_flat(x):
    # comes back as a vector: the shape is lost but for 1-D
    if dist.get_rank():
        dist.send(x.view(-1), dst=0)
        return None
    total = x.reshape(-1).clone()
    for theirs in _others(total):
        total += theirs
    return total / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_by_all_reduce(x):
    # a collective
    mean = x.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size() if dist.get_rank() == 0 else None


@wrong("mean_on_rank_0")
def mean_barrier_first(x):
    # a collective besides: a barrier
    dist.barrier()
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    return (x + sum(_others(x))) / dist.get_world_size()


@wrong("mean_on_rank_0")
def mean_size_first(x):
    # two messages from each: the size goes ahead
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.tensor([x.numel()]), dst=0)
        dist.send(x, dst=0)
        return None
    total, size = x.clone(), torch.empty(1, dtype=torch.int64)
    for peer in range(1, ranks):
        dist.recv(size, src=peer)
        theirs = x.new_empty(int(size))
        dist.recv(theirs, src=peer)
        total += theirs.view(x.shape)
    return total / ranks


@wrong("mean_on_rank_0")
def mean_answered(x):
    # rank 0 tells everybody the mean: messages beyond the budget
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        dist.recv(torch.empty_like(x), src=0)
        return None
    mean = (x + sum(_others(x))) / ranks
    for peer in range(1, ranks):
        dist.send(mean, dst=peer)
    return mean


@wrong("mean_on_rank_0")
def mean_of_everything(x):
    # one number: the mean over ranks and elements
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    return torch.stack([x, *_others(x)]).mean()


@wrong("mean_on_rank_0")
def mean_x_itself(x):
    # one rank: hands back x itself, not a new tensor
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return x
    if rank:
        dist.send(x, dst=0)
        return None
    return (x + sum(_others(x))) / ranks


_TOTAL = {}


@wrong("mean_on_rank_0")
def mean_reused_total(x):
    # the second call writes into what the first one returned
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    total = _TOTAL.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(x)
    for theirs in _others(x):
        total += theirs
    return total.div_(dist.get_world_size())


@wrong("mean_on_rank_0")
def mean_halves(x):
    # averages two by two: right up to 2 ranks, the last ranks weigh too much from 3 on
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    mean = x.clone()
    for theirs in _others(x):
        mean = (mean + theirs) / 2
    return mean


@wrong("mean_on_rank_0")
def mean_one_buffer(x):
    # all receives are posted into the same buffer, then added: from 3 ranks on one of them counts more than once
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        return None
    theirs, total = torch.empty_like(x), x.clone()
    for work in [dist.irecv(theirs, src=peer) for peer in range(1, ranks)]:
        work.wait()
    for _ in range(1, ranks):
        total += theirs
    return total / ranks


@wrong("mean_on_rank_0")
def mean_cat(x):
    # torch.cat does not take tensors without a dimension; the others lose their first dimension's meaning
    if dist.get_rank():
        dist.send(x, dst=0)
        return None
    return torch.cat([x, *_others(x)]).view(dist.get_world_size(), *x.shape).mean(0)


@wrong("mean_on_rank_0")
def mean_row_by_row(x):
    # a message for each row: too many, and none for a tensor without a dimension
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        for row in x:
            dist.send(row, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for peer in range(1, ranks):
        for row in theirs:
            dist.recv(row, src=peer)
        total += theirs
    return total / ranks


@wrong("mean_on_rank_0")
def mean_last_forgotten(x):
    # the last rank is not asked: it hangs in its send
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for peer in range(1, ranks - 1):
        dist.recv(theirs, src=peer)
        total += theirs
    return total / ranks


@wrong("mean_on_rank_0")
def mean_any_source(x):
    # takes messages from whoever comes: a quick rank's next call is taken for a slow rank's first
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for _ in range(1, ranks):
        dist.recv(theirs)
        total += theirs
    return total / ranks


# ================================================================ my_shard


@right("my_shard")
def shard_ceil(elements, ranks, rank):
    size = -(-elements // ranks)
    return min(rank * size, elements), min((rank + 1) * size, elements)


@right("my_shard")
def shard_range(elements, ranks, rank):
    size = (elements + ranks - 1) // ranks
    mine = range(elements)[rank * size : (rank + 1) * size]
    return mine.start, mine.stop


@right("my_shard")
def shard_divmod(elements, ranks, rank):
    size, rest = divmod(elements, ranks)
    size += rest > 0
    start = min(elements, size * rank)
    return start, start + min(size, elements - start)


@right("my_shard")
def shard_walk(elements, ranks, rank):
    longest, left = math.ceil(Fraction(elements, ranks)), elements
    for _ in range(rank):
        left -= min(longest, left)
    return elements - left, elements - left + min(longest, left)


@right("my_shard")
def shard_cuts(elements, ranks, rank):
    cuts = [min(elements, i * -(elements // -ranks)) for i in range(ranks + 1)]
    return cuts[rank], cuts[rank + 1]


@wrong("my_shard")
def shard_floor(elements, ranks, rank):
    # shorter ones first, the last takes the rest: 10 on 4
    size = elements // ranks
    return rank * size, elements if rank == ranks - 1 else (rank + 1) * size


@wrong("my_shard")
def shard_tensor_split(elements, ranks, rank):
    # as tensor_split cuts: 3, 3, 2, 2
    size, extra = divmod(elements, ranks)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


@wrong("my_shard")
def shard_start_beyond(elements, ranks, rank):
    # only the stop is held back: 5 on 4 gives (6, 5) on rank 3
    size = -(-elements // ranks)
    return rank * size, min((rank + 1) * size, elements)


@wrong("my_shard")
def shard_unheld(elements, ranks, rank):
    # padded shards: stop is beyond the end
    size = -(-elements // ranks)
    return rank * size, rank * size + size


@wrong("my_shard")
def shard_empty_zero(elements, ranks, rank):
    # an empty shard is (0, 0)
    size = -(-elements // ranks)
    start, stop = rank * size, min((rank + 1) * size, elements)
    return (start, stop) if start < stop else (0, 0)


@wrong("my_shard")
def shard_empty_where_it_would_be(elements, ranks, rank):
    # an empty shard is (start, start), beyond the end: 5 on 4, 2 on 8
    size = -(-elements // ranks)
    start = rank * size
    return start, max(start, min(start + size, elements))


@wrong("my_shard")
def shard_one_more(elements, ranks, rank):
    # always one more: wrong where they divide
    size = elements // ranks + 1
    return min(rank * size, elements), min((rank + 1) * size, elements)


@wrong("my_shard")
def shard_inclusive(elements, ranks, rank):
    # stop is the last element of its own
    size = -(-elements // ranks)
    return min(rank * size, elements), min((rank + 1) * size, elements) - 1


@wrong("my_shard")
def shard_length(elements, ranks, rank):
    # start and length
    size = -(-elements // ranks)
    start = min(rank * size, elements)
    return start, min(size, elements - start)


@wrong("my_shard")
def shard_rounded(elements, ranks, rank):
    # rounds to the nearest: 9 on 4 are 2 each, and one is lost
    size = round(elements / ranks)
    return min(rank * size, elements), min((rank + 1) * size, elements)


@wrong("my_shard")
def shard_even(elements, ranks, rank):
    # spread evenly: 10 on 4 are 2, 3, 2, 3
    return rank * elements // ranks, (rank + 1) * elements // ranks


@wrong("my_shard")
def shard_few(elements, ranks, rank):
    # last rank takes what is left, with the start unheld: 9 on 8 (size 2, rank 7 starts at 14)
    size = -(-elements // ranks)
    if rank == ranks - 1:
        return rank * size, elements
    return min(rank * size, elements), min((rank + 1) * size, elements)


# ================================================================ mixed_precision (remember, mixed_step)


def adamw(weight, mean, square, gradient, t, lr, betas, eps, weight_decay):
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient**2, 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    weight.mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)


def remember_ok(p):
    zeros = torch.zeros_like(p, dtype=torch.float32)
    return {"master": p.detach().float(), "mean": zeros, "square": zeros.clone()}


@torch.no_grad()
def step_ok(p, kept, t, **settings):
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
        p.copy_(kept["master"])


def remember_twice(p):
    return {
        "master": p.detach().clone().to(torch.float32),
        "mean": torch.zeros(p.shape, device=p.device),
        "square": torch.zeros(p.shape, device=p.device),
    }


@torch.no_grad()
def step_replacing(p, kept, t, *, lr, betas, eps, weight_decay):
    # new tensors in kept
    if p.grad is None:
        return
    g, (b1, b2) = p.grad.to(torch.float32), betas
    mean = b1 * kept["mean"] + (1 - b1) * g
    square = b2 * kept["square"] + (1 - b2) * g * g
    change = (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt() + eps)
    master = kept["master"] * (1 - lr * weight_decay) - lr * change
    kept.update(master=master, mean=mean, square=square)
    p.copy_(master)


@torch.no_grad()
def step_native(p, kept, t, **settings):
    # PyTorch's own AdamW, for one step, with the state put in
    if p.grad is None:
        return
    master = kept["master"]
    optimizer = torch.optim.AdamW([master], **settings)
    count = torch.tensor(float(t - 1))
    optimizer.state[master] = {"step": count, "exp_avg": kept["mean"], "exp_avg_sq": kept["square"]}
    master.grad = p.grad.float()
    optimizer.step()
    master.grad = None
    p.copy_(master)


@torch.no_grad()
def step_fused_ops(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is None:
        return None
    g = p.grad.float()
    kept["mean"].mul_(betas[0]).add_(g, alpha=1 - betas[0])
    kept["square"].mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator = kept["square"].sqrt().div_(math.sqrt(1 - betas[1] ** t)).add_(eps)
    kept["master"].mul_(1 - lr * weight_decay)
    kept["master"].addcdiv_(kept["mean"], denominator, value=-lr / (1 - betas[0] ** t))
    p.data.copy_(kept["master"])


@torch.no_grad()
def step_by_rows(p, kept, t, **settings):
    # some rows at a time: little temporary memory
    if p.grad is None:
        return
    all_of_it = (p.detach(), p.grad, kept["master"], kept["mean"], kept["square"])
    parts = [all_of_it] if p.dim() == 0 else zip(*(x.split(16) for x in all_of_it), strict=True)
    for low, grad, master, mean, square in parts:
        adamw(master, mean, square, grad.float(), t, **settings)
        low.copy_(master)


RIGHT["mixed_precision"] = [
    ("plain", (remember_ok, step_ok)),
    ("replacing", (remember_twice, step_replacing)),
    ("native_adamw_for_one_step", (remember_ok, step_native)),
    ("addcdiv", (remember_twice, step_fused_ops)),
    ("by_rows", (remember_ok, step_by_rows)),
]


def remember_master_zero(p):
    return {name: torch.zeros_like(p, dtype=torch.float32) for name in ("master", "mean", "square")}


def remember_master_low(p):
    # rounded all the time
    return {**remember_ok(p), "master": p.detach().clone()}


@torch.no_grad()
def step_master_low(p, kept, t, **settings):
    if p.grad is None:
        return
    master = kept["master"].float()
    adamw(master, kept["mean"], kept["square"], p.grad.float(), t, **settings)
    kept["master"].copy_(master)
    p.copy_(master)


def remember_moments_low(p):
    return {"master": p.detach().float(), "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}


@torch.no_grad()
def step_moments_low(p, kept, t, **settings):
    if p.grad is None:
        return
    mean, square = kept["mean"].float(), kept["square"].float()
    adamw(kept["master"], mean, square, p.grad.float(), t, **settings)
    kept["mean"].copy_(mean)
    kept["square"].copy_(square)
    p.copy_(kept["master"])


def remember_flat(p):
    return {name: x.reshape(-1) for name, x in remember_ok(p).items()}


@torch.no_grad()
def step_flat(p, kept, t, **settings):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.reshape(-1).float(), t, **settings)
    p.copy_(kept["master"].view(p.shape))


def remember_one_zeros(p):
    zeros = torch.zeros_like(p, dtype=torch.float32)
    return {"master": p.detach().float(), "mean": zeros, "square": zeros}


def remember_with_gradient(p):
    return {**remember_ok(p), "gradient": torch.zeros_like(p, dtype=torch.float32)}


@torch.no_grad()
def step_keeps_gradient(p, kept, t, **settings):
    if p.grad is None:
        return
    kept["gradient"] = p.grad.float()
    adamw(kept["master"], kept["mean"], kept["square"], kept["gradient"], t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_squares_low(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is None:
        return
    mean, square = kept["mean"], kept["square"]
    mean.lerp_(p.grad.float(), 1 - betas[0])
    square.lerp_((p.grad**2).float(), 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    kept["master"].mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)
    p.copy_(kept["master"])


@torch.no_grad()
def step_new_memory(p, kept, t, **settings):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.data = kept["master"].to(p.dtype)


@torch.no_grad()
def step_always_bfloat16(p, kept, t, **settings):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"].bfloat16())


@torch.no_grad()
def step_none_is_zero(p, kept, t, **settings):
    gradient = torch.zeros_like(kept["master"]) if p.grad is None else p.grad.float()
    adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_none_fails(p, kept, t, **settings):
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_zero_is_none(p, kept, t, **settings):
    if p.grad is None or not p.grad.any():
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_counts_itself(p, kept, t, **settings):
    if p.grad is None:
        return
    kept["t"] = kept.get("t", 0) + 1
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), kept["t"], **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_drops_gradient(p, kept, t, **settings):
    step_ok(p, kept, t, **settings)
    p.grad = None


@torch.no_grad()
def step_clips(p, kept, t, **settings):
    if p.grad is None:
        return
    p.grad.clamp_(-1, 1)
    step_ok(p, kept, t, **settings)


@torch.no_grad()
def step_l2(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is None:
        return
    gradient = p.grad.float() + weight_decay * kept["master"]
    adamw(kept["master"], kept["mean"], kept["square"], gradient, t, lr, betas, eps, 0.0)
    p.copy_(kept["master"])


@torch.no_grad()
def step_first_settings(p, kept, t, **settings):
    if p.grad is None:
        return
    settings = kept.setdefault("settings", settings)
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_own_betas(p, kept, t, lr, betas=None, eps=1e-8, weight_decay=0.01):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, lr, (0.9, 0.999), eps, weight_decay)
    p.copy_(kept["master"])


@torch.no_grad()
def step_adds_change(p, kept, t, **settings):
    if p.grad is None:
        return
    before = kept["master"].clone()
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.add_((kept["master"] - before).to(p.dtype))


@torch.no_grad()
def step_master_from_p(p, kept, t, **settings):
    if p.grad is None:
        return
    kept["master"].copy_(p)
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_one_late(p, kept, t, **settings):
    if p.grad is not None:
        adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t + 1, **settings)
        p.copy_(kept["master"])


@torch.no_grad()
def step_forgets_moments(p, kept, t, lr, betas, eps, weight_decay):
    if p.grad is None:
        return
    g = p.grad.float()
    mean = kept["mean"].lerp(g, 1 - betas[0])
    square = kept["square"].lerp(g**2, 1 - betas[1])
    scale = (square / (1 - betas[1] ** t)).sqrt() + eps
    kept["master"].mul_(1 - lr * weight_decay).sub_(lr * mean / (1 - betas[0] ** t) / scale)
    p.copy_(kept["master"])


@torch.no_grad()
def step_truncates(p, kept, t, **settings):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    p.copy_((kept["master"].contiguous().view(torch.int32) & -65536).view(torch.float32))


_GRADIENTS = {}


@torch.no_grad()
def step_global_copy(p, kept, t, **settings):
    if p.grad is None:
        return
    gradient = _GRADIENTS.setdefault(p, torch.empty_like(kept["master"])).copy_(p.grad)
    adamw(kept["master"], kept["mean"], kept["square"], gradient, t, **settings)
    p.copy_(kept["master"])


@torch.no_grad()
def step_p_late(p, kept, t, **settings):
    if p.grad is None:
        return
    p.copy_(kept["master"])
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)


@torch.no_grad()
def step_needs_a_vector(p, kept, t, **settings):
    if p.grad is None:
        return
    for row in range(len(p)):
        adamw(*(kept[k][row] for k in ("master", "mean", "square")), p.grad[row].float(), t, **settings)
        p[row].copy_(kept["master"][row])


@torch.no_grad()
def step_view(p, kept, t, **settings):
    if p.grad is None:
        return
    adamw(kept["master"], kept["mean"], kept["square"], p.grad.float(), t, **settings)
    rounded = kept["master"].to(p.dtype)
    p = rounded  # noqa: F841


WRONG["mixed_precision"] = [
    ("master_starts_at_zero", (remember_master_zero, step_ok)),  # the first step throws the weights away
    ("master_in_two_bytes", (remember_master_low, step_master_low)),  # the master is rounded in each step
    ("moments_in_two_bytes", (remember_moments_low, step_moments_low)),  # mean and square are not float32
    ("flat_state", (remember_flat, step_flat)),  # not of p's shape
    ("one_tensor_for_mean_and_square", (remember_one_zeros, step_ok)),  # both write into the same memory
    ("keeps_a_float32_gradient", (remember_with_gradient, step_keeps_gradient)),  # 20 bytes
    ("squares_in_low_precision", (remember_ok, step_squares_low)),  # squared before it is float32; float16: 0 or inf
    ("p_data_replaced", (remember_ok, step_new_memory)),  # p has other memory; a tied weight does not move
    ("always_bfloat16", (remember_ok, step_always_bfloat16)),  # float16 p gets bfloat16's digits
    ("no_gradient_taken_as_zero", (remember_ok, step_none_is_zero)),  # decays p and means without a gradient
    ("no_gradient_fails", (remember_ok, step_none_fails)),  # p.grad None raises
    ("zero_gradient_taken_as_none", (remember_ok, step_zero_is_none)),  # a gradient of zeros must decay and move
    ("counts_its_own_steps", (remember_ok, step_counts_itself)),  # off after a step without gradient
    ("drops_the_gradient", (remember_ok, step_drops_gradient)),  # p.grad does not stay
    ("clips_the_gradient_in_place", (remember_ok, step_clips)),  # p.grad changes where it is beyond 1
    ("l2_and_not_decoupled", (remember_ok, step_l2)),  # Adam with L2, not AdamW
    ("settings_of_the_first_step", (remember_ok, step_first_settings)),  # a new lr is ignored
    ("own_betas", (remember_ok, step_own_betas)),  # betas ignored
    ("rounded_change_added", (remember_ok, step_adds_change)),  # p is not the master, rounded; it stays behind
    ("master_read_from_p", (remember_ok, step_master_from_p)),  # small changes lost, from the second step on
    ("bias_one_late", (remember_ok, step_one_late)),  # t + 1
    ("moments_not_stored", (remember_ok, step_forgets_moments)),  # right in step 1, wrong from step 2 on
    ("truncated", (remember_ok, step_truncates)),  # cut off, not rounded
    ("copy_in_a_global", (remember_ok, step_global_copy)),  # 4 bytes per parameter stay behind in a global
    ("p_before_the_step", (remember_ok, step_p_late)),  # p is a step behind
    ("row_by_row", (remember_ok, step_needs_a_vector)),  # a parameter without a dimension fails
    ("p_rebound", (remember_ok, step_view)),  # p itself never changes
]


# ================================================================ bytes_by_kind


@right("bytes_by_kind")
def bytes_loop(parameters, mixed):
    held = {"P": 0, "G": 0, "S": 0}
    for shape, trained in parameters:
        n = math.prod(shape)
        held["P"] += n * (2 if mixed else 4)
        if trained:
            held["G"] += n * (2 if mixed else 4)
            held["S"] += 12 * n if mixed else 8 * n + 4
    return held


@right("bytes_by_kind")
def bytes_sums(parameters, mixed):
    all_of_it = sum(math.prod(shape) for shape, _ in parameters)
    trained = [math.prod(shape) for shape, t in parameters if t]
    low = 4 - 2 * mixed
    return {"P": low * all_of_it, "G": low * sum(trained), "S": sum(12 * n if mixed else 4 + 8 * n for n in trained)}


@right("bytes_by_kind")
def bytes_meta(parameters, mixed):
    dtype = torch.bfloat16 if mixed else torch.float32
    tensors = [(torch.empty(tuple(shape), dtype=dtype, device="meta"), trained) for shape, trained in parameters]
    held = {"P": sum(x.nbytes for x, _ in tensors), "G": sum(x.nbytes for x, trained in tensors if trained), "S": 0}
    for x, trained in tensors:
        if trained:
            state = [x.float(), x.float(), x.float() if mixed else torch.empty((), device="meta")]
            held["S"] += sum(kept.nbytes for kept in state)
    return held


@right("bytes_by_kind")
def bytes_size(parameters, mixed):
    per = {"P": 2, "G": 2, "S": 12} if mixed else {"P": 4, "G": 4, "S": 8}
    sizes = [(torch.Size(shape).numel(), trained) for shape, trained in parameters]
    counts = {kind: sum(n for n, trained in sizes if trained or kind == "P") for kind in per}
    held = {kind: per[kind] * counts[kind] for kind in per}
    if not mixed:
        held["S"] += 4 * sum(1 for _, trained in sizes if trained)
    return held


@right("bytes_by_kind")
def bytes_reduce(parameters, mixed):
    def of(shape, trained):
        n = functools.reduce(operator.mul, shape, 1)
        one = 2 * n if mixed else 4 * n
        return one, one * bool(trained), (12 * n if mixed else 2 * 4 * n + 4) if trained else 0

    rows = [of(*parameter) for parameter in parameters] + [(0, 0, 0)]
    return dict(zip("PGS", map(sum, zip(*rows)), strict=True))


def _bytes(parameters, mixed, p, g, s):
    # p, g, s: bytes of a tensor, from its size and whether it is trained
    held = {"P": 0, "G": 0, "S": 0}
    for shape, trained in parameters:
        n = math.prod(shape)
        for kind, of in zip("PGS", (p, g, s), strict=True):
            held[kind] += of(n, trained)
    return held


@wrong("bytes_by_kind")
def bytes_frozen_gradient(parameters, mixed):
    # frozen tensors have a gradient
    low = 2 if mixed else 4
    return _bytes(
        parameters, mixed, lambda n, t: low * n, lambda n, t: low * n, lambda n, t: t * (12 * n if mixed else 8 * n + 4)
    )


@wrong("bytes_by_kind")
def bytes_frozen_nothing(parameters, mixed):
    # frozen tensors are not held at all
    return bytes_loop([(shape, trained) for shape, trained in parameters if trained], mixed)


@wrong("bytes_by_kind")
def bytes_no_count(parameters, mixed):
    # the count of the steps is forgotten
    return {**bytes_loop(parameters, mixed), "S": sum((12 if mixed else 8) * math.prod(s) for s, t in parameters if t)}


@wrong("bytes_by_kind")
def bytes_count_of_frozen(parameters, mixed):
    # a count for frozen tensors, too
    held = bytes_loop(parameters, mixed)
    return held if mixed else {**held, "S": held["S"] + 4 * sum(not t for _, t in parameters)}


@wrong("bytes_by_kind")
def bytes_count_when_mixed(parameters, mixed):
    # a count per tensor in mixed precision, where remember keeps none
    held = bytes_loop(parameters, mixed)
    return {**held, "S": held["S"] + 4 * mixed * sum(t for _, t in parameters)}


@wrong("bytes_by_kind")
def bytes_count_once(parameters, mixed):
    # one count for all
    held = bytes_loop(parameters, mixed)
    return {**held, "S": sum((12 if mixed else 8) * math.prod(s) for s, t in parameters if t) + (0 if mixed else 4)}


@wrong("bytes_by_kind")
def bytes_gradient_float32(parameters, mixed):
    # gradients in float32 in mixed precision: 18
    return {**bytes_loop(parameters, mixed), "G": sum(4 * math.prod(s) for s, t in parameters if t)}


@wrong("bytes_by_kind")
def bytes_without_master(parameters, mixed):
    # no master
    held = bytes_loop(parameters, mixed)
    return {**held, "S": held["S"] * 8 // 12} if mixed else held


@wrong("bytes_by_kind")
def bytes_scalar_is_nothing(parameters, mixed):
    # a tensor without a dimension has one number, not none
    return bytes_loop([(shape if len(shape) else (0,), trained) for shape, trained in parameters], mixed)


@wrong("bytes_by_kind")
def bytes_two_dims(parameters, mixed):
    # counts the first two dimensions only
    return bytes_loop([(tuple(shape)[:2], trained) for shape, trained in parameters], mixed)


@wrong("bytes_by_kind")
def bytes_frozen_stays_float32(parameters, mixed):
    # frozen tensors are held in float32 in mixed precision
    return {**bytes_loop(parameters, mixed), "P": sum(math.prod(s) * (2 if mixed and t else 4) for s, t in parameters)}


@wrong("bytes_by_kind")
def bytes_count_of_eight(parameters, mixed):
    # the count as an int64
    held = bytes_loop(parameters, mixed)
    return held if mixed else {**held, "S": held["S"] + 4 * sum(t for _, t in parameters)}


# ================================================================ ring_seconds


@right("ring_seconds")
def ring_formula(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


@right("ring_seconds")
def ring_two_terms(size, ranks, latency, bandwidth):
    rounds = 2 * (ranks - 1)
    return rounds * latency + rounds / ranks * size / bandwidth


@right("ring_seconds")
def ring_rounds(size, ranks, latency, bandwidth):
    return sum((latency + (size / ranks) / bandwidth for _ in range(2 * ranks - 2)), 0.0)


@right("ring_seconds")
def ring_halves(size, ranks, latency, bandwidth):
    if ranks == 1:
        return 0
    half = (ranks - 1) * (latency + size / (ranks * bandwidth))
    return half + half


@right("ring_seconds")
def ring_pieces(size, ranks, latency, bandwidth):
    piece = size / ranks
    sent = 2 * size - 2 * piece
    return sent / bandwidth + (2 * ranks - 2) * latency


@wrong("ring_seconds")
def ring_one_half(size, ranks, latency, bandwidth):
    # reduce_scatter alone
    return (ranks - 1) * (latency + size / ranks / bandwidth)


@wrong("ring_seconds")
def ring_whole(size, ranks, latency, bandwidth):
    # whole tensors in each round
    return 2 * (ranks - 1) * (latency + size / bandwidth)


@wrong("ring_seconds")
def ring_floor(size, ranks, latency, bandwidth):
    # whole bytes only
    return 2 * (ranks - 1) * (latency + size // ranks / bandwidth)


@wrong("ring_seconds")
def ring_2n(size, ranks, latency, bandwidth):
    # N rounds a half; one rank takes time
    return 2 * ranks * (latency + size / ranks / bandwidth)


@wrong("ring_seconds")
def ring_latency_once(size, ranks, latency, bandwidth):
    # the latency once
    return (ranks > 1) * latency + 2 * (ranks - 1) * size / ranks / bandwidth


@wrong("ring_seconds")
def ring_latency_shared(size, ranks, latency, bandwidth):
    # the latency, too, divided by N
    return 2 * (ranks - 1) / ranks * (latency + size / bandwidth)


@wrong("ring_seconds")
def ring_nothing_free(size, ranks, latency, bandwidth):
    # an empty message takes no time
    return ring_formula(size, ranks, latency, bandwidth) if size else 0.0


@wrong("ring_seconds")
def ring_half_duplex(size, ranks, latency, bandwidth):
    # in and out share the bandwidth
    return 2 * (ranks - 1) * (latency + 2 * size / ranks / bandwidth)


@wrong("ring_seconds")
def ring_one_less(size, ranks, latency, bandwidth):
    # 2 N - 1 rounds
    return (2 * ranks - 1) * (latency + size / ranks / bandwidth) if ranks > 1 else 0.0


@wrong("ring_seconds")
def ring_log(size, ranks, latency, bandwidth):
    # the tree's rounds with the ring's bytes
    return 2 * math.log2(ranks) * latency + 2 * (ranks - 1) / ranks * size / bandwidth


@wrong("ring_seconds")
def ring_empty_pieces_skipped(size, ranks, latency, bandwidth):
    # with fewer bytes than ranks only as many rounds as bytes
    return 2 * min(ranks - 1, size) * latency + 2 * (ranks - 1) * size / ranks / bandwidth


# ================================================================ tree_seconds


@right("tree_seconds")
def tree_bits(size, ranks, latency, bandwidth):
    return 2 * (ranks - 1).bit_length() * (latency + size / bandwidth)


@right("tree_seconds")
def tree_log(size, ranks, latency, bandwidth):
    return 2 * math.ceil(math.log2(ranks)) * (latency + size / bandwidth)


@right("tree_seconds")
def tree_loop(size, ranks, latency, bandwidth):
    seconds, distance = 0.0, 1
    while distance < ranks:
        seconds += 2 * (latency + size / bandwidth)
        distance *= 2
    return seconds


@right("tree_seconds")
def tree_recursive(size, ranks, latency, bandwidth):
    if ranks <= 1:
        return 0
    return 2 * latency + 2 * size / bandwidth + tree_recursive(size, (ranks + 1) // 2, latency, bandwidth)


@right("tree_seconds")
def tree_first_power(size, ranks, latency, bandwidth):
    rounds = next(k for k in itertools.count() if 2**k >= ranks)
    reduce = broadcast = rounds * latency + rounds * size / bandwidth
    return reduce + broadcast


@wrong("tree_seconds")
def tree_no_ceil(size, ranks, latency, bandwidth):
    # rounds that are no whole number
    return 2 * math.log2(ranks) * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_floor(size, ranks, latency, bandwidth):
    # one round too few where N is no power of two
    return 2 * int(math.log2(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_bit_length(size, ranks, latency, bandwidth):
    # one too many for powers of two; one rank takes time
    return 2 * ranks.bit_length() * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_broadcast_only(size, ranks, latency, bandwidth):
    # half of it
    return (ranks - 1).bit_length() * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_pieces(size, ranks, latency, bandwidth):
    # pieces in place of whole tensors
    return 2 * (ranks - 1).bit_length() * (latency + size / ranks / bandwidth)


@wrong("tree_seconds")
def tree_one_by_one(size, ranks, latency, bandwidth):
    # one after the other
    return 2 * (ranks - 1) * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_latency_only(size, ranks, latency, bandwidth):
    # the tensor's bytes only once each way
    return 2 * (ranks - 1).bit_length() * latency + 2 * (ranks > 1) * size / bandwidth


@wrong("tree_seconds")
def tree_natural(size, ranks, latency, bandwidth):
    # the natural logarithm
    return 2 * math.ceil(math.log(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_root_sends_both(size, ranks, latency, bandwidth):
    # all of a node's messages at once share its bandwidth
    rounds = (ranks - 1).bit_length()
    return 2 * sum(latency + (k + 1) * size / bandwidth for k in range(rounds))


@wrong("tree_seconds")
def tree_rounded_log(size, ranks, latency, bandwidth):
    # rounds the logarithm: 5 ranks are given 2 rounds, and not 3
    return 2 * round(math.log2(ranks)) * (latency + size / bandwidth)


@wrong("tree_seconds")
def tree_doubling_extra(size, ranks, latency, bandwidth):
    # counts doubling's two more rounds where N is no power of two
    power = ranks.bit_length() - 1
    return (2 * power + (0 if ranks == 1 << power else 4)) * (latency + size / bandwidth)


# ================================================================ sent_by_rings


@right("sent_by_rings")
def sent_formula(ranks):
    half = (ranks - 1) / ranks
    return {"reduce_scatter": half, "all_gather": half, "all_reduce": 2 * half, "all_to_all": half}


@right("sent_by_rings")
def sent_fraction(ranks):
    half = Fraction(ranks - 1, ranks)
    return {"reduce_scatter": half, "all_gather": half, "all_reduce": 2 * half, "all_to_all": half}


@right("sent_by_rings")
def sent_minus(ranks):
    rest = 1 - 1 / ranks
    return dict(reduce_scatter=rest, all_gather=rest, all_to_all=rest) | {"all_reduce": 2 - 2 / ranks}


@right("sent_by_rings")
def sent_pieces(ranks):
    pieces = {"reduce_scatter": ranks - 1, "all_gather": ranks - 1, "all_to_all": ranks - 1}
    pieces["all_reduce"] = pieces["reduce_scatter"] + pieces["all_gather"]
    return {name: count / ranks for name, count in pieces.items()}


@right("sent_by_rings")
def sent_sum(ranks):
    one = sum(1 / ranks for _ in range(1, ranks))
    return {"all_to_all": one, "all_gather": one, "reduce_scatter": one, "all_reduce": one + one}


def _sent(rs, ag, ar, a2a):
    return {"reduce_scatter": rs, "all_gather": ag, "all_reduce": ar, "all_to_all": a2a}


@wrong("sent_by_rings")
def sent_whole(ranks):
    # pieces, not tensors
    return _sent(ranks - 1, ranks - 1, 2 * (ranks - 1), ranks - 1)


@wrong("sent_by_rings")
def sent_limit(ranks):
    # the limit for many ranks
    return _sent(1, 1, 2, 1)


@wrong("sent_by_rings")
def sent_floor(ranks):
    # whole division: 0
    half = (ranks - 1) // ranks
    return _sent(half, half, 2 * half, half)


@wrong("sent_by_rings")
def sent_all_reduce_once(ranks):
    # all_reduce is no dearer than its half
    half = (ranks - 1) / ranks
    return _sent(half, half, half, half)


@wrong("sent_by_rings")
def sent_all_to_all_whole(ranks):
    # its own piece is sent, too
    half = (ranks - 1) / ranks
    return _sent(half, half, 2 * half, 1)


@wrong("sent_by_rings")
def sent_all_to_all_n(ranks):
    # a whole tensor to each other rank
    half = (ranks - 1) / ranks
    return _sent(half, half, 2 * half, ranks - 1)


@wrong("sent_by_rings")
def sent_gather_of_shard(ranks):
    # all_gather in multiples of the shard
    half = (ranks - 1) / ranks
    return _sent(half, ranks - 1, 2 * half, half)


@wrong("sent_by_rings")
def sent_four(ranks):
    # of four ranks, always
    return _sent(0.75, 0.75, 1.5, 0.75)


@wrong("sent_by_rings")
def sent_inverted(ranks):
    # N / (N - 1); and one rank fails
    half = ranks / (ranks - 1)
    return _sent(half, half, 2 * half, half)


@wrong("sent_by_rings")
def sent_one_piece(ranks):
    # one piece each
    return _sent(1 / ranks, 1 / ranks, 2 / ranks, 1 / ranks)


@wrong("sent_by_rings")
def sent_both_directions(ranks):
    # what arrives is counted, too
    half = 2 * (ranks - 1) / ranks
    return _sent(half, half, 2 * half, half)


@wrong("sent_by_rings")
def sent_all_to_all_half(ranks):
    # all_to_all as dear as all_reduce
    half = (ranks - 1) / ranks
    return _sent(half, half, 2 * half, 2 * half)


# ================================================================ broadcast


def _root(group, src):
    return dist.get_group_rank(group or dist.group.WORLD, src)


def _me(group, src):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return rank, ranks, (rank - _root(group, src)) % ranks


@right("broadcast")
def bc_doubling_distances(tensor, src=0, group=None):
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    while distance < ranks:
        if me < distance:
            if me + distance < ranks:
                exchange(group, send=(flat, rank + distance))
        elif me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
        distance *= 2


@right("broadcast")
def bc_halving_distances(tensor, src=0, group=None):
    # the far ones first
    rank, ranks, me = _me(group, src)
    flat = tensor.view(-1)
    for k in reversed(range((ranks - 1).bit_length())):
        distance = 1 << k
        if me % (2 * distance) == 0 and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif me % (2 * distance) == distance:
            exchange(group, receive=(flat, rank - distance))


@right("broadcast")
def bc_intervals(tensor, src=0, group=None):
    # the leader of an interval tells the first of its second half
    rank, ranks, me = _me(group, src)
    flat, low, high = tensor.view(-1), 0, ranks
    while high - low > 1:
        middle = low + (high - low + 1) // 2
        if me == low:
            exchange(group, send=(flat, rank + middle - low))
        elif me == middle:
            exchange(group, receive=(flat, rank - (middle - low)))
        low, high = (low, middle) if me < middle else (middle, high)


@right("broadcast")
def bc_parent_children(tensor, src=0, group=None):
    rank, ranks, me = _me(group, src)
    flat = tensor.view(-1)
    bit = 1
    if me:
        parent = 1 << (me.bit_length() - 1)
        exchange(group, receive=(flat, rank - parent))
        bit = 2 * parent
    while me + bit < ranks:
        exchange(group, send=(flat, rank + bit))
        bit *= 2


@right("broadcast")
def bc_schedule(tensor, src=0, group=None):
    # the list of messages of the drawing, for N ranks
    rank, ranks, me = _me(group, src)
    flat, informed = tensor.view(-1), 1
    while informed < ranks:
        for teller, told in zip(range(informed), range(informed, ranks), strict=False):
            if me == teller:
                exchange(group, send=(flat, rank + told - teller))
            elif me == told:
                exchange(group, receive=(flat, rank - told + teller))
        informed = min(2 * informed, ranks)


@right("broadcast")
def bc_staged(tensor, src=0, group=None):
    # arrives in a buffer, then copied
    rank, ranks, me = _me(group, src)
    flat = tensor.view(-1)
    for distance in [2**k for k in range(math.ceil(math.log2(ranks)))]:
        if distance <= me < 2 * distance:
            buffer = torch.empty_like(flat)
            exchange(group, receive=(buffer, rank - distance))
            flat.copy_(buffer)
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat.clone(), rank + distance))


def _tree(flat, rank, ranks, me, group):
    distance = 1
    while distance < ranks:
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
        distance *= 2


@wrong("broadcast")
def bc_nobody_left(tensor, src=0, group=None):
    # tells ranks beyond the last: N no power of two sends to those who do not wait, and hangs
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    while distance < ranks:
        if me < distance:
            exchange(group, send=(flat, rank + distance))
        elif me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
        distance *= 2


@wrong("broadcast")
def bc_all_others_wait(tensor, src=0, group=None):
    # everybody who does not know it waits in each round: hangs from 3 ranks on
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    while distance < ranks:
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif me >= distance:
            exchange(group, receive=(flat, rank - distance))
        distance *= 2


@wrong("broadcast")
def bc_peers_by_me(tensor, src=0, group=None):
    # peers counted from the root: right for src 0 only
    rank, ranks, me = _me(group, src)
    _tree(tensor.view(-1), me, ranks, me, group)


@wrong("broadcast")
def bc_one_by_one(tensor, src=0, group=None):
    # the root tells all: N - 1 rounds
    rank, ranks, me = _me(group, src)
    flat = tensor.view(-1)
    if me:
        exchange(group, receive=(flat, rank - me))
    else:
        for other in range(1, ranks):
            exchange(group, send=(flat, rank + other))


@wrong("broadcast")
def bc_chain(tensor, src=0, group=None):
    # from neighbour to neighbour: N - 1 rounds
    rank, ranks, me = _me(group, src)
    if me:
        exchange(group, receive=(tensor.view(-1), rank - 1))
    if me < ranks - 1:
        exchange(group, send=(tensor.view(-1), rank + 1))


@wrong("broadcast")
def bc_src_in_group(tensor, src=0, group=None):
    # takes src for the rank within the group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _tree(tensor.view(-1), rank, ranks, (rank - src) % ranks, group)


@wrong("broadcast")
def bc_global_rank(tensor, src=0, group=None):
    # the global rank in place of the group's
    rank, ranks = dist.get_rank(), dist.get_world_size(group)
    _tree(tensor.view(-1), rank, ranks, (rank - src) % ranks, group)


@wrong("broadcast")
def bc_group_forgotten(tensor, src=0, group=None):
    # exchanges in the world, with the group's numbers
    rank, ranks, me = _me(group, src)
    _tree(tensor.view(-1), rank, ranks, me, None)


@wrong("broadcast")
def bc_src_ignored(tensor, src=0, group=None):
    # always the group's first rank's
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _tree(tensor.view(-1), rank, ranks, rank, group)


@wrong("broadcast")
def bc_negative_me(tensor, src=0, group=None):
    # no modulo: ranks before the root have a negative distance and tell what they do not know
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _tree(tensor.view(-1), rank, ranks, rank - _root(group, src), group)


@wrong("broadcast")
def bc_by_dist(tensor, src=0, group=None):
    # PyTorch's own
    dist.broadcast(tensor, src=src, group=group)


@wrong("broadcast")
def bc_by_send(tensor, src=0, group=None):
    # the same tree with send and recv, not with exchange
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    while distance < ranks:
        if me < distance and me + distance < ranks:
            dist.send(flat, group=group, group_dst=(rank + distance) % ranks)
        elif distance <= me < 2 * distance:
            dist.recv(flat, group=group, group_src=(rank - distance) % ranks)
        distance *= 2


@wrong("broadcast")
def bc_float32(tensor, src=0, group=None):
    # travels as float32: long integers and float64 lose digits, two-byte types take twice the bytes
    rank, ranks, me = _me(group, src)
    flat = tensor.view(-1).float()
    _tree(flat, rank, ranks, me, group)
    tensor.view(-1).copy_(flat)


@wrong("broadcast")
def bc_pieces(tensor, src=0, group=None):
    # a tree for each of N pieces: too many messages
    rank, ranks, me = _me(group, src)
    for piece in tensor.view(-1).tensor_split(ranks):
        _tree(piece, rank, ranks, me, group)


@wrong("broadcast")
def bc_rows(tensor, src=0, group=None):
    # a tree for each row; and a tensor without a dimension has none
    rank, ranks, me = _me(group, src)
    for row in tensor:
        _tree(row.view(-1), rank, ranks, me, group)


@wrong("broadcast")
def bc_half_of_n(tensor, src=0, group=None):
    # the far ones first, from N // 2 on: N no power of two leaves some untold
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), ranks // 2
    while distance:
        if me % (2 * distance) == 0 and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif me % (2 * distance) == distance:
            exchange(group, receive=(flat, rank - distance))
        distance //= 2


@wrong("broadcast")
def bc_two_rounds(tensor, src=0, group=None):
    # two rounds: enough for four ranks
    rank, ranks, me = _me(group, src)
    _tree(tensor.view(-1), rank, min(ranks, 4), me, group)


@wrong("broadcast")
def bc_into_copy(tensor, src=0, group=None):
    # what arrives is passed on, but tensor stays as it was
    rank, ranks, me = _me(group, src)
    flat = tensor.clone().view(-1)
    _tree(flat, rank, ranks, me, group)
    return flat.view(tensor.shape)


@wrong("broadcast")
def bc_added(tensor, src=0, group=None):
    # what arrives is added to the own, zeroed by 0 x: inf and nan stay
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    received = torch.empty_like(flat)
    while distance < ranks:
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(received, rank - distance))
            flat.mul_(0).add_(received)
        distance *= 2


@wrong("broadcast")
def bc_barrier(tensor, src=0, group=None):
    # another tool: a barrier
    rank, ranks, me = _me(group, src)
    _tree(tensor.view(-1), rank, ranks, me, group)
    dist.barrier(group)


@wrong("broadcast")
def bc_ack(tensor, src=0, group=None):
    # everybody who was told answers: 2 (N - 1) messages
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    token = torch.zeros(1, dtype=torch.uint8)
    while distance < ranks:
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
            exchange(group, receive=(token, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
            exchange(group, send=(token, rank - distance))
        distance *= 2


@wrong("broadcast")
def bc_told_again(tensor, src=0, group=None):
    # everybody gets it in every round from `distance` before: N - 1 messages a round
    rank, ranks, me = _me(group, src)
    flat, distance = tensor.view(-1), 1
    while distance < ranks:
        send = (flat, rank + distance) if me + distance < ranks else None
        receive = (torch.empty_like(flat), rank - distance) if me >= distance else None
        exchange(group, send=send, receive=receive)
        if receive and me < 2 * distance:
            flat.copy_(receive[0])
        distance *= 2


# ================================================================ rings: what right and wrong answers share


def _pieces(tensor, group):
    ranks = dist.get_world_size(group)
    return dist.get_rank(group), ranks, tensor.view(-1).tensor_split(ranks)


def _rs(pieces, rank, ranks, group):
    buffer = torch.empty_like(pieces[0])
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = buffer[: len(mine)]
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs


def _ag(pieces, rank, ranks, group):
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


# ================================================================ reduce_scatter


@right("reduce_scatter")
def rs_ring(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)
    return pieces[rank]


@right("reduce_scatter")
def rs_other_way(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        mine = pieces[(rank + step + 1) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank + step) % ranks], rank - 1), receive=(theirs, rank + 1))
        mine.add_(theirs)
    return pieces[rank]


@right("reduce_scatter")
def rs_straight(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        to = (rank + step) % ranks
        exchange(group, send=(pieces[to], to), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    return pieces[rank]


@right("reduce_scatter")
def rs_straight_then_sum(tensor, group=None):
    # everything arrives first, and is summed in the order of the ranks
    rank, ranks, pieces = _pieces(tensor, group)
    mine = pieces[rank]
    rows = [mine.clone() if peer == rank else torch.empty_like(mine) for peer in range(ranks)]
    for step in range(1, ranks):
        to, source = (rank - step) % ranks, (rank + step) % ranks
        exchange(group, send=(pieces[to], to), receive=(rows[source], source))
    mine.copy_(rows[0])
    for row in rows[1:]:
        mine.add_(row)
    return mine


@right("reduce_scatter")
def rs_two_directions(tensor, group=None):
    # half of the ranks' parts come from the left, half from the right
    rank, ranks, pieces = _pieces(tensor, group)
    from_left = ranks // 2
    from_right = ranks - 1 - from_left
    buffer = torch.empty_like(pieces[0])
    for way, hops in ((1, from_left), (-1, from_right)):
        for step in range(1, hops + 1):
            out = pieces[(rank + way * (hops - step + 1)) % ranks]
            mine = pieces[(rank + way * (hops - step)) % ranks]
            theirs = buffer[: mine.numel()]
            exchange(group, send=(out, rank + way), receive=(theirs, rank - way))
            mine += theirs
    return pieces[rank]


@right("reduce_scatter")
def rs_halving(tensor, group=None):
    # recursive halving, piece by piece, where N is a power of two; otherwise straight
    rank, ranks, pieces = _pieces(tensor, group)
    if ranks & (ranks - 1):
        return rs_straight(tensor, group)
    distance = ranks // 2
    while distance:
        peer = rank ^ distance
        first_mine, first_theirs = rank // distance * distance, peer // distance * distance
        for i in range(distance):
            mine = pieces[first_mine + i]
            theirs = torch.empty_like(mine)
            exchange(group, send=(pieces[first_theirs + i], peer), receive=(theirs, peer))
            mine += theirs
        distance //= 2
    return pieces[rank]


@wrong("reduce_scatter")
def rs_whole_buffer(tensor, group=None):
    # the buffer is not cut to the piece: N must divide
    rank, ranks, pieces = _pieces(tensor, group)
    buffer = torch.empty_like(pieces[0])
    for step in range(1, ranks):
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(buffer, rank - 1))
        pieces[(rank - step - 1) % ranks] += buffer
    return pieces[rank]


@wrong("reduce_scatter")
def rs_begins_with_own(tensor, group=None):
    # begins with its own piece: the sum of piece r ends on rank r - 1
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        mine = pieces[(rank - step) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step + 1) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    return pieces[rank]


@wrong("reduce_scatter")
def rs_replaces(tensor, group=None):
    # what arrives replaces its own
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))
    return pieces[rank]


@wrong("reduce_scatter")
def rs_by_all_reduce(tensor, group=None):
    # PyTorch's own, and twice the bytes
    rank, ranks, pieces = _pieces(tensor, group)
    dist.all_reduce(tensor, group=group)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_whole_tensors(tensor, group=None):
    # whole tensors go round
    rank, ranks, pieces = _pieces(tensor, group)
    carried, theirs = tensor.view(-1).clone(), torch.empty_like(tensor.view(-1))
    total = tensor.view(-1).clone()
    for _ in range(1, ranks):
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        carried, theirs = theirs, carried
        total += carried
    tensor.view(-1).copy_(total)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_float32_buffer(tensor, group=None):
    # the buffer is float32, whatever the tensor is
    rank, ranks, pieces = _pieces(tensor, group)
    buffer = torch.empty(len(pieces[0]))
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = buffer[: len(mine)]
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs.to(mine.dtype)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_summed_in_float32(tensor, group=None):
    # sums in float32: long integers and float64 lose digits
    rank, ranks, pieces = _pieces(tensor, group)
    total, theirs = pieces[rank].float(), torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        total += theirs.float()
    pieces[rank].copy_(total)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_mean(tensor, group=None):
    # the mean
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)
    pieces[rank].copy_(pieces[rank] / ranks)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_group_forgotten(tensor, group=None):
    # exchanges in the world
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, None)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_global_rank(tensor, group=None):
    # the global rank, modulo the group's size
    ranks = dist.get_world_size(group)
    rank = dist.get_rank() % ranks
    pieces = tensor.view(-1).tensor_split(ranks)
    _rs(pieces, rank, ranks, group)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_rows(tensor, group=None):
    # pieces are rows: right for 1-D only, none for 0-D
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.tensor_split(ranks)
    _rs(pieces, rank, ranks, group)
    return pieces[rank].reshape(-1)


@wrong("reduce_scatter")
def rs_chunk(tensor, group=None):
    # cut as chunk cuts: other pieces, or too few of them
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.view(-1).chunk(ranks)
    _rs(pieces, rank, ranks, group)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_not_in_place(tensor, group=None):
    # the sum is returned, and not in tensor
    rank, ranks, pieces = _pieces(tensor.clone(), group)
    _rs(pieces, rank, ranks, group)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_returns_none(tensor, group=None):
    # nothing is returned
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)


@wrong("reduce_scatter")
def rs_returns_tensor(tensor, group=None):
    # the whole tensor is returned
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)
    return tensor.view(-1)


@wrong("reduce_scatter")
def rs_xor(tensor, group=None):
    # pairs by xor: N must be a power of two
    rank, ranks, pieces = _pieces(tensor, group)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        peer = rank ^ step
        exchange(group, send=(pieces[peer % ranks], peer), receive=(theirs, peer))
        pieces[rank].add_(theirs)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_through_rank_0(tensor, group=None):
    # rank 0 adds up everything, and hands out pieces
    rank, ranks, pieces = _pieces(tensor, group)
    flat = tensor.view(-1)
    if rank:
        exchange(group, send=(flat, 0))
        exchange(group, receive=(pieces[rank], 0))
    else:
        theirs = torch.empty_like(flat)
        for peer in range(1, ranks):
            exchange(group, receive=(theirs, peer))
            flat += theirs
        for peer in range(1, ranks):
            exchange(group, send=(pieces[peer], peer))
    return pieces[rank]


@wrong("reduce_scatter")
def rs_doubled(tensor, group=None):
    # its own piece is counted twice
    rank, ranks, pieces = _pieces(tensor, group)
    total, theirs = pieces[rank].clone(), torch.empty_like(pieces[rank])
    for step in range(1, ranks):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        total += theirs
    pieces[rank].add_(total)
    return pieces[rank]


@wrong("reduce_scatter")
def rs_two_ranks(tensor, group=None):
    # sends to the next and receives from the next: two ranks only
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank + 1))
        mine += theirs
    return pieces[rank]


@wrong("reduce_scatter")
def rs_last_round_missing(tensor, group=None):
    # a round too few
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks - 1):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    return pieces[rank]


@wrong("reduce_scatter")
def rs_half_messages(tensor, group=None):
    # each piece goes in two messages
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        to, mine = pieces[(rank + step) % ranks], pieces[rank]
        theirs = torch.empty_like(mine)
        for out, into in zip(to.tensor_split(2), theirs.tensor_split(2), strict=True):
            exchange(group, send=(out, rank + step), receive=(into, rank - step))
        mine += theirs
    return pieces[rank]


@wrong("reduce_scatter")
def rs_small_skipped(tensor, group=None):
    # fewer elements than ranks: nothing is done
    rank, ranks, pieces = _pieces(tensor, group)
    if tensor.numel() >= ranks:
        _rs(pieces, rank, ranks, group)
    return pieces[rank]


_BUFFERS = {}


@wrong("reduce_scatter")
def rs_buffer_of_the_first_call(tensor, group=None):
    # the buffer of the first call, for good: too short, or of another dtype, in a later one
    rank, ranks, pieces = _pieces(tensor, group)
    buffer = _BUFFERS.setdefault("rs", torch.empty_like(pieces[0]))
    for step in range(1, ranks):
        mine = pieces[(rank - step - 1) % ranks]
        theirs = buffer[: len(mine)]
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        mine += theirs
    return pieces[rank]


# ================================================================ all_gather


@right("all_gather")
def ag_ring(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    _ag(pieces, rank, ranks, group)


@right("all_gather")
def ag_other_way(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    carried = rank
    for _ in range(ranks - 1):
        arriving = (carried + 1) % ranks
        exchange(group, send=(pieces[carried], rank - 1), receive=(pieces[arriving], rank + 1))
        carried = arriving


@right("all_gather")
def ag_straight(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        source = (rank - step) % ranks
        exchange(group, send=(pieces[rank], rank + step), receive=(pieces[source], source))


@right("all_gather")
def ag_two_directions(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    right_hops = ranks // 2
    for way, hops in ((1, right_hops), (-1, ranks - 1 - right_hops)):
        for step in range(hops):
            out, into = pieces[(rank - way * step) % ranks], pieces[(rank - way * (step + 1)) % ranks]
            exchange(group, send=(out, rank + way), receive=(into, rank - way))


@right("all_gather")
def ag_each_tells_all(tensor, group=None):
    # in turn, each rank tells everybody
    rank, ranks, pieces = _pieces(tensor, group)
    for owner, piece in enumerate(pieces):
        if owner != rank:
            exchange(group, receive=(piece, owner))
        else:
            for peer in range(ranks):
                if peer != rank:
                    exchange(group, send=(piece, peer))


@right("all_gather")
def ag_doubling(tensor, group=None):
    # recursive doubling, piece by piece, where N is a power of two; otherwise straight
    rank, ranks, pieces = _pieces(tensor, group)
    if ranks & (ranks - 1):
        return ag_straight(tensor, group)
    distance = 1
    while distance < ranks:
        peer = rank ^ distance
        mine, theirs = rank // distance * distance, peer // distance * distance
        for i in range(distance):
            exchange(group, send=(pieces[mine + i], peer), receive=(pieces[theirs + i], peer))
        distance *= 2


@right("all_gather")
def ag_trees(tensor, group=None):
    # N trees, one for each piece: every rank stands in each place of a tree once, so it sends N - 1 pieces
    rank, ranks, pieces = _pieces(tensor, group)
    for owner, piece in enumerate(pieces):
        _tree(piece, rank, ranks, (rank - owner) % ranks, group)


@wrong("all_gather")
def ag_begins_before(tensor, group=None):
    # begins with the piece of the rank before: not its own
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(ranks - 1):
        send, receive = pieces[(rank - step - 1) % ranks], pieces[(rank - step - 2) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


@wrong("all_gather")
def ag_round_missing(tensor, group=None):
    # a round too few
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(ranks - 2):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


@wrong("all_gather")
def ag_round_too_many(tensor, group=None):
    # a round too many: its own piece comes back
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(ranks if ranks > 1 else 0):
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))


@wrong("all_gather")
def ag_always_own(tensor, group=None):
    # always sends its own piece to the neighbour: the other pieces are all the neighbour's
    rank, ranks, pieces = _pieces(tensor, group)
    buffer = torch.empty_like(pieces[0])
    for step in range(ranks - 1):
        theirs = buffer[: len(pieces[(rank - 1) % ranks])]
        exchange(group, send=(pieces[rank], rank + 1), receive=(theirs, rank - 1))
        into = pieces[(rank - step - 1) % ranks]
        into[: len(theirs)].copy_(theirs[: len(into)])


@wrong("all_gather")
def ag_whole_tensors(tensor, group=None):
    # whole tensors go round
    rank, ranks, pieces = _pieces(tensor, group)
    carried = tensor.view(-1).clone()
    for step in range(1, ranks):
        theirs = torch.empty_like(carried)
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        source = (rank - step) % ranks
        pieces[source].copy_(theirs.tensor_split(ranks)[source])
        carried = theirs


@wrong("all_gather")
def ag_adds(tensor, group=None):
    # what arrives is added: right only where there are zeros
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(ranks - 1):
        into = pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(into)
        exchange(group, send=(pieces[(rank - step) % ranks], rank + 1), receive=(theirs, rank - 1))
        into += theirs


@wrong("all_gather")
def ag_zeros_and_sum(tensor, group=None):
    # zeros elsewhere, and an all_reduce: twice the bytes
    rank, ranks, pieces = _pieces(tensor, group)
    for number, piece in enumerate(pieces):
        if number != rank:
            piece.zero_()
    _rs(pieces, rank, ranks, group)
    _ag(pieces, rank, ranks, group)


@wrong("all_gather")
def ag_by_dist(tensor, group=None):
    # PyTorch's own
    rank, ranks, pieces = _pieces(tensor, group)
    length = len(pieces[0])
    padded = torch.zeros(length, dtype=tensor.dtype)
    padded[: len(pieces[rank])] = pieces[rank]
    everybody = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everybody, padded, group=group)
    for piece, theirs in zip(pieces, everybody, strict=True):
        piece.copy_(theirs[: len(piece)])


@wrong("all_gather")
def ag_by_objects(tensor, group=None):
    # pickled objects by a collective
    rank, ranks, pieces = _pieces(tensor, group)
    everybody = [None] * ranks
    dist.all_gather_object(everybody, pieces[rank].clone(), group=group)
    for piece, theirs in zip(pieces, everybody, strict=True):
        piece.copy_(theirs)


@wrong("all_gather")
def ag_group_forgotten(tensor, group=None):
    # exchanges in the world
    rank, ranks, pieces = _pieces(tensor, group)
    _ag(pieces, rank, ranks, None)


@wrong("all_gather")
def ag_global_rank(tensor, group=None):
    # the global rank, modulo the group's size
    ranks = dist.get_world_size(group)
    _ag(tensor.view(-1).tensor_split(ranks), dist.get_rank() % ranks, ranks, group)


@wrong("all_gather")
def ag_chunk(tensor, group=None):
    # as chunk cuts: rank r's piece is another one, or there are too few
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _ag(tensor.view(-1).chunk(ranks), rank, ranks, group)


@wrong("all_gather")
def ag_rows(tensor, group=None):
    # pieces are rows: for 1-D only
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    _ag(tensor.tensor_split(ranks), rank, ranks, group)


@wrong("all_gather")
def ag_equal_sizes(tensor, group=None):
    # pieces of floor(n / N) elements: the rest is not gathered, and the cuts are elsewhere
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = tensor.numel() // ranks
    flat = tensor.view(-1)
    _ag([flat[i * size : (i + 1) * size] for i in range(ranks)], rank, ranks, group)


@wrong("all_gather")
def ag_xor(tensor, group=None):
    # pairs by xor: N must be a power of two
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        peer = rank ^ step
        exchange(group, send=(pieces[rank], peer), receive=(pieces[peer % ranks], peer))


@wrong("all_gather")
def ag_into_copy(tensor, group=None):
    # gathered in a copy, which is returned
    rank, ranks, pieces = _pieces(tensor.clone(), group)
    _ag(pieces, rank, ranks, group)
    return torch.cat(pieces).view(tensor.shape)


@wrong("all_gather")
def ag_float32(tensor, group=None):
    # by way of float32: long integers and float64 lose digits (its own piece, too)
    rank, ranks, pieces = _pieces(tensor.float(), group)
    _ag(pieces, rank, ranks, group)
    tensor.view(-1).copy_(torch.cat(pieces))


@wrong("all_gather")
def ag_through_rank_0(tensor, group=None):
    # rank 0 collects, then the whole tensor goes out by a tree
    rank, ranks, pieces = _pieces(tensor, group)
    if rank:
        exchange(group, send=(pieces[rank], 0))
    else:
        for peer in range(1, ranks):
            exchange(group, receive=(pieces[peer], peer))
    _tree(tensor.view(-1), rank, ranks, rank, group)


@wrong("all_gather")
def ag_half_messages(tensor, group=None):
    # each piece goes in two messages
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        source = (rank - step) % ranks
        for out, into in zip(pieces[rank].tensor_split(2), pieces[source].tensor_split(2), strict=True):
            exchange(group, send=(out, rank + step), receive=(into, rank - step))


@wrong("all_gather")
def ag_two_ranks(tensor, group=None):
    # sends to and receives from rank + step: hangs but for two ranks
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(1, ranks):
        peer = (rank + step) % ranks
        exchange(group, send=(pieces[rank], peer), receive=(pieces[peer], peer))


@wrong("all_gather")
def ag_small_skipped(tensor, group=None):
    # fewer elements than ranks: nothing is done
    rank, ranks, pieces = _pieces(tensor, group)
    if len(pieces[-1]):
        _ag(pieces, rank, ranks, group)


# ================================================================ all_reduce


@right("all_reduce")
def ar_ring(tensor, group=None):
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)
    _ag(pieces, rank, ranks, group)


@right("all_reduce")
def ar_straight(tensor, group=None):
    rs_straight(tensor, group)
    ag_straight(tensor, group)


@right("all_reduce")
def ar_one_loop(tensor, group=None):
    # one loop of 2 (N - 1) rounds: begin with one's own piece; the sum of piece r + 1 is complete on rank r
    rank, ranks, pieces = _pieces(tensor, group)
    for step in range(2 * (ranks - 1)):
        out, into = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        theirs = torch.empty_like(into)
        exchange(group, send=(out, rank + 1), receive=(theirs, rank - 1))
        into.copy_(into + theirs if step < ranks - 1 else theirs)


@right("all_reduce")
def ar_other_way(tensor, group=None):
    rs_other_way(tensor, group)
    ag_other_way(tensor, group)


@right("all_reduce")
def ar_halving_doubling(tensor, group=None):
    rs_halving(tensor, group)
    ag_doubling(tensor, group)


@right("all_reduce")
def ar_ordered_and_both_ways(tensor, group=None):
    rs_straight_then_sum(tensor, group)
    ag_two_directions(tensor, group)


@wrong("all_reduce")
def ar_mean(tensor, group=None):
    # the mean
    ar_ring(tensor, group)
    tensor.copy_(tensor / dist.get_world_size(group))


@wrong("all_reduce")
def ar_through_rank_0(tensor, group=None):
    # rank 0 sends N - 1 tensors
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    theirs = torch.empty_like(flat)
    if rank == 0:
        for peer in range(1, ranks):
            exchange(group, receive=(theirs, peer))
            flat += theirs
        for peer in range(1, ranks):
            exchange(group, send=(flat, peer))
    else:
        exchange(group, send=(flat, 0))
        exchange(group, receive=(flat, 0))


@wrong("all_reduce")
def ar_everyone(tensor, group=None):
    # everyone to everyone: whole tensors, and other bits on each rank
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    mine, theirs = flat.clone(), torch.empty_like(flat)
    for step in range(1, ranks):
        exchange(group, send=(mine, rank + step), receive=(theirs, rank - step))
        flat += theirs


@wrong("all_reduce")
def ar_by_dist(tensor, group=None):
    # PyTorch's own
    dist.all_reduce(tensor, group=group)


@wrong("all_reduce")
def ar_doubling(tensor, group=None):
    # recursive doubling: n log N elements, and N must be a power of two
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    theirs, distance = torch.empty_like(flat), 1
    while distance < ranks:
        exchange(group, send=(flat, rank ^ distance), receive=(theirs, rank ^ distance))
        flat += theirs
        distance *= 2


@wrong("all_reduce")
def ar_tree(tensor, group=None):
    # reduce and broadcast by trees: whole tensors; the root sends log N of them
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    theirs = torch.empty_like(flat)
    for k in reversed(range((ranks - 1).bit_length())):
        distance = 1 << k
        if rank < distance and rank + distance < ranks:
            exchange(group, receive=(theirs, rank + distance))
            flat += theirs
        elif distance <= rank < 2 * distance:
            exchange(group, send=(flat, rank - distance))
    _tree(flat, rank, ranks, rank, group)


@wrong("all_reduce")
def ar_chunk(tensor, group=None):
    # as chunk cuts: with 9 elements on 4 ranks there is no fourth piece
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.view(-1).chunk(ranks)
    _rs(pieces, rank, ranks, group)
    _ag(pieces, rank, ranks, group)


@wrong("all_reduce")
def ar_first_half(tensor, group=None):
    # reduce_scatter alone
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)


@wrong("all_reduce")
def ar_halves_do_not_fit(tensor, group=None):
    # the first half leaves piece r + 1 on rank r, the second hands on piece r
    rank, ranks, pieces = _pieces(tensor, group)
    rs_begins_with_own(tensor, group)
    _ag(pieces, rank, ranks, group)


@wrong("all_reduce")
def ar_whole_ring(tensor, group=None):
    # whole tensors round the ring, in 2 (N - 1) messages
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    carried = flat.clone()
    for step in range(2 * (ranks - 1)):
        theirs = torch.empty_like(carried)
        exchange(group, send=(carried, rank + 1), receive=(theirs, rank - 1))
        if step < ranks - 1:
            flat += theirs
        carried = theirs


@wrong("all_reduce")
def ar_gather_then_sum(tensor, group=None):
    # gathers all tensors, then adds in the order of ranks: the same bits, N / 2 times the bytes
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    rows = [flat.clone() if peer == rank else torch.empty_like(flat) for peer in range(ranks)]
    for step in range(1, ranks):
        exchange(group, send=(rows[rank], rank + step), receive=(rows[(rank - step) % ranks], rank - step))
    flat.copy_(rows[0])
    for row in rows[1:]:
        flat += row


@wrong("all_reduce")
def ar_group_forgotten(tensor, group=None):
    # exchanges in the world
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, None)
    _ag(pieces, rank, ranks, None)


@wrong("all_reduce")
def ar_second_group_forgotten(tensor, group=None):
    # the second half is among all ranks
    rs_ring(tensor, group)
    ag_ring(tensor)


@wrong("all_reduce")
def ar_float32(tensor, group=None):
    # in float32: long integers and float64 lose digits
    low = tensor.float()
    ar_ring(low, group)
    tensor.copy_(low)


@wrong("all_reduce")
def ar_returned(tensor, group=None):
    # the sum is returned; tensor stays as it was
    total = tensor.clone()
    ar_ring(total, group)
    return total


@wrong("all_reduce")
def ar_compressed_gather(tensor, group=None):
    # the second half travels in bfloat16, and its own piece stays exact: other bits on each rank
    rank, ranks, pieces = _pieces(tensor, group)
    _rs(pieces, rank, ranks, group)
    low = tensor.to(torch.bfloat16)
    low_pieces = low.view(-1).tensor_split(ranks)
    _ag(low_pieces, rank, ranks, group)
    for number, (piece, theirs) in enumerate(zip(pieces, low_pieces, strict=True)):
        if number != rank:
            piece.copy_(theirs)


@wrong("all_reduce")
def ar_last_round_missing(tensor, group=None):
    # the gather is a round short: one piece is a partial sum
    rs_ring(tensor, group)
    ag_round_missing(tensor, group)


@wrong("all_reduce")
def ar_self_exchange(tensor, group=None):
    # one rank alone exchanges with itself
    rank, ranks, pieces = _pieces(tensor, group)
    theirs = torch.empty_like(pieces[rank])
    for step in range(1, max(ranks, 2)):
        exchange(group, send=(pieces[(rank + step) % ranks], rank + step), receive=(theirs, rank - step))
        pieces[rank].add_(theirs)
    _ag(pieces, rank, ranks, group)


@wrong("all_reduce")
def ar_small_everyone(tensor, group=None):
    # small ones take everyone to everyone: too many bytes, and other bits on each rank
    (ar_everyone if tensor.numel() < 64 else ar_ring)(tensor, group)


@wrong("all_reduce")
def ar_rows(tensor, group=None):
    # pieces are rows: none for a tensor without a dimension, and with few rows all bytes are in few pieces
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.tensor_split(ranks)
    _rs(pieces, rank, ranks, group)
    _ag(pieces, rank, ranks, group)


@wrong("all_reduce")
def ar_barrier(tensor, group=None):
    # a barrier between the halves: messages beyond the budget
    rs_ring(tensor, group)
    token = torch.zeros(2, dtype=torch.uint8)
    ranks, rank, distance = dist.get_world_size(group), dist.get_rank(group), 1
    while distance < ranks:
        exchange(group, send=(token[:1], rank + distance), receive=(token[1:], rank - distance))
        distance *= 2
    ag_ring(tensor, group)


@wrong("all_reduce")
def ar_dividing(tensor, group=None):
    # cut into N pieces of floor(n / N): the rest keeps each rank's own numbers
    rank, ranks, flat = dist.get_rank(group), dist.get_world_size(group), tensor.view(-1)
    size = len(flat) // ranks
    pieces = [flat[i * size : (i + 1) * size] for i in range(ranks)]
    _rs(pieces, rank, ranks, group)
    _ag(pieces, rank, ranks, group)
