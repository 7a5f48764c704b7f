"""What a rank holds under stage 2 beyond DeepSpeed's estimate of it (labs.deepspeed.estimates)."""

import random
from collections.abc import Callable
from typing import Any

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pencil.sheet import Sheet, as_if, on_paper


def missing_bytes(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    states = 2 * parameters - 2 * parameters // ranks if float32 else 0
    return states + activations + (4 if float32 else 2) * bucket


# fmt: off
OUT = (
    Mistake("activations are shared by the ranks", "Each rank has its own sequences. Who keeps their activations?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept // ranks, bucket, long))),
    Mistake("the bucket is left out, too", "Where do gradients wait until they are reduced?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long)),
            shows="out of memory in the first backward, though the states would fit twice"),
    Mistake("the bucket is shared by the ranks", "Who has a place for gradients that wait?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, bucket // ranks, long))),
    Mistake("elements of the bucket are taken for bytes", "How many bytes has an element?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, 0, long) + bucket)),
    Mistake("16 bits are taken for granted", "How many bytes has a parameter in float32, and how many are estimated?",
            as_if(lambda n, ranks, kept, bucket, long: missing_bytes(n, ranks, kept, (1 + long) * bucket, False))),
    Mistake("in float32 only the parameters are others", "2 + 4 + 12 bytes of a share: are there two kinds of G?",
            as_if(lambda n, ranks, *others: missing_bytes(n, ranks, *others) + others[-1] * 2 * n // ranks)),
)
# fmt: on


@answered
def left_out(fn: Callable[..., Any], seed: int) -> str:
    """`fn(parameters, ranks, activations, bucket, float32) -> bytes`: what stage 2 holds beyond its estimate."""
    draw, sheets = random.Random(seed), []
    for float32 in (False, True, False, True):
        ranks = draw.choice((4, 8, 16))
        parameters, activations, bucket = (ranks * draw.randrange(1, 9) * 10**power for power in (6, 8, 7))
        arguments = parameters, ranks, activations, bucket, float32
        words = f"{parameters:,} parameters, {ranks} ranks, {activations:,} bytes of activations, bucket {bucket:,}"
        sheets.append(Sheet(arguments, missing_bytes(*arguments), f"{words}, in {'float32' if float32 else '16 bits'}"))
    return on_paper(fn, sheets, OUT, "Go through P, G, S and A, and then all that comes and goes. What is not in it?")
