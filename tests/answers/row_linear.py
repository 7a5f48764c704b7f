"""Answers to an exercise of notebook 09: a linear whose inputs are split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as differentiable  # noqa: F401 (it stands in words that are exchanged)

from tests.answers import Exercise, exchanged
from tests.answers.conjugate import as_is, border, by_pieces, copy, gathered, reduce, summed  # noqa: F401 (as above)

# fmt: off
answers = Exercise("row_linear")


@answers.right(
    line="you sent 1.50 × y forward and 0.00 × backward; the least possible is 1.50 × and 0.00 ×", blind=True
)
def in_two_lines(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias


@answers.right(blind=True, long=True)
def by_einsum(x, weight, bias, group=None):
    y = reduce(torch.einsum("...i,oi->...o", x, weight), group)
    return torch.add(y, bias) if bias is not None else y


@answers.right(blind=True, long=True)
def as_a_matrix(x, weight, bias, group=None):
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = reduce(torch.mm(flat, weight.t()), group)
    if bias is not None:
        y = y + bias[None]
    return y.view(*x.shape[:-1], weight.shape[0])


@answers.right(blind=True, long=True)
def added_in_place(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    if bias is not None:
        y += bias
    return y


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


class RowOfLinear(torch.autograd.Function):
    """Saves what it was given, and lets autograd work out the rest."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        return summed(F.linear(x, weight), group)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            return *torch.autograd.grad(F.linear(*given), given, gradient), None


@answers.right(long=True)
def by_autograd_again(x, weight, bias, group=None):
    y = RowOfLinear.apply(x, weight, group)
    return y if bias is None else y + bias


@answers.right(long=True)
def sum_by_pieces(x, weight, bias, group=None):
    y = border(by_pieces, as_is)(x.matmul(weight.t()), group)
    return y if bias is None else y + bias


def joined(x, group, longest=0):
    """From all ranks' pieces, padded where there is a longest; a gradient comes back to this rank's own."""
    x = F.pad(x, (0, max(0, longest - x.shape[-1])))
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    parts[dist.get_rank(group)] = x
    return torch.cat(parts, -1)


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
spoil(ONE, f"reduce(F.linear(x, weight) + (0 if bias is None else bias * ({RANK} == 0)), group)", "y")
spoil(LEFT_OUT, end="y")
spoil("right only with a bias", end="y + bias")
spoil("", end="y + bias if bias else y", long=True)
spoil("", "reduce(x @ weight, group)", long=True)
spoil(GROUP, "reduce(F.linear(x, weight))")
spoil(AS_WELL, "reduce(F.linear(copy(x, group), weight), group)", alone=True, long=True)
spoil(AS_WELL, end="y if bias is None else y + copy(bias, group)", long=True)
spoil(AS_WELL, "reduce(F.linear(x, copy(weight, group)), group)", alone=True, long=True)
spoil(MANY, "torch.cat([reduce(F.linear(x, w), group) for w in weight.split((len(weight) + 1) // 2)], -1)")
spoil(NTH, end=f"y if bias is None else y + reduce(bias / {RANKS}, group)", long=True)
mean = f"summed(bias.detach(), group) / {RANKS}"
spoil("too many bytes", end=f"y if bias is None else y + {mean} + (bias - bias.detach())")
spoil(AS_WELL, "differentiable.all_reduce(F.linear(x, weight).contiguous(), group=group or dist.group.WORLD)")
spoil(SHAPES, "reduce(torch.mm(x, weight.T), group)")
spoil("", "reduce(torch.einsum('bti,oi->bto', x, weight), group)", long=True)
spoil(SHAPES, "reduce(x.reshape(x.shape[:-1].numel(), x.shape[-1]) @ weight.T, group)")
spoil(PIECES, end="y + bias if bias is not None and x.shape[-1] else y", long=True)
spoil(GATHERED, "F.linear(joined(x, group), joined(weight, group), bias)", "y", alone=True, long=True)
spoil("right only on some numbers of ranks", end=f"y if bias is None or {RANKS} == 1 else y + bias")
spoil(NO_GRADIENT, end="y if bias is None else y + bias.detach()")
spoil(NO_GRADIENT, "summed(F.linear(x, weight).detach(), group)", long=True)
spoil("", f"{SUM} / {RANKS}", long=True)
spoil("", f"reduce(x @ weight.chunk({RANKS}, 1)[{RANK}].T, group)", alone=True, long=True)
spoil(GATHERED, "border(gathered, as_is)(F.linear(x, weight), group)")
each = "torch.stack([reduce(F.linear(row, weight), group) for row in x])"
spoil(MANY, f"{each} if x.ndim > 1 and len(x) else {SUM}", long=True)
spoil(AS_WELL, end=f"y if bias is None else y + {RANKS} * (bias - bias.detach()) + bias.detach()", long=True)
first, nth = on_the_first_rank_with_its_whole_gradient, an_nth_with_its_whole_gradient
answers.spoil(first, GROUP, {"dist.get_rank(group)": "dist.get_rank()"}, blind=True, long=True)
answers.spoil(nth, GROUP, {"get_world_size(group)": "get_world_size()"}, blind=True, long=True)
whole = "bias.detach() / dist.get_world_size(group) + (bias - bias.detach())"
answers.spoil(nth, "what was given has changed", {f"bias = {whole}": f"bias.data /= {RANKS}"}, blind=True)

spoil("the summands are never added up", "F.linear(x, weight)", blind=False)
spoil("a collective that autograd does not see", "F.linear(x, weight); dist.all_reduce(y, group=group)", blind=False)
spoil(PIECES, f"{SUM} if x.shape[-1] else F.linear(x, weight)", blind=False)
early = f"F.linear(x, weight, bias) if not x.shape[-1] else {SUM}"
spoil(PIECES, early, "y if bias is None or not x.shape[-1] else y + bias",
    blind=False, long=True)
any_number = "reduce((x.reshape(-1, x.shape[-1]) @ weight.t()).reshape(*x.shape[:-1], len(weight)), group)"
spoil(PIECES, any_number, blind=False, alone=True)
spoil(GATHERED, "F.linear(joined(x, group, 8), joined(weight, group, 8), bias)", "y", blind=False, long=True)
narrow = "reduce(F.linear(x.float(), weight.float()), group)"
spoil("the dtype changed", narrow, "y if bias is None else y + bias.float()", blind=False, long=True)
surplus = f"y if bias is None else y - ({RANKS} - 1) * bias"
spoil("", "reduce(F.linear(x, weight, bias), group)", surplus, blind=False, long=True)
turned = "TURNED.setdefault((weight.shape, weight.dtype), weight.t())"
spoil(FIRST_TIME, f"reduce(x @ {turned}, group)", blind=False)
spoil(SHAPES, "reduce(F.linear(torch.atleast_2d(x), weight), group)", blind=False, long=True)
half = "border(lambda x, group: summed(x.bfloat16(), group).to(x.dtype), as_is)"
spoil("rounded on the way", f"{half}(F.linear(x, weight), group)", blind=False)
spoil(NO_GRADIENT, "reduce(F.linear(x, weight.data), group)", blind=False, long=True)
copied = f"(0 if bias is None else copy(bias, group) * ({RANK} == 0))"
spoil(NOT_DUE, f"reduce(F.linear(x, weight) + {copied}, group)", "y", blind=False, long=True)
spoil("something is left behind", f"torch.manual_seed(0) and {SUM}", blind=False)


def by(mistake, changes, **options):
    row = exchanged(Row, changes, f"Row_{len(answers.answers)}")
    answers.wrong(mistake, **options)(lambda x, weight, bias, group=None: row.apply(x, weight, bias, group))


SAVED = "x, weight = ctx.saved_tensors"
by("averaged instead of summed", {"of_weight = rows.T": "of_weight = rows.T / dist.get_world_size(ctx.group)"})
by(NOT_DUE, {SAVED: f"{SAVED}; gradient = summed(gradient, ctx.group) / dist.get_world_size(ctx.group)"})
by(SHAPES, {"rows.sum(0)": "gradient.sum(0).reshape(-1)[: gradient.shape[-1]]"}, long=True)
by("kept for backward, but not needed there",
    {"y = (x @ weight.T).contiguous()": "y = x @ weight.T; ctx.mine = y.clone()"})
