import math

import torch


RIGHT, WRONG = {}, {}


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
