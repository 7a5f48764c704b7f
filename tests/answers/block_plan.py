"""Answers to an exercise of notebook 09b: a block of another model, split by a table of styles."""

from collections import ChainMap

from labs.dtensor import Replicate, Shard
from labs.tp import ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan
from labs.tp.shares import Keys, Queries
from tests.answers import Exercise

# fmt: off
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
        "mixer": PrepareModuleInput(input_layouts=x),
        "mixer.query": ColwiseParallel(heads=queries),
        "mixer.gates": ColwiseParallel(heads=queries),
        "mixer.key": ColwiseParallel(heads=keys),
        "mixer.value": ColwiseParallel(heads=keys),
        "mixer.out": RowwiseParallel(heads=queries, output_layouts=x),
        "ffn": PrepareModuleInput(input_layouts=x),
        "ffn.w1": ColwiseParallel(),
        "ffn.w3": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=x),
    }
    if sequence_parallel:
        plan["norm_1"] = plan["norm_2"] = SequenceParallel()
    return plan


@answers.right(blind=True, long=True)
def by_patterns(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = {"[mf]*[rn]": PrepareModuleInput(input_layouts=x)}
    plan |= {"mixer.[kv]*": ColwiseParallel(heads=keys), "mixer.[qg]*": ColwiseParallel(heads=queries)}
    plan |= {"ffn.w[13]": ColwiseParallel(), "ffn.w2": RowwiseParallel(output_layouts=x)}
    plan |= {"mixer.out": RowwiseParallel(heads=queries, output_layouts=x)}
    return plan | ({"norm_*": SequenceParallel()} if sequence_parallel else {})


@answers.right(blind=True)
def later_rows_win(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    plan = Plan({"mixer.[kv]*": ColwiseParallel(heads=keys), "ffn.*": ColwiseParallel()})
    plan["mixer.query"] = plan["mixer.gates"] = ColwiseParallel(heads=queries)
    plan["mixer.out"] = RowwiseParallel(heads=queries, output_layouts=x)
    plan["ffn.w2"] = RowwiseParallel(output_layouts=x)
    for block, norm in {"mixer": "norm_1", "ffn": "norm_2"}.items():
        plan[block] = PrepareModuleInput(input_layouts=x)
        if sequence_parallel:
            plan[norm] = SequenceParallel()
    return plan


@answers.right(blind=True, long=True)
def all_said(config, sequence_parallel):
    x, queries, keys = parts(config, sequence_parallel)
    columns = {"input_layouts": x, "output_layouts": Shard(-1)}
    rows = {"input_layouts": Shard(-1), "output_layouts": x}
    plan = {norm: SequenceParallel() for norm in ("norm_2", "norm_1")} if sequence_parallel else {}
    plan |= {"ffn.w2": RowwiseParallel(**rows), "mixer.out": RowwiseParallel(**rows, heads=queries)}
    plan |= {"ffn.w3": ColwiseParallel(**columns), "ffn.w1": ColwiseParallel(**columns)}
    plan |= {f"mixer.{name}": ColwiseParallel(**columns, heads=keys) for name in ("value", "key")}
    plan |= {f"mixer.{name}": ColwiseParallel(**columns, heads=queries) for name in ("query", "gates")}
    return plan | {"ffn": PrepareModuleInput(input_layouts=x), "mixer": PrepareModuleInput(input_layouts=x)}


@answers.right(long=True)
def two_maps(config, sequence_parallel):
    plan = in_a_table(config, sequence_parallel)
    return ChainMap({name: plan[name] for name in plan if "ffn" in name}, plan)


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
    rows = {"mixer.out": RowwiseParallel(heads=q, output_layouts=x), "ffn.w2": RowwiseParallel(output_layouts=x)}
    return {name: PrepareModuleInput(input_layouts=x) for name in ("mixer", "ffn")} | rows


QKV, KV, UP = ("mixer.query", "mixer.key", "mixer.value"), ("mixer.key", "mixer.value"), ("ffn.w1", "ffn.w3")
READS = "mixer.query", "mixer.gates"
HEAD, UNLIKE, NEVER = "a cut goes through a head", "query, key and value are not split alike", "it cannot be obeyed"
NORMS, WHOLE, TWICE = (
    "the norms' gradients are not summed",
    "a matrix is not split",
    "x crosses the border once for each matrix",
)
MEETS, COMES_WHOLE = "what is whole meets a piece", "the sum comes whole, and x is a shard"

of("a shard is taken for the whole", lambda config, sequence_parallel: in_a_table(config, False))
of("", lambda config, sequence_parallel: in_a_table(config, True))
of("", lambda config, sequence_parallel: in_a_table(config, not sequence_parallel), long=True)
but(NORMS, drop=("norm_1", "norm_2"))
but(NORMS, drop=("norm_1",), long=True)
but(NORMS, drop=("norm_2",), long=True)
but("the gradient is summed as well", lambda c, x, q, k, s: {"norm_*": SequenceParallel()})
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=q), alone=True, long=True)
but("", lambda c, x, q, k, s: columns(QKV[:1], heads=k))  # its name depends on how many heads were drawn
but(HEAD, lambda c, x, q, k, s: columns(QKV) | {"mixer.out": RowwiseParallel(output_layouts=x)}, alone=True, long=True)
but(HEAD, lambda c, x, q, k, s: columns(QKV), blind=False, alone=True)
but(HEAD, lambda c, x, q, k, s: columns(KV), alone=True, long=True)
but("", lambda c, x, q, k, s: columns(QKV[:1]), long=True)  # by which words it fails depends on who fails first
but(NEVER, lambda c, x, q, k, s: {"mixer.out": RowwiseParallel(output_layouts=x)})
but("", lambda c, x, q, k, s: columns(QKV[:1]) | {"mixer.out": RowwiseParallel(output_layouts=x)}, long=True)
but(HEAD, lambda c, x, q, k, s: columns(("mixer.value",)), alone=True, long=True)
but(TWICE,
    lambda c, x, q, k, s: columns(READS, heads=q, input_layouts=x) | columns(KV, heads=k, input_layouts=x),
    drop=("mixer",))
but(TWICE, lambda c, x, q, k, s: columns(UP, input_layouts=x), drop=("ffn",))
but(TWICE, drop=("ffn", "mixer"), long=True)
but(NEVER, lambda c, x, q, k, s: {name: PrepareModuleInput() for name in ("ffn", "mixer")}, long=True)
but(NEVER, lambda c, x, q, k, s: {"mixer": PrepareModuleInput()}, long=True)
but(COMES_WHOLE, lambda c, x, q, k, s: {"ffn.w2": RowwiseParallel()})
but(COMES_WHOLE, lambda c, x, q, k, s: {"mixer.out": RowwiseParallel(heads=q)}, long=True)
but(
    "columns where rows belong, or rows where columns do",
    lambda c, x, q, k, s: (
        {name: RowwiseParallel(input_layouts=Replicate()) for name in UP}
        | {"ffn.w2": ColwiseParallel(output_layouts=Replicate())}
    ),
    drop=("ffn",),
)
but("columns where rows belong, or rows where columns do",
    lambda c, x, q, k, s: {} if s else columns((*UP, "ffn.w2"), output_layouts=Replicate()), blind=False,
    long=True)
but(WHOLE, drop=("ffn", "ffn.w1", "ffn.w3", "ffn.w2"))
but(WHOLE, drop=("mixer", *QKV, "mixer.gates", "mixer.out"), long=True)
but(MEETS, drop=("mixer.gates",))
but("two pieces that are not cut alike", lambda c, x, q, k, s: columns(("mixer.gates",)))
but("", lambda c, x, q, k, s: columns(("mixer.gates",), heads=k), long=True)  # likewise
but(WHOLE, lambda c, x, q, k, s: columns(UP, output_layouts=Replicate()), drop=("ffn.w2",), blind=False, long=True)
of(WHOLE, lambda config, sequence_parallel: {}, blind=False, long=True)
but(
    TWICE,
    lambda c, x, q, k, s: (
        columns(UP, output_layouts=Replicate())
        | {"ffn.w2": RowwiseParallel(input_layouts=Replicate(), output_layouts=x)}
    ),
    long=True,
)
but("", lambda c, x, q, k, s: within(x, q, 0))
but(NEVER, lambda c, x, q, k, s: within(x, q, 2), long=True)
but(
    "",
    lambda c, x, q, k, s: (
        columns(QKV[:1], heads=Queries(c.heads, c.heads))
        | {"mixer.out": RowwiseParallel(heads=Queries(c.heads, c.heads), output_layouts=x)}
    ),
    long=True,
)
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=Keys(c.heads, c.heads)), alone=True, long=True)
but(HEAD, lambda c, x, q, k, s: columns(KV, heads=Keys(c.kv_heads, c.heads)), alone=True, long=True)
but("", lambda c, x, q, k, s: columns(QKV[:1], heads=Queries(c.kv_heads, c.heads)), blind=False, long=True)
of(NEVER, lambda config, sequence_parallel: gpt_plan(config, sequence_parallel))
but(UNLIKE, drop=("mixer.value",))
but(MEETS, drop=("ffn.w1",))
but(MEETS, drop=("ffn.w3",), blind=False, long=True)
but(NEVER, drop=("mixer.out",), long=True)
but(UNLIKE, drop=("mixer.key", "mixer.value"), long=True)
but(NEVER, lambda c, x, q, k, s: {name: SequenceParallel() for name in ("ffn", "mixer")} if s else {}, long=True)
but(
    UNLIKE,
    lambda c, x, q, k, s: (
        columns(QKV[:1], heads=Queries(4, 2))
        | columns(KV, heads=Keys(4, 2))
        | {"mixer.out": RowwiseParallel(heads=Queries(4, 2), output_layouts=x)}
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
