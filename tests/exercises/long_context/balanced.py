"""Answers to balanced (12): which rank takes which tokens."""

from itertools import pairwise

import torch

from labs.cp import contiguous, striped
from tests.answers import Exercise

answers = Exercise("balanced")


@answers.right(line="of 500,500 products (1,000 tokens, 4 ranks) a rank takes")
def zigzag(tokens, ranks):
    ends = [tokens * number // (2 * ranks) for number in range(2 * ranks + 1)]
    chunks = [list(range(start, end)) for start, end in pairwise(ends)]
    return [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]


answers.right(striped)


@answers.right
def by_tensor_split(tokens, ranks):
    chunks = torch.arange(tokens).tensor_split(2 * ranks)
    return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(ranks)]


@answers.right
def the_longest_to_the_idlest(tokens, ranks):
    own, work = [[] for _ in range(ranks)], [0] * ranks
    for place in reversed(range(tokens)):
        rank = min(range(ranks), key=lambda rank: (len(own[rank]), work[rank]))
        own[rank].insert(0, place)
        work[rank] += place + 1
    return own


answers.wrong("one chunk for each rank")(contiguous)
spoil = answers.slips(zigzag)
ENDS, REMAINDER = "tokens * number // (2 * ranks)", "(number == 2 * ranks) * (tokens % (2 * ranks))"
spoil(
    "not in ascending order", "chunks[rank] + ", "", "[2 * ranks - 1 - rank]", "[2 * ranks - 1 - rank] + chunks[rank]"
)
spoil("the first head goes with the first tail", "[2 * ranks - 1 - rank]", "[ranks + rank]")
spoil("a token is missing, or there twice", ENDS, "tokens // (2 * ranks) * number")
spoil("a token is missing, or there twice", "2 * ranks - 1 - rank", "-rank")
spoil("the remainder is on one rank", ENDS, f"tokens // (2 * ranks) * number + {REMAINDER}")
spoil("not a list of places for each rank", "return [", "return sum([", "in range(ranks)]", "in range(ranks)], [])")
spoil("a rank without tokens", "chunks[rank] +", "[] if rank else sum(chunks, []) or")


@answers.wrong("equal work, but not equal tokens")
def equal_triangles(tokens, ranks):
    ends = [round(tokens * (rank / ranks) ** 0.5) for rank in range(ranks + 1)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


@answers.wrong()
def by_chunk(tokens, ranks):
    chunks = torch.arange(tokens).chunk(2 * ranks)  # may return fewer
    return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(ranks)]
