import functools
import itertools
import math
import operator
from fractions import Fraction

import torch


RIGHT, WRONG = {}, {}


def right(exercise):
    return lambda answer: RIGHT.setdefault(exercise, []).append((answer.__name__, answer)) or answer


def wrong(exercise):
    return lambda answer: WRONG.setdefault(exercise, []).append((answer.__name__, answer)) or answer


# ================================================================ mean_on_rank_0


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


# ================================================================ rings: what right and wrong answers share


# ================================================================ reduce_scatter


# ================================================================ all_gather


# ================================================================ all_reduce


