"""save_interval: the time between two saves of a job with a time limit, whose last save ends at the limit.

The job has n saves, for a whole number n, and trains limit / n - saving seconds before each.  The answer is the n that
loses the least time to saves, and to work that is done again after an interruption.
"""

import random
from collections.abc import Callable
from functools import partial
from math import ceil, floor, sqrt
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

HOUR = 3600


@answered
def save_interval(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(limit, saving, rate) -> seconds` of training between two saves; return the ✓ line.

    limit: the seconds after which the job is ended
    saving: the seconds that training waits in a save
    rate: interruptions per hour
    """
    draw = random.Random(seed)
    jobs = [
        (10 * HOUR, 60, 0.43),
        *(as_many(draw.choice([2, 4, 12]) * HOUR, draw.uniform(20, 120), draw.randrange(3, 9) + x) for x in (0.3, 0.7)),
        as_many(2 * HOUR, 90, 1.46),
        as_many(48 * HOUR, 20, 240.3),
        (1800, 100, 0.01),
        (600, 30, 0),
    ]
    words = "a limit of {:.0f} s, {:.3g} s per save, {:.3g} interruptions per hour"
    sheets = [Sheet(job, fitted(*job), words.format(*job)) for job in jobs]
    return on_paper(fn, sheets, MISTAKES, "What must be true at the limit, and what is lost before it?")


def as_many(limit: float, saving: float, saves: float) -> tuple[float, float, float]:
    """Return a job in which this number of saves would be best if it need not be whole."""
    return limit, saving, 2 * saving * (saves / limit) ** 2 * HOUR


def young(limit: float, saving: float, rate: float) -> float:
    """Return the best interval of a job without a limit.  Source: Young 1974, as in the notebook on resuming."""
    return sqrt(2 * saving * HOUR / rate) if rate else limit


def lost(limit: float, saving: float, rate: float, saves: int, again: float = 0.5) -> float:
    """Return the seconds lost in a job.

    again: the part of an interval that is lost to an interruption, on average
    """
    return saves * saving + rate / HOUR * limit * again * (limit / saves - saving)


def fitted(limit: float, saving: float, rate: float, again: float = 0.5) -> float:
    """Return the seconds between two saves that lose the least time."""
    most = ceil(limit / saving) - 1  # with one more, nothing would be trained
    saves = min(range(1, most + 1), key=partial(lost, limit, saving, rate, again=again))
    return limit / saves - saving


def whole(limit: float, saving: float, rate: float, rounded: Callable[[float], float]) -> float:
    """Return the interval for Young's number of saves, rounded."""
    return limit / max(1, rounded(limit / young(limit, saving, rate))) - saving


# fmt: off
LAST = "When does the last save end, and when is the job ended?"
MISTAKES = (
    Mistake("the time limit is forgotten", LAST, as_if(young),
            symptom="a job that loses all that it did after its last save, each time that it meets its limit"),
    Mistake("no save ends at the limit", LAST,
            as_if(lambda limit, saving, rate: min(young(limit, saving, rate), limit - saving))),
    Mistake("the last save does not fit before the limit", "How long is an interval together with its save?",
            as_if(lambda *job: fitted(*job) + job[1],
                  lambda limit, saving, rate: min(young(limit, saving, rate), limit)),
            symptom="the newest checkpoint is never complete: the job is ended while it saves"),
    Mistake("a single save, at the limit", "How much is lost if the job is interrupted shortly before its limit?",
            as_if(lambda limit, saving, rate: limit - saving)),
    Mistake("a rate per hour is taken for one per second", "In which unit is the rate?",
            as_if(lambda limit, saving, rate: fitted(limit, saving, rate * HOUR))),
    Mistake("the whole interval is lost to an interruption", "How much of an interval is lost on average?",
            as_if(partial(fitted, again=1.0))),
    Mistake("the number of saves is rounded", "Which of the two whole numbers beside it loses less?",
            as_if(partial(whole, rounded=round), partial(whole, rounded=floor), partial(whole, rounded=ceil))),
    Mistake("the number of saves is not whole", "When would the last of 2.3 saves end?",
            as_if(partial(whole, rounded=float))),
    Mistake("the number of saves, and not the time between them", "In which unit is the result?",
            as_if(lambda *job: job[0] / (fitted(*job) + job[1]))),
)
# fmt: on

save_interval.expected = fitted  # the notebook goes on with this function, if the learner's is not right yet
