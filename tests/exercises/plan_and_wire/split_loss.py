"""Answers to an exercise of notebook 09b: a loss whose vocabulary is split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.answers import Exercise, exchanged
from tests.exercises.tensor_parallel.conjugate import as_is, border, reduce, summed  # noqa: F401 (as above)

# fmt: off
answers = Exercise("split_loss")
NONE = "none backward; 3 are enough for any vocabulary"


def target_column(logits, targets, first):
    """Beyond this rank's own, a column of -inf for those that others have."""
    here = (targets >= first) & (targets < first + logits.shape[1])
    column = (targets - first).where(here, logits.shape[1])
    return here, column, F.pad(logits, (0, 1), value=-torch.inf)


def top(logits, group):
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


@answers.right(line=f"you sent 3.00 numbers per token forward and {NONE}")
def in_two(logits, targets, first, group=None):
    here, column, padded = target_column(logits, targets, first)
    shifted = padded - top(padded, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(shifted.exp().sum(1), group), reduce(picked, group)
    return (total.log() - target).mean()


@answers.right
def without_padding(logits, targets, first, group=None):
    v = logits.shape[1]
    here = (targets >= first) & (targets < first + v)
    highest = logits.detach().amax(1) if v else logits.new_full((len(targets),), -torch.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    column = (targets - first).clamp(0, max(0, v - 1))[:, None]
    picked = shifted.gather(1, column)[:, 0].where(here, 0) if v else shifted.sum(1)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group).unbind()
    return (total.log() - target).sum() / len(targets)


class SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        here, column, padded = target_column(logits, targets, first)
        padded.sub_(top(padded, group)[:, None])
        both = padded.new_zeros(2, len(targets))
        both[1] = padded.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
        padded.exp_()
        both[0] = padded.sum(1)
        dist.all_reduce(both, group=group)
        padded.div_(both[0][:, None])
        ctx.save_for_backward(padded, column)
        ctx.group = group
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, column = ctx.saved_tensors
        out = softmax.clone()
        out[torch.arange(len(column)), column] -= 1
        return out[:, :-1] * (gradient / len(column)), None, None, None


def applied(function):
    return lambda logits, targets, first, group=None: function.apply(logits, targets, first, group)


# ---- with other words ------------------------------------------------------------------------------------

TOP = "top(padded, group)[:, None]"
SUM, TARGET, END = "reduce(shifted.exp().sum(1), group)", "reduce(picked, group)", "(total.log() - target).mean()"
RANK = "dist.get_rank(group)"
LOW = "padded.detach().amax(1).nan_to_num(neginf=0.0)"  # of this rank alone
INFINITE, GRADIENT = "not finite", "the right loss with a wrong gradient"
MANY, DIVIDE = "more than three numbers per token", "right only where the ranks divide the vocabulary"
TOKENS = "summed over the tokens"

spoil = answers.slips(in_two)
spoil(INFINITE, {TOP: "0"})
spoil("relative to each rank's own highest logit", {TOP: f"{LOW}[:, None]"})
spoil(TOKENS, {END: "(total.log() - target).sum()"})
spoil("a target's logit stays on its rank", {TARGET: "picked"})
spoil(GRADIENT, {SUM: "summed(shifted.exp().sum(1).detach(), group)"})
spoil("divided by the tokens of one rank", {END: "(total.log() - target).sum() / here.sum().clamp(min=1)"})
fourth = "target / reduce(here.to(logits.dtype), group)"
spoil(MANY, {END: f"(total.log() - {fourth}).mean()"})
spoil(DIVIDE, {"targets, first)": f"targets, {RANK} * logits.shape[1])"})


@answers.wrong("logits are gathered")
def gathers(logits, targets, first, group=None):
    n, width = dist.get_world_size(group), torch.tensor([logits.shape[1]])
    widths = [torch.empty_like(width) for _ in range(n)]
    dist.all_gather(widths, width, group=group)
    widths = [int(w) for w in widths]
    mine = F.pad(logits.detach(), (0, max(widths) - logits.shape[1])).contiguous()
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    parts = [p[:, :w] for p, w in zip(parts, widths, strict=True)]
    parts[dist.get_rank(group)] = logits
    return F.cross_entropy(torch.cat(parts, 1), targets)


def by_hand(mistake, changes, **options):
    answers.wrong(mistake, **options)(applied(exchanged(SplitLoss, changes, f"SplitLoss_{len(answers.answers)}")))


by_hand("the gradient that comes in is left out", {"gradient / len": "1 / len"})

# ---- not seen by others ----------------------------------------------------------------------------------

mine = "(logits.logsumexp(1) if logits.shape[1] else logits.sum(1)) - picked"
mine = "shifted.exp().sum(1)"
