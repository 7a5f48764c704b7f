"""mend: three batch sizes of a DeepSpeed file that do not agree on these ranks."""

import random
from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Mended = tuple[int, int | None]


def mended(train: int, micro: int, accumulation: int, ranks: int) -> Mended:
    """Return for how many ranks the batch sizes were written, and the micro-batches on these ranks, or None."""
    rounded, rest = divmod(train, micro * ranks)
    return train // (micro * accumulation), None if rest else rounded


# fmt: off
CONTRADICT = (
    Mistake("another batch on another number of ranks", "Fewer ranks, as many micro-batches: what becomes of the step?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), each))),
    Mistake("rounded, and the batch is another one", "Multiply the three again. Is it the batch?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train // (micro * ranks))),
            symptom="a loss curve that leaves the old one after a move to other machines"),
    Mistake("a fraction of a micro-batch", "Can a rank take 2.67 micro-batches? What does the docstring say then?",
            as_if(lambda train, micro, each, ranks: (train // (micro * each), train / (micro * ranks))),
            symptom="DeepSpeed refuses the file, or rounds what stands in it"),
    Mistake("none at all, where there are too few sequences", "Fewer sequences than micro × ranks: who goes without?",
            as_if(lambda *job: (mended(*job)[0], 0 if job[0] < job[1] * job[3] else mended(*job)[1]))),
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
