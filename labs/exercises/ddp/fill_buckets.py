"""fill_buckets: which gradients share a bucket?  The check asks about models of 0 to thousands of tensors."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, as_if, cut, on_paper

Buckets = list[list[int]]


@answered
def fill_buckets(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(nbytes, bucket_bytes) -> buckets`: lists of tensors' numbers, from the last tensor to the first."""
    draw = random.Random(seed)
    models = [
        ([4, 8, 4, 16, 4], 16),
        ([40, 4, 4, 4], 10),
        ([4, 4, 4, 50, 4, 4], 12),
        ([8, 8, 8, 8], 16),
        ([4, 0, 4, 0, 0, 8], 8),
        ([0, 4, 0, 4], 4),
        ([100], 1),
        ([1] * 7, 100),
        ([], 16),
        ([8, 24, 64] * 1000, 4000),
        *(([draw.choice([0, 4, 64, 256, 4096, 65_536]) for _ in range(24)], draw.randrange(1, 9000)) for _ in range(4)),
    ]
    sheets = [
        Sheet((n, limit), filled(n, limit), f"tensors of {cut(n)} bytes, buckets of {limit}") for n, limit in models
    ]
    return on_paper(fn, sheets, MISTAKES, "Go from the last tensor to the first: when is a bucket full?")


def when_reached(has: int, more: int, limit: int) -> bool:
    """Return whether a bucket is full as soon as its bytes reach the limit, for any size of the next tensor."""
    return has >= limit


def filled(
    nbytes: Sequence[int], limit: int, order: Callable = reversed, full: Callable[[int, int, int], bool] = when_reached
) -> Buckets:
    """Return the right buckets; or, with other arguments than the defaults, those of a mistake.

    order: puts the tensors' numbers in order.
    full: `full(bytes in the bucket, bytes of the next tensor, limit)` tells whether the bucket is closed.
    """
    buckets, has = [], 0
    for i in order(range(len(nbytes))):
        if not buckets or full(has, nbytes[i], limit):
            buckets.append([])
            has = 0
        buckets[-1].append(i)
        has += nbytes[i]
    return buckets


def places(buckets: Any) -> list[int]:
    """Return the tensors' numbers in all buckets, or [] if the buckets are not lists."""
    return [i for bucket in buckets for i in bucket] if all(isinstance(b, list) for b in buckets) else []


# fmt: off
MISTAKES = (
    Mistake("begun at the wrong end", "Which gradient does backward finish first?", as_if(filled, order=iter)),
    Mistake("closed before it is full",
            "Is a bucket closed when it has reached bucket_bytes, or when the next tensor would not fit?",
            as_if(filled, full=lambda has, more, limit: has + more > limit),
            symptom="more buckets than needed, and each costs a message"),
    Mistake("closed one tensor too late", "What should happen when a bucket has exactly bucket_bytes?",
            as_if(filled, full=lambda has, more, limit: has > limit)),
    Mistake("an empty bucket", "Which tensor is in it?",
            answer_is(lambda found, expected: isinstance(found, list) and [] in found)),
    Mistake("a tensor is missing, or travels twice", "In how many buckets should each tensor be?",
            answer_is(lambda found, expected: isinstance(found, list)
                      and sorted(places(found)) != sorted(places(expected)))),
)
