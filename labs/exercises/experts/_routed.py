"""Tokens that have chosen their experts on some ranks, and the rows that travel to the experts' ranks and back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.on_ranks import F64, Draw
from labs.exercises.engine.scripts import World


@dataclass(frozen=True)
class Routed(World):
    """A world whose ranks have tokens, each of which has chosen some experts.

    rank_of: the rank of each expert, by its place among the members
    tokens: the number of tokens of each member
    top_k: experts of a token
    popular: the experts among which all tokens choose, or () for all
    dim: the numbers of a row
    is_odd: whether the results of a token's three experts are 2²⁴, 1 and -2²⁴, whose sum depends on the order
    """

    rank_of: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    top_k: int = 2
    popular: tuple[int, ...] = ()
    dim: int = 5
    is_odd: bool = False

    @cached_property
    def chosen(self) -> list[Tensor]:
        """Return each member's experts, [tokens, top_k], in ascending order."""
        scores = torch.zeros(len(self.rank_of))
        scores[list(self.popular)] = 9
        return [
            (scores + torch.rand(count, len(scores), generator=self.generator(rank)))
            .topk(self.top_k)
            .indices.sort(-1)
            .values
            for rank, count in enumerate(self.tokens)
        ]

    @cached_property
    def order(self) -> list[Tensor]:
        """Return for each member the places in `chosen.flatten()` of its rows, sorted by rank, expert and token."""
        keys = torch.tensor([rank * len(self.rank_of) + e for e, rank in enumerate(self.rank_of)])
        return [keys[chosen.flatten()].argsort(stable=True) for chosen in self.chosen]

    @cached_property
    def rows(self) -> Tensor:
        """Return the number of rows that each member sends to each member, [from, to]."""
        ranks = torch.tensor(self.rank_of)
        return torch.stack([ranks[chosen.flatten()].bincount(minlength=self.n) for chosen in self.chosen])

    @cached_property
    def results(self) -> list[Tensor]:
        """Return the results of each member's rows, [tokens, top_k, dim]."""
        if self.is_odd:
            odd = torch.tensor([2.0**24, 1, -(2.0**24)], dtype=self.dtype)
            return [odd[:, None].expand(count, 3, self.dim) for count in self.tokens]
        return [
            torch.randn(count, self.top_k, self.dim, generator=self.generator(rank, 1), dtype=F64).to(self.dtype)
            for rank, count in enumerate(self.tokens)
        ]

    @cached_property
    def weights(self) -> list[Tensor]:
        """Return each member's weights of its rows, [tokens, top_k]."""
        return [
            torch.ones(count, self.top_k, dtype=self.dtype)
            if self.is_odd
            else torch.rand(count, self.top_k, generator=self.generator(rank, 2), dtype=F64).to(self.dtype)
            for rank, count in enumerate(self.tokens)
        ]

    def sorted(self, member: int) -> Tensor:
        """Return the results of a member's rows, in the order in which it sent the rows."""
        return self.results[member].flatten(0, 1)[self.order[member]]

    def computed_by(self, member: int) -> Tensor:
        """Return the results that a member has computed: those of the first rank's rows come first."""
        parts = [self.sorted(source).split(self.rows[source].tolist())[member] for source in range(self.n)]
        return torch.cat(parts)

    @property
    def nbytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.within}, {self.tokens} tokens with {self.top_k} experts each, experts on ranks {self.rank_of}"


SPREAD = "right only where experts lie side by side"
NO_TOKENS = "right only where every rank has tokens"


def worlds(draw: Draw, **options: Any) -> dict[int, list[Routed]]:
    """Return the worlds of the exercises; `options` are those of all of them."""

    def world(ranks: int, rank_of: tuple[int, ...], tokens: tuple[int, ...], only: str = "", **own: Any) -> Routed:
        return draw.world(Routed, ranks, rank_of=rank_of, tokens=tokens, only=only, **options | own)

    a, b = draw.random.randrange(5, 9), draw.random.randrange(9, 13)
    side_by_side = (0, 0, 0, 1, 1, 2, 2, 3, 3)
    return {
        4: [
            world(4, side_by_side, (a + 9, b + 9, 17, 16)),  # so many that every rank gets rows of every other
            world(4, (2, 0, 3, 1, 1, 0, 2, 3), (b, 6, a, 8), SPREAD, top_k=3),
            world(4, side_by_side, (a, 3, 4, 5), "right only where every rank gets rows", popular=(0, 3, 4)),
            world(4, side_by_side, (2, 3, 1, 4), "right only where every rank gets rows", popular=(8,), top_k=1),
            world(4, side_by_side, (a, 0, 0, b), NO_TOKENS, top_k=1),
            world(4, (0, 0, 1, 1, 2), (a, 4, 5), "right only on the group of all ranks", group=(1, 2, 3)),
        ],
        1: [world(1, (0, 0, 0), (a,), "right only on several ranks")],
    }


def by_member(make: Callable[[Routed, int], Any]) -> Callable[[Routed], list[Any]]:
    """Return a function that computes `make(world, member)` for each member of a world."""
    return lambda world: [make(world, member) for member in range(world.n)]
