"""The checks of notebook 09 against answers that are known to be right, and against wrong ones that are known by name.

Right: as the course does it, and answers that go another way about it (hooks on tensors, gradients by hand, sums of
what each rank has added up already, heads dealt out in turn, plans by patterns).  Wrong: tests/wrong_answers/tensor.py.
"""

from collections import ChainMap, OrderedDict
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed import ReduceOp

from labs.dtensor import Replicate, Shard
from labs.kit import check
from labs.tp import ColwiseParallel, Plan, RowwiseParallel, SequenceParallel, gpt_plan
from labs.tp.shares import Keys, Queries
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.tensor import (
    block_plan,
    border,
    by_hand,
    copy,
    deal_heads,
    highest,
    of_logits,
    of_targets,
    reduce,
    row_linear,
    same,
    split_loss,
    summed,
)

CHECKS = {
    "conjugate": 2,
    "row_linear": 1,
    "deal_heads": 1,
    "split_loss": 1,
    "block_plan": 1,
}  # and of how many functions

# ---- right answers ---------------------------------------------------------------------------------------


def copy_by_a_hook(x, group=None):
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: summed(gradient, group))
    return y


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(x, group):
        y = x.contiguous().clone()
        dist.all_reduce(y, op=ReduceOp.SUM, group=group, async_op=True).wait()
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


def reduce_with_a_context_of_its_own(x, group=None):
    return Reduce.apply(x, group)


def reduce_by_the_difference(x, group=None):
    """The sum, with the gradient of the summand."""
    with torch.no_grad():
        others = summed(x, group) - x
    return x + others


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        y = summed(x @ weight.t(), group)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t() @ x.reshape(len(rows), x.shape[-1])
        return gradient @ weight, of_weight, rows.sum(0) if ctx.biased else None, None


def row_by_hand(x, weight, bias, group=None):
    return Row.apply(x, weight, bias, group)


def row_by_einsum(x, weight, bias, group=None):
    y = reduce(torch.einsum("...i,oi->...o", x, weight), group)
    return y if bias is None else y + bias.expand_as(y)


def loss_by_hand(logits, targets, first, group=None):
    backward = by_hand(lambda gradient, softmax, column, group: gradient * of_logits(softmax, column))
    return backward.apply(logits, targets, first, group)


def loss_of_sums_of_each_rank(logits, targets, first, group=None):
    """Two numbers a token, and one more in all: what is added up over the tokens need not travel for each."""
    own = logits.logsumexp(1) if logits.shape[1] else logits.sum(1) - torch.inf
    highest = own.detach().clone()
    dist.all_reduce(highest, ReduceOp.MAX, group=group)
    total = reduce((own - highest).exp(), group).log() + highest
    return total.mean() - reduce(of_targets(logits, targets, first).mean(), group)


def heads_in_turn(heads, kv_heads, ranks, rank):
    together, copies = heads // kv_heads, max(1, ranks // kv_heads)
    keys = range(rank // copies, kv_heads, max(1, ranks // copies))
    queries = torch.tensor([key * together + i for key in keys for i in range(together)])
    return queries.chunk(copies)[rank % copies], keys, range(rank - rank % copies, rank - rank % copies + copies)


def heads_by_shares(heads, kv_heads, ranks, rank):
    queries, keys = Queries(heads, kv_heads).cut(heads, 0, ranks), Keys(heads, kv_heads).cut(kv_heads, 0, ranks)
    mine = [list(range(cut.starts[rank], cut.stops[rank])) for cut in (queries, keys)]
    return *mine, [other for other in range(ranks) if keys.starts[other] == keys.starts[rank]]


def plan_by_patterns(config, sequence_parallel):
    plan = block_plan(config, sequence_parallel)
    names = ("attention", "attention.q", "attention.o", "mlp", "mlp.down")
    norms = {"*_norm": SequenceParallel()} if sequence_parallel else {}
    return Plan({n: plan[n] for n in names} | {"*.[kv]": plan["attention.k"], "mlp.[gu]*": ColwiseParallel()} | norms)


def plan_of_the_course(config, sequence_parallel):
    plan = gpt_plan(config, sequence_parallel).items()
    return {name.removeprefix("layers.*."): style for name, style in plan if name.startswith("layers")}


# ---- right answers that were written without looking at what the checks do -----------------------------------


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


def copy_by_the_other(x, group=None):
    return CopyAgain.apply(x, group)


def reduce_by_the_other(x, group=None):
    return ReduceAgain.apply(x, group)


def functional_sum(x, group):
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group or dist.group.WORLD))


FUNCTIONAL_COPY, FUNCTIONAL_REDUCE = border(same, functional_sum), border(functional_sum, same)


def copy_by_functional_collectives(x, group=None):
    return FUNCTIONAL_COPY.apply(x, group)


def reduce_by_functional_collectives(x, group=None):
    return FUNCTIONAL_REDUCE.apply(x, group)


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


COPY_BY_PIECES, REDUCE_BY_PIECES = border(same, by_pieces), border(by_pieces, same)


def copy_by_pieces(x, group=None):
    return COPY_BY_PIECES.apply(x, group)


def reduce_by_pieces(x, group=None):
    return REDUCE_BY_PIECES.apply(x, group)


def copy_unless_alone(x, group=None):
    return x if dist.get_world_size(group) == 1 else copy(x, group)


def reduce_unless_alone(x, group=None):
    return x if dist.get_world_size(group) == 1 else reduce(x, group)


def row_by_pieces(x, weight, bias, group=None):
    y = reduce_by_pieces(x.matmul(weight.t()), group)
    if bias is not None:
        y = y + bias
    return y


def row_by_addmm(x, weight, bias, group=None):
    if x.ndim == 1:
        y = reduce(weight @ x, group)
    else:
        y = reduce(torch.mm(x.flatten(0, -2), weight.mT), group).unflatten(0, x.shape[:-1])
    return torch.add(y, bias) if bias is not None else y


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


def row_by_autograd_again(x, weight, bias, group=None):
    y = RowOfLinear.apply(x, weight, group)
    return y if bias is None else y + bias


class InPlace(torch.autograd.Function):
    """The gradient is written where the softmax was."""

    @staticmethod
    def forward(ctx, logits, targets, first, group):
        shifted = logits - highest(logits, group)[:, None]
        columns = targets - first
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = columns.where(here, 0)
        target = shifted[torch.arange(len(logits)), columns] * here if logits.shape[1] else shifted.sum(1)
        exponentials = shifted.exp_()
        total = exponentials.sum(1)
        dist.all_reduce(target, group=group)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials.div_(total[:, None]), columns, here)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, columns, here = ctx.saved_tensors
        if softmax.shape[1]:
            softmax[torch.arange(len(softmax)), columns] -= here.to(softmax)
        return softmax.mul_(gradient / len(softmax)), None, None, None


def loss_in_place(logits, targets, first, group=None):
    return InPlace.apply(logits, targets, first, group)


def loss_of_two_halves(logits, targets, first, group=None):
    """The tokens in two chunks."""
    halves = zip(logits.chunk(2), targets.chunk(2), strict=True)
    return sum(split_loss(*half, first, group) * len(half[1]) for half in halves) / len(targets)


def loss_of_each_token(logits, targets, first, group=None):
    shifted = logits - highest(logits, group).unsqueeze(-1)
    index = targets.sub(first)
    mask = index.lt(0) | index.ge(logits.size(-1))
    mine = shifted.new_zeros(len(shifted))
    if logits.size(-1):
        mine = shifted.gather(-1, index.masked_fill(mask, 0).unsqueeze(-1)).squeeze(-1).masked_fill(mask, 0)
    else:
        mine = mine + shifted.sum()
    return reduce(shifted.exp().sum(-1), group).log().sub(reduce(mine, group)).mean()


def heads_of_a_tensor(heads, kv_heads, ranks, rank):
    return tuple(map(torch.tensor, deal_heads(heads, kv_heads, ranks, rank)))


def plan_of_two_maps(config, sequence_parallel):
    plan = block_plan(config, sequence_parallel)
    return ChainMap({name: plan[name] for name in plan if "mlp" in name}, plan)


def plan_backwards(config, sequence_parallel):
    return OrderedDict(reversed(block_plan(config, sequence_parallel).items()))


def plan_with_layouts_spelled_out(config, sequence_parallel):
    x = Shard(1) if sequence_parallel else Replicate()
    plan = block_plan(config, sequence_parallel)
    down = RowwiseParallel(input_layouts=Shard(-1), output_layouts=x)
    return plan | {"mlp.down": down, "mlp.up": ColwiseParallel(output_layouts=Shard(-1))}


# ---- accepted --------------------------------------------------------------------------------------------

LINES = {
    "conjugate": (
        "✓ conjugate: copy sent 0.00 × the tensor forward and 1.50 × backward, reduce 1.50 × forward and 0.00 × "
        "backward; the least possible is 1.50 × where something is due, and 0.00 × elsewhere"
    ),
    "row_linear": (
        "✓ row_linear: you sent 1.50 × y forward and 0.00 × backward; the least possible is 1.50 × and 0.00 ×"
    ),
    "deal_heads": (
        "✓ deal_heads: 21 deals, on 1 to 16 ranks: each head once, its keys and values beside it, and not one message"
    ),
    "split_loss": (
        "✓ split_loss: you sent {} numbers per token forward and none backward; 3 are enough for any vocabulary"
    ),
    "block_plan": (
        "✓ block_plan: a rank holds its part of every matrix, and sent 3.00 × x forward and 3.00 × backward; "
        "the least possible is 3.00 ×, as two all-reduces each way"
    ),
}
RIGHT = [
    ("conjugate", (), [copy, reduce]),
    ("conjugate", (), [copy_by_a_hook, reduce_with_a_context_of_its_own]),
    ("row_linear", (), [row_linear]),
    ("row_linear", (), [row_by_hand]),
    ("deal_heads", (), [deal_heads]),
    ("deal_heads", (), [heads_in_turn]),
    ("deal_heads", (), [heads_by_shares]),
    ("split_loss", ("3.00",), [split_loss]),
    ("split_loss", ("2.02",), [loss_of_sums_of_each_rank]),
    ("block_plan", (), [block_plan]),
    ("block_plan", (), [plan_of_the_course]),
]
BEYOND = [
    ("block_plan", [plan_by_patterns]),
    ("split_loss", [loss_by_hand]),
    ("row_linear", [row_by_einsum]),
    ("conjugate", [copy, reduce_by_the_difference]),
    ("conjugate", [copy_by_the_other, reduce_by_the_other]),
    ("conjugate", [copy_by_functional_collectives, reduce_by_functional_collectives]),
    ("conjugate", [copy_by_pieces, reduce_by_pieces]),
    ("conjugate", [copy_unless_alone, reduce_unless_alone]),
    ("row_linear", [row_by_pieces]),
    ("row_linear", [row_by_addmm]),
    ("row_linear", [row_by_autograd_again]),
    ("split_loss", [loss_in_place]),
    ("split_loss", [loss_of_two_halves]),
    ("split_loss", [loss_of_each_token]),
    ("deal_heads", [heads_of_a_tensor]),
    ("block_plan", [plan_of_two_maps]),
    ("block_plan", [plan_backwards]),
    ("block_plan", [plan_with_layouts_spelled_out]),
]


def rights(name):
    return [tuple(fns) for check_of, _, fns in RIGHT if check_of == name]


def wrongs(name):
    return [wrong for wrong in ANSWERS if wrong.check == name and wrong.listed]


@cache
def said(name):
    """Of the right answers, and behind them of the wrong ones: the same jobs do for both."""
    asked = [(name, fns, False) for fns in rights(name)]
    return together(asked + [(name, wrong.functions, wrong.alone) for wrong in wrongs(name)])


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    figures = [figures for check_of, figures, _ in RIGHT if check_of == name]
    for fns, of, answer in zip(rights(name), figures, said(name), strict=False):
        assert answer.ok is True and answer, f"{fns[-1].__name__}: {answer}"
        assert str(answer) == LINES[name].format(*of)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_beyond_these_are_accepted(name):
    for answer in together([(name, tuple(fns), False) for check_of, fns in BEYOND if check_of == name], seed=None):
        assert answer.ok is True, answer


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args, **options):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(*[stub] * (1 + (name == "conjugate")))
    assert answer.ok is None and not answer
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


# ---- wrong answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert len(wrongs(name)) >= 8
    for wrong, answer in zip(wrongs(name), said(name)[len(rights(name)) :], strict=True):
        assert wrong.caught(answer), f"{wrong.functions[0].__name__}: wanted {wrong.mistake!r}\n{answer}"


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_that_were_written_without_looking(name):
    assert let_past(name, listed=False) == ""


def test_what_it_raises_is_told_with_its_line():
    def fn(config, sequence_parallel):
        return {}[config.heads]

    answer = check.block_plan(fn)
    assert answer.ok is False and answer.question
    assert "KeyError" in answer.text and "{}[config.heads]" in answer.text


def test_the_same_seed_gives_the_same_answer():
    first, again, other = (check.deal_heads(lambda *sizes: ([0], [0], [0]), seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.seed != other.seed
