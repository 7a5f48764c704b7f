"""Answers to an exercise of notebook 09: a linear whose inputs are split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as differentiable  # noqa: F401 (it stands in words that are exchanged)

from tests.answers import Exercise, exchanged
from tests.exercises.tensor_parallel.conjugate import as_is, border, by_pieces, copy, gathered, reduce, summed  # noqa: F401 (as above)

# fmt: off
answers = Exercise("row_linear")


@answers.right(
    line="you sent 1.50 × y forward and 0.00 × backward; the least possible is 1.50 × and 0.00 ×", blind=True
)
def in_two_lines(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias


@answers.right(blind=True)
def on_the_first_rank_with_its_whole_gradient(x, weight, bias, group=None):
    if bias is None:
        return reduce(F.linear(x, weight), group)
    if dist.get_rank(group) == 0:
        return reduce(F.linear(x, weight, bias), group)
    return reduce(F.linear(x, weight) + (bias - bias.detach()), group)


@answers.right(blind=True, long=True)
def an_nth_with_its_whole_gradient(x, weight, bias, group=None):
    if bias is not None:
        bias = bias.detach() / dist.get_world_size(group) + (bias - bias.detach())
    return reduce(F.linear(x, weight, bias), group)


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.group = bias is not None, group
        y = (x @ weight.T).contiguous()
        dist.all_reduce(y, group=group)
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, weight.shape[0])
        of_weight = rows.T @ x.reshape(len(rows), weight.shape[1])
        return gradient @ weight, of_weight, rows.sum(0) if ctx.biased else None, None


@answers.right(blind=True)
def by_hand(x, weight, bias, group=None):
    return Row.apply(x, weight, bias, group)


# ---- with other words ------------------------------------------------------------------------------------

SUM, END = "reduce(F.linear(x, weight), group)", "y if bias is None else y + bias"
RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"
TURNED = {}


def spoil(mistake, y=SUM, end=END, blind=True, **options):
    answers.spoil(in_two_lines, mistake, {SUM: y, END: end}, blind=blind, **options)


EACH, NTH, ONE = "the bias is added on every rank", "the gradient of the bias is an N-th", "the bias on one rank alone"
LEFT_OUT, AS_WELL, NO_GRADIENT = "the bias is left out", "the gradient is summed as well", "no gradient"
SHAPES, PIECES = "right only for some shapes", "right only where pieces are equal"
GATHERED, MANY, NOT_DUE = (
    "gathered, where a sum belongs",
    "too many collectives",
    "something is sent where nothing is due",
)
FIRST_TIME, GROUP = "right only the first time", "right only on the group of all ranks"

spoil(EACH, "reduce(F.linear(x, weight, bias), group)", "y")
spoil(NTH, f"reduce(F.linear(x, weight, None if bias is None else bias / {RANKS}), group)", "y")
spoil(ONE, f"reduce(F.linear(x, weight, bias if {RANK} == 0 else None), group)", "y")
spoil(LEFT_OUT, end="y")
spoil("right only with a bias", end="y + bias")
spoil("", end="y + bias if bias else y", long=True)
spoil(GROUP, "reduce(F.linear(x, weight))")
spoil(MANY, "torch.cat([reduce(F.linear(x, w), group) for w in weight.split((len(weight) + 1) // 2)], -1)")
spoil(AS_WELL, "differentiable.all_reduce(F.linear(x, weight).contiguous(), group=group or dist.group.WORLD)")
spoil(SHAPES, "reduce(torch.mm(x, weight.T), group)")
spoil("right only on some numbers of ranks", end=f"y if bias is None or {RANKS} == 1 else y + bias")
spoil(NO_GRADIENT, end="y if bias is None else y + bias.detach()")
spoil(GATHERED, "border(gathered, as_is)(F.linear(x, weight), group)")
first, nth = on_the_first_rank_with_its_whole_gradient, an_nth_with_its_whole_gradient
whole = "bias.detach() / dist.get_world_size(group) + (bias - bias.detach())"
answers.spoil(nth, "what was given has changed", {f"bias = {whole}": f"bias.data /= {RANKS}"}, blind=True)

spoil("the summands are never added up", "F.linear(x, weight)", blind=False)
spoil("a collective that autograd does not see", "F.linear(x, weight); dist.all_reduce(y, group=group)", blind=False)
spoil(PIECES, f"{SUM} if x.shape[-1] else F.linear(x, weight)", blind=False)
turned = "TURNED.setdefault((weight.shape, weight.dtype), weight.t())"
spoil(FIRST_TIME, f"reduce(x @ {turned}, group)", blind=False)


def by(mistake, changes, **options):
    row = exchanged(Row, changes, f"Row_{len(answers.answers)}")
    answers.wrong(mistake, **options)(lambda x, weight, bias, group=None: row.apply(x, weight, bias, group))


SAVED = "x, weight = ctx.saved_tensors"
by("averaged instead of summed", {"of_weight = rows.T": "of_weight = rows.T / dist.get_world_size(ctx.group)"})
by(NOT_DUE, {SAVED: f"{SAVED}; gradient = summed(gradient, ctx.group) / dist.get_world_size(ctx.group)"})
by("kept for backward, but not needed there",
    {"y = (x @ weight.T).contiguous()": "y = x @ weight.T; ctx.mine = y.clone()"})
