"""Wrong answers to the exercises of notebook 09, and the right ones that they spoil."""

import random
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ReduceOp
from torch.distributed.nn import functional as differentiable

from labs.dtensor import Replicate, Shard
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan
from labs.tp.shares import Keys, Queries
from tests.wrong_answers import answers


def wrong(check, mistake="", **options):
    """A wrong copy comes with a right reduce, and the other way round."""
    pairs = {"copy": lambda fn: (fn, reduce), "reduce": lambda fn: (copy, fn)}
    return answers.wrong("conjugate" if check in pairs else check, mistake, functions=pairs.get(check), **options)


# ---- right ones, which those below spoil -----------------------------------------------------------------


def same(x, group=None):
    return x.view_as(x)


def summed(x, group=None):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group)
    return y


def border(forward, backward):
    """A function with this forward, and this one for its gradient."""

    class Border(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.group), None

    return Border


COPY, REDUCE = border(same, summed), border(summed, same)


def copy(x, group=None):
    return COPY.apply(x, group)


def reduce(x, group=None):
    return REDUCE.apply(x, group)


def row_linear(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias


def gathered(x, group, dim=-1):
    """From all ranks' pieces, padded to the longest; a gradient comes back to this rank's own."""
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.long)
    sizes[dist.get_rank(group)] = x.shape[-1] if x.ndim else 1
    dist.all_reduce(sizes, group=group)
    x = F.pad(x, (0, int(sizes.max()) - x.shape[-1])) if x.ndim else x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    parts[dist.get_rank(group)] = x
    return torch.cat(parts, dim)


def highest(logits, group=None):
    mine = logits.detach()
    highest = mine.amax(1) if mine.shape[1] else mine.new_full((len(mine),), -torch.inf)
    dist.all_reduce(highest, ReduceOp.MAX, group=group)
    return highest


def of_targets(logits, targets, first):
    """Zero where another rank has the target."""
    columns = torch.arange(first, first + logits.shape[1])
    return torch.where(columns == targets[:, None], logits, 0).sum(1)


def split_loss(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return (total.log() - target).mean()


def of_logits(softmax, column):
    """The gradient of the loss."""
    return (softmax - (torch.arange(softmax.shape[1]) == column[:, None]).to(softmax)) / len(softmax)


def by_hand(backward):
    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets, first, group):
            shifted = logits - highest(logits, group)[:, None]
            total, target = summed(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
            ctx.save_for_backward(shifted.exp() / total[:, None], targets - first)
            ctx.group = group
            return (total.log() - target).mean()

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, *ctx.saved_tensors, ctx.group), None, None, None

    return CrossEntropy


def deal_heads(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        copies, each = ranks // kv_heads, heads // ranks
        first = rank // copies * copies
        return list(range(rank * each, rank * each + each)), [rank // copies], list(range(first, first + copies))
    least, more = divmod(kv_heads, ranks)
    start = rank * least + min(rank, more)
    keys = list(range(start, start + least + (rank < more)))
    return [key * heads // kv_heads + i for key in keys for i in range(heads // kv_heads)], keys, [rank]


def block_plan(config, sequence_parallel):
    x = Shard(1) if sequence_parallel else Replicate()
    queries, keys = Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)
    return {
        "attention": PrepareModuleInput(input_layouts=x),
        "attention.q": ColwiseParallel(heads=queries),
        "attention.k": ColwiseParallel(heads=keys),
        "attention.v": ColwiseParallel(heads=keys),
        "attention.o": RowwiseParallel(heads=queries, output_layouts=x),
        "mlp": PrepareModuleInput(input_layouts=x),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=x),
        **({"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()} if sequence_parallel else {}),
    }


# ---- the conjugate pair ----------------------------------------------------------------------------------

PLAIN, BOTH_WAYS = border(same, same), border(summed, summed)
MEAN_BACK = border(same, lambda gradient, group: summed(gradient, group) / dist.get_world_size(group))
FORWARD_MEAN = border(lambda x, group: summed(x, group) / dist.get_world_size(group), summed)
SENT_BACK = border(summed, lambda gradient, group: summed(gradient, group) / dist.get_world_size(group))


@wrong("copy", "the gradient of copy is not summed")
def nothing_at_all(x, group=None):
    return PLAIN.apply(x, group)


@wrong("copy", "averaged instead of summed")
def mean_of_gradients(x, group=None):
    return MEAN_BACK.apply(x, group)


@wrong("copy", "copy sends forward")
def sums_both_ways(x, group=None):
    return BOTH_WAYS.apply(x, group)


@wrong("copy", "something is sent where nothing is due")
def makes_sure_that_all_have_x(x, group=None):
    return FORWARD_MEAN.apply(x, group)


def sum_in_place(gradient, group):
    gradient = gradient.contiguous()
    dist.all_reduce(gradient, group=group)
    return gradient


IN_PLACE_BACK = border(same, sum_in_place)


@wrong("copy", "changed in place")
def into_the_gradient(x, group=None):
    return IN_PLACE_BACK.apply(x, group)


ALL_RANKS = border(same, lambda gradient, group: summed(gradient))


@wrong("copy", "right only on the group of all ranks")
def without_the_group(x, group=None):
    return ALL_RANKS.apply(x, group)


def start_a_sum(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group, async_op=True)
    return y


UNWAITED = border(same, start_a_sum)


@wrong("copy", "nobody waited")
def does_not_wait(x, group=None):
    return UNWAITED.apply(x, group)


@wrong("copy", "no gradient")
def leaves_the_graph(x, group=None):
    return x.data


@wrong("reduce", "the summands are never added up")
def still_a_summand(x, group=None):
    return PLAIN.apply(x, group)


@wrong("reduce", "the gradient is summed as well")
def by_torchs_own(x, group=None):
    return differentiable.all_reduce(x, group=group or dist.group.WORLD)


@wrong("reduce", "something is sent where nothing is due", listed=False)
def mean_of_equal_gradients(x, group=None):
    return SENT_BACK.apply(x, group)


@wrong("reduce", "no gradient", listed=False)
def no_border(x, group=None):
    return summed(x.detach(), group)


@wrong("reduce", "a collective that autograd does not see")
def only_the_collective(x, group=None):
    return summed(x, group)


INTO_X = border(lambda x, group: sum_in_place(x, group).clone(), same)


@wrong("reduce", "changed in place", listed=False)
def into_the_summand(x, group=None):
    return INTO_X.apply(x, group)


GATHERED = border(lambda x, group: gathered(x[None], group, 0).sum(0), same)


@wrong("reduce", "gathered, where a sum belongs")
def gathers_summands(x, group=None):
    return GATHERED.apply(x, group)


NARROW = border(lambda x, group: summed(x.to(torch.bfloat16), group).to(x.dtype), same)
WIDE = border(lambda x, group: summed(x.double(), group).to(x.dtype), same)


@wrong("reduce", "rounded on the way")
def in_half_precision(x, group=None):
    return NARROW.apply(x, group)


@wrong("reduce", "a different dtype travels")
def in_double_precision(x, group=None):
    return WIDE.apply(x, group)


def to_the_first(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group=group, group_dst=0)
    return y


TO_ONE = border(to_the_first, same)


@wrong("reduce", listed=False)
def to_one_rank(x, group=None):
    return TO_ONE.apply(x, group)


def half_by_half(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    for half in y.view(2, -1):
        dist.all_reduce(half, group=group)
    return y


HALVES = border(half_by_half, same)


@wrong("reduce", listed=False)
def of_an_even_number(x, group=None):
    return HALVES.apply(x, group)


def clone_alone(x, group):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


CLONE_BACK, CLONE_FORWARD = border(same, clone_alone), border(clone_alone, same)


@wrong("copy", "the ranks make different calls", alone=True)
def gradient_with_its_strides(x, group=None):
    return CLONE_BACK.apply(x, group)


@wrong("reduce", "the ranks make different calls", alone=True)
def summand_with_its_strides(x, group=None):
    return CLONE_FORWARD.apply(x, group)


def row_by_row(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    for row in y if y.ndim else [y]:
        dist.all_reduce(row, group=group)
    return y


ROWS_BACK, ROWS_FORWARD = border(same, row_by_row), border(row_by_row, same)


@wrong("copy", "too many collectives", listed=False)
def gradient_row_by_row(x, group=None):
    return ROWS_BACK.apply(x, group)


@wrong("reduce", "too many collectives")
def summand_row_by_row(x, group=None):
    return ROWS_FORWARD.apply(x, group)


def after_a_barrier(x, group):
    dist.barrier(group=group)
    return x.view_as(x)


BARRIER_FORWARD, BARRIER_BACK = border(after_a_barrier, summed), border(summed, after_a_barrier)


@wrong("copy", "something is sent where nothing is due", listed=False)
def waits_for_all_before(x, group=None):
    return BARRIER_FORWARD.apply(x, group)


@wrong("reduce", "something is sent where nothing is due")
def waits_for_all_on_the_way_back(x, group=None):
    return BARRIER_BACK.apply(x, group)


class SavesWhole(COPY):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.save_for_backward(x)
        return x.view_as(x)


@wrong("copy", "kept for backward, but not needed there")
def saves_x(x, group=None):
    return SavesWhole.apply(x, group)


class SavesSum(REDUCE):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, y = group, summed(x, group)
        ctx.save_for_backward(y)
        return y


@wrong("reduce", "kept for backward, but not needed there", listed=False)
def saves_the_sum(x, group=None):
    return SavesSum.apply(x, group)


class Saves(REDUCE):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.save_for_backward(x)
        return summed(x, group)


@wrong("reduce", "kept for backward, but not needed there")
def saves_the_summand(x, group=None):
    return Saves.apply(x, group)


KEPT = []


@wrong("reduce", "something is kept from every call", alone=True, listed=False)
def remembers(x, group=None):
    KEPT.append(y := reduce(x, group))
    return y


@wrong("reduce", "nothing is returned")
def forgets_to_return(x, group=None):
    reduce(x, group)


# ---- a row-parallel linear -------------------------------------------------------------------------------


@wrong("row_linear", "the bias is added on every rank")
def bias_with_each_summand(x, weight, bias, group=None):
    return reduce(F.linear(x, weight, bias), group)


@wrong("row_linear", "the gradient of the bias is an N-th")
def bias_in_n_parts(x, weight, bias, group=None):
    part = None if bias is None else bias / dist.get_world_size(group)
    return reduce(F.linear(x, weight, part), group)


@wrong("row_linear", "the bias on one rank alone")
def bias_on_the_first_rank(x, weight, bias, group=None):
    return reduce(F.linear(x, weight, bias if dist.get_rank(group) == 0 else None), group)


@wrong("row_linear", "the bias on one rank alone")
def bias_times_one_or_zero(x, weight, bias, group=None):
    mine = None if bias is None else bias * (dist.get_rank(group) == 0)
    return reduce(F.linear(x, weight, mine), group)


def to_one_and_back(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group_dst=0, group=group)
    dist.broadcast(y, group_src=0, group=group)
    return y


ONE_FOR_ALL = border(to_one_and_back, same)


@wrong("reduce", "one rank adds up for all")
def reduced_to_one_rank(x, group=None):
    return ONE_FOR_ALL.apply(x, group)


@wrong("row_linear", "a rank without inputs leaves early")
def leaves_without_inputs(x, weight, bias, group=None):
    if not x.shape[-1]:
        return F.linear(x, weight, bias)
    return row_linear(x, weight, bias, group)


@wrong("row_linear", "the bias on one rank alone")
def bias_on_rank_0_and_unused_elsewhere(x, weight, bias, group=None):
    return reduce(F.linear(x, weight, bias if dist.get_rank(group) == 0 else None), group)


@wrong("row_linear", "the bias is left out")
def without_bias(x, weight, bias, group=None):
    return reduce(F.linear(x, weight), group) + (0 if bias is None else 0 * bias)


@wrong("row_linear", "no gradient", listed=False)
def bias_outside_of_the_graph(x, weight, bias, group=None):
    return reduce(F.linear(x, weight), group) + (0 if bias is None else bias.detach())


@wrong("row_linear", "the gradient is summed as well", listed=False)
def bias_through_a_copy(x, weight, bias, group=None):
    return row_linear(x, weight, None if bias is None else copy(bias, group), group)


@wrong("row_linear", "right only with a bias", listed=False)
def always_with_bias(x, weight, bias, group=None):
    return reduce(F.linear(x, weight), group) + bias


@wrong("row_linear", "the summands are never added up")
def one_summand(x, weight, bias, group=None):
    return F.linear(x, weight, bias)


@wrong("row_linear", "the gradient is summed as well")
def torchs_all_reduce(x, weight, bias, group=None):
    y = differentiable.all_reduce(F.linear(x, weight), group=group or dist.group.WORLD)
    return y if bias is None else y + bias


@wrong("row_linear", "the gradient is summed as well", listed=False)
def copies_x_first(x, weight, bias, group=None):
    """As if x were whole."""
    y = reduce(F.linear(x, weight), group)
    return copy(y if bias is None else y + bias, group)


@wrong("row_linear", "a collective that autograd does not see")
def sum_in_its_place(x, weight, bias, group=None):
    y = F.linear(x, weight)
    dist.all_reduce(y, group=group)
    return y if bias is None else y + bias


@wrong("row_linear", "no gradient", listed=False)
def sum_without_grad(x, weight, bias, group=None):
    y = summed(F.linear(x, weight).detach(), group)
    return y if bias is None else y + bias


@wrong("row_linear", "gathered, where a sum belongs")
def whole_x_and_whole_weight(x, weight, bias, group=None):
    return F.linear(gathered(x, group), gathered(weight, group), bias)


@wrong("row_linear", "gathered, where a sum belongs", listed=False)
def gathers_x_and_cuts_it_again(x, weight, bias, group=None):
    pieces = gathered(x, group).chunk(dist.get_world_size(group), -1)
    return row_linear(pieces[dist.get_rank(group)][..., : x.shape[-1]], weight, bias, group)


@wrong("row_linear", "right only on the group of all ranks")
def sums_over_all_ranks(x, weight, bias, group=None):
    return row_linear(x, weight, bias)


@wrong("row_linear", "right only for some shapes")
def a_matrix_alone(x, weight, bias, group=None):
    return row_linear(x, weight, bias, group) if x.ndim == 2 else row_linear(x.flatten(0, -2), weight, bias, group)


@wrong("row_linear", "a different shape or dtype")
def in_float32(x, weight, bias, group=None):
    return row_linear(x.float(), weight.float(), None if bias is None else bias.float(), group)


@wrong("row_linear", "right only where pieces are equal", alone=True)
def a_row_of_any_number(x, weight, bias, group=None):
    y = reduce((x.reshape(-1, x.shape[-1]) @ weight.t()).reshape(*x.shape[:-1], len(weight)), group)
    return y if bias is None else y + bias


@wrong("row_linear", alone=True, listed=False)
def home_early_without_inputs(x, weight, bias, group=None):
    if x.shape[-1]:
        return row_linear(x, weight, bias, group)
    return F.linear(x, weight, bias)


@wrong("row_linear", "too many collectives")
def token_by_token(x, weight, bias, group=None):
    y = F.linear(x, weight)
    y = torch.stack([reduce(token, group) for token in y.view(-1, len(weight))]).view(y.shape) if len(y) else y
    return y if bias is None else y + bias


@wrong("row_linear", "something is sent where nothing is due", listed=False)
def waits_in_backward(x, weight, bias, group=None):
    y = reduce_after_a_barrier(F.linear(x, weight), group)
    return y if bias is None else y + bias


def reduce_after_a_barrier(x, group=None):
    return BARRIER_BACK.apply(x, group)


class SavesY(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        mine = F.linear(x, weight)
        ctx.save_for_backward(x, weight, mine)
        return summed(mine, group)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return *torch.autograd.grad(F.linear(x, weight), (x, weight), gradient), None


@wrong("row_linear", "kept for backward, but not needed there")
def saves_its_summand(x, weight, bias, group=None):
    y = SavesY.apply(x, weight, group)
    return y if bias is None else y + bias


# ---- a loss over a split vocabulary ----------------------------------------------------------------------


@wrong("split_loss", "logits are gathered")
def by_all_logits(logits, targets, first, group=None):
    far = torch.full((), -1e30, dtype=logits.dtype)
    whole = gathered(torch.cat([logits, far.expand(len(logits), 1)], 1), group)  # a column that is never the target
    firsts = gathered(torch.tensor([float(first)]), group).long()
    owner = (targets[:, None] >= firsts).sum(1) - 1
    return F.cross_entropy(whole, owner * (whole.shape[1] // len(firsts)) + targets - firsts[owner])


@wrong("split_loss", "not finite")
def without_the_highest(logits, targets, first, group=None):
    total, target = reduce(torch.stack([logits.exp().sum(1), of_targets(logits, targets, first)]), group)
    return (total.log() - target).mean()


@wrong("split_loss", "relative to each rank's own highest logit")
def own_highest(logits, targets, first, group=None):
    mine = logits.detach().amax(1) if logits.shape[1] else logits.new_zeros(len(logits))
    shifted = logits - mine[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return (total.log() - target).mean()


@wrong("split_loss", "the gradient is summed as well")
def sums_of_torchs(logits, targets, first, group=None):
    shifted, all_ranks = logits - highest(logits, group)[:, None], group or dist.group.WORLD
    both = torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)])
    total, target = differentiable.all_reduce(both, group=all_ranks)
    return (total.log() - target).mean()


@wrong("split_loss", "a collective that autograd does not see")
def sums_unseen(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    both = torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)])
    dist.all_reduce(both, group=group)
    return (both[0].log() - both[1]).mean()


@wrong("split_loss", "no gradient")
def of_constants(logits, targets, first, group=None):
    return split_loss(logits.detach(), targets, first, group)


@wrong("split_loss", "the right loss with a wrong gradient")
def softmax_of_this_rank(logits, targets, first, group=None):
    """The right loss, as a constant, with the gradient of a loss over this rank's columns."""
    loss = split_loss(logits.detach(), targets, first, group)
    mine = (logits.logsumexp(1) if logits.shape[1] else logits.sum(1)) - of_targets(logits, targets, first)
    return loss + (mine - mine.detach()).mean()


SUMMED = by_hand(lambda gradient, softmax, column, group: gradient * len(softmax) * of_logits(softmax, column))
UNSCALED = by_hand(lambda gradient, softmax, column, group: of_logits(softmax, column))
NO_TARGET = by_hand(lambda gradient, softmax, column, group: gradient * softmax / len(softmax))
SENDS_BACK = by_hand(
    lambda gradient, softmax, column, group: (
        summed(gradient, group) / dist.get_world_size(group) * of_logits(softmax, column)
    )
)


@wrong("split_loss", "summed over the tokens")
def gradient_of_the_sum(logits, targets, first, group=None):
    return SUMMED.apply(logits, targets, first, group)


@wrong("split_loss", "the gradient that comes in is left out")
def unscaled(logits, targets, first, group=None):
    return UNSCALED.apply(logits, targets, first, group)


@wrong("split_loss", "the right loss with a wrong gradient")
def without_minus_one(logits, targets, first, group=None):
    return NO_TARGET.apply(logits, targets, first, group)


@wrong("split_loss", "something is sent where nothing is due")
def asks_again_in_backward(logits, targets, first, group=None):
    return SENDS_BACK.apply(logits, targets, first, group)


@wrong("split_loss", "summed over the tokens", listed=False)
def not_the_mean(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group) * len(targets)


@wrong("split_loss", listed=False)
def every_rank_adds_a_logit(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    column = (targets - first).clamp(0, max(0, logits.shape[1] - 1))
    mine = shifted.gather(1, column[:, None])[:, 0] if logits.shape[1] else shifted.sum(1)
    total, target = reduce(torch.stack([shifted.exp().sum(1), mine]), group)
    return (total.log() - target).mean()


@wrong("split_loss", "right only where the ranks divide the vocabulary")
def counts_columns_itself(logits, targets, first, group=None):
    return split_loss(logits, targets, dist.get_rank(group) * logits.shape[1], group)


@wrong("split_loss", "right only where the ranks divide the vocabulary", listed=False)
def nothing_is_the_highest_of_nothing(logits, targets, first, group=None):
    """A rank without columns takes 0 for its highest logit."""
    mine = logits.detach().amax(1) if logits.shape[1] else logits.new_full((len(logits),), 1e6)
    dist.all_reduce(mine, ReduceOp.MAX, group=group)
    shifted = logits - mine[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return ((total + 1e-30).log() - target).mean()


@wrong("split_loss", "right only where the ranks divide the vocabulary", alone=True, listed=False)
def takes_a_column_for_granted(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group) + 0 * logits[:, 0].mean()


@wrong("split_loss", "more than three numbers per token")
def also_the_mean_logit(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    mine = [shifted.exp().sum(1), of_targets(shifted, targets, first), shifted.detach().sum(1), shifted.detach().sum(1)]
    total, target, *_ = reduce(torch.stack(mine), group)
    return (total.log() - target).mean()


@wrong("split_loss", "more than three numbers per token")
def by_a_gather_of_sums(logits, targets, first, group=None):
    """One number a token from each rank, and one that is added up."""
    own = logits.logsumexp(1) if logits.shape[1] else logits.sum(1) - torch.inf
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.detach(), group=group)
    parts[dist.get_rank(group)] = own
    return (torch.stack(parts).logsumexp(0) - reduce(of_targets(logits, targets, first), group)).mean()


@wrong("split_loss", "too many collectives")
def one_token_at_a_time(logits, targets, first, group=None):
    tokens = zip(logits.split(1), targets.split(1), strict=True)
    return sum(split_loss(*token, first, group) for token in tokens) / len(targets)


def highest_among(ranks, logits, targets, first, group):
    """Not of those beyond."""
    low = torch.full_like(logits[:, :1], -1e5)
    top = highest(torch.cat([logits, low], 1) if dist.get_rank(group) in ranks else low, group)
    shifted = logits - top[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return (total.log() - target).mean()


@wrong("split_loss")
def highest_of_two_ranks(logits, targets, first, group=None):
    return highest_among((0, 1), logits, targets, first, group)


@wrong("split_loss", listed=False)
def highest_of_all_but_the_first(logits, targets, first, group=None):
    return highest_among(range(1, 8), logits, targets, first, group)


@wrong("split_loss", "right only on the group of all ranks")
def over_all_ranks(logits, targets, first, group=None):
    return split_loss(logits, targets, first)


@wrong("split_loss", "changed in place")
def shifts_in_place(logits, targets, first, group=None):
    with torch.no_grad():
        logits -= highest(logits, group)[:, None]
    total, target = reduce(torch.stack([logits.exp().sum(1), of_targets(logits, targets, first)]), group)
    return (total.log() - target).mean()


@wrong("split_loss", "too many copies at a time")
def one_hot_of_the_vocabulary(logits, targets, first, group=None):
    one_hot = F.one_hot(targets, first + logits.shape[1] + int(targets.max()) + 512)
    mine = one_hot[:, first : first + logits.shape[1]]
    shifted = logits - highest(logits, group)[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), torch.where(mine > 0, shifted, 0).sum(1)]), group)
    return (total.log() - target).mean()


# ---- heads -----------------------------------------------------------------------------------------------


@wrong("deal_heads", "a rank without a head")
def as_if_it_divided(heads, kv_heads, ranks, rank):
    q, k = heads // ranks, kv_heads // ranks
    return list(range(rank * q, rank * q + q)), list(range(rank * k, rank * k + k)), [rank]


@wrong("deal_heads", "the gradient of shared keys and values is not summed")
def shares_with_nobody(heads, kv_heads, ranks, rank):
    return *deal_heads(heads, kv_heads, ranks, rank)[:2], [rank]


@wrong("deal_heads", "summed over the wrong ranks")
def shares_with_everybody(heads, kv_heads, ranks, rank):
    return *deal_heads(heads, kv_heads, ranks, rank)[:2], list(range(ranks))


@wrong("deal_heads", "summed over the wrong ranks")
def all_but_itself(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, keys, [other for other in sharers if other != rank] or [rank]


@wrong("deal_heads", "summed over the wrong ranks")
def itself_first(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, keys, sorted(sharers, key=lambda other: other != rank)


@wrong("deal_heads", "keys and values that its queries do not read")
def keys_in_turn(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    if ranks > kv_heads:
        keys, sharers = [rank % kv_heads], list(range(rank % kv_heads, ranks, kv_heads))
    return queries, keys, sharers


@wrong("deal_heads", "keys and values that its queries do not read")
def all_keys_where_they_are_few(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return (queries, keys, sharers) if ranks <= kv_heads else (queries, list(range(kv_heads)), list(range(ranks)))


def by_queries(heads, kv_heads, ranks, queries):
    """Each rank's queries, and whatever keys they read."""
    read = [sorted({query * kv_heads // heads for query in queries(rank)}) for rank in range(ranks)]
    return lambda rank: (queries(rank), read[rank], [r for r in range(ranks) if set(read[r]) & set(read[rank])])


@wrong("deal_heads", "keys and values twice, where there are enough")
def queries_cut_evenly(heads, kv_heads, ranks, rank):
    chunk = -(-heads // ranks)
    return by_queries(heads, kv_heads, ranks, lambda r: list(range(heads))[r * chunk : r * chunk + chunk])(rank)


@wrong("deal_heads", "keys and values twice, where there are enough")
def queries_in_turn(heads, kv_heads, ranks, rank):
    return by_queries(heads, kv_heads, ranks, lambda r: list(range(r, heads, ranks)))(rank)


@wrong("deal_heads", "a query head is missing, or there twice")
def the_rest_is_lost(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return deal_heads(heads, kv_heads, ranks, rank)
    n = kv_heads // ranks
    keys = list(range(rank * n, rank * n + n))
    return [query for query in range(heads) if query * kv_heads // heads in keys], keys, [rank]


@wrong("deal_heads", "uneven, or the extra heads are not on the first ranks")
def the_last_takes_the_rest(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return deal_heads(heads, kv_heads, ranks, rank)
    keys = [rank] if rank < ranks - 1 else list(range(rank, kv_heads))
    return [query for query in range(heads) if query * kv_heads // heads in keys], keys, [rank]


@wrong("deal_heads", "uneven, or the extra heads are not on the first ranks")
def one_more_for_the_last(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, ranks - 1 - rank)
    mine = [heads - 1 - query for query in reversed(queries)]
    return mine, [kv_heads - 1 - key for key in reversed(keys)], [ranks - 1 - other for other in reversed(sharers)]


@wrong("deal_heads", "uneven, or the extra heads are not on the first ranks")
def in_proportion(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return deal_heads(heads, kv_heads, ranks, rank)
    keys = list(range(-(-rank * kv_heads // ranks), -(-(rank + 1) * kv_heads // ranks)))
    return [query for query in range(heads) if query * kv_heads // heads in keys], keys, [rank]


@wrong("deal_heads", "not in order")
def from_the_last_on(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries[::-1], keys, sharers


@wrong("deal_heads", "ranks that share are not neighbours")
def far_from_each_other(heads, kv_heads, ranks, rank):
    if ranks <= kv_heads:
        return deal_heads(heads, kv_heads, ranks, rank)
    key, place, copies = rank % kv_heads, rank // kv_heads, ranks // kv_heads
    each = heads // ranks
    first = key * heads // kv_heads + place * each
    return range(first, first + each), [key], [key + kv_heads * other for other in range(copies)]


@wrong("deal_heads", "a query head is missing, or there twice")
def every_query_of_its_keys(heads, kv_heads, ranks, rank):
    _, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return [query for query in range(heads) if query * kv_heads // heads in keys], keys, sharers


@wrong("deal_heads", "a query head is missing, or there twice")
def each_query_twice(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries * 2, keys, sharers


@wrong("deal_heads", "a query head is missing, or there twice")
def from_one_on(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return [query + 1 for query in queries], keys, sharers


@wrong("deal_heads", "not three lists of heads and ranks")
def how_many(heads, kv_heads, ranks, rank):
    return tuple(map(len, deal_heads(heads, kv_heads, ranks, rank)))


@wrong("deal_heads", "not three lists of heads and ranks")
def without_the_ranks(heads, kv_heads, ranks, rank):
    return deal_heads(heads, kv_heads, ranks, rank)[:2]


@wrong("deal_heads", "not three lists of heads and ranks")
def silence(heads, kv_heads, ranks, rank):
    deal_heads(heads, kv_heads, ranks, rank)


@wrong("deal_heads", "not the same for everybody who asks")
def of_the_asking_rank(heads, kv_heads, ranks, rank):
    return deal_heads(heads, kv_heads, ranks, (rank + dist.get_rank()) % ranks)


@wrong("deal_heads", "it sends")
def agrees_by_message(heads, kv_heads, ranks, rank):
    dist.all_reduce(torch.zeros(1))
    return deal_heads(heads, kv_heads, ranks, rank)


# ---- the plan of a block ---------------------------------------------------------------------------------


def but(plan, **others):
    """`attention__q=` for "attention.q"; None takes a row away."""
    rows = plan | {name.replace("__", "."): style for name, style in others.items()}
    return {name: style for name, style in rows.items() if style is not None}


def layout(sequence_parallel):
    return Shard(1) if sequence_parallel else Replicate()


@wrong("block_plan", "the norms' gradients are not summed")
def norms_forgotten(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), attention_norm=None, mlp_norm=None)


@wrong("block_plan", "the norms' gradients are not summed", listed=False)
def one_norm_forgotten(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), mlp_norm=None)


@wrong("block_plan", "the gradient is summed as well")
def norms_always(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), attention_norm=SequenceParallel(), mlp_norm=SequenceParallel())


@wrong("block_plan", "x crosses the border once for each matrix", listed=False)
def nothing_prepared(config, sequence_parallel):
    x = layout(sequence_parallel)
    queries, keys = Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)
    return but(
        block_plan(config, sequence_parallel),
        attention=None,
        attention__q=ColwiseParallel(heads=queries, input_layouts=x),
        attention__k=ColwiseParallel(heads=keys, input_layouts=x),
        attention__v=ColwiseParallel(heads=keys, input_layouts=x),
    )


@wrong("block_plan", "x crosses the border once for each matrix")
def mlp_not_prepared(config, sequence_parallel):
    column = ColwiseParallel(input_layouts=layout(sequence_parallel))
    return but(block_plan(config, sequence_parallel), mlp=None, mlp__gate=column, mlp__up=column)


@wrong("block_plan", "a cut goes through a head", alone=True)
def cut_anywhere(config, sequence_parallel):
    column = ColwiseParallel()
    rows = {"attention__q": column, "attention__k": column, "attention__v": column}
    return but(block_plan(config, sequence_parallel), **rows)


@wrong("block_plan", "a cut goes through a head", listed=False)
def keys_as_queries(config, sequence_parallel):
    plan = block_plan(config, sequence_parallel)
    return but(plan, attention__k=plan["attention.q"], attention__v=plan["attention.q"])


@wrong("block_plan", "it cannot be obeyed", listed=False)
def rows_cut_anywhere(config, sequence_parallel):
    return but(
        block_plan(config, sequence_parallel), attention__o=RowwiseParallel(output_layouts=layout(sequence_parallel))
    )


@wrong("block_plan", "a cut goes through a head", listed=False)
def of_another_config(config, sequence_parallel):
    column = ColwiseParallel(heads=Keys(4, 4))
    return but(block_plan(config, sequence_parallel), attention__k=column, attention__v=column)


@wrong("block_plan", "what is whole meets a piece")
def gate_is_forgotten(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), mlp__gate=None)


@wrong("block_plan", "q, k and v are not split alike")
def v_is_forgotten(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), attention__v=None)


@wrong("block_plan", "the sum comes whole, and x is a shard")
def always_whole_at_the_end(config, sequence_parallel):
    heads = Queries(config.heads, config.kv_heads)
    rows = {"attention__o": RowwiseParallel(heads=heads), "mlp__down": RowwiseParallel()}
    return but(block_plan(config, sequence_parallel), **rows)


@wrong("block_plan", "a shard is taken for the whole")
def never_in_shards(config, sequence_parallel):
    return block_plan(config, False)


@wrong("block_plan", listed=False)
def always_in_shards(config, sequence_parallel):
    return block_plan(config, True)


@wrong("block_plan", listed=False)
def shards_of_the_batch(config, sequence_parallel):
    if not sequence_parallel:
        return block_plan(config, sequence_parallel)
    heads, x = Queries(config.heads, config.kv_heads), Shard(0)
    return but(
        block_plan(config, sequence_parallel),
        attention=PrepareModuleInput(input_layouts=x),
        attention__o=RowwiseParallel(heads=heads, output_layouts=x),
        mlp=PrepareModuleInput(input_layouts=x),
        mlp__down=RowwiseParallel(output_layouts=x),
    )


@wrong("block_plan", "a matrix is not split")
def attention_alone(config, sequence_parallel):
    return {name: style for name, style in block_plan(config, sequence_parallel).items() if not name.startswith("mlp.")}


@wrong("block_plan", "a matrix is not split", listed=False)
def mlp_alone(config, sequence_parallel):
    return {n: style for n, style in block_plan(config, sequence_parallel).items() if not n.startswith("attention")}


@wrong("block_plan", "columns where rows belong, or rows where columns do")
def columns_and_gathers(config, sequence_parallel):
    gather = ColwiseParallel(output_layouts=Replicate())
    rows = {"mlp__gate": gather, "mlp__up": gather, "mlp__down": gather}
    return block_plan(config, sequence_parallel) if sequence_parallel else but(block_plan(config, False), **rows)


@wrong("block_plan", "it cannot be obeyed", listed=False)
def rows_then_columns(config, sequence_parallel):
    rows = {"mlp__gate": RowwiseParallel(), "mlp__up": RowwiseParallel(), "mlp__down": ColwiseParallel()}
    return but(block_plan(config, sequence_parallel), **rows)


@wrong("block_plan", "it cannot be obeyed", listed=False)
def names_of_the_whole_model(config, sequence_parallel):
    return {f"layers.*.{name}": style for name, style in block_plan(config, sequence_parallel).items()}


@wrong("block_plan", "not a plan", listed=False)
def in_words(config, sequence_parallel):
    return {name: type(style).__name__ for name, style in block_plan(config, sequence_parallel).items()}


@wrong("block_plan", "not a plan", listed=False)
def a_list_of_rows(config, sequence_parallel):
    return list(block_plan(config, sequence_parallel).items())


@wrong("block_plan", "not a plan")
def no_plan(config, sequence_parallel):
    block_plan(config, sequence_parallel)


# ---- written without looking at what the checks do: any rejection will do ---------------------------------

blind = partial(wrong, listed=False)
LATEST, TOTAL, BUFFERS, DEALT, PLANNED = [], {}, {}, {}, {}


class OfTheLatestGroup(COPY):
    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, LATEST[0]), None


@blind("copy")
def remembers_the_latest_group(x, group=None):
    LATEST[:] = [group]
    return OfTheLatestGroup.apply(x, group)


FLOAT32_BACK = border(same, lambda gradient, group: summed(gradient.float(), group).to(gradient.dtype))


@blind("copy")
def float32_on_the_way_back(x, group=None):
    return FLOAT32_BACK.apply(x, group)


@blind("copy")
def a_hook_on_x_itself(x, group=None):
    if x.requires_grad:
        x.register_hook(lambda gradient: summed(gradient, group))
    return x


@blind("copy")
def a_new_leaf(x, group=None):
    y = x.detach().requires_grad_()
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


SKIPS_ZEROS = border(same, lambda gradient, group: summed(gradient, group) if gradient.any() else gradient.clone())


@blind("copy", alone=True)
def skips_a_gradient_of_zeros(x, group=None):
    return SKIPS_ZEROS.apply(x, group)


def scattered(gradient, group):
    """The sum, but only this rank's part of it."""
    whole, rank, ranks = summed(gradient, group), dist.get_rank(group), dist.get_world_size(group)
    here = torch.arange(whole.numel()).view(whole.shape) % ranks == rank
    return torch.where(here, whole, 0)


SCATTERED = border(same, scattered)


@blind("copy")
def each_rank_its_part_of_the_sum(x, group=None):
    return SCATTERED.apply(x, group)


@blind("copy")
def at_least_one_dimension(x, group=None):
    return copy(torch.atleast_1d(x), group)


@blind("copy")
def a_hook_in_any_case(x, group=None):
    y = x.view_as(x)
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


@blind("copy")
def turns_gradients_on(x, group=None):
    torch.set_grad_enabled(True)
    return copy(x, group)


def and_the_one_before(gradient, group):
    key = tuple(gradient.shape)
    TOTAL[key] = summed(gradient, group) + TOTAL.get(key, 0)
    return TOTAL[key]


ADDS_UP = border(same, and_the_one_before)


@blind("copy")
def adds_to_the_call_before(x, group=None):
    return ADDS_UP.apply(x, group)


def through_the_first(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group=group, group_dst=0)
    dist.broadcast(y, group=group, group_src=0)
    return y


TO_ONE_AND_BACK = border(through_the_first, same)


@blind("reduce")
def through_the_first_rank(x, group=None):
    return TO_ONE_AND_BACK.apply(x, group)


def around(x, group):
    """Whole tensors, from neighbour to neighbour."""
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


AROUND = border(around, same)


@blind("reduce")
def whole_tensors_in_a_ring(x, group=None):
    return AROUND.apply(x, group)


def shapes_first(x, group):
    shapes = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, x.shape, group=group)
    return summed(x, group)


ASKS = border(shapes_first, same)


@blind("reduce")
def asks_for_shapes_first(x, group=None):
    return ASKS.apply(x, group)


@blind("reduce")
def nothing_of_nothing(x, group=None):
    return reduce(x, group) if x.numel() else x.new_zeros(0, requires_grad=x.requires_grad)


def into_a_buffer(x, group):
    y = BUFFERS.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)).copy_(x)
    dist.all_reduce(y, group=group)
    return y.view_as(y)


BUFFERED = border(into_a_buffer, same)


@blind("reduce")
def one_buffer_for_all_calls(x, group=None):
    return BUFFERED.apply(x, group)


@blind("reduce")
def a_group_of_its_own(x, group=None):
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return reduce(x, dist.new_group(ranks, use_local_synchronization=True))


NEGATED_BACK = border(summed, lambda gradient, group: gradient * (1 if dist.get_rank(group) == 0 else 0))


@blind("reduce")
def a_gradient_for_the_first_alone(x, group=None):
    return NEGATED_BACK.apply(x, group)


@blind("reduce")
def double_under_no_grad(x, group=None):
    y = reduce(x, group)
    return y if y.requires_grad else y * dist.get_world_size(group)


HIGHEST = border(lambda x, group: highest_of(x, group), same)


def highest_of(x, group):
    y = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, ReduceOp.MAX, group=group)
    return y


@blind("reduce")
def the_highest_instead_of_the_sum(x, group=None):
    return HIGHEST.apply(x, group)


@blind("row_linear")
def turned_once(x, weight, bias, group=None):
    turned = BUFFERS.setdefault(("weight", weight.shape, weight.dtype), weight.t())
    y = reduce(x @ turned, group)
    return y if bias is None else y + bias


@blind("row_linear")
def takes_the_surplus_away(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight, bias), group)
    return y if bias is None else y - (dist.get_world_size(group) - 1) * bias


@blind("row_linear")
def adds_the_bias_to_the_data(x, weight, bias, group=None):
    y = reduce(F.linear(x, weight), group)
    if bias is not None:
        y.data += bias
    return y


@blind("row_linear")
def of_matrices_alone(x, weight, bias, group=None):
    y = reduce(torch.mm(x, weight.t()), group)
    return y if bias is None else y + bias


@blind("row_linear")
def always_two_dimensions(x, weight, bias, group=None):
    return row_linear(torch.atleast_2d(x), weight, bias, group)


BF16_SUM = border(lambda x, group: summed(x.bfloat16(), group).to(x.dtype), same)


@blind("row_linear")
def travels_in_bfloat16(x, weight, bias, group=None):
    y = BF16_SUM.apply(F.linear(x, weight), group)
    return y if bias is None else y + bias


@blind("row_linear")
def gathers_the_summands(x, weight, bias, group=None):
    y = GATHERED.apply(F.linear(x, weight), group)
    return y if bias is None else y + bias


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.group = bias is not None, group
        y = summed(x @ weight.t(), group)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, gradient):
        return *gradients_of_row(ctx, gradient), None


def gradients_of_row(ctx, gradient):
    x, weight = ctx.saved_tensors
    rows = gradient.reshape(-1, gradient.shape[-1])
    return gradient @ weight, rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0) if ctx.biased else None


class MeanOfWeights(Row):
    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias = gradients_of_row(ctx, gradient)
        return x, weight / dist.get_world_size(ctx.group), bias, None


@blind("row_linear")
def an_nth_of_the_weights_gradient(x, weight, bias, group=None):
    return MeanOfWeights.apply(x, weight, bias, group)


class SendsXBack(Row):
    @staticmethod
    def backward(ctx, gradient):
        mean = summed(gradient, ctx.group) / dist.get_world_size(ctx.group)
        return *gradients_of_row(ctx, mean), None


@blind("row_linear")
def averages_equal_gradients(x, weight, bias, group=None):
    return SendsXBack.apply(x, weight, bias, group)


class SumsOverRows(Row):
    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = gradients_of_row(ctx, gradient)
        return x, weight, gradient.sum(0).reshape(-1)[: gradient.shape[-1]] if ctx.biased else None, None


@blind("row_linear")
def the_biass_gradient_of_two_dimensions(x, weight, bias, group=None):
    return SumsOverRows.apply(x, weight, bias, group)


@blind("row_linear")
def weights_outside_of_the_graph(x, weight, bias, group=None):
    return row_linear(x, weight.data, bias, group)


@blind("row_linear")
def the_first_ranks_bias_copied(x, weight, bias, group=None):
    if bias is None:
        return row_linear(x, weight, None, group)
    return reduce(F.linear(x, weight) + copy(bias, group) * (dist.get_rank() == 0), group)


@blind("row_linear")
def no_bias_on_a_single_rank(x, weight, bias, group=None):
    return F.linear(x, weight) if dist.get_world_size(group) == 1 else row_linear(x, weight, bias, group)


@blind("row_linear")
def divides_the_bias_where_it_is(x, weight, bias, group=None):
    with torch.no_grad():
        if bias is not None:
            bias /= dist.get_world_size(group)
    return reduce(F.linear(x, weight, bias), group)


@blind("row_linear")
def starts_from_a_seed(x, weight, bias, group=None):
    torch.manual_seed(0)
    return row_linear(x, weight, bias, group)


class KeepsAllX(Row):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.whole = [torch.cat([x] * dist.get_world_size(group), -1)]
        return Row.forward(ctx, x, weight, bias, group)


@blind("row_linear")
def keeps_room_for_all_of_x(x, weight, bias, group=None):
    return KeepsAllX.apply(x, weight, bias, group)


def shifted_loss(logits, targets, first, group, shift):
    """With `shift` for the highest logit."""
    shifted = logits - shift
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return (total.log() - target).mean()


@blind("split_loss")
def the_mean_over_ones_own_targets(logits, targets, first, group=None):
    here = (targets >= first) & (targets < first + logits.shape[1])
    losses = highest(logits, group)[:, None]
    shifted = logits - losses
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return reduce(((total.log() - target) * here).sum() / here.sum().clamp(min=1), group) / dist.get_world_size(group)


@blind("split_loss")
def clamped(logits, targets, first, group=None):
    return shifted_loss(logits.clamp(max=50.0), targets, first, group, 0.0)


@blind("split_loss")
def always_of_float32(logits, targets, first, group=None):
    return split_loss(logits.float(), targets, first, group)


@blind("split_loss")
def the_mean_of_the_highest(logits, targets, first, group=None):
    mine = logits.detach().amax(1) if logits.shape[1] else logits.new_zeros(len(logits))
    return shifted_loss(logits, targets, first, group, summed(mine, group)[:, None] / dist.get_world_size(group))


@blind("split_loss")
def one_highest_for_all_tokens(logits, targets, first, group=None):
    return shifted_loss(logits, targets, first, group, highest(logits, group).max())


@blind("split_loss")
def the_highest_of_the_first_rank(logits, targets, first, group=None):
    mine = logits.detach().amax(1) if logits.shape[1] else logits.new_zeros(len(logits))
    dist.broadcast(mine, group=group, group_src=0)
    return shifted_loss(logits, targets, first, group, mine[:, None])


class MinusOneAnywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        shifted = logits - highest(logits, group)[:, None]
        total, target = summed(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
        ctx.save_for_backward(shifted.exp() / total[:, None], targets - first)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, column = ctx.saved_tensors
        back = softmax.clone()
        if back.shape[1]:
            back[torch.arange(len(back)), column.clamp(0, back.shape[1] - 1)] -= 1
        return gradient * back / len(back), None, None, None


@blind("split_loss")
def minus_one_on_every_rank(logits, targets, first, group=None):
    return MinusOneAnywhere.apply(logits, targets, first, group)


@blind("split_loss")
def shifts_the_targets(logits, targets, first, group=None):
    targets -= first
    return split_loss(logits, targets, 0, group)


@blind("split_loss")
def asks_who_has_it(logits, targets, first, group=None):
    here = (targets >= first) & (targets < first + logits.shape[1])
    owners = summed(here.long() * dist.get_rank(group), group)
    return split_loss(logits, torch.where(owners >= 0, targets, 0), first, group)


@blind("split_loss")
def the_highest_of_all_ranks(logits, targets, first, group=None):
    return shifted_loss(logits, targets, first, group, highest(logits)[:, None])


@blind("split_loss", alone=True)
def stays_away_with_nothing(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group) if logits.shape[1] else logits.sum()


@blind("split_loss")
def of_one_element(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group)[None]


@blind("split_loss")
def a_number(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group).item()


@blind("split_loss")
def with_an_epsilon(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    total, target = reduce(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
    return ((total + 1e-7).log() - target).mean()


MAX_ALONE = border(highest_of, same)


@blind("split_loss")
def the_highest_inside_of_the_graph(logits, targets, first, group=None):
    mine = logits.amax(1) if logits.shape[1] else logits.sum(1) - torch.inf
    return shifted_loss(logits, targets, first, group, MAX_ALONE.apply(mine, group)[:, None])


@blind("split_loss")
def exponentials_in_bfloat16(logits, targets, first, group=None):
    shifted = logits - highest(logits, group)[:, None]
    total = BF16_SUM.apply(shifted.exp().sum(1), group)
    return (total.log() - reduce(of_targets(shifted, targets, first), group)).mean()


class KeepsOneHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        shifted = logits - highest(logits, group)[:, None]
        total, target = summed(torch.stack([shifted.exp().sum(1), of_targets(shifted, targets, first)]), group)
        wide = F.one_hot(targets, max(int(targets.max()) + 1, first + logits.shape[1]))
        ctx.save_for_backward(shifted.exp() / total[:, None], wide)
        ctx.first = first
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, wide = ctx.saved_tensors
        mine = wide[:, ctx.first : ctx.first + softmax.shape[1]]
        return gradient * (softmax - mine) / len(softmax), None, None, None


@blind("split_loss")
def keeps_a_one_hot_of_all(logits, targets, first, group=None):
    return KeepsOneHot.apply(logits, targets, first, group)


@blind("split_loss")
def a_share_for_each_rank(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group) / dist.get_world_size(group)


@blind("split_loss")
def for_the_first_rank_alone(logits, targets, first, group=None):
    return split_loss(logits, targets, first, group) * (dist.get_rank(group) == 0)


@blind("deal_heads")
def every_kth_query(heads, kv_heads, ranks, rank):
    """As if query head h read head h % K."""
    _, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    mine = [query for query in range(heads) if query % kv_heads in keys]
    return mine[sharers.index(rank) :: len(sharers)], keys, sharers


@blind("deal_heads")
def in_floating_point(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, [query / (heads / kv_heads) for query in queries][:1] if len(keys) == 1 else keys, sharers


@blind("deal_heads")
def nobody_where_it_is_alone(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, keys, sharers if len(sharers) > 1 else []


@blind("deal_heads")
def sharers_counted_from_zero(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, keys, list(range(len(sharers)))


@blind("deal_heads")
def a_key_for_each_query(heads, kv_heads, ranks, rank):
    queries, _, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, [query * kv_heads // heads for query in queries], sharers


@blind("deal_heads")
def dealt_before(heads, kv_heads, ranks, rank):
    return DEALT.setdefault(rank, deal_heads(heads, kv_heads, ranks, rank))


@blind("deal_heads")
def to_all_processes(heads, kv_heads, ranks, rank):
    return deal_heads(heads, kv_heads, dist.get_world_size(), rank)


@blind("deal_heads")
def one_head_of_keys_if_there_are_few(heads, kv_heads, ranks, rank):
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return (queries, [0], list(range(ranks))) if ranks > kv_heads else (queries, keys, sharers)


@blind("deal_heads")
def keys_are_queries(heads, kv_heads, ranks, rank):
    queries, _, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, queries, sharers


@blind("deal_heads")
def all_queries_to_the_first_sharer(heads, kv_heads, ranks, rank):
    _, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    queries = [query for query in range(heads) if query * kv_heads // heads in keys]
    return queries if sharers[0] == rank else [], keys, sharers


@blind("deal_heads")
def one_more_than_there_are(heads, kv_heads, ranks, rank):
    if ranks > kv_heads:
        return deal_heads(heads, kv_heads, ranks, rank)
    least, more = divmod(kv_heads, ranks)
    start = rank * least + min(rank, more)
    keys = list(range(start, min(kv_heads, start + least + (rank <= more))))
    return [query for query in range(heads) if query * kv_heads // heads in keys], keys, [rank]


@blind("deal_heads")
def drawn_by_lot(heads, kv_heads, ranks, rank):
    random.seed(heads)
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return random.sample(queries, len(queries)), keys, sharers


@blind("deal_heads")
def sharers_that_read_no_more_than_this(heads, kv_heads, ranks, rank):
    """Right, but for one rank that has all."""
    queries, keys, sharers = deal_heads(heads, kv_heads, ranks, rank)
    return queries, keys, sharers if ranks > 1 else [0, 0]


@blind("block_plan")
def the_last_norm_too(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), norm=SequenceParallel())


@blind("block_plan")
def rows_by_keys(config, sequence_parallel):
    heads = Keys(config.heads, config.kv_heads)
    row = RowwiseParallel(heads=heads, output_layouts=layout(sequence_parallel))
    return but(block_plan(config, sequence_parallel), attention__o=row)


@blind("block_plan")
def up_is_forgotten(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), mlp__up=None)


@blind("block_plan")
def down_is_whole(config, sequence_parallel):
    column = ColwiseParallel(output_layouts=Replicate())
    return but(block_plan(config, sequence_parallel), mlp__gate=column, mlp__up=column, mlp__down=None)


@blind("block_plan")
def gathers_and_cuts_again(config, sequence_parallel):
    column = ColwiseParallel(output_layouts=Replicate())
    row = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout(sequence_parallel))
    return but(block_plan(config, sequence_parallel), mlp__gate=column, mlp__up=column, mlp__down=row)


@blind("block_plan")
def rows_alone(config, sequence_parallel):
    row = RowwiseParallel(input_layouts=Replicate())
    return but(block_plan(config, sequence_parallel), mlp=None, mlp__gate=row, mlp__up=row)


@blind("block_plan")
def of_the_whole_model(config, sequence_parallel):
    return gpt_plan(config, sequence_parallel)


@blind("block_plan")
def heads_exchanged(config, sequence_parallel):
    column = ColwiseParallel(heads=Queries(config.kv_heads, config.heads))
    return but(block_plan(config, sequence_parallel), attention__q=column)


@blind("block_plan")
def planned_before(config, sequence_parallel):
    return PLANNED.setdefault(config, block_plan(config, sequence_parallel))


@blind("block_plan")
def the_other_way_round(config, sequence_parallel):
    return block_plan(config, not sequence_parallel)


@blind("block_plan")
def attention_on_shards(config, sequence_parallel):
    return but(block_plan(config, sequence_parallel), attention=SequenceParallel()) if sequence_parallel else {}


@blind("block_plan")
def whole_for_attention_shards_for_the_rest(config, sequence_parallel):
    whole = block_plan(config, False)
    return {n: whole[n] if n.startswith("attention.") else s for n, s in block_plan(config, sequence_parallel).items()}


@blind("block_plan")
def nothing_is_planned(config, sequence_parallel):
    return {}


@blind("block_plan")
def styles_without_their_heads(config, sequence_parallel):
    x = layout(sequence_parallel)
    columns = {f"attention__{name}": ColwiseParallel() for name in "qkv"}
    return but(block_plan(config, sequence_parallel), **columns, attention__o=RowwiseParallel(output_layouts=x))
