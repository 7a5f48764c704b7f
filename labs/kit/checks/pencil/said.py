"""Said from memory: a notebook's table, filled in without looking.

The answer is not given away: of a wrong table, only the row that is wrong is named.
"""

from collections.abc import Callable
from typing import Any

from labs import pp
from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pencil.sheet import Seen, Sheet, as_if, form, on_paper, plain, same, so

STAGES = {  # what happens at an event under stage 1, 2 and 3; the head of labs/zero/zero.py
    "before_forward": ("", "", "all_gather"),
    "after_forward": ("", "", "drop"),
    "before_backward": ("", "", "all_gather"),
    "after_backward": ("", "", "drop"),
    "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
    "sync": ("reduce_scatter", "", ""),
    "step": ("all_gather", "all_gather", ""),
}


@answered
def sent_by_rings(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks) -> {collective: elements that a rank sends, × the tensor's}`."""
    sheets = [Sheet((n,), rings((n - 1) / n), f"{n} ranks", secret=True) for n in (2, 3, 4, 8, 512, 1)]
    return on_paper(fn, sheets, RINGS, "How many pieces does a rank send, and how large is one?")


def rings(part: float, twice: float = 2) -> dict[str, float]:
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": twice * part, "all_to_all": part}


@answered
def started_when(fn: Callable[..., Any], seed: int) -> str:
    """`fn(tensors, buckets) -> {strategy: (all-reduces started by backward, by sync)}`, in one micro-batch."""
    sheets = [
        Sheet(
            (t, b),
            {"Naive": (0, t), "Bucketed": (0, b), "Overlapped": (b, 0)},
            f"{t} tensors, {b} buckets",
            secret=True,
        )
        for t, b in ((28, 6), (100, 1), (7, 7))
    ]
    return on_paper(fn, sheets, STARTED, "Who starts an all-reduce, a hook of backward or sync()?")


@answered
def stages_by_event(fn: Callable[..., Any], seed: int) -> str:
    """`fn() -> {event: (stage 1, stage 2, stage 3)}`: "all_gather", "drop", "reduce_scatter" or ""."""
    return on_paper(
        fn,
        [Sheet((), STAGES, "the table", secret=True)],
        BY_EVENT,
        "What does a rank need at this event that it does not hold?",
    )


@answered
def held_and_sent(fn: Callable[..., Any], seed: int) -> str:
    """`fn(shards, replicas) -> {strategy: (P held from forward to backward, sent)}`, × the model."""
    sheets = [
        Sheet((s, r), strategies(s, r), f"{s} shards × {r} replicas", secret=True)
        for s, r in ((4, 2), (8, 16), (2, 2), (3, 5))
    ]
    return on_paper(
        fn, sheets, STRATEGIES, "How often is each parameter gathered, and how often is each gradient reduced?"
    )


def strategies(s: int, r: int) -> dict[str, tuple[float, float]]:
    half = (s - 1) / s
    return {
        "FULL_SHARD": (1 / s, 3 * half),
        "SHARD_GRAD_OP": (1, 2 * half),
        "HYBRID_SHARD": (1 / s, 3 * half + 2 * (r - 1) / r / s),
    }


@answered
def bubbles(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches, stages_per_rank) -> {schedule: bubble}`, × the ideal time, with F = I = W."""
    drawn = ((4, 8, 2), (2, 4, 2), (4, 16, 4), (3, 9, 2), (1, 4, 2))
    sheets = [
        Sheet((p, m, v), simulated(p, m, v), f"{p} ranks, {m} micro-batches, {v} stages per rank", secret=True)
        for p, m, v in drawn
    ]
    return on_paper(fn, sheets, BUBBLES, "For how long does the last rank have nothing to do before its first forward?")


def simulated(p: int, m: int, v: int) -> dict[str, float]:
    lists = {
        "GPipe": pp.gpipe(p, m),
        "1F1B": pp.one_f_one_b(p, m),
        "interleaved": pp.interleaved(p, m, v),
        "zero bubble": pp.zb1p(p, m),
    }
    return {name: pp.simulate(each).bubble for name, each in lists.items()}


def closed(p: int, m: int, v: int, interleaved: float = 1) -> dict[str, float]:
    """The closed forms; `interleaved`, where given, is a factor that is wrong."""
    bubble = (p - 1) / m
    return {
        "GPipe": bubble,
        "1F1B": bubble,
        "interleaved": interleaved * bubble / v,
        "zero bubble": bubble / 3,
    }


def sent(pairs: Any) -> dict[str, float] | None:
    """Of each strategy; None where it is not such a table."""
    try:
        return {name: sent for name, (_, sent) in pairs.items()}
    except (AttributeError, TypeError, ValueError):
        return None


def at_a_stage(test: Callable[[str, str], bool]) -> Callable[[Seen], str | None]:
    """At the first event that is wrong: the stages of which what is found and what is due are so."""

    def fits(seen: Seen) -> str | None:
        found, due = plain(seen.found), plain(seen.sheet.due)
        if form(found) != form(due):
            return None
        event = next(event for event in due if not same(found[event], due[event]))
        if form(found[event]) != "list" or len(found[event]) != len(due[event]):
            return None
        pairs = enumerate(zip(found[event], due[event], strict=True), 1)
        stages = [str(stage) for stage, pair in pairs if pair[0] != pair[1] and test(*pair)]
        return f"{seen.told}; wrong for stage{'s' * (len(stages) > 1)} {' and '.join(stages)}" if stages else None

    return fits


# fmt: off
RINGS = (
    Mistake("all_reduce once instead of twice", "Which two collectives is it made of?",
            as_if(lambda n: rings((n - 1) / n, 1))),
    Mistake("(N − 1) tensors instead of pieces", "How large is a piece?", as_if(lambda n: rings(n - 1))),
    Mistake("N pieces, and not N − 1", "Whom does a rank send its own piece to?", as_if(lambda n: rings(1))),
)
STARTED = (
    Mistake("the columns are exchanged", "Which comes first in a pair, and when does Naive send?",
            as_if(lambda t, b: {"Naive": (t, 0), "Bucketed": (b, 0), "Overlapped": (0, b)})),
    Mistake("Overlapped is made to send twice", "What is left for sync(), when all buckets are on their way?",
            as_if(lambda t, b: {"Naive": (0, t), "Bucketed": (0, b), "Overlapped": (b, b)})),
)
BY_EVENT = (
    Mistake("stage 2 is made to reduce in sync, as stage 1 does", "What would a rank hold at the end of backward?",
            as_if(lambda: STAGES | {"gradient_ready": ("", "", "reduce_scatter"),
                                    "sync": ("reduce_scatter",) * 2 + ("",)})),
    Mistake("stage 3 is made to gather in its step",
            "Which parameters does it update, and who needs them whole before the next forward?",
            as_if(lambda: STAGES | {"step": ("all_gather",) * 3})),
    Mistake("a stage does something where nothing is left to do",
            "What has this stage done already before this event, or what does it do later?",
            at_a_stage(lambda found, due: not due)),
    Mistake("a gather is missing", "What does a rank need at this event that it does not hold?",
            at_a_stage(lambda found, due: not found and due == "all_gather")),
    Mistake("", "What does a rank hold at this event, and which part of it does it need from now on?",
            at_a_stage(lambda found, due: True)),
)
STRATEGIES = (
    Mistake("the replicas are made to reduce everything",
            "How large is what a rank has after the reduce-scatter inside?",
            as_if(lambda s, r: strategies(s, r) | {"HYBRID_SHARD": (1 / s, 3 * (s - 1) / s + 2 * (r - 1) / r)})),
    Mistake("SHARD_GRAD_OP is given only a shard", "What does it not gather again in backward, and why?",
            as_if(lambda s, r: strategies(s, r) | {"SHARD_GRAD_OP": (1 / s, 2 * (s - 1) / s)})),
    Mistake("only what is held is wrong",
            "What does a rank drop after a layer's forward, and among how many ranks is what it keeps divided?",
            so(lambda found, due: sent(found) is not None and same(sent(found), sent(due)))),
)
BUBBLES = (
    Mistake("p over m, and not p − 1", "With one rank, for whom does it wait?",
            as_if(lambda p, m, v: closed(p + 1, m, v))),
    Mistake("1F1B is given a smaller bubble than GPipe", "What does 1F1B make smaller?",
            so(lambda found, due: form(found) == form(due) and found["1F1B"] < found["GPipe"])),
    Mistake("a fraction of the whole time, and not of the ideal one",
            "The bubble is divided by what the rank would take without it. Which time is that?",
            as_if(lambda p, m, v: {name: x / (1 + x) for name, x in closed(p, m, v).items()})),
    Mistake("interleaved has not been divided by v",
            "How long does the last rank wait, if a stage takes a v-th of the time?",
            as_if(lambda p, m, v: closed(p, m, v, interleaved=v))),
)
