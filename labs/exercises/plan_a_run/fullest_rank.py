"""fullest_rank: the bytes that the first rank of a pipeline holds.

Its state depends on the stage of ZeRO, and its activations are those that are alive under 1F1B.
"""

import random
from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

JOBS = (  # parameters, activations, tp, pp, dp, zero, microbatches
    (7_000_000_000, 30e9, 1, 1, 1, 0, 1),
    (7_000_000_000, 30e9, 1, 1, 8, 0, 4),
    (70_000_000_000, 200e9, 8, 1, 4, 3, 32),
    (70_000_000_000, 200e9, 8, 4, 1, 0, 512),
    (70_000_000_000, 200e9, 4, 8, 2, 1, 3),
    (1_000_000_000_003, 777_777_777_777.0, 3, 5, 7, 2, 5),
)
WORDS = "{:,} parameters, {:,.0f} bytes of activations, tp {}, pp {}, dp {}, ZeRO {}, {} micro-batches"


@answered
def fullest_rank(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(parameters, activations, tp, pp, dp, zero, microbatches) -> bytes` on the first rank of 1F1B.

    Returns the ✓ line.
    """
    draw = random.Random(seed)
    sizes = ([draw.randint(1, 9) for _ in range(3)] + [stage, draw.randint(1, 20)] for stage in range(4))
    jobs = [*JOBS, *((draw.randrange(10**11, 10**12), draw.uniform(1e11, 1e12), *each) for each in sizes)]
    sheets = [Sheet(job, bytes_held(*job), WORDS.format(*job)) for job in jobs]
    return on_paper(fn, sheets, MISTAKES, "Which part of the model has a rank, and what does it keep of that?")


def bytes_held(
    n: int, a: float, tp: int, pp: int, dp: int, zero: int, m: int, alive: float | None = None, a_over: float = 0
) -> float:
    """Return the bytes on the first rank; with `alive` or `a_over`, those of a mistake.

    alive: the number of micro-batches alive
    a_over: the number by which the activations are divided
    """
    return state(n / (tp * pp), dp, zero) + a / (a_over or tp * pp) * (min(pp, m) if alive is None else alive)


def state(n: float, dp: int, zero: int, bytes_of: tuple[int, int, int] = (2, 2, 12)) -> float:
    """Return the bytes of the parameters, their gradients and AdamW's state: 2, 2 and 12 bytes per parameter.

    ZeRO shards the parameters from stage 3 on, the gradients from stage 2 on, and the state from stage 1 on.
    """
    return sum(size * n / (dp if zero >= stage else 1) for size, stage in zip(bytes_of, (3, 2, 1), strict=True))


# fmt: off
ALIVE = "Rank 0 does how many forwards before its first backward, and what does each of them leave behind?"
MISTAKES = (
    Mistake("the activations of one micro-batch only", ALIVE, as_if(bytes_held, alive=1),
            symptom="out of memory in a pipeline that should fit: its activations were divided by pp"),
    Mistake("the activations of all micro-batches", "Which schedule keeps all of them, and which one is asked for?",
            as_if(lambda *job: bytes_held(*job, alive=job[6]))),
    Mistake("activations that tensor parallelism does not split", "With sequence parallelism, what does a rank keep?",
            as_if(lambda *job: bytes_held(*job, a_over=job[3]))),
    Mistake("activations that the pipeline does not split", "How many of the layers has this rank?",
            as_if(lambda *job: bytes_held(*job, a_over=job[2]))),
    Mistake("the state of more than this rank's part", "Which part of the parameters do tp and pp leave on a rank?",
            as_if(*(lambda n, a, *sizes, over=over: state(n / over(*sizes[:2]), *sizes[2:4]) + bytes_held(0, a, *sizes)
                    for over in (lambda tp, pp: 1, lambda tp, pp: tp, lambda tp, pp: pp)))),
    Mistake("ZeRO shares too little", "What does stage 2 share besides, and what stage 3?",
            as_if(*(lambda n, a, tp, pp, dp, zero, m, stages=stages: bytes_held(n, a, tp, pp, dp, stages[zero], m)
                    for stages in ((0, 1, 1, 1), (0, 1, 2, 2), (0, 0, 0, 3), (0, 0, 2, 3), (0, 1, 1, 3))))),
    Mistake("ZeRO shares without being asked", "What does plain data parallelism share?",
            as_if(*(lambda n, a, tp, pp, dp, zero, m, least=least: bytes_held(n, a, tp, pp, dp, max(zero, least), m)
                    for least in (1, 2, 3)))),
    Mistake("the wrong stage for one kind", "State, gradients, parameters: which stage of ZeRO shares which?",
            as_if(*(lambda n, a, tp, pp, dp, zero, m, sizes=sizes:
                    state(n / (tp * pp), dp, zero, sizes) + bytes_held(0, a, tp, pp, dp, zero, m)
                    for sizes in ((12, 2, 2), (2, 12, 2))))),
)
# fmt: on

fullest_rank.expected = bytes_held  # the notebook goes on with this function, if the learner's is not right yet
