"""Answers to an exercise of notebook 09b: a block of another model, split by a table of styles."""

from labs.dtensor import Replicate, Shard
from labs.tp import ColwiseParallel, Plan, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.parameter_cuts import Keys, Queries
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


@answers.right(line=LINE)
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


@answers.right
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


# ---- the right one with other rows, or without some ------------------------------------------------------


def but(mistake, changes=None, drop=(), **options):
    """changes(config, x, queries, keys, sequence_parallel)."""

    def plan(config, sequence_parallel):
        right = in_a_table(config, sequence_parallel)
        if changes:
            right |= changes(config, *parts(config, sequence_parallel), sequence_parallel)
        return {name: style for name, style in right.items() if name not in drop}

    plan.__name__ = plan.__qualname__ = f"but_{len(answers.answers)}"
    answers.wrong(mistake, **options)(plan)


def of(mistake, plan, **options):
    answers.wrong(mistake, **options)(plan)


def columns(names, **options):
    return {name: ColwiseParallel(**options) for name in names}


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
but(NORMS, drop=("norm_1", "norm_2"))
but(HEAD, lambda c, x, q, k, s: columns(QKV), alone=True)
but(NEVER, lambda c, x, q, k, s: {"mixer.out": RowwiseParallel(output_layouts=x)})
but(TWICE,
    lambda c, x, q, k, s: columns(READS, heads=q, input_layouts=x) | columns(KV, heads=k, input_layouts=x),
    drop=("mixer",))
but(COMES_WHOLE, lambda c, x, q, k, s: {"ffn.w2": RowwiseParallel()})
but(
    "columns where rows belong, or rows where columns do",
    lambda c, x, q, k, s: (
        {name: RowwiseParallel(input_layouts=Replicate()) for name in UP}
        | {"ffn.w2": ColwiseParallel(output_layouts=Replicate())}
    ),
    drop=("ffn",),
)
but(WHOLE, drop=("ffn", "ffn.w1", "ffn.w3", "ffn.w2"))
but(MEETS, drop=("mixer.gates",))
but("two pieces that are not cut alike", lambda c, x, q, k, s: columns(("mixer.gates",)))
but(UNLIKE, drop=("mixer.value",))

# ---- no plan, or one of an earlier call ------------------------------------------------------------------


@answers.wrong("not a plan")
def nothing(config, sequence_parallel):
    in_a_table(config, sequence_parallel)
