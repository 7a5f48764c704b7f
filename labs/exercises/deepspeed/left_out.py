"""left_out: the bytes that a rank holds under stage 2 beyond DeepSpeed's estimate (labs.deepspeed.estimates)."""

import random
from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper


def missing_bytes(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    """Return the bytes that a rank holds, minus DeepSpeed's estimate."""
    whole, share = (
        (4, 4 + 12) if float32 else (2, 2 + 4 + 12)
    )  # bytes per parameter: P, and that of which it has a share
    held = whole * parameters + share * parameters // ranks + activations + whole * bucket
    return held - (2 * parameters + 18 * parameters // ranks)


# fmt: off
OUT = (
    Mistake("activations are shared by the ranks", "Each rank has its own sequences. Who keeps their activations?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept // ranks, bucket, long))),
    Mistake("the bucket has other numbers than the parameters", "In which dtype are gradients reduced?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long) + 2 * bucket,
                  lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long) + 4 * bucket)),
    Mistake("float32's bytes in mixed precision, too", "Is P, G or S estimated too small in mixed precision?",
            as_if(lambda n, ranks, kept, bucket, long:
                  missing_bytes(n, ranks, kept, 0, True) + (4 if long else 2) * bucket)),
    Mistake("the bucket is left out, too", "Where do gradients wait until they are reduced?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long)),
            symptom="out of memory in the first backward, though the states would fit twice"),
    Mistake("elements of the bucket are taken for bytes", "How many bytes has an element?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long) + bucket)),
)
# fmt: on


@answered
def left_out(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(parameters, ranks, activations, bucket, float32) -> bytes` that stage 2 holds beyond its estimate.

    Returns the ✓ line.
    """
    draw, sheets = random.Random(seed), []
    for float32 in (False, True, False, True):
        ranks = draw.choice((4, 8, 16))
        parameters, activations, bucket = (ranks * draw.randrange(1, 9) * 10**power for power in (6, 8, 7))
        arguments = parameters, ranks, activations, bucket, float32
        words = f"{parameters:,} parameters, {ranks} ranks, {activations:,} bytes of activations, bucket {bucket:,}"
        sheets.append(Sheet(arguments, missing_bytes(*arguments), f"{words}, in {'float32' if float32 else '16 bits'}"))
    return on_paper(fn, sheets, OUT, "Go through P, G, S and A, and then all that comes and goes. What is not in it?")


left_out.expected = missing_bytes  # the notebook goes on with this function, if the learner's is not right yet
