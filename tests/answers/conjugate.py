"""Answers to an exercise of notebook 09: copy and reduce, each the other's backward."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed import ReduceOp  # noqa: F401 (it stands in words that are exchanged)
from torch.distributed.nn import functional as differentiable

from labs.dtensor import Partial, Replicate
from labs.dtensor.redistribute import Line
from labs.tp.conjugate import Border
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
    """A function with this forward, and this one for its gradient; what it keeps of both sides meanwhile."""

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

right("both", line=LINE, blind=True)(summed)
right("copy_forward", blind=True, long=True)(lambda x, group: x)
right("reduce_backward", blind=True, long=True)(lambda gradient, group: gradient)
right("reduce_backward", long=True)(lambda gradient, group: gradient.clone())


@right("both", blind=True)
def waited_for(x, group):
    total = x.detach().contiguous()
    if total.data_ptr() == x.data_ptr():
        total = total.clone()
    dist.all_reduce(total, group=group, async_op=True).wait()
    return total


@right("both", blind=True, long=True)
def flat(x, group):
    y = torch.cat([x.reshape(-1)])
    dist.all_reduce(y, group=group)
    return y.view(x.shape)


@right("both", blind=True, long=True)
def nothing_for_one_rank(x, group):
    return x.view_as(x) if dist.get_world_size(group) == 1 else summed(x, group)


@right("both", long=True)
def by_functional_collectives(x, group):
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group or dist.group.WORLD))


@right("both", long=True)
def by_pieces(x, group):
    """An exchange of pieces, a sum of them, and a gather."""
    ranks = dist.get_world_size(group)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % ranks))
    pieces = torch.empty_like(flat)
    dist.all_to_all_single(pieces, flat, group=group)
    mine = pieces.view(ranks, -1).sum(0)
    whole = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(whole, mine, group=group)
    return torch.cat(whole)[: x.numel()].view(x.shape)


@answers.right(blind=True, long=True, given=lambda borders: borders())
def the_courses_own():
    def of(before, after):
        def border(x, group=None):
            line = Line(tuple(x.shape), dist.get_world_size(group), dist.get_rank(group), group)
            return Border.apply(x, line, before, after)

        return border

    whole, split = (Replicate(), Replicate()), (Partial(), Replicate())
    return of(whole, split), of(split, whole)


@answers.right(blind=True, given=lambda borders: borders())
def with_a_context_of_their_own():
    def of(there, back):
        class Border(torch.autograd.Function):
            @staticmethod
            def forward(x, group):
                return there(x, group)

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.group = inputs[1]

            @staticmethod
            def backward(ctx, gradient):
                return back(gradient, ctx.group), None

        return lambda x, group=None: Border.apply(x, group)

    return of(as_is, summed), of(summed, lambda gradient, group: gradient)


class CopyAgain(torch.autograd.Function):
    """Each is the other's backward: second derivatives, too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ReduceAgain.apply(gradient, ctx.group), None


class ReduceAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return CopyAgain.apply(gradient, ctx.group), None


@answers.right(long=True, given=lambda borders: borders())
def each_the_others_backward():
    return lambda x, group=None: CopyAgain.apply(x, group), lambda x, group=None: ReduceAgain.apply(x, group)


@right("copy")
def by_a_hook(x, group=None):
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: summed(gradient, group))
    return y


@right("reduce", long=True)
def by_the_difference(x, group=None):
    """The sum, with the gradient of the summand."""
    with torch.no_grad():
        others = summed(x, group) - x
    return x + others


@right("copy", long=True)
def unless_alone(x, group=None):
    return x if dist.get_world_size(group) == 1 else copy(x, group)


# ---- the sum with other words ----------------------------------------------------------------------------

CLONE, SEND, END = "x.clone(memory_format=torch.contiguous_format)", "dist.all_reduce(y, group=group)", "return y"
NOT_DUE, IN_PLACE, STRIDES = (
    "something is sent where nothing is due",
    "what was given has changed",
    "right only for contiguous tensors",
)
GATHERED, MANY, ROUNDED = "gathered, where a sum belongs", "too many collectives", "rounded on the way"


def spoil(mistake, ways, changes, blind=True, **options):
    for place, way in enumerate(ways.split()):
        answers.spoil(summed, mistake, changes, given=WAYS[way], blind=blind, **({"long": place > 0} | options))


wrong("copy_forward", "copy sends forward")(summed)
wrong("reduce_backward", "the gradient is summed as well", blind=True)(summed)
wrong("copy_backward", "the gradient of copy is not summed", blind=True)(as_is)
wrong("reduce_forward", "the summands are never added up")(as_is)
answers.wrong("copy sends forward", blind=True, long=True)(pair(summed, as_is, as_is, summed))

spoil("averaged instead of summed", "copy_backward reduce_forward", {END: "return y / dist.get_world_size(group)"})
spoil("N times too large", "reduce_forward", {END: "return y * dist.get_world_size(group)"}, blind=False)
spoil(NOT_DUE, "copy_forward", {END: "return y / dist.get_world_size(group)"})
spoil(NOT_DUE, "reduce_backward", {END: "return y / dist.get_world_size(group)"}, blind=False, long=True)
from_the_first = {SEND: "dist.broadcast(y, group=group, group_src=0)"}
spoil(NOT_DUE, "copy_forward reduce_backward", from_the_first, long=True)
barrier = {CLONE: "x.view_as(x)", SEND: "dist.barrier(group=group)"}
spoil(NOT_DUE, "reduce_backward copy_forward", barrier, blind=False)
spoil("right only on the group of all ranks", "copy_backward reduce_forward", {", group=group": ""})
spoil(IN_PLACE, "copy_backward", {CLONE: "x"}, long=True)
spoil(IN_PLACE, "copy_backward reduce_forward", {CLONE: "x.contiguous()"})
spoil(STRIDES, "reduce_forward copy_backward", {CLONE: "x.clone()"}, alone=True)
spoil(IN_PLACE, "reduce_forward", {CLONE: "x"}, alone=True, long=True)
spoil(IN_PLACE, "reduce_forward", {CLONE: "x.detach()"}, alone=True, long=True)
spoil(STRIDES, "both", {CLONE: "torch.empty_like(x).copy_(x)"}, alone=True, long=True)
spoil("nobody waited", "copy_backward", {"group=group": "group=group, async_op=True"}, blind=False)
to_the_first = {"dist.all_reduce(y, group=group)": "dist.reduce(y, group=group, group_dst=0)"}
spoil("", "reduce_forward", to_the_first, long=True)
and_back = {SEND: f"{to_the_first[SEND]}; {from_the_first[SEND]}"}
spoil("one rank adds up for all", "reduce_forward", and_back)
halves = {SEND: "[dist.all_reduce(half, group=group) for half in y.view(-1).chunk(2)]"}
spoil(MANY, "reduce_forward copy_backward", halves)
spoil(MANY, "reduce_forward", {SEND: "[dist.all_reduce(row, group=group) for row in y]"}, long=True)
rows = {SEND: "[dist.all_reduce(row, group=group) for row in (y if y.ndim else [y])]"}
spoil(MANY, "reduce_forward copy_backward", rows, blind=False, long=True)
spoil(ROUNDED, "reduce_forward copy_backward", {"x.clone": "x.float().clone", END: "return y.to(x.dtype)"})
half = {"x.clone": "x.bfloat16().clone", END: "return y.to(x.dtype)"}
spoil(ROUNDED, "reduce_forward", half, blind=False, long=True)
twice_as_wide = {"x.clone": "x.double().clone", END: "return y.to(x.dtype)"}
spoil("a different dtype travels", "reduce_forward", twice_as_wide, blind=False)
spoil("the dtype changed", "reduce_forward", {"x.clone": "x.float().clone"})
spoil(STRIDES, "copy_backward",
    {CLONE: "x.view(-1).clone()",
     END: "return y.view(x.shape)"}, alone=True, long=True)
spoil("", "reduce_forward", {"group=group": "group=group, op=ReduceOp.MAX"}, blind=False, long=True)
here = "(torch.arange(y.numel()).view(y.shape) % dist.get_world_size(group) == dist.get_rank(group))"
spoil("", "copy_backward", {END: f"return y * {here}"}, blind=False, long=True)
shapes = "dist.all_gather_object([None] * dist.get_world_size(group), x.shape, group=group)"
spoil("a different dtype travels", "reduce_forward", {SEND: f"{shapes}; {SEND}"}, blind=False, long=True)
zeros = {
    CLONE: f"{CLONE} if x.any() else None",
    SEND: f"x.any() and {SEND}",
    END: "return x.clone() if y is None else y",
}
spoil("one side of a message or a collective is missing", "copy_backward", zeros, blind=False, alone=True, long=True)
wrong("reduce_backward", "averaged instead of summed", blind=True, long=True)(
    lambda gradient, group: gradient / dist.get_world_size(group))
wrong("reduce_backward", "the gradient is summed as well", blind=True, long=True)(
    lambda gradient, group: gradient.mul_(dist.get_world_size(group)))
wrong("reduce_backward", long=True)(lambda gradient, group: gradient * (dist.get_rank(group) == 0))


@wrong("reduce_forward", GATHERED, blind=True)
@wrong("copy_backward", GATHERED, blind=True, long=True)
def gathered(x, group):
    x = x.contiguous()
    of_all = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, x, group=group)
    return torch.stack(of_all).sum(0).to(x.dtype)


@wrong("reduce_forward", "too many bytes")
def whole_tensors_in_a_ring(x, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = travels = x.contiguous()
    for _ in range(ranks - 1):
        arrived = torch.empty_like(travels)
        works = [
            dist.isend(travels, group=group, group_dst=(rank + 1) % ranks),
            dist.irecv(arrived, group=group, group_src=(rank - 1) % ranks),
        ]
        for work in works:
            work.wait()
        total, travels = total + arrived, arrived
    return total.clone()


BUFFERS, BEFORE, KEPT, LATEST = {}, {}, [], []


@wrong("reduce_forward", "a later call writes into what this one returned", long=True)
def into_one_buffer(x, group):
    y = BUFFERS.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)).copy_(x)
    dist.all_reduce(y, group=group)
    return y.view_as(y)


@wrong("copy_backward", "right only the first time")
def adds_to_the_call_before(gradient, group):
    BEFORE[gradient.shape] = summed(gradient, group) + BEFORE.get(gradient.shape, 0)
    return BEFORE[gradient.shape]


# ---- what is kept ----------------------------------------------------------------------------------------

KEEPS = "kept for backward, but not needed there"
answers.wrong(KEEPS, blind=True)((copy, border(summed, as_is, lambda x, y: x)))
answers.wrong(KEEPS, blind=True)((border(as_is, summed, lambda x, y: x.clone()), reduce))
answers.wrong(KEEPS, blind=True, long=True)((copy, border(summed, as_is, lambda x, y: y.detach())))
answers.wrong(KEEPS, long=True)((border(as_is, summed, lambda x, y: x), reduce))


@wrong("reduce", "something is kept from every call", alone=True)
def remembers(x, group=None):
    KEPT.append(y := reduce(x, group))
    return y


# ---- no border at all ------------------------------------------------------------------------------------


@wrong("copy", "no gradient")
def leaves_the_graph(x, group=None):
    return x.data


@wrong("reduce", "no gradient", blind=True, long=True)
def detached(x, group=None):
    return summed(x.detach(), group)


wrong("reduce", "a collective that autograd does not see")(lambda x, group=None: summed(x, group))


@wrong("reduce", "the gradient is summed as well", blind=True)
def torchs_all_reduce(x, group=None):
    return differentiable.all_reduce(x.contiguous(), group=group or dist.group.WORLD)


@wrong("reduce", "nothing is returned")
def forgets_to_return(x, group=None):
    reduce(x, group)


@wrong("copy", "right only on the group of all ranks", long=True)
def of_the_latest_group(x, group=None):
    LATEST[:] = [group]
    return border(as_is, lambda gradient, group: summed(gradient, LATEST[0]))(x, group)


@wrong("copy", long=True)
def a_hook_on_x_itself(x, group=None):
    if x.requires_grad:
        x.register_hook(lambda gradient: summed(gradient, group))
    return x


@wrong("copy", "no gradient", long=True)
def a_new_leaf(x, group=None):
    y = x.detach().requires_grad_()
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


@wrong("copy", long=True)
def a_hook_in_any_case(x, group=None):
    y = x.view_as(x)
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


@wrong("copy", "right only for some shapes", long=True)
def at_least_one_dimension(x, group=None):
    return copy(torch.atleast_1d(x), group)


@wrong("reduce", "right only for some shapes", long=True)
def nothing_of_nothing(x, group=None):
    return reduce(x, group) if x.numel() else x.new_zeros(0, requires_grad=x.requires_grad)


@wrong("copy", "something is left behind")
def turns_gradients_on(x, group=None):
    torch.set_grad_enabled(True)
    return copy(x, group)


@wrong("reduce", "something is left behind", long=True)
def a_group_of_its_own(x, group=None):
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return reduce(x, dist.new_group(ranks, use_local_synchronization=True))


@wrong("reduce", "right only with gradients")
def double_under_no_grad(x, group=None):
    y = reduce(x, group)
    return y if y.requires_grad else y * dist.get_world_size(group)
