"""All layouts of a setup: each that can be run, and for each other one, the reason.

layouts(setup)            yields all of them
require(setup, layout)    raises ValueError with the reason if one layout cannot be run
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from labs import cost
from labs.cost.split import can_be_dealt
from labs.plan.layout import Layout, Setup


class Rejected(NamedTuple):
    """A layout that cannot be run, or several with the same reason, in words; and the reason."""

    layout: str
    reason: str


def require(setup: Setup, layout: Layout) -> None:
    """Raise ValueError for a layout that this cluster cannot run, however large its memory is."""
    for name in ("tp", "pp", "stages_per_rank", "replicas", "shards", "batch", "accumulation", "cp", "ep"):
        value = getattr(layout, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: it must be a whole number, and at least 1")
    if layout.recompute not in cost.RECOMPUTE:
        known = ", ".join(map(repr, cost.RECOMPUTE))
        raise ValueError(f"recompute is {layout.recompute!r}: it must be one of {known}")
    if layout.ranks != setup.cluster.gpus:
        sizes = f"pp {layout.pp} × replicas {layout.replicas} × shards {layout.shards} × tp {layout.tp}"
        sizes += f" × cp {layout.cp}" * (layout.cp > 1)
        raise ValueError(f"{sizes} = {layout.ranks}, but there are {setup.cluster.gpus} GPUs")
    if layout.zero not in (0, 1, 2, 3) or ((layout.zero == 0) != (layout.shards == 1) and layout.dp > 1):
        raise ValueError(f"ZeRO stage {layout.zero} with {layout.shards} shards: stage 0 has 1, the others share dp")
    if layout.dp * layout.batch * layout.accumulation != setup.batch:
        raise ValueError(
            f"dp {layout.dp} × {layout.accumulation} micro-batches of {layout.batch} = "
            f"{layout.dp * layout.batch * layout.accumulation} sequences, but a step has {setup.batch}"
        )
    for reason in (
        tp_reason(setup, layout.tp, layout.sequence_parallel),
        pp_reason(setup, layout.pp, layout.schedule, layout.stages_per_rank),
        pace_reason(layout),
        cp_reason(setup, layout),
        ep_reason(setup, layout),
    ):
        if reason:
            raise ValueError(f"{layout}: {reason}")


# ---- reasons ---------------------------------------------------------------------------------------------


def tp_reason(setup: Setup, tp: int, sequence_parallel: bool) -> str:
    heads, kv_heads = setup.config.heads, setup.config.kv_heads
    if not can_be_dealt(heads, kv_heads, tp):
        return f"{heads} query heads over {kv_heads} of keys and values cannot be split over {tp} ranks"
    if sequence_parallel and setup.context % tp:
        return f"{setup.context} positions are not divisible by {tp} ranks"
    return ""


def cp_reason(setup: Setup, layout: Layout) -> str:
    if setup.context % (2 * layout.cp) and layout.cp > 1:
        return (
            f"{setup.context} positions are not divisible by 2 × {layout.cp}, the heads and tails of {layout.cp} ranks"
        )
    return ""


def ep_reason(setup: Setup, layout: Layout) -> str:
    experts, ranks = getattr(setup.config, "experts", 0), layout.ranks // layout.pp
    if layout.ep > 1 and not experts:
        return f"ep is {layout.ep}, but the model has no experts"
    if experts % layout.ep or ranks % layout.ep:
        return f"{layout.ep} ranks cannot share {experts} experts evenly among the {ranks} ranks of a stage"
    return ""


def pp_reason(setup: Setup, pp: int, schedule: str, stages_per_rank: int) -> str:
    stages = pp * stages_per_rank
    if schedule in STAGES and pp > 1 and stages_per_rank != STAGES[schedule]:
        its = STAGES[schedule]
        return (
            f"{schedule} has {its} stage{'s' * (its > 1)} per rank, not {stages_per_rank}: give stages_per_rank={its}"
        )
    if stages > setup.config.depth:
        return f"{stages} stages for {setup.config.depth} layers"
    return ""


def pace_reason(layout: Layout) -> str:
    """Return why the micro-batches do not fit the schedule; an empty string if they do."""
    pp, m = layout.pp, layout.accumulation
    if pp > 1 and m < pp:
        return f"{m} micro-batches are fewer than {pp} stages: give {pp} or more, or a shorter pipeline"
    if layout.stages_per_rank > 1 and layout.schedule in ("interleaved", "zb1p") and m % pp:
        return f"{m} micro-batches do not make rounds of {pp}"
    if pp > 1 and layout.schedule == "dualpipev" and m < 2 * pp:
        return f"dualpipev takes {2 * pp} micro-batches or more, not {m}"
    if pp > 1 and layout.zero == 3 and layout.schedule in ("zb1p", "zbv", "dualpipev"):
        return "FSDP gathers a stage again for each half of a backward: PyTorch's is silently wrong there"
    return ""


# ---- all of them -----------------------------------------------------------------------------------------

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved", v) for v in (2, 4, 8)),
    ("zb1p", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}  # stages per rank, for schedules with a fixed number
NO_PIPELINE = [("1f1b", 1)]
LARGEST_BATCH = 64  # sequences of a micro-batch


def layouts(setup: Setup) -> Iterator[Layout | Rejected]:
    for tp, sequence_parallel in splits(setup):
        if reason := tp_reason(setup, tp, sequence_parallel):
            yield Rejected(f"tp {tp}" + ", sequence parallel" * sequence_parallel, reason)
            continue
        for pp in divisors(setup.cluster.gpus // tp):
            dp = setup.cluster.gpus // tp // pp
            if setup.batch % dp:
                yield Rejected(f"pp {pp} × dp {dp} × tp {tp}", f"{setup.batch} sequences do not divide among {dp}")
                continue
            for schedule, stages in SCHEDULES if pp > 1 else NO_PIPELINE:
                if reason := pp_reason(setup, pp, schedule, stages):
                    yield Rejected(f"pp {pp} × dp {dp} × tp {tp}, {schedule} of {stages}", reason)
                    continue
                base = Layout(tp, sequence_parallel, pp, schedule, stages)
                yield from of_mesh(setup, base, dp)
                for cp, ep in inside(setup, dp, tp):
                    yield from of_mesh(setup, base._replace(cp=cp, ep=ep), dp // cp)


LONG = 32_768  # tokens: no rank's piece of a sequence is made shorter than this


def inside(setup: Setup, dp: int, tp: int) -> list[tuple[int, int]]:
    """Return the pairs of cp and ep that are tried, except 1 and 1: powers of two, within what dp ranks have.

    Of the numbers of ranks that share the experts, only the four largest are tried: fewer hold too much of a model
    that needs them.
    """
    cps = [cp for cp in powers(max(1, setup.context // LONG)) if dp % cp == 0 and setup.context % (2 * cp) == 0]
    experts = getattr(setup.config, "experts", 1)
    eps = [ep for ep in powers(experts) if experts % ep == 0 and (dp * tp) % ep == 0]
    return [pair for pair in product(cps, [1, *eps[1:][-4:]]) if pair != (1, 1)]


def of_mesh(setup: Setup, base: Layout, dp: int) -> Iterator[Layout | Rejected]:
    each = setup.batch // dp
    for batch in (n for n in divisors(each) if n <= LARGEST_BATCH):
        for replicas, shards, zero in states(dp):
            layout = base._replace(replicas=replicas, shards=shards, zero=zero, batch=batch, accumulation=each // batch)
            if reason := pace_reason(layout):
                yield Rejected(str(layout), reason)
                continue
            yield layout
            for recompute in cost.RECOMPUTE[1:]:
                yield layout._replace(recompute=recompute)


def splits(setup: Setup) -> list[tuple[int, bool]]:
    """Return (size of tensor parallelism, whether with sequence parallelism), for sizes up to two nodes."""
    sizes = [n for n in divisors(setup.cluster.gpus) if n <= min(2 * setup.cluster.node, setup.config.heads)]
    return [(1, False), *((n, parallel) for n in sizes[1:] for parallel in (False, True))]


def states(dp: int) -> list[tuple[int, int, int]]:
    """Return all (replicas, shards, stage of ZeRO) for dp ranks."""
    if dp == 1:
        return [(1, 1, 0)]
    hybrid = [(dp // shards, shards, 3) for shards in divisors(dp)[1:-1]]
    return [(dp, 1, 0), (1, dp, 1), (1, dp, 2), (1, dp, 3), *hybrid]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]
