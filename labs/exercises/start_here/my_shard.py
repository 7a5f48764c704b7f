"""my_shard: which part of a tensor is this rank's?  Tried on sizes that the ranks divide and others, down to 0."""

from collections.abc import Callable
from typing import Any

import torch

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, as_if, on_paper

SIZES = ((8, 4), (8, 3), (10, 4), (9, 4), (2, 4), (0, 3), (7, 1), (1000, 64))


@answered
def my_shard(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(elements, ranks, rank) -> (start, stop)`: shards as `torch.chunk` cuts them; the last may be empty."""
    sheets = [
        Sheet((n, ranks, rank), part(n, ranks, rank), f"{n} elements, {ranks} ranks: rank {rank}")
        for n, ranks in SIZES
        for rank in range(ranks)
    ]
    return on_paper(fn, sheets, MISTAKES, "How many elements do the ranks before this one hold, together?")


def part(elements: int, ranks: int, rank: int) -> tuple[int, int]:
    pieces = torch.arange(elements).chunk(ranks)
    start = sum(piece.numel() for piece in pieces[:rank])
    return start, start + (pieces[rank].numel() if rank < len(pieces) else 0)


def rounded_down(elements: int, ranks: int, rank: int) -> tuple[int, int]:
    return rank * (elements // ranks), (rank + 1) * (elements // ranks)


def one_more_for_the_first(elements: int, ranks: int, rank: int) -> tuple[int, int]:
    size, rest = divmod(elements, ranks)
    return rank * size + min(rank, rest), (rank + 1) * size + min(rank + 1, rest)


# fmt: off
MISTAKES = (
    Mistake("the last rank is given a longer shard than the others",
            "How long is the longest shard, if all but the last ones are equally long?",
            as_if(lambda n, ranks, rank: (rank * (n // ranks), n) if rank == ranks - 1
            else rounded_down(n, ranks, rank))),
    Mistake("not cut as torch.chunk cuts", "How long is each shard, until the elements run out?",
            as_if(one_more_for_the_first)),
    Mistake("past the end", "Which is the last element?",
            as_if(lambda n, ranks, rank: (rank * -(-n // ranks), (rank + 1) * -(-n // ranks)))),
    Mistake("start and length instead of start and stop", "What does the second number say?",
            as_if(lambda *job: (part(*job)[0], part(*job)[1] - part(*job)[0]))),
    Mistake("an empty shard that does not end where it starts",
            "What are the start and stop of a shard without elements, after all the others?",
            answer_is(lambda found, expected: expected[0] == expected[1] and found != expected)),
)
