"""Answers to an exercise of notebook 09b: a layer, split by a table of styles."""

from collections import ChainMap

from labs.dtensor import Replicate, Shard
from labs.tp import ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan
from labs.tp.shares import Keys, Queries
from tests.answers import Exercise

answers = Exercise("block_plan")
LINE = (
    "a rank holds its part of every matrix, and sent 3.00 × x forward and 3.00 × backward; "
    "the least possible is 3.00 ×, as two all-reduces each way"
)


def parts(config, sequence_parallel):
    x = Shard(1) if sequence_parallel else Replicate()
    return x, Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)


@answers.right(line=LINE, blind=True)
def in_a_table(config, sequence_parallel):
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


@answers.right(blind=True, long=True)
def by_patterns(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = {"[am]*[np]": PrepareModuleInput(input_layouts=x)}
    plan |= {"attention.[kv]": ColwiseParallel(heads=keys), "attention.q": ColwiseParallel(heads=queries)}
    plan |= {"mlp.[gu]*": ColwiseParallel(), "mlp.d*": RowwiseParallel(output_layouts=x)}
    plan |= {"attention.o": RowwiseParallel(heads=queries, output_layouts=x)}
    return plan | ({"*_norm": SequenceParallel()} if sequence_parallel else {})


@answers.right(blind=True)
def later_rows_win(config, sequence_parallel):
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


@answers.right(blind=True, long=True)
def out_of_the_models(config, sequence_parallel):
    plan, start = gpt_plan(config, sequence_parallel), "layers.*."
    return {name.removeprefix(start): style for name, style in plan.items() if name.startswith(start)}


@answers.right(blind=True, long=True)
def all_said(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    columns = {"input_layouts": x, "output_layouts": Shard(-1)}
    rows = {"input_layouts": Shard(-1), "output_layouts": x}
    plan = {norm: SequenceParallel() for norm in ("mlp_norm", "attention_norm")} if sequence_parallel else {}
    plan |= {"mlp.down": RowwiseParallel(**rows), "attention.o": RowwiseParallel(**rows, heads=queries)}
    plan |= {"mlp.up": ColwiseParallel(**columns), "mlp.gate": ColwiseParallel(**columns)}
    plan |= {f"attention.{name}": ColwiseParallel(**columns, heads=keys) for name in "vk"}
    plan |= {"attention.q": ColwiseParallel(**columns, heads=queries)}
    return plan | {"mlp": PrepareModuleInput(input_layouts=x), "attention": PrepareModuleInput(input_layouts=x)}


@answers.right(long=True)
def two_maps(config, sequence_parallel):
    plan = in_a_table(config, sequence_parallel)
    return ChainMap({name: plan[name] for name in plan if "mlp" in name}, plan)


# ---- the right one with other rows, or without some ------------------------------------------------------


def but(mistake, changes=None, drop=(), blind=True, **options):
    """changes(config, x, queries, keys, sequence_parallel)."""

    def plan(config, sequence_parallel):
        right = in_a_table(config, sequence_parallel)
        if changes:
            right |= changes(config, *parts(config, sequence_parallel), sequence_parallel)
        return {name: style for name, style in right.items() if name not in drop}

    plan.__name__ = plan.__qualname__ = f"but_{len(answers.answers)}"
    answers.wrong(mistake, blind=blind, **options)(plan)


def of(mistake, plan, blind=True, **options):
    answers.wrong(mistake, blind=blind, **options)(plan)


def columns(names, **options):
    return {name: ColwiseParallel(**options) for name in names}


def within(x, q, dim):
    """As if each rank had a part of this dim."""
    if x == Replicate():
        return {}
    x = Shard(dim)
    rows = {"attention.o": RowwiseParallel(heads=q, output_layouts=x), "mlp.down": RowwiseParallel(output_layouts=x)}
    return {name: PrepareModuleInput(input_layouts=x) for name in ("attention", "mlp")} | rows


QKV, KV, UP = ("attention.q", "attention.k", "attention.v"), ("attention.k", "attention.v"), ("mlp.gate", "mlp.up")
HEAD, UNLIKE, NEVER = "a cut goes through a head", "q, k and v are not split alike", "it cannot be obeyed"
NORMS, WHOLE, TWICE = (
    "the norms' gradients are not summed",
    "a matrix is not split",
    "x crosses the border once for each matrix",
)
MEETS, COMES_WHOLE = "what is whole meets a piece", "the sum comes whole, and x is a shard"

of("a shard is taken for the whole", lambda config, sequence_parallel: in_a_table(config, False))
of("", lambda config, sequence_parallel: in_a_table(config, True))
of("", lambda config, sequence_parallel: in_a_table(config, not sequence_parallel), long=True)
but(NORMS, drop=("attention_norm", "mlp_norm"))
but(NORMS, drop=("attention_norm",), long=True)
but(NORMS, drop=("mlp_norm",), long=True)
but("the gradient is summed as well", lambda c, x, q, k, s: {"*_norm": SequenceParallel()})
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=q), alone=True, long=True)
but(NEVER, lambda c, x, q, k, s: columns(QKV[:1], heads=k))
but(
    HEAD, lambda c, x, q, k, s: columns(QKV) | {"attention.o": RowwiseParallel(output_layouts=x)}, alone=True, long=True
)
but(HEAD, lambda c, x, q, k, s: columns(QKV), blind=False, alone=True)
but(HEAD, lambda c, x, q, k, s: columns(KV), alone=True, long=True)
but("", lambda c, x, q, k, s: columns(QKV[:1]), long=True)  # by which words it fails depends on who fails first
but(NEVER, lambda c, x, q, k, s: {"attention.o": RowwiseParallel(output_layouts=x)})
but(UNLIKE, lambda c, x, q, k, s: columns(QKV[:1]) | {"attention.o": RowwiseParallel(output_layouts=x)}, long=True)
but(HEAD, lambda c, x, q, k, s: columns(("attention.v",)), alone=True, long=True)
but(
    TWICE,
    lambda c, x, q, k, s: columns(QKV[:1], heads=q, input_layouts=x) | columns(KV, heads=k, input_layouts=x),
    drop=("attention",),
)
but(TWICE, lambda c, x, q, k, s: columns(UP, input_layouts=x), drop=("mlp",))
but(TWICE, drop=("mlp", "attention"), long=True)
but(NEVER, lambda c, x, q, k, s: {name: PrepareModuleInput() for name in ("mlp", "attention")}, long=True)
but(NEVER, lambda c, x, q, k, s: {"attention": PrepareModuleInput()}, long=True)
but(COMES_WHOLE, lambda c, x, q, k, s: {"mlp.down": RowwiseParallel()})
but(COMES_WHOLE, lambda c, x, q, k, s: {"attention.o": RowwiseParallel(heads=q)}, long=True)
but(
    "columns where rows belong, or rows where columns do",
    lambda c, x, q, k, s: (
        {name: RowwiseParallel(input_layouts=Replicate()) for name in UP}
        | {"mlp.down": ColwiseParallel(output_layouts=Replicate())}
    ),
    drop=("mlp",),
)
but(
    "columns where rows belong, or rows where columns do",
    lambda c, x, q, k, s: {} if s else columns((*UP, "mlp.down"), output_layouts=Replicate()),
    blind=False,
    long=True,
)
but(WHOLE, drop=("mlp", "mlp.gate", "mlp.up", "mlp.down"))
but(WHOLE, drop=("attention", "attention.q", "attention.k", "attention.v", "attention.o"), long=True)
but(WHOLE, lambda c, x, q, k, s: columns(UP, output_layouts=Replicate()), drop=("mlp.down",), blind=False, long=True)
of(WHOLE, lambda config, sequence_parallel: {}, blind=False, long=True)
but(
    TWICE,
    lambda c, x, q, k, s: (
        columns(UP, output_layouts=Replicate())
        | {"mlp.down": RowwiseParallel(input_layouts=Replicate(), output_layouts=x)}
    ),
    long=True,
)
but("", lambda c, x, q, k, s: within(x, q, 0))
but(NEVER, lambda c, x, q, k, s: within(x, q, 2), long=True)
but(
    UNLIKE,
    lambda c, x, q, k, s: (
        columns(QKV[:1], heads=Queries(c.heads, c.heads))
        | {"attention.o": RowwiseParallel(heads=Queries(c.heads, c.heads), output_layouts=x)}
    ),
    long=True,
)
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=Keys(c.heads, c.heads)), alone=True, long=True)
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=Keys(c.kv_heads, c.heads)), alone=True, long=True)
but(NEVER, lambda c, x, q, k, s: columns(QKV[:1], heads=Queries(c.kv_heads, c.heads)), blind=False, long=True)
of(
    NEVER,
    lambda config, sequence_parallel: {
        name: style for name, style in gpt_plan(config, sequence_parallel).items() if name.startswith("layers")
    },
)
but(UNLIKE, drop=("attention.v",))
but(MEETS, drop=("mlp.gate",))
but(MEETS, drop=("mlp.up",), blind=False, long=True)
but(NEVER, drop=("attention.o",), long=True)
but(UNLIKE, drop=("attention.k", "attention.v"), long=True)
but(NEVER, lambda c, x, q, k, s: {name: SequenceParallel() for name in ("mlp", "attention")} if s else {}, long=True)
but(
    UNLIKE,
    lambda c, x, q, k, s: (
        columns(QKV[:1], heads=Queries(4, 2))
        | columns(KV, heads=Keys(4, 2))
        | {"attention.o": RowwiseParallel(heads=Queries(4, 2), output_layouts=x)}
    ),
    long=True,
)
but(UNLIKE, lambda c, x, q, k, s: columns(KV, heads=k, output_layouts=Replicate()), long=True)
but(NEVER, lambda c, x, q, k, s: {"norm": SequenceParallel()}, blind=False, long=True)

# ---- no plan, or one of an earlier call ------------------------------------------------------------------

PLANNED = {}


@answers.wrong("not a plan")
def nothing(config, sequence_parallel):
    in_a_table(config, sequence_parallel)


@answers.wrong("not a plan", long=True)
def a_list_of_rows(config, sequence_parallel):
    return list(in_a_table(config, sequence_parallel).items())


@answers.wrong("not a plan", long=True)
def in_words(config, sequence_parallel):
    return {name: type(style).__name__ for name, style in in_a_table(config, sequence_parallel).items()}


@answers.wrong("a shard is taken for the whole", long=True)
def planned_before(config, sequence_parallel):
    return PLANNED.setdefault(config, in_a_table(config, sequence_parallel))
