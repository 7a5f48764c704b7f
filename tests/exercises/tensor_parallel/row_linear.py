"""Answers to an exercise of notebook 09: a linear whose inputs are split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as differentiable  # noqa: F401 (it stands in words that are exchanged)

from tests.answers import Exercise
from tests.exercises.tensor_parallel.conjugate import as_is, border, copy, gathered, reduce, summed  # noqa: F401 (as above)

# fmt: off
answers = Exercise("row_linear")


@answers.right(
    line="you sent 1.50 × y forward and 0.00 × backward; the least possible is 1.50 × and 0.00 ×"
)
def in_two_lines(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias


@answers.right
def on_the_first_rank_with_its_whole_gradient(x, weight, bias, group=None):
    if bias is None:
        return reduce(F.linear(x, weight), group)
    if dist.get_rank(group) == 0:
        return reduce(F.linear(x, weight, bias), group)
    return reduce(F.linear(x, weight) + (bias - bias.detach()), group)


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


# ---- with other words ------------------------------------------------------------------------------------

SUM, END = "reduce(F.linear(x, weight), group)", "y if bias is None else y + bias"
RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"


def spoil(mistake, y=SUM, end=END, **options):
    answers.spoil(in_two_lines, mistake, {SUM: y, END: end}, **options)


EACH, NTH, ONE = "the bias is added on every rank", "the gradient of the bias is an N-th", "the bias on one rank alone"
LEFT_OUT, AS_WELL = "the bias is left out", "the gradient is summed as well"
PIECES = "right only where pieces are equal"

spoil(EACH, "reduce(F.linear(x, weight, bias), group)", "y")
spoil(NTH, f"reduce(F.linear(x, weight, None if bias is None else bias / {RANKS}), group)", "y")
spoil(ONE, f"reduce(F.linear(x, weight, bias if {RANK} == 0 else None), group)", "y")
spoil(LEFT_OUT, end="y")
spoil("right only with a bias", end="y + bias")
spoil(AS_WELL, "differentiable.all_reduce(F.linear(x, weight).contiguous(), group=group or dist.group.WORLD)")
spoil("right only on some numbers of ranks", end=f"y if bias is None or {RANKS} == 1 else y + bias")

spoil(PIECES, f"{SUM} if x.shape[-1] else F.linear(x, weight)")
