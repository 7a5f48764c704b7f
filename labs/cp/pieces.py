"""The pieces into which a sequence is cut, one for each rank: lists of places, chosen so that all ranks work alike.

A token attends to itself and to the tokens before it, so the token at place t, counted from 0, takes t + 1 products of
a query and a key.  The last of N contiguous pieces takes almost 2 N times as many as the first.  There are three cuts
of a sequence; here are those of 8 tokens for 2 ranks:

                                       rank 0     rank 1     products
    contiguous    one chunk            0 1 2 3    4 5 6 7    10 and 26
    zigzag        one chunk from the   0 1 6 7    2 3 4 5    18 and 18
                  head, and one from
                  the tail
    striped       every N-th token     0 2 4 6    1 3 5 7    16 and 20

In a ring, ranks that are done wait for the slowest one in every step, so each step should be balanced, too: `products`
counts them by the rank whose keys a rank sees in a step.

Sources: zigzag, Llama Team 2024, arXiv 2407.21783, section 3.3.2; striped, Brandon et al. 2023, arXiv 2311.09431.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Places = Sequence[int]  # places of tokens in the whole sequence, in ascending order


class Tokens(NamedTuple):
    """Some tokens of a sequence: their places, and the number of each one's document, [B, T], if there are several."""

    places: Places
    documents: Tensor | None = None


@dataclass(frozen=True)
class Pieces:
    """A sequence cut into pieces.

    places: the places of each rank's tokens
    documents: the number of each token's document, of the whole sequence [B, T]; None if a row is one document

    Raises ValueError for a rank without tokens, and for places that do not have each token once, in ascending order.
    """

    places: Sequence[Places]
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        given = sorted(place for places in self.places for place in places)
        if not all(self.places):
            raise ValueError(
                f"a sequence of {len(given)} tokens leaves one of {len(self.places)} ranks without any: take fewer "
                "ranks, or longer sequences"
            )
        if given != [*range(len(given))] or any(list(places) != sorted(places) for places in self.places):
            raise ValueError(
                "the pieces do not make up a sequence: give each of the places 0, 1, 2, ... to exactly one rank, and "
                "list a rank's places in ascending order, as contiguous, zigzag and striped do"
            )

    def __getitem__(self, rank: int) -> Tokens:
        """Return the tokens of a rank."""
        documents = None if self.documents is None else pick(self.documents, self.places[rank], 1)
        return Tokens(self.places[rank], documents)

    @property
    def whole(self) -> Tokens:
        return Tokens(range(sum(map(len, self.places))), self.documents)

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """Cut x, which has the whole sequence along `dim`, into the ranks' pieces."""
        return [pick(x, places, dim) for places in self.places]

    def join(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole sequence along `dim`, given the ranks' pieces."""
        order = torch.tensor([place for places in self.places for place in places]).argsort()
        return torch.cat(list(xs), dim).index_select(dim, order.to(xs[0].device))


def pick(x: Tensor, places: Places, dim: int) -> Tensor:
    return x.index_select(dim, torch.tensor(places, device=x.device))


def contiguous(tokens: int, ranks: int) -> list[Places]:
    """Cut a sequence into chunks, one for each rank, as even as possible."""
    ends = [tokens * n // ranks for n in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def zigzag(tokens: int, ranks: int) -> list[Places]:
    """Cut a sequence into two chunks for each rank; rank r gets the r-th and the r-th from the end."""
    chunks = contiguous(tokens, 2 * ranks)
    return [[*chunks[rank], *chunks[-1 - rank]] for rank in range(ranks)]


def striped(tokens: int, ranks: int) -> list[Places]:
    """Deal out the tokens of a sequence in turn; rank r gets the tokens r, r + N, r + 2 N, ..."""
    return [range(rank, tokens, ranks) for rank in range(ranks)]


def products(pieces: Sequence[Places]) -> list[list[int]]:
    """Return [rank][source]: the number of products of the rank's queries and the source's keys that no mask hides."""
    return [[sum(k <= q for q in queries for k in keys) for keys in pieces] for queries in pieces]
