"""interval: the time that a training should run between two saves.  The answer is Young's formula."""

import random
from collections.abc import Callable
from math import sqrt
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

YEAR = 365 * 86_400


@answered
def interval(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(save, machine, machines) -> seconds` between two saves; return the ✓ line.

    save: the seconds that a save takes
    machine: the seconds between two failures of one machine
    machines: the number of machines
    """
    draw = random.Random(seed)
    jobs = [
        (60, YEAR, 1),
        (120, YEAR, 64),
        (0.5, 30 * 86_400, 1000),
        (10, 5e7, 16_384),
        (0, YEAR, 8),
        *((draw.uniform(1, 300), draw.uniform(0.1, 3) * YEAR, draw.randrange(2, 20_000)) for _ in range(3)),
    ]
    words = "a save takes {:.3g} s, a machine fails every {:.3g} s, {} machines"
    sheets = [Sheet(job, young(*job), words.format(*job)) for job in jobs]
    return on_paper(fn, sheets, MISTAKES, "What is lost by saving too often, and what by saving too seldom?")


def young(save: float, machine: float, machines: int) -> float:
    """Return the seconds between two saves by Young's formula.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 1974.
    """
    return sqrt(2 * save * machine / machines)


def daly(save: float, machine: float, machines: int) -> float:
    """Return the seconds between two saves by Daly's formula.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 2006.
    """
    mean = machine / machines
    if save >= 2 * mean:
        return mean
    share = save / (2 * mean)
    return sqrt(2 * save * mean) * (1 + sqrt(share) / 3 + share / 9) - save


# fmt: off
FAILS = "If each of a thousand machines fails once in a thousand days, how often does a job on all of them fail?"
MISTAKES = (
    Mistake("the failures of one machine only", FAILS, as_if(lambda save, machine, machines: young(save, machine, 1)),
            symptom="a large job that saves as seldom as a small one, and loses more and more to each failure"),
    Mistake("without the 2", "A failure comes at any time between two saves: how much work is lost, on average?",
            as_if(lambda *job: young(*job) / sqrt(2))),
    Mistake("the 2 is outside of the root", "Where does Young's formula have its 2?",
            as_if(lambda *job: sqrt(2) * young(*job))),
    Mistake("Daly's formula, and not Young's", "Which of the two does the docstring ask for?",
            as_if(daly, lambda *job: young(*job) - job[0])),
    *(Mistake(f"{unit}, and not seconds", "In which unit are save and machine given, and the answer?",
              as_if(lambda *job, seconds=seconds: young(*job) / seconds))
      for unit, seconds in (("minutes", 60), ("hours", 3600))),
)
# fmt: on

interval.expected = young  # the notebook goes on with this function, if the learner's is not right yet
