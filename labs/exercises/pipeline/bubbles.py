"""bubbles: the bubbles of four schedules, as a table from memory."""

from collections.abc import Callable
from typing import Any

from labs import pp
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, as_if, form, on_paper


@answered
def bubbles(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(ranks, microbatches, stages_per_rank) -> {schedule: bubble}`; return the ✓ line.

    A bubble is a multiple of the ideal time, with F = I = W.
    """
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
    """Return the bubbles by their closed forms.

    interleaved: the number by which the interleaved bubble is multiplied; a wrong number imitates a mistake
    """
    bubble = (p - 1) / m
    return {
        "GPipe": bubble,
        "1F1B": bubble,
        "interleaved": interleaved * bubble / v,
        "zero bubble": bubble / 3,
    }


# fmt: off
BUBBLES = (
    Mistake("p over m, and not p − 1", "With one rank, for whom does it wait?",
            as_if(lambda p, m, v: closed(p + 1, m, v))),
    Mistake("1F1B is given a smaller bubble than GPipe", "What does 1F1B make smaller?",
            answer_is(lambda found, expected: form(found) == form(expected) and found["1F1B"] < found["GPipe"])),
    Mistake("a fraction of the whole time, and not of the ideal one",
            "The bubble is divided by what the rank would take without it. Which time is that?",
            as_if(lambda p, m, v: {name: x / (1 + x) for name, x in closed(p, m, v).items()})),
    Mistake("interleaved has not been divided by v",
            "How long does the last rank wait, if a stage takes a v-th of the time?",
            as_if(lambda p, m, v: closed(p, m, v, interleaved=v))),
)
# fmt: on
