"""The checks of notebook 09 against answers that are known to be right, and against wrong ones that are known by name.

Right: as the course does it, and answers that go another way about it (hooks on tensors, gradients by hand, sums of
what each rank has added up already, heads dealt out in turn, plans by patterns).  Wrong: tests/wrong_answers/tensor.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from labs.kit import check
from labs.shares import Keys, Queries
from labs.tp import ColwiseParallel, Plan, SequenceParallel, gpt_plan
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.tensor import (
    block_plan,
    by_hand,
    copy,
    deal_heads,
    of_logits,
    of_targets,
    reduce,
    row_linear,
    split_loss,
    summed,
)
from tests.wrong_answers.together import together

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
        return gradient @ weight, rows.t() @ x.reshape(-1, x.shape[-1]), rows.sum(0) if ctx.biased else None, None


def row_by_hand(x, weight, bias, group=None):
    return Row.apply(x, weight, bias, group)


def row_by_einsum(x, weight, bias, group=None):
    y = reduce(torch.einsum("...i,oi->...o", x, weight), group)
    return y if bias is None else y + bias.expand_as(y)


def loss_by_hand(logits, targets, first, group=None):
    backward = by_hand(lambda gradient, softmax, column, group: gradient * of_logits(softmax, column))
    return backward.apply(logits, targets, first, group)


def loss_of_sums_of_each_rank(logits, targets, first, group=None):
    """Two numbers a token, and one more: what is added up over the tokens need not travel for each."""
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


LINES = {
    "conjugate": (
        "✓ conjugate: copy sent 0.00 × the tensor forward and 1.50 × backward, reduce 1.50 × forward and 0.00 × "
        "backward; the least possible is 1.50 × where something is due, and 0.00 × elsewhere"
    ),
    "row_linear": (
        "✓ row_linear: you sent 1.50 × y forward and 0.00 × backward; the least possible is 1.50 × and 0.00 ×"
    ),
    "deal_heads": (
        "✓ deal_heads: 21 deals without a message; a job that obeys, of 8 query heads over 2 of keys and values, "
        "4 ranks, has one process's attention"
    ),
    "split_loss": (
        "✓ split_loss: you all-reduced {} numbers a token forward and none backward; 3 are enough for any vocabulary"
    ),
    "block_plan": (
        "✓ block_plan: a rank holds its part of every matrix, and sent 3.00 × x forward and 3.00 × backward; "
        "the least possible is 3.00 ×, as two all-reduces each way"
    ),
}
RIGHT = [
    ("conjugate", (), [copy, reduce]),
    ("conjugate", (), [copy_by_a_hook, reduce_with_a_context_of_its_own]),
    ("conjugate", (), [copy, reduce_by_the_difference]),
    ("row_linear", (), [row_linear]),
    ("row_linear", (), [row_by_hand]),
    ("row_linear", (), [row_by_einsum]),
    ("deal_heads", (), [deal_heads]),
    ("deal_heads", (), [heads_in_turn]),
    ("deal_heads", (), [heads_by_shares]),
    ("split_loss", ("3.00",), [split_loss]),
    ("split_loss", ("3.00",), [loss_by_hand]),
    ("split_loss", ("2.01",), [loss_of_sums_of_each_rank]),
    ("block_plan", (), [block_plan]),
    ("block_plan", (), [plan_by_patterns]),
    ("block_plan", (), [plan_of_the_course]),
]


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    answers = [(figures, fns) for check_of, figures, fns in RIGHT if check_of == name]
    said = together([(name, tuple(fns), False) for _, fns in answers])
    for (figures, fns), answer in zip(answers, said, strict=True):
        assert answer.ok is True and answer, f"{fns[-1].__name__}: {answer}"
        assert str(answer) == LINES[name].format(*figures)


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
    assert sum(answer.check == name for answer in ANSWERS) >= 12
    assert let_past(name) == ""


def test_what_it_raises_is_told_with_its_line():
    def fn(config, sequence_parallel):
        return {}[config.heads]

    answer = check.block_plan(fn)
    assert answer.ok is False and answer.question
    assert "KeyError" in answer.text and "{}[config.heads]" in answer.text


def test_the_same_seed_gives_the_same_answer():
    first, again, other = (check.deal_heads(lambda *sizes: ([0], [0], [0]), seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.seed != other.seed
