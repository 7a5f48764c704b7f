"""What a rank holds under stage 2 beyond DeepSpeed's estimate of it (labs.deepspeed.estimates)."""

import random
from collections.abc import Callable
from typing import Any

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.pencil.sheet import Sheet, as_if, on_paper


def missing_bytes(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    states = 2 * parameters - 2 * parameters // ranks if float32 else 0
    return states + activations + (4 if float32 else 2) * bucket


def activations_shared(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations // ranks, bucket, float32)


def bucket_shared(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations, bucket // ranks, float32)


def elements_as_bytes(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations, 0, float32) + bucket


def always_low(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations, 2 * bucket if float32 else bucket, False)


def only_parameters(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations, bucket, float32) + float32 * 2 * parameters // ranks


def no_bucket(parameters: int, ranks: int, activations: int, bucket: int, float32: bool) -> int:
    return missing_bytes(parameters, ranks, activations, 0, float32)


# fmt: off
OUT = (
    Mistake("activations are shared by the ranks", "Each rank has its own sequences. Who keeps their activations?",
            as_if(activations_shared)),
    Mistake("the bucket is left out, too", "Where do gradients wait until they are reduced?", as_if(no_bucket),
            shows="out of memory in the first backward, though the states would fit twice"),
    Mistake("the bucket is shared by the ranks", "Who has a place for gradients that wait?", as_if(bucket_shared)),
    Mistake("elements of the bucket are taken for bytes", "How many bytes has an element?", as_if(elements_as_bytes)),
    Mistake("16 bits are taken for granted", "How many bytes has a parameter in float32, and how many are estimated?",
            as_if(always_low)),
    Mistake("in float32 only the parameters are others", "2 + 4 + 12 bytes of a share: are there two kinds of G?",
            as_if(only_parameters)),
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
