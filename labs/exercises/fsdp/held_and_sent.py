"""held_and_sent: a table from memory of what FSDP's strategies hold and send."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, as_if, on_paper, same


@answered
def held_and_sent(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(shards, replicas) -> {strategy: (P held from forward to backward, sent)}`, × the model."""
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


def sent(pairs: Any) -> dict[str, float] | None:
    """Return {strategy: bytes sent} from the learner's table, or None if the answer is no such table."""
    try:
        return {name: sent for name, (_, sent) in pairs.items()}
    except (AttributeError, TypeError, ValueError):
        return None


# fmt: off
STRATEGIES = (
    Mistake("the replicas are made to reduce everything",
            "How large is what a rank has after the reduce-scatter inside?",
            as_if(lambda s, r: strategies(s, r) | {"HYBRID_SHARD": (1 / s, 3 * (s - 1) / s + 2 * (r - 1) / r)})),
    Mistake("SHARD_GRAD_OP is given only a shard", "What does it not gather again in backward, and why?",
            as_if(lambda s, r: strategies(s, r) | {"SHARD_GRAD_OP": (1 / s, 2 * (s - 1) / s)})),
    Mistake("only what is held is wrong",
            "What does a rank drop after a layer's forward, and among how many ranks is what it keeps divided?",
            answer_is(lambda found, expected: sent(found) is not None and same(sent(found), sent(expected)))),
)
# fmt: on
