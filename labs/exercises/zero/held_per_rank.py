"""held_per_rank: the bytes that a rank holds under each stage of ZeRO, for layers that the ranks divide and others."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Bytes = tuple[float, ...]  # (P, G, S)
FLOAT32, MIXED, MEGATRON = (4, 4, 8), (2, 2, 12), (2, 4, 12)


@answered
def held_per_rank(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(stage, layers, ranks, size) -> (P, G, S)`: bytes that one rank holds between backward and the step."""
    draw = random.Random(seed)
    jobs = [
        (0, [8, 2, 3], 4, FLOAT32),
        (1, [12, 8], 4, FLOAT32),
        *((stage, [10, 3, 7], 4, MIXED) for stage in (1, 2, 3)),
        (3, [5, 5, 5], 8, MEGATRON),
        (2, [8], 1, MEGATRON),
        (3, [0, 6, 1], 3, FLOAT32),
        (1, [], 2, FLOAT32),
        *((stage, [draw.randrange(1, 5000) for _ in range(6)], draw.randrange(2, 9), MEGATRON) for stage in range(4)),
    ]
    sheets = [Sheet(job, held(*job), words(*job)) for job in jobs]
    return on_paper(fn, sheets, MISTAKES, "Which kinds does this stage cut, and into parts of how many elements?")


def words(stage: int, layers: Sequence[int], ranks: int, size: Sequence[int]) -> str:
    way = f"stage {stage}" if stage else "stage 0 (DDP)"
    return f"{way}, layers of {layers} parameters, {ranks} ranks, {size} bytes per parameter"


def by_layer(stage: int, layers: Sequence[int], ranks: int) -> int:
    """Return the model's elements, with each layer padded to a multiple of the ranks; DDP has no padding."""
    return sum(n + -n % ranks for n in layers) if stage else sum(layers)


def held(
    stage: int,
    layers: Sequence[int],
    ranks: int,
    size: Sequence[int],
    elements: Callable[[int, Sequence[int], int], int] = by_layer,
    cut: Callable[[int, int], bool] = int.__ge__,
) -> Bytes:
    """Return (P, G, S) of a rank: the right bytes; or, with other arguments than the defaults, those of a mistake.

    elements: `elements(stage, layers, ranks)` counts the elements of the model, with padding.
    cut: `cut(stage, first)` tells whether a stage shards a kind that stage `first` is the first to shard.
    """
    n = elements(stage, layers, ranks)
    return tuple(b * n / (ranks if cut(stage, first) else 1) for b, first in zip(size, (3, 2, 1), strict=True))


# fmt: off
MISTAKES = (
    Mistake("the padding is left out", "A layer of 10 elements on 4 ranks: how many elements are in each rank's shard?",
            as_if(held, elements=lambda stage, layers, ranks: sum(layers))),
    Mistake("all layers are padded as one, and not each by itself",
            "What gets zeros at its end: each layer, or the whole model?",
            as_if(held, elements=lambda stage, layers, ranks: by_layer(stage, [sum(layers)], ranks))),
    Mistake("padding where none is needed", "How many zeros does a layer of 12 elements need on 4 ranks?",
            as_if(held, elements=lambda stage, layers, ranks: sum(n + (ranks - n % ranks) * (stage > 0)
                                                                  for n in layers))),
    Mistake("padding under DDP, where none is needed", "What does DDP cut?",
            as_if(held, elements=lambda stage, layers, ranks: by_layer(1, layers, ranks))),
    Mistake("a stage leaves the earlier ones' kinds whole", "In stage 2, is S whole again?",
            as_if(held, cut=int.__eq__)),
    Mistake("P is cut first, not S", "Which kind does stage 1 shard?",
            as_if(held, cut=lambda stage, first: stage >= 4 - first)),
    Mistake("elements, and not bytes", "What is size for?", as_if(lambda *job: held(*job[:3], (1, 1, 1)))),
    Mistake("what all ranks hold together, and not one of them", "How many ranks does the question ask about?",
            as_if(lambda *job: tuple(b * job[2] for b in held(*job)))),
)
