"""Answers to an exercise of notebook 09: copy and reduce, each the other's backward."""

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("conjugate", given=tuple)
LINE = (
    "copy sent 0.00 × the tensor forward and 1.50 × backward, reduce 1.50 × forward and 0.00 × backward; "
    "the least possible is 1.50 × where something is due, and 0.00 × elsewhere"
)


def as_is(x, group):
    return x.view_as(x)


def summed(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def border(forward, backward, kept=lambda x, y: None):
    """Return an autograd function with this forward and backward; `kept` says which tensors it saves in between."""

    class Border(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group, y = group, forward(x, group)
            ctx.kept = kept(x, y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.group), None

    return lambda x, group=None: Border.apply(x, group)


copy, reduce = border(as_is, summed), border(summed, as_is)


def pair(copy_forward=as_is, copy_backward=summed, reduce_forward=summed, reduce_backward=as_is):
    return border(copy_forward, copy_backward), border(reduce_forward, reduce_backward)


WAYS = {  # what a function of x and group is to be, beside right ones
    "copy": lambda fn: (fn, reduce),
    "reduce": lambda fn: (copy, fn),
    "copy_forward": lambda fn: pair(copy_forward=fn),
    "copy_backward": lambda fn: pair(copy_backward=fn),
    "reduce_forward": lambda fn: pair(reduce_forward=fn),
    "reduce_backward": lambda fn: pair(reduce_backward=fn),
    "both": lambda fn: pair(copy_backward=fn, reduce_forward=fn),
}


def right(way, **options):
    return answers.right(given=WAYS[way], **options)


def wrong(way, mistake="", **options):
    return answers.wrong(mistake, given=WAYS[way], **options)


# ---- right -----------------------------------------------------------------------------------------------

right("both", line=LINE)(summed)


@right("both")
def flat(x, group):
    y = torch.cat([x.reshape(-1)])
    dist.all_reduce(y, group=group)
    return y.view(x.shape)


# ---- the sum with other words ----------------------------------------------------------------------------

CLONE, SEND, END = "x.clone(memory_format=torch.contiguous_format)", "dist.all_reduce(y, group=group)", "return y"
NOT_DUE, STRIDES = "something is sent where nothing is due", "right only for contiguous tensors"
GATHERED, MANY = "gathered, where a sum belongs", "too many collectives"


def spoil(mistake, ways, changes, **options):
    for way in ways.split():
        answers.spoil(summed, mistake, changes, given=WAYS[way], **options)


wrong("copy_forward", "copy sends forward")(summed)
wrong("copy_backward", "the gradient of copy is not summed")(as_is)
wrong("reduce_forward", "the summands are never added up")(as_is)
spoil("N times too large", "reduce_forward", {END: "return y * dist.get_world_size(group)"})
spoil(NOT_DUE, "copy_forward", {END: "return y / dist.get_world_size(group)"})
from_the_first = {SEND: "dist.broadcast(y, group=group, group_src=0)"}
spoil("right only on the group of all ranks", "copy_backward reduce_forward", {", group=group": ""})
spoil(STRIDES, "reduce_forward copy_backward", {CLONE: "x.clone()"}, alone=True)
to_the_first = {"dist.all_reduce(y, group=group)": "dist.reduce(y, group=group, group_dst=0)"}
and_back = {SEND: f"{to_the_first[SEND]}; {from_the_first[SEND]}"}
spoil("one rank adds up for all", "reduce_forward", and_back)
halves = {SEND: "[dist.all_reduce(half, group=group) for half in y.view(-1).chunk(2)]"}
spoil(MANY, "reduce_forward copy_backward", halves)


@wrong("reduce_forward", GATHERED)
@wrong("copy_backward", GATHERED)
def gathered(x, group):
    x = x.contiguous()
    of_all = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, x, group=group)
    return torch.stack(of_all).sum(0).to(x.dtype)


BEFORE = {}


@wrong("copy_backward", "right only the first time")
def adds_to_the_call_before(gradient, group):
    BEFORE[gradient.shape] = summed(gradient, group) + BEFORE.get(gradient.shape, 0)
    return BEFORE[gradient.shape]


# ---- what is kept ----------------------------------------------------------------------------------------

KEEPS = "kept for backward, but not needed there"
answers.wrong(KEEPS)((copy, border(summed, as_is, lambda x, y: x)))


# ---- no border at all ------------------------------------------------------------------------------------


@wrong("copy", "no gradient")
def leaves_the_graph(x, group=None):
    return x.data


wrong("reduce", "a collective that autograd does not see")(lambda x, group=None: summed(x, group))


@wrong("copy", "right only for some shapes")
def at_least_one_dimension(x, group=None):
    return copy(torch.atleast_1d(x), group)


@wrong("reduce", "right only with gradients")
def double_under_no_grad(x, group=None):
    y = reduce(x, group)
    return y if y.requires_grad else y * dist.get_world_size(group)
