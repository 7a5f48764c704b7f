import sys

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labs.tp.conjugate import Border
from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.redistribute import Line
from labs.tp.shares import Keys, Queries
from labs.tp import ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan

cloudpickle.register_pickle_by_value(sys.modules[__name__])
NAMES = ("conjugate", "row_linear", "deal_heads", "split_loss", "block_plan")
RIGHT = {n: [] for n in NAMES}
WRONG = {n: [] for n in NAMES}


def right(exercise):
    def add(fn):
        RIGHT[exercise].append((fn.__name__, (fn,)))
        return fn
    return add


def wrong(exercise):
    def add(fn):
        WRONG[exercise].append((fn.__name__, (fn,)))
        return fn
    return add


# ================================================================ 1 conjugate
def summed(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def as_is(x, group):
    return x.view_as(x)


def pair(copy_forward=as_is, copy_backward=summed, reduce_forward=summed, reduce_backward=as_is):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return copy_forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return copy_backward(gradient, ctx.group), None

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return reduce_forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return reduce_backward(gradient, ctx.group), None

    def copy(x, group=None):
        return Copy.apply(x, group)

    def reduce(x, group=None):
        return Reduce.apply(x, group)

    return copy, reduce


def R(name, *fns):
    RIGHT["conjugate"].append((name, fns))


def W(name, *fns):
    WRONG["conjugate"].append((name, fns))


R("standard", *pair())
R("return_x_itself", *pair(copy_forward=lambda x, g: x, reduce_backward=lambda x, g: x))


def by_new_empty(x, group):
    total = x.new_empty(x.shape)
    total.copy_(x)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


R("new_empty_copy", *pair(copy_backward=by_new_empty, reduce_forward=by_new_empty))


def by_async(x, group):
    total = x.detach().contiguous()
    if total.data_ptr() == x.data_ptr():
        total = total.clone()
    dist.all_reduce(total, group=group, async_op=True).wait()
    return total


R("contiguous_then_clone_async_wait", *pair(copy_backward=by_async, reduce_forward=by_async))


def line_of(x, group):
    return Line(tuple(x.shape), dist.get_world_size(group), dist.get_rank(group), group)


def course_copy(x, group=None):
    return Border.apply(x, line_of(x, group), (Replicate(), Replicate()), (Partial(), Replicate()))


def course_reduce(x, group=None):
    return Border.apply(x, line_of(x, group), (Partial(), Replicate()), (Replicate(), Replicate()))


R("courses_border", course_copy, course_reduce)


class CopyNew(torch.autograd.Function):
    @staticmethod
    def forward(x, group):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class ReduceNew(torch.autograd.Function):
    @staticmethod
    def forward(x, group):
        return summed(x, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_new(x, group=None):
    return CopyNew.apply(x, group)


def reduce_new(x, group=None):
    return ReduceNew.apply(x, group)


R("setup_context", copy_new, reduce_new)


def skip_alone(x, group):
    if dist.get_world_size(group) == 1:
        return x.view_as(x)
    return summed(x, group)


R("nothing_for_one_rank", *pair(copy_backward=skip_alone, reduce_forward=skip_alone))


def flat_sum(x, group):
    flat = torch.cat([x.reshape(-1)])
    dist.all_reduce(flat, group=group)
    return flat.view(x.shape)


R("flat_buffer", *pair(copy_backward=flat_sum, reduce_forward=flat_sum))

# table: copy as it is forward, all-reduce backward; reduce the other way
W("swapped", *pair(summed, as_is, as_is, summed))


def in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def in_place_dirty(x, group):
    y = x.contiguous()
    dist.all_reduce(y, group=group)
    return y


def in_place_detached(x, group):
    y = x.detach()
    dist.all_reduce(y, group=group)
    return y


# neither x nor the gradient that comes in is yours to change
W("reduce_in_place", *pair(reduce_forward=in_place))
W("reduce_in_place_mere_contiguous", *pair(reduce_forward=in_place_dirty))
W("reduce_in_place_detach", *pair(reduce_forward=in_place_detached))
W("copy_backward_in_place", *pair(copy_backward=in_place))
W("copy_backward_mere_contiguous", *pair(copy_backward=in_place_dirty))


def plain_clone(x, group):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def like_copy(x, group):
    y = torch.empty_like(x).copy_(x)
    dist.all_reduce(y, group=group)
    return y


# clone() keeps the strides, ranks may have different ones / needs a contiguous tensor
W("reduce_plain_clone", *pair(reduce_forward=plain_clone))
W("copy_backward_plain_clone", *pair(copy_backward=plain_clone))
W("both_empty_like", *pair(copy_backward=like_copy, reduce_forward=like_copy))
# reduce's backward: the gradient as it is (here the sum over ranks, N times too large)
W("reduce_backward_sums", *pair(reduce_backward=summed))
# copy's backward: all-reduce
W("copy_backward_as_is", *pair(copy_backward=as_is))


def summed_all(x, group):
    return summed(x, None)


# ctx.group is the group of ranks
W("copy_forgets_group", *pair(copy_backward=summed_all))
W("reduce_forgets_group", *pair(reduce_forward=summed_all))


def mean(x, group):
    return summed(x, group) / dist.get_world_size(group)


# the sum
W("copy_backward_mean", *pair(copy_backward=mean))
W("reduce_mean", *pair(reduce_forward=mean))


def by_gather(x, group):
    x = x.contiguous()
    all_of_them = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, x, group=group)
    return torch.stack(all_of_them).sum(0).to(x.dtype)


# each border sends one all-reduce
W("reduce_by_all_gather", *pair(reduce_forward=by_gather))
W("copy_backward_by_all_gather", *pair(copy_backward=by_gather))


def by_reduce_broadcast(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group=group, group_dst=0)
    dist.broadcast(y, group=group, group_src=0)
    return y


# each border sends one all-reduce (here two collectives)
W("reduce_by_reduce_and_broadcast", *pair(reduce_forward=by_reduce_broadcast))


def in_halves(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    for half in y.view(-1).chunk(2):
        dist.all_reduce(half, group=group)
    return y


# one all-reduce
W("reduce_in_two_halves", *pair(reduce_forward=in_halves))
W("copy_backward_in_two_halves", *pair(copy_backward=in_halves))


class SavingReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.save_for_backward(x)
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class KeepingCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.x = group, x.clone()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class KeepingReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = summed(x, group)
        ctx.total = total.detach()
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def saving_reduce(x, group=None):
    return SavingReduce.apply(x, group)


def keeping_copy(x, group=None):
    return KeepingCopy.apply(x, group)


def keeping_reduce(x, group=None):
    return KeepingReduce.apply(x, group)


COPY, REDUCE = pair()
# keeps nothing for backward
W("reduce_saves_x", COPY, saving_reduce)
W("copy_keeps_x_clone_in_ctx", keeping_copy, REDUCE)
W("reduce_keeps_total_in_ctx", COPY, keeping_reduce)


def in_float32(x, group):
    return summed(x.float(), group).to(x.dtype)


def to_float32(x, group):
    return summed(x.float(), group)


# for any dtype (float64 loses digits; the result is float32)
W("reduce_through_float32", *pair(reduce_forward=in_float32))
W("reduce_gives_float32", *pair(reduce_forward=to_float32))
W("copy_backward_through_float32", *pair(copy_backward=in_float32))


def forward_checked(x, group):
    total = summed(x, group)
    return (total / dist.get_world_size(group)).to(x.dtype)


# nothing in the other direction; x as it is
W("copy_forward_averages", *pair(copy_forward=forward_checked))


def from_first(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(y, group=group, group_src=0)
    return y


# nothing in the other direction
W("copy_forward_broadcasts", *pair(copy_forward=from_first))
W("reduce_backward_broadcasts", *pair(reduce_backward=from_first))


def viewed(x, group):
    flat = x.view(-1).clone()
    dist.all_reduce(flat, group=group)
    return flat.view(x.shape)


# with gradients that are not contiguous
W("copy_backward_view_flat", *pair(copy_backward=viewed))


def by_rows(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    for row in y:
        dist.all_reduce(row, group=group)
    return y


# any shape (0-dim has no rows), one all-reduce
W("reduce_row_by_row", *pair(reduce_forward=by_rows))


def torchs_reduce(x, group=None):
    import torch.distributed.nn.functional as DF

    return DF.all_reduce(x.contiguous(), group=group or dist.group.WORLD)


# the gradient as it is; (the backward of torch.distributed.nn.functional.all_reduce adds up)
W("torchs_all_reduce", COPY, torchs_reduce)


def detached_reduce(x, group=None):
    return summed(x.detach(), group)


# its gradient: autograd function with a gradient for each argument
W("reduce_detached", COPY, detached_reduce)


def only_first(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group=group, group_dst=0)
    return y


# the sum (on every rank)
W("reduce_to_rank_0_only", *pair(reduce_forward=only_first))
# the gradient as it is (an N-th)
W("reduce_backward_nth", *pair(reduce_backward=lambda x, g: x / dist.get_world_size(g)))
# returns the gradient in another memory: not wrong; instead changes the incoming gradient in reduce's backward
W("reduce_backward_in_place_scale", *pair(reduce_backward=lambda x, g: x.mul_(dist.get_world_size(g))))


# ================================================================ 2 row_linear
def reduce(x, group=None):
    return REDUCE(x, group)


@right("row_linear")
def rl_plain(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    return y if bias is None else y + bias


@right("row_linear")
def rl_linear_border(x, weight, bias, group=None):
    y = course_reduce(F.linear(x, weight), group)
    if bias is not None:
        y = y + bias
    return y


@right("row_linear")
def rl_einsum(x, weight, bias, group=None):
    y = reduce(torch.einsum("...i,oi->...o", x, weight), group)
    return torch.add(y, bias) if bias is not None else y


@right("row_linear")
def rl_flatten(x, weight, bias, group=None):
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = reduce(torch.mm(flat, weight.t()), group)
    if bias is not None:
        y = y + bias[None]
    return y.view(*x.shape[:-1], weight.shape[0])


@right("row_linear")
def rl_in_place_add(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    if bias is not None:
        y += bias
    return y


@right("row_linear")
def rl_first_rank_with_whole_gradient(x, weight, bias, group=None):
    if bias is None:
        return reduce(F.linear(x, weight), group)
    if dist.get_rank(group) == 0:
        return reduce(F.linear(x, weight, bias), group)
    return reduce(F.linear(x, weight) + (bias - bias.detach()), group)


@right("row_linear")
def rl_nth_with_whole_gradient(x, weight, bias, group=None):
    if bias is not None:
        bias = bias.detach() / dist.get_world_size(group) + (bias - bias.detach())
    return reduce(F.linear(x, weight, bias), group)


class RowFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = (x @ weight.T).contiguous()
        dist.all_reduce(y, group=group)
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, weight.shape[0])
        of_weight = flat.T @ x.reshape(len(flat), weight.shape[1])
        return gradient @ weight, of_weight, flat.sum(0) if ctx.has_bias else None, None


@right("row_linear")
def rl_own_function(x, weight, bias, group=None):
    return RowFunction.apply(x, weight, bias, group)


@wrong("row_linear")  # If each adds it to its summand, the result has it N times
def rl_bias_on_each(x, weight, bias, group=None):
    return reduce(F.linear(x, weight, bias), group)


@wrong("row_linear")  # Add an N-th of it on each rank, and its gradient is an N-th, too
def rl_bias_nth(x, weight, bias, group=None):
    b = None if bias is None else bias / dist.get_world_size(group)
    return reduce(F.linear(x, weight, b), group)


@wrong("row_linear")  # Add the bias on rank 0 alone, and only rank 0's copy learns
def rl_bias_on_first(x, weight, bias, group=None):
    return reduce(F.linear(x, weight, bias if dist.get_rank(group) == 0 else None), group)


@wrong("row_linear")  # as before, others with bias * 0: their gradient is 0
def rl_bias_on_first_times_zero(x, weight, bias, group=None):
    y = x @ weight.T
    if bias is not None:
        y = y + bias * (dist.get_rank(group) == 0)
    return reduce(y, group)


@wrong("row_linear")  # with its bias
def rl_no_bias(x, weight, bias, group=None):
    return reduce(x @ weight.T, group)


@wrong("row_linear")  # or None
def rl_none_unhandled(x, weight, bias, group=None):
    return reduce(x @ weight.T, group) + bias


@wrong("row_linear")  # bias is a tensor [outputs]: its truth is ambiguous
def rl_if_bias(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    if bias:
        y = y + bias
    return y


@wrong("row_linear")  # weight: [outputs, i]
def rl_not_transposed(x, weight, bias, group=None):
    y = reduce(x @ weight, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # in sub-groups
def rl_forgets_group(x, weight, bias, group=None):
    y = reduce(x @ weight.T)
    return y if bias is None else y + bias


@wrong("row_linear")  # nothing backward; x's gradient is its own inputs'
def rl_copy_in_front(x, weight, bias, group=None):
    y = reduce(COPY(x, group) @ weight.T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # gradients of the bias; nothing backward
def rl_copy_of_bias(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    return y if bias is None else y + COPY(bias, group)


@wrong("row_linear")  # gradients of weight; nothing backward
def rl_copy_of_weight(x, weight, bias, group=None):
    y = reduce(x @ COPY(weight, group).T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # one all-reduce forward
def rl_two_halves_of_outputs(x, weight, bias, group=None):
    y = torch.cat([reduce(x @ part.T, group) for part in weight.split(max(1, (len(weight) + 1) // 2))], -1)
    return y if bias is None else y + bias


@wrong("row_linear")  # one all-reduce forward (one for the bias); its gradient is an N-th
def rl_reduces_bias_too(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    return y if bias is None else y + reduce(bias / dist.get_world_size(group), group)


@wrong("row_linear")  # one all-reduce forward: the bias is reduced besides, with the right gradient
def rl_reduces_bias_besides(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    if bias is None:
        return y
    mean = summed(bias.detach(), group) / dist.get_world_size(group)
    return y + mean + (bias - bias.detach())


@wrong("row_linear")  # nothing backward, and gradients N times
def rl_torchs_all_reduce(x, weight, bias, group=None):
    y = torchs_reduce(x @ weight.T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # any number of outer dims
def rl_two_dims_only(x, weight, bias, group=None):
    y = reduce(torch.mm(x, weight.T), group)
    return y if bias is None else y + bias


@wrong("row_linear")  # any number of outer dims
def rl_batched_only(x, weight, bias, group=None):
    y = reduce(torch.einsum("bti,oi->bto", x, weight), group)
    return y if bias is None else y + bias


@wrong("row_linear")  # [..., outputs]
def rl_stays_flat(x, weight, bias, group=None):
    y = reduce(x.reshape(x.shape[:-1].numel(), x.shape[-1]) @ weight.T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # where ranks have no inputs: these, too, have the whole output with its bias
def rl_no_bias_without_inputs(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    return y + bias if bias is not None and x.shape[-1] else y


@wrong("row_linear")  # where ranks have different numbers of inputs
def rl_gathers_inputs(x, weight, bias, group=None):
    n = dist.get_world_size(group)
    xs = [torch.empty_like(x) for _ in range(n)]
    ws = [torch.empty_like(weight) for _ in range(n)]
    dist.all_gather(xs, x.detach().contiguous(), group=group)
    dist.all_gather(ws, weight.detach().contiguous(), group=group)
    r = dist.get_rank(group)
    xs[r], ws[r] = x, weight
    return F.linear(torch.cat(xs, -1), torch.cat(ws, 1), bias)


@wrong("row_linear")  # on 1 rank: with its bias
def rl_one_rank_without_bias(x, weight, bias, group=None):
    if dist.get_world_size(group) == 1:
        return x @ weight.T
    y = reduce(x @ weight.T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # the gradients of bias
def rl_bias_detached(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    return y if bias is None else y + bias.detach()


@wrong("row_linear")  # the gradients of x and weight
def rl_sum_without_autograd(x, weight, bias, group=None):
    y = summed((x @ weight.T).detach(), group)
    return y if bias is None else y + bias


@wrong("row_linear")  # the whole output: a sum, no mean
def rl_mean(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group) / dist.get_world_size(group)
    return y if bias is None else y + bias


@wrong("row_linear")  # weight: its columns for them already
def rl_cuts_weight_again(x, weight, bias, group=None):
    part = weight.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
    y = reduce(x @ part.T, group)
    return y if bias is None else y + bias


@wrong("row_linear")  # in sub-groups: that without process 0 has no bias
def rl_global_first_rank(x, weight, bias, group=None):
    if bias is None:
        return reduce(F.linear(x, weight), group)
    if dist.get_rank() == 0:
        return reduce(F.linear(x, weight, bias), group)
    return reduce(F.linear(x, weight) + (bias - bias.detach()), group)


@wrong("row_linear")  # in sub-groups: N is the group's
def rl_nth_of_the_world(x, weight, bias, group=None):
    if bias is not None:
        bias = bias.detach() / dist.get_world_size() + (bias - bias.detach())
    return reduce(F.linear(x, weight, bias), group)


@wrong("row_linear")  # bias: whole - here it is changed in place
def rl_shrinks_bias_in_place(x, weight, bias, group=None):
    if bias is not None:
        bias.data /= dist.get_world_size(group)
    return reduce(F.linear(x, weight, bias), group)


@wrong("row_linear")  # one all-reduce
def rl_all_gather_sum(x, weight, bias, group=None):
    y = x @ weight.T
    everyone = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, y.detach().contiguous(), group=group)
    y = y + (sum(everyone) - y).detach()
    return y if bias is None else y + bias


@wrong("row_linear")  # one all-reduce: one for each row of the batch
def rl_row_by_row(x, weight, bias, group=None):
    if x.ndim == 1 or not len(x):
        y = reduce(x @ weight.T, group)
    else:
        y = torch.stack([reduce(row @ weight.T, group) for row in x])
    return y if bias is None else y + bias


@wrong("row_linear")  # the gradient of the bias is N times as large
def rl_bias_gradient_times_n(x, weight, bias, group=None):
    y = reduce(x @ weight.T, group)
    if bias is None:
        return y
    n = dist.get_world_size(group)
    return y + n * bias - (n - 1) * bias.detach()


# ================================================================ 3 deal_heads
def sharing(heads, kv_heads, ranks, rank):
    copies, each = ranks // kv_heads, heads // ranks
    kv = rank // copies
    return (
        list(range(rank * each, (rank + 1) * each)),
        [kv],
        list(range(kv * copies, (kv + 1) * copies)),
    )


def bounds(kv_heads, ranks, rank):
    least, more = divmod(kv_heads, ranks)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


@right("deal_heads")
def dh_side_by_side(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    start, stop = bounds(kv_heads, ranks, rank)
    return list(range(start * group, stop * group)), list(range(start, stop)), [rank]


@right("deal_heads")
def dh_in_turn(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    kv = list(range(rank, kv_heads, ranks))
    return [h for h in range(heads) if h // group in kv], kv, [rank]


@right("deal_heads")
def dh_by_cuts(heads, kv_heads, ranks, rank):
    q, k = Queries(heads, kv_heads).cut(heads, 0, ranks), Keys(heads, kv_heads).cut(kv_heads, 0, ranks)
    same = [r for r in range(ranks) if k.starts[r] == k.starts[rank] and k.stops[r] == k.stops[rank]]
    return list(range(q.starts[rank], q.stops[rank])), list(range(k.starts[rank], k.stops[rank])), same


@right("deal_heads")
def dh_tensor_split(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks <= kv_heads:
        kv = torch.arange(kv_heads).tensor_split(ranks)[rank].tolist()
        return [k * group + i for k in kv for i in range(group)], kv, [rank]
    queries = torch.arange(heads).view(ranks, -1)
    of_kv = torch.arange(ranks).view(kv_heads, -1)
    kv = int((of_kv == rank).any(1).nonzero())
    return queries[rank].tolist(), [kv], of_kv[kv].tolist()


@right("deal_heads")
def dh_in_turn_within_group(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        copies = ranks // kv_heads
        kv, place = divmod(rank, copies)
        neighbours = [kv * copies + c for c in range(copies)]
        return list(range(kv * group + place, (kv + 1) * group, copies)), [kv], neighbours
    kv = [k for k in range(kv_heads) if k % ranks == rank]
    return [h for h in range(heads) if h // group % ranks == rank], kv, [rank]


@right("deal_heads")
def dh_cards(heads, kv_heads, ranks, rank):
    """Everybody's hand, one card at a time."""
    group = heads // kv_heads
    hands = [[] for _ in range(ranks)]
    if ranks <= kv_heads:
        sizes = [kv_heads // ranks + (r < kv_heads % ranks) for r in range(ranks)]
        deck = iter(range(kv_heads))
        for hand, size in zip(hands, sizes, strict=True):
            for _ in range(size):
                k = next(deck)
                hand.extend(range(k * group, (k + 1) * group))
    else:
        deck = iter(range(heads))
        for hand in hands:
            hand.extend(next(deck) for _ in range(heads // ranks))
    kvs = [sorted({h // group for h in hand}) for hand in hands]
    return hands[rank], kvs[rank], [r for r in range(ranks) if kvs[r] == kvs[rank]]


@wrong("deal_heads")  # more ranks than kv heads: several neighbours need a copy
def dh_no_sharing(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    start, stop = bounds(kv_heads, ranks, rank)
    return list(range(start * group, stop * group)), list(range(start, stop)), [rank]


@wrong("deal_heads")  # the first ranks get one more
def dh_last_get_more(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    start, stop = bounds(kv_heads, ranks, ranks - 1 - rank)
    start, stop = kv_heads - stop, kv_heads - start
    return list(range(start * group, stop * group)), list(range(start, stop)), [rank]


def with_bounds(heads, kv_heads, ranks, rank, start, stop):
    group = heads // kv_heads
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    return list(range(start * group, stop * group)), list(range(start, stop)), [rank]


@wrong("deal_heads")  # as evenly as possible
def dh_as_torch_chunk(heads, kv_heads, ranks, rank):
    size = -(-kv_heads // ranks)
    return with_bounds(heads, kv_heads, ranks, rank, min(rank * size, kv_heads), min((rank + 1) * size, kv_heads))


@wrong("deal_heads")  # the first ranks get one more (here the last heads are nobody's)
def dh_drops_remainder(heads, kv_heads, ranks, rank):
    size = kv_heads // ranks
    return with_bounds(heads, kv_heads, ranks, rank, rank * size, (rank + 1) * size)


@wrong("deal_heads")  # as evenly as possible: the last rank has all that is left
def dh_last_gets_rest(heads, kv_heads, ranks, rank):
    size = kv_heads // ranks
    return with_bounds(heads, kv_heads, ranks, rank, rank * size, kv_heads if rank == ranks - 1 else (rank + 1) * size)


@wrong("deal_heads")  # as evenly as possible: the first rank has all that is left
def dh_first_gets_rest(heads, kv_heads, ranks, rank):
    size, rest = divmod(kv_heads, ranks)
    return with_bounds(heads, kv_heads, ranks, rank, rank * size + rest * (rank > 0), (rank + 1) * size + rest)


@wrong("deal_heads")  # the first ranks get one more (5 heads on 4 ranks: 1 1 1 2)
def dh_rounded_down(heads, kv_heads, ranks, rank):
    return with_bounds(heads, kv_heads, ranks, rank, rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks)


@wrong("deal_heads")  # the first ranks get one more (6 heads on 4 ranks: 2 1 2 1)
def dh_rounded_up(heads, kv_heads, ranks, rank):
    return with_bounds(heads, kv_heads, ranks, rank, -(-rank * kv_heads // ranks), -(-(rank + 1) * kv_heads // ranks))


@wrong("deal_heads")  # the ranks that have the same ones
def dh_only_itself(heads, kv_heads, ranks, rank):
    q, k, _ = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, [rank]


@wrong("deal_heads")  # (itself included)
def dh_without_itself(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, [r for r in same if r != rank]


@wrong("deal_heads")  # itself included: left out where it is alone only
def dh_alone_has_none(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, same if len(same) > 1 else []


@wrong("deal_heads")  # the ranks that share a head must be neighbours
def dh_sharers_apart(heads, kv_heads, ranks, rank):
    if ranks <= kv_heads:
        return dh_side_by_side(heads, kv_heads, ranks, rank)
    group, kv, place = heads // kv_heads, rank % kv_heads, rank // kv_heads
    each = heads // ranks
    start = kv * group + place * each
    return list(range(start, start + each)), [kv], list(range(kv, ranks, kv_heads))


@wrong("deal_heads")  # query head h reads head h // (H // K)
def dh_reads_modulo(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    kv = list(range(*bounds(kv_heads, ranks, rank)))
    return [h for h in range(heads) if h % kv_heads in kv], kv, [rank]


@wrong("deal_heads")  # If there are enough heads of keys and values, no two ranks share one
def dh_queries_evenly(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    deal = [list(range(*bounds(heads, ranks, r))) for r in range(ranks)]
    kvs = [sorted({h // group for h in q}) for q in deal]
    return deal[rank], kvs[rank], [r for r in range(ranks) if set(kvs[r]) & set(kvs[rank])]


@wrong("deal_heads")  # the ranks that have the same ones
def dh_all_ranks_share(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, same if ranks <= kv_heads else list(range(ranks))


@wrong("deal_heads")  # it is not the number of the process that calls you
def dh_own_rank(heads, kv_heads, ranks, rank):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return dh_side_by_side(heads, kv_heads, ranks, rank % ranks)


@wrong("deal_heads")  # Give every rank its query heads: those that share each have the whole group
def dh_whole_group_each(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    group = heads // kv_heads
    return [h for h in range(heads) if h // group in k], k, same


@wrong("deal_heads")  # the heads of keys and values that these read: not all of them
def dh_all_kv_everywhere(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, list(range(kv_heads)), list(range(ranks))


@wrong("deal_heads")  # the heads of keys and values that these read: each once
def dh_one_kv_a_query(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, [h // (heads // kv_heads) for h in q], same


@wrong("deal_heads")  # With more ranks than kv_heads (here: wherever it does not come out even)
def dh_uneven_taken_for_sharing(heads, kv_heads, ranks, rank):
    if kv_heads % ranks == 0:
        return dh_side_by_side(heads, kv_heads, ranks, rank)
    copies = max(1, ranks // kv_heads)
    kv = rank // copies
    each = heads // ranks
    return list(range(rank * each, (rank + 1) * each)), [kv], list(range(kv * copies, (kv + 1) * copies))


@wrong("deal_heads")  # query head h reads h // (H // K): the offset of the group is forgotten
def dh_group_offset_forgotten(heads, kv_heads, ranks, rank):
    if ranks <= kv_heads:
        return dh_side_by_side(heads, kv_heads, ranks, rank)
    copies, each = ranks // kv_heads, heads // ranks
    place = rank % copies
    return list(range(place * each, (place + 1) * each)), [rank // copies], sharing(heads, kv_heads, ranks, rank)[2]


@wrong("deal_heads")  # numbers of heads: here counted from 0 on each rank
def dh_local_numbers(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return [h - q[0] for h in q], [h - k[0] for h in k], same


@wrong("deal_heads")  # numbers in order
def dh_queries_out_of_order(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    group = heads // kv_heads
    return sorted(q, key=lambda h: (h % group, h)), k, same


@wrong("deal_heads")  # numbers in order: itself first among the sharers
def dh_itself_first(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, [rank, *(r for r in same if r != rank)]


@wrong("deal_heads")  # numbers in order: heads of keys and values backwards
def dh_kv_backwards(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k[::-1], same


@wrong("deal_heads")  # Budget: no message
def dh_asks_others(heads, kv_heads, ranks, rank):
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (heads, kv_heads))
    return dh_side_by_side(heads, kv_heads, ranks, rank)


@wrong("deal_heads")  # ranks that have the latter: the last one is forgotten
def dh_sharers_off_by_one(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, same[:-1] or same


@wrong("deal_heads")  # the heads that these read: queries in turn, keys side by side
def dh_mixed(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return sharing(heads, kv_heads, ranks, rank)
    _, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    q, _, _ = dh_in_turn(heads, kv_heads, ranks, rank)
    return q, k, same


@wrong("deal_heads")  # queries of the head that the rank has: in the shared case dealt in turn over all
def dh_shared_queries_in_turn(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q if ranks <= kv_heads else list(range(rank, heads, ranks)), k, same


@wrong("deal_heads")  # several neighbours: works for two only
def dh_two_sharers_only(heads, kv_heads, ranks, rank):
    q, k, same = dh_side_by_side(heads, kv_heads, ranks, rank)
    return q, k, same if ranks <= kv_heads else sorted((rank, rank ^ 1))


@wrong("deal_heads")  # more ranks than kv_heads: beyond the first kv_heads nobody has any
def dh_spare_ranks_idle(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        has = rank < kv_heads
        return list(range(rank * group, (rank + 1) * group)) * has, [rank] * has, [rank]
    return dh_side_by_side(heads, kv_heads, ranks, rank)


# ================================================================ 4 split_loss
def target_column(logits, targets, first):
    here = (targets >= first) & (targets < first + logits.shape[1])
    column = (targets - first).where(here, logits.shape[1])
    return here, column, F.pad(logits, (0, 1), value=-torch.inf)


def top(logits, group):
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


@right("split_loss")
def sl_standard(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    shifted = logits - top(logits, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@right("split_loss")
def sl_three_reduces(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    highest = top(logits, group)
    total = reduce((logits - highest[:, None]).exp().sum(dim=1), group)
    picked = logits[torch.arange(len(targets)), column]
    target = reduce(torch.where(here, picked - highest, 0.0), group)
    return torch.mean(torch.log(total) - target)


@right("split_loss")
def sl_thousands_of_tokens_at_a_time(logits, targets, first, group=None):
    total = 0
    for some, theirs in zip(logits.split(4096), targets.split(4096), strict=True):
        here, column, some = target_column(some, theirs, first)
        some = some - top(some, group)[:, None]
        picked = torch.take_along_dim(some, column[:, None], 1).squeeze(1).masked_fill(~here, 0)
        sums, picked = reduce(torch.cat([some.exp().sum(1), picked]), group).chunk(2)
        total = total + (sums.log() - picked).sum()
    return total / len(targets)


@right("split_loss")
def sl_without_padding(logits, targets, first, group=None):
    v = logits.shape[1]
    here = (targets >= first) & (targets < first + v)
    highest = logits.detach().amax(1) if v else logits.new_full((len(targets),), -torch.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    if v:
        picked = shifted.gather(1, (targets - first).clamp(0, v - 1)[:, None])[:, 0].where(here, 0)
    else:
        picked = shifted.sum(1)
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
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, column = ctx.saved_tensors
        out = softmax.clone()
        out[torch.arange(len(column)), column] -= 1
        return out[:, :-1] * (gradient / len(column)), None, None, None


@right("split_loss")
def sl_own_function(logits, targets, first, group=None):
    return SplitLoss.apply(logits, targets, first, group)


@right("split_loss")
def sl_logsumexp(logits, targets, first, group=None):
    """Through the logs of the ranks' own sums."""
    here, column, padded = target_column(logits, targets, first)
    shifted = padded - top(padded, group)[:, None]
    mine = torch.logsumexp(shifted, 1).exp() if logits.shape[1] else logits.sum(1)
    picked = torch.where(here, shifted.gather(1, column[:, None])[:, 0], 0.0)
    total, target = reduce(torch.stack([mine, picked]), group)
    return (total.log() - target).mean()


def variant(logits, targets, first, group=None, *, top=top, reduce=reduce, reduce_target=None, log=torch.log,
            mask=lambda picked, here: picked.masked_fill(~here, 0), end=torch.mean, base=0):
    here, column, logits = target_column(logits, targets, first)
    shifted = logits - top(logits, group)[:, None]
    picked = mask(shifted.gather(1, column[:, None])[:, 0], here)
    total, target = reduce(shifted.exp().sum(1), group), (reduce_target or reduce)(picked, group)
    return end(log(total) - target)


@wrong("split_loss")  # The highest is subtracted because exp(100) is infinite
def sl_no_highest(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    picked = logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([logits.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@wrong("split_loss")  # The first is a maximum over all ranks
def sl_local_highest(logits, targets, first, group=None):
    return variant(logits, targets, first, group, top=lambda x, g: x.detach().amax(1).nan_to_num(neginf=0.0))


@wrong("split_loss")  # a maximum, not a sum, over all ranks
def sl_sum_of_highest(logits, targets, first, group=None):
    def top(x, g):
        highest = x.detach().amax(1).nan_to_num(neginf=0.0)
        dist.all_reduce(highest, group=g)
        return highest

    return variant(logits, targets, first, group, top=top)


@wrong("split_loss")  # of each token the highest logit (here the highest of all tokens: others underflow)
def sl_one_highest_for_all(logits, targets, first, group=None):
    def top(x, g):
        highest = x.detach().amax()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=g)
        return highest.expand(len(x))

    return variant(logits, targets, first, group, top=top)


@wrong("split_loss")  # in sub-groups
def sl_max_forgets_group(logits, targets, first, group=None):
    world = top
    return variant(logits, targets, first, group, top=lambda x, g: world(x, None))


@wrong("split_loss")  # in sub-groups
def sl_sum_forgets_group(logits, targets, first, group=None):
    return variant(logits, targets, first, group, reduce=lambda x, g: reduce(x))


@wrong("split_loss")  # The mean
def sl_sum(logits, targets, first, group=None):
    return variant(logits, targets, first, group, end=torch.sum)


@wrong("split_loss")  # never a gathered logit
def sl_gathers(logits, targets, first, group=None):
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


@wrong("split_loss")  # target's logit - highest
def sl_target_not_shifted(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    shifted = logits - top(logits, group)[:, None]
    picked = logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@wrong("split_loss")  # -inf x 0 is not a number
def sl_times_mask(logits, targets, first, group=None):
    return variant(logits, targets, first, group, mask=lambda picked, here: picked * here)


@wrong("split_loss")  # the others contribute zero
def sl_not_masked(logits, targets, first, group=None):
    return variant(logits, targets, first, group, mask=lambda picked, here: picked)


@wrong("split_loss")  # the others contribute zero (here -highest, which is added N - 1 times)
def sl_masked_before_shift(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    highest = top(logits, group)
    total = reduce((logits - highest[:, None]).exp().sum(1), group)
    target = reduce(logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0) - highest, group)
    return (total.log() - target).mean()


@wrong("split_loss")  # the same on all ranks
def sl_target_not_reduced(logits, targets, first, group=None):
    return variant(logits, targets, first, group, reduce_target=lambda x, g: x)


@wrong("split_loss")  # the gradient of the logits
def sl_sum_outside_autograd(logits, targets, first, group=None):
    return variant(logits, targets, first, group, reduce=lambda x, g: summed(x.detach(), g), reduce_target=reduce)


@wrong("split_loss")  # the gradient of the logits (of the target)
def sl_target_outside_autograd(logits, targets, first, group=None):
    return variant(logits, targets, first, group, reduce_target=lambda x, g: summed(x.detach(), g))


@wrong("split_loss")  # the mean of all tokens
def sl_divided_by_own_tokens(logits, targets, first, group=None):
    here = (targets >= first) & (targets < first + logits.shape[1])
    return variant(logits, targets, first, group, end=lambda x: x.sum() / here.sum().clamp(min=1))


@wrong("split_loss")  # nothing backward
def sl_torchs_reduce(logits, targets, first, group=None):
    return variant(logits, targets, first, group, reduce=torchs_reduce)


@wrong("split_loss")  # all-reduced for many tokens at a time
def sl_token_by_token(logits, targets, first, group=None):
    losses = [variant(logits[i : i + 1], targets[i : i + 1], first, group) for i in range(len(targets))]
    return torch.stack(losses).mean()


@wrong("split_loss")  # in nats
def sl_in_bits(logits, targets, first, group=None):
    return variant(logits, targets, first, group) / 0.6931471805599453


@wrong("split_loss")  # any rank may have no column at all
def sl_amax_of_nothing(logits, targets, first, group=None):
    here = (targets >= first) & (targets < first + logits.shape[1])
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    picked = shifted.gather(1, (targets - first).where(here, 0)[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@wrong("split_loss")  # three numbers per token (a fourth: how many ranks have the target)
def sl_four_numbers(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    shifted = logits - top(logits, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target, count = reduce(torch.stack([shifted.exp().sum(1), picked, here.to(logits.dtype)]), group)
    return (total.log() - target / count).mean()


@wrong("split_loss")  # three numbers all-reduced (the highest is gathered: N numbers)
def sl_gathers_highest(logits, targets, first, group=None):
    def top(x, g):
        mine = x.detach().amax(1)
        of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(g))]
        dist.all_gather(of_all, mine, group=g)
        return torch.stack(of_all).amax(0)

    return variant(logits, targets, first, group, top=top)


@wrong("split_loss")  # with logits of +-10,000
def sl_clamps(logits, targets, first, group=None):
    return sl_no_highest(logits.clamp(-80, 80), targets, first, group)


@wrong("split_loss")  # with logits of +-10,000: exp of the logsumexp
def sl_exp_of_logsumexp(logits, targets, first, group=None):
    here, column, padded = target_column(logits, targets, first)
    mine = torch.logsumexp(padded, 1).exp() if logits.shape[1] else logits.sum(1)
    picked = padded.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([mine, picked]), group)
    return (total.log() - target).mean()


@wrong("split_loss")  # this rank's part ends before first + v
def sl_end_inclusive(logits, targets, first, group=None):
    here = (targets >= first) & (targets <= first + logits.shape[1])
    column = (targets - first).where(here, logits.shape[1])
    logits = F.pad(logits, (0, 1), value=-torch.inf)
    shifted = logits - top(logits, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


class OneGradient(SplitLoss):
    @staticmethod
    def backward(ctx, gradient):
        return SplitLoss.backward(ctx, torch.ones_like(gradient))


class NotDivided(SplitLoss):
    @staticmethod
    def backward(ctx, gradient):
        return SplitLoss.backward(ctx, gradient * len(ctx.saved_tensors[1]))


class NoOneHot(SplitLoss):
    @staticmethod
    def backward(ctx, gradient):
        softmax, column = ctx.saved_tensors
        return softmax[:, :-1] * (gradient / len(column)), None, None, None


class SummedGradient(SplitLoss):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        ctx.group = group
        return SplitLoss.forward(ctx, logits, targets, first, group)

    @staticmethod
    def backward(ctx, gradient):
        n = dist.get_world_size(ctx.group)
        return SplitLoss.backward(ctx, summed(gradient, ctx.group) / n)


@wrong("split_loss")  # with a gradient of the loss other than 1
def sl_gradient_taken_for_one(logits, targets, first, group=None):
    return OneGradient.apply(logits, targets, first, group)


@wrong("split_loss")  # the gradient of a mean
def sl_gradient_not_divided(logits, targets, first, group=None):
    return NotDivided.apply(logits, targets, first, group)


@wrong("split_loss")  # the gradient of the logits
def sl_gradient_without_one_hot(logits, targets, first, group=None):
    return NoOneHot.apply(logits, targets, first, group)


@wrong("split_loss")  # nothing backward
def sl_gradient_all_reduced(logits, targets, first, group=None):
    return SummedGradient.apply(logits, targets, first, group)


@wrong("split_loss")  # the same on all ranks
def sl_only_first_rank(logits, targets, first, group=None):
    loss = variant(logits, targets, first, group)
    return loss if dist.get_rank(group) == 0 else loss * 0


@wrong("split_loss")  # its gradient is not needed: it may come from a detached tensor (here a part of it has one)
def sl_highest_attached(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    mine = logits.amax(1)
    highest = mine.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    highest = torch.where(mine == highest, mine, highest)
    shifted = logits - highest[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@wrong("split_loss")  # which begins at `first`
def sl_first_by_rank(logits, targets, first, group=None):
    return variant(logits, targets, dist.get_rank(group) * logits.shape[1], group)


@wrong("split_loss")  # 0-dim
def sl_one_loss_a_token(logits, targets, first, group=None):
    return variant(logits, targets, first, group, end=lambda x: x)


@wrong("split_loss")  # 0-dim
def sl_shape_one(logits, targets, first, group=None):
    return variant(logits, targets, first, group, end=lambda x: x.mean(0, keepdim=True))


@wrong("split_loss")  # the mean over ranks, too: an N-th
def sl_mean_over_ranks(logits, targets, first, group=None):
    return variant(logits, targets, first, group) / dist.get_world_size(group)


@wrong("split_loss")  # three numbers per token (the highest goes twice: found, and then confirmed)
def sl_highest_twice(logits, targets, first, group=None):
    def twice(x, g):
        highest = top(x, g)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=g)
        return highest

    return variant(logits, targets, first, group, top=twice)


# ================================================================ 5 block_plan
def parts(config, sequence_parallel):
    x = Shard(1) if sequence_parallel else Replicate()
    return x, Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)


@right("block_plan")
def bp_standard(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = {
        "attention": PrepareModuleInput(input_layouts=x),
        "attention.q": ColwiseParallel(heads=queries),
        "attention.k": ColwiseParallel(heads=keys),
        "attention.v": ColwiseParallel(heads=keys),
        "attention.o": RowwiseParallel(heads=queries, output_layouts=x),
        "mlp": PrepareModuleInput(input_layouts=x),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=x),
    }
    if sequence_parallel:
        plan["attention_norm"] = plan["mlp_norm"] = SequenceParallel()
    return plan


@right("block_plan")
def bp_patterns(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = {"[am]*[np]": PrepareModuleInput(input_layouts=x)}
    plan |= {"attention.[kv]": ColwiseParallel(heads=keys), "attention.q": ColwiseParallel(heads=queries)}
    plan |= {"mlp.[gu]*": ColwiseParallel(), "mlp.d*": RowwiseParallel(output_layouts=x)}
    plan |= {"attention.o": RowwiseParallel(heads=queries, output_layouts=x)}
    return plan | ({"*_norm": SequenceParallel()} if sequence_parallel else {})


@right("block_plan")
def bp_later_rows_win(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = Plan({"attention.[qkv]": ColwiseParallel(heads=keys), "mlp.*": ColwiseParallel()})
    plan["attention.q"] = ColwiseParallel(heads=queries)
    plan["attention.o"] = RowwiseParallel(heads=queries, output_layouts=x)
    plan["mlp.down"] = RowwiseParallel(output_layouts=x)
    for block in ("attention", "mlp"):
        plan[block] = PrepareModuleInput(input_layouts=x)
        if sequence_parallel:
            plan[f"{block}_norm"] = SequenceParallel()
    return plan


@right("block_plan")
def bp_out_of_the_models(config, sequence_parallel):
    start = "layers.*."
    return {
        name.removeprefix(start): style
        for name, style in gpt_plan(config, sequence_parallel).items()
        if name.startswith(start)
    }


@right("block_plan")
def bp_all_said(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    columns = {"input_layouts": x, "output_layouts": Shard(-1)}
    rows = {"input_layouts": Shard(-1), "output_layouts": x}
    plan = {norm: SequenceParallel() for norm in ("mlp_norm", "attention_norm")} if sequence_parallel else {}
    plan |= {"mlp.down": RowwiseParallel(**rows), "attention.o": RowwiseParallel(**rows, heads=queries)}
    plan |= {"mlp.up": ColwiseParallel(**columns), "mlp.gate": ColwiseParallel(**columns)}
    plan |= {f"attention.{n}": ColwiseParallel(**columns, heads=h) for n, h in zip("vkq", (keys, keys, queries))}
    return plan | {"mlp": PrepareModuleInput(input_layouts=x), "attention": PrepareModuleInput(input_layouts=x)}


def but(changes=None, drop=()):
    """A wrong plan: the right one, with changes(config, x, queries, keys, sequence_parallel) on top, without some."""
    def plan(config, sequence_parallel):
        right = bp_standard(config, sequence_parallel)
        if changes:
            right |= changes(config, *parts(config, sequence_parallel), sequence_parallel)
        return {name: style for name, style in right.items() if name not in drop}
    return plan


def B(name, fn):
    WRONG["block_plan"].append((name, (fn,)))


# `Shard(1)` where each rank has a part of the tokens
B("ignores_sequence_parallel", lambda config, sequence_parallel: bp_standard(config, False))
# `Replicate()` where it is whole
B("always_sequence_parallel", lambda config, sequence_parallel: bp_standard(config, True))
# two collectives without sequence parallelism / the other way round
B("flag_reversed", lambda config, sequence_parallel: bp_standard(config, not sequence_parallel))
# SequenceParallel() is for a norm that sees a part of the tokens
B("no_norms", but(drop=("attention_norm", "mlp_norm")))
B("attention_norm_forgotten", but(drop=("attention_norm",)))
B("mlp_norm_forgotten", but(drop=("mlp_norm",)))
B("norms_always", but(lambda c, x, q, k, s: {"*_norm": SequenceParallel()}))
# Keys (for k and v)
B("kv_as_queries", but(lambda c, x, q, k, s: {f"attention.{n}": ColwiseParallel(heads=q) for n in "kv"}))
# a Queries for q
B("q_as_keys", but(lambda c, x, q, k, s: {"attention.q": ColwiseParallel(heads=k)}))
# they cut between heads only
B("no_heads", but(lambda c, x, q, k, s: {f"attention.{n}": ColwiseParallel() for n in "qkv"}
                  | {"attention.o": RowwiseParallel(output_layouts=x)}))
B("kv_without_heads", but(lambda c, x, q, k, s: {f"attention.{n}": ColwiseParallel() for n in "kv"}))
B("q_without_heads", but(lambda c, x, q, k, s: {"attention.q": ColwiseParallel()}))
B("o_without_heads", but(lambda c, x, q, k, s: {"attention.o": RowwiseParallel(output_layouts=x)}))
B("q_and_o_without_heads", but(lambda c, x, q, k, s: {"attention.q": ColwiseParallel(),
                                                       "attention.o": RowwiseParallel(output_layouts=x)}))
B("v_without_heads", but(lambda c, x, q, k, s: {"attention.v": ColwiseParallel()}))
# once for all columns in it; two collectives backward
B("attention_not_prepared", but(lambda c, x, q, k, s: {
    "attention.q": ColwiseParallel(heads=q, input_layouts=x),
    "attention.[kv]": ColwiseParallel(heads=k, input_layouts=x)}, drop=("attention", "attention.k", "attention.v")))
B("mlp_not_prepared", but(lambda c, x, q, k, s: {
    f"mlp.{n}": ColwiseParallel(input_layouts=x) for n in ("gate", "up")}, drop=("mlp",)))
B("nothing_prepared_nor_said", but(drop=("mlp", "attention")))
# PrepareModuleInput(input_layouts=x)
B("prepared_whole", but(lambda c, x, q, k, s: {n: PrepareModuleInput() for n in ("mlp", "attention")}))
B("attention_prepared_whole", but(lambda c, x, q, k, s: {"attention": PrepareModuleInput()}))
# RowwiseParallel(output_layouts=x)
B("down_gives_whole", but(lambda c, x, q, k, s: {"mlp.down": RowwiseParallel()}))
B("o_gives_whole", but(lambda c, x, q, k, s: {"attention.o": RowwiseParallel(heads=q)}))
# ColwiseParallel and RowwiseParallel are the two halves of a pair
B("mlp_rows_first", but(lambda c, x, q, k, s: {
    "mlp.gate": RowwiseParallel(input_layouts=Replicate()), "mlp.up": RowwiseParallel(input_layouts=Replicate()),
    "mlp.down": ColwiseParallel(output_layouts=Replicate())}, drop=("mlp",)))
# every matrix split: measures what each rank holds
B("mlp_whole", but(drop=("mlp", "mlp.gate", "mlp.up", "mlp.down")))
B("attention_whole", but(drop=("attention", "attention.q", "attention.k", "attention.v", "attention.o")))
# two collectives forward
B("gate_and_up_gathered", but(lambda c, x, q, k, s: {
    "mlp.gate": ColwiseParallel(output_layouts=Replicate()), "mlp.up": ColwiseParallel(output_layouts=Replicate()),
    "mlp.down": RowwiseParallel(input_layouts=Replicate(), output_layouts=x)}))
# Shard(1): dim 1 is the tokens
B("shards_dim_0", lambda config, sequence_parallel: _with_dim(config, sequence_parallel, 0))
B("shards_last_dim", lambda config, sequence_parallel: _with_dim(config, sequence_parallel, 2))
# Keys of fewer heads
B("queries_as_if_no_sharing", but(lambda c, x, q, k, s: {
    "attention.q": ColwiseParallel(heads=Queries(c.heads, c.heads)),
    "attention.o": RowwiseParallel(heads=Queries(c.heads, c.heads), output_layouts=x)}))
B("keys_as_if_no_sharing", but(lambda c, x, q, k, s: {
    f"attention.{n}": ColwiseParallel(heads=Keys(c.heads, c.heads)) for n in "kv"}))
B("keys_swapped", but(lambda c, x, q, k, s: {
    f"attention.{n}": ColwiseParallel(heads=Keys(c.kv_heads, c.heads)) for n in "kv"}))
# names of the submodules of one Layer
B("names_of_the_model", lambda config, sequence_parallel: {
    n: s for n, s in gpt_plan(config, sequence_parallel).items() if n.startswith("layers")})
B("v_forgotten", but(drop=("attention.v",)))
B("gate_forgotten", but(drop=("mlp.gate",)))
B("o_forgotten", but(drop=("attention.o",)))
# with fewer heads of keys and values than ranks: k and v whole on every rank
B("kv_whole", but(drop=("attention.k", "attention.v")))
# SequenceParallel() is for a norm
B("sequence_parallel_on_blocks", but(lambda c, x, q, k, s: {n: SequenceParallel() for n in ("mlp", "attention")} if s else {}))
# config: with heads and kv_heads
B("example_heads", but(lambda c, x, q, k, s: {
    "attention.q": ColwiseParallel(heads=Queries(4, 2)), "attention.[kv]": ColwiseParallel(heads=Keys(4, 2)),
    "attention.o": RowwiseParallel(heads=Queries(4, 2), output_layouts=x)}, drop=("attention.k", "attention.v")))
# two collectives forward: q gathered? k and v put together again after the columns
B("kv_gathered", but(lambda c, x, q, k, s: {
    f"attention.{n}": ColwiseParallel(heads=k, output_layouts=Replicate()) for n in "kv"}))


def _with_dim(config, sequence_parallel, dim):
    plan = bp_standard(config, sequence_parallel)
    if sequence_parallel:
        x, q, _ = Shard(dim), *parts(config, True)[1:]
        plan |= {"attention": PrepareModuleInput(input_layouts=x), "mlp": PrepareModuleInput(input_layouts=x)}
        plan |= {"attention.o": RowwiseParallel(heads=q, output_layouts=x), "mlp.down": RowwiseParallel(output_layouts=x)}
    return plan
