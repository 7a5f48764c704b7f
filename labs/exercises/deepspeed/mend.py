"""mend: three batch sizes of a DeepSpeed file that do not agree on these ranks."""

import random
from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Mended = tuple[int, int | None]


def mended(train: int, micro: int, accumulation: int, ranks: int) -> Mended:
    """Return the ranks that the sizes were written for, and the micro-batches on these ranks, or None."""
    rounded, rest = divmod(train, micro * ranks)
    return train // (micro * accumulation), None if rest else rounded


def or_if_too_few(number: int) -> Callable[..., Mended]:
    """Return an answer that gives this number of micro-batches if there are fewer sequences than micro × ranks."""

    def fn(train: int, micro: int, accumulation: int, ranks: int) -> Mended:
        was, rounded = mended(train, micro, accumulation, ranks)
        return was, number if train < micro * ranks else rounded

    return fn


# fmt: off
CONTRADICT = (
    Mistake("another batch on another number of ranks", "Fewer ranks, as many micro-batches: what becomes of the step?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), each))),
    Mistake("the wrong way round", "Half the ranks: are there more micro-batches for each, or fewer?",
            as_if(lambda train, micro, each, ranks: (was := train // (micro * each), each * ranks // was))),
    Mistake("rounded, and the batch is another one", "Multiply the three again. Is it the batch?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train // (micro * ranks))),
            symptom="a loss curve that leaves the old one after a move to other machines"),
    Mistake("a fraction of a micro-batch", "Can a rank take 2.67 micro-batches? What does the docstring say then?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train / (micro * ranks))),
            symptom="DeepSpeed refuses the file, or rounds what stands in it"),
    Mistake("none at all, where there are too few sequences", "Fewer sequences than micro × ranks: who goes without?",
            as_if(or_if_too_few(0))),
    Mistake("one at least, and the batch is larger", "Fewer sequences than micro × ranks: is one each train?",
            as_if(or_if_too_few(1))),
    Mistake("rounded up", "Multiply the three again. Is it the batch?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), -(-train // (micro * ranks))))),
    Mistake("the accumulation is left out", "With which number of ranks do the three agree?",
            as_if(lambda *job: (job[0] // job[1], mended(*job)[1]))),
    Mistake("the ranks that are here, and not those it was for", "With which number of ranks do the three agree?",
            as_if(lambda *job: (job[-1], mended(*job)[1]))),
)
# fmt: on


@answered
def mend(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(train, micro, accumulation, ranks) -> (ranks they were written for, micro-batches on these ranks)`.

    Returns the ✓ line.
    """
    draw = random.Random(seed)
    cases = [(64, 4, 8, 1), (256, 4, 8, 1), (8, 2, 1, 1), (48, 4, 3, 8), (96, 4, 2, 8), (256, 8, 8, 16), (60, 5, 1, 8)]
    cases.append((8, 2, 1, 8))  # fewer sequences than micro × ranks
    draw.shuffle(cases)
    sheets = [
        Sheet(case, mended(*case), "train {}, micro {}, accumulation {}, on {} ranks".format(*case)) for case in cases
    ]
    return on_paper(fn, sheets, CONTRADICT, "Which of the three may change, if training is to stay the same?")
