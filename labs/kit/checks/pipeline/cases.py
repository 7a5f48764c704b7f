"""What the checks of pipelines are tried on.

Size      ranks, micro-batches, stages a rank: a list for each rank is asked for, and judged on paper
Obeyed    lists, and a model of as many stages, of which each rank obeys its list
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs import pp
from labs.kit.checks import case as shared
from labs.pp.checker import microbatches_of, ranks_of, stages_of

VOCABULARY, DIM, SEQUENCES, TOKENS = 11, 6, 3, 7
FEW, ALONE, NO_MULTIPLE = "micro-batches than ranks", "on more than one rank", "for a multiple of the ranks"


@dataclass(frozen=True)
class Size:
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    only: str = ""  # the name of what is right everywhere but here
    refusable: bool = False  # a ValueError is a right answer here, and there is no target

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def __str__(self) -> str:
        each = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return f"{many(self.ranks, 'rank')}, {many(self.microbatches, 'micro-batch', 'es')}{each}"


def many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural * (n != 1)}"


def sizes(seed: int, few: str = f"right only with no fewer {FEW}") -> list[Size]:
    """The one that is drawn in the notebook comes first, and those with fewer micro-batches than ranks last."""
    draw = random.Random(seed)
    plain = [(4, 8), (3, 6), (2, 4), (4, 4), (8, 16), (3, 5), (8, 11), (4, 5 + draw.randrange(20))]
    alone = [(1, 4), (1, 1)]
    less = [(4, 2), (4, 3), (3, 2), (2, 1), (4, 1), (8, 3), (8, draw.randrange(1, 8))]
    names = [(plain, ""), (alone, f"right only {ALONE}"), (less, few)]
    return [Size(*size, only=name) for several, name in names for size in several]


def interleaved_sizes(seed: int) -> list[Size]:
    p = random.Random(seed).randrange(2, 7)
    three, alone = "right only with two stages a rank", f"right only {ALONE}"
    plain = [(4, 8, 2), (2, 4, 2), (3, 6, 2), (4, 4, 2), (8, 16, 2), (p, 3 * p, 2)]
    odd = [(4, 6, 2), (4, 2, 2), (3, 1, 3), (2, 4, 1)]
    return [
        *(Size(*size) for size in plain),
        *(Size(*size, only=three) for size in ((2, 4, 3), (3, 6, 3), (4, 8, 4))),
        *(Size(*size, only=alone) for size in ((1, 3, 2), (1, 1, 3))),
        *(Size(*size, only=f"right only {NO_MULTIPLE}", refusable=True) for size in odd),
    ]


# ---- a model that obeys ----------------------------------------------------------------------------------


class Stage(nn.Module):
    """tokens, or what the stage before makes -> what the next one takes, or logits."""

    def __init__(self, number: int, stages: int, dtype: torch.dtype, seed: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM) if number == 0 else None
        self.linear = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY) if number == stages - 1 else None
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed + number)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + torch.tanh(self.linear(x))
        return x if self.head is None else self.head(x)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Obeyed(shared.Case):
    """Two batches, one after the other; nobody sets the gradients to zero between them."""

    name: str
    lists: pp.Lists

    @cached_property
    def stages(self) -> int:
        return stages_of(self.lists)

    @cached_property
    def microbatches(self) -> int:
        return microbatches_of(self.lists)

    def model(self) -> list[Stage]:
        return [Stage(number, self.stages, self.dtype, self.seed % 2**40) for number in range(self.stages)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [micro-batches × 3, 7]."""
        size = (2, self.microbatches * SEQUENCES, TOKENS)
        x, y = torch.randint(VOCABULARY, size, generator=self.generator(step=step))
        return x, y

    def rank_of(self, stage: int) -> int:
        return ranks_of(self.lists)[stage]

    def gradients(self, step: int) -> Iterator[list[Tensor]]:
        """Of each micro-batch of a batch by itself, by stage."""
        for x, y in zip(*(each.chunk(self.microbatches) for each in self.batch(step)), strict=True):
            stages = self.model()
            (mean_loss(nn.Sequential(*stages)(x), y) / self.microbatches).backward()
            yield [flat(stage) for stage in stages]

    def __str__(self) -> str:
        return f"{self.name}, {many(len(self.lists), 'rank')}, {many(self.microbatches, 'micro-batch', 'es')}"


def flat(stage: nn.Module) -> Tensor:
    """The gradients of its parameters in one vector; NaN where there is none."""
    return torch.cat(
        [(torch.full_like(p, torch.nan) if p.grad is None else p.grad).flatten() for p in stage.parameters()]
    )


def obeyed(seed: int) -> list[Obeyed]:
    """Those of 2 ranks first."""
    draw = random.Random(seed)

    def case(name: str, ranks: int, lists: pp.Lists, only: str = "", dtype: torch.dtype = torch.float64) -> Obeyed:
        return Obeyed(draw.randrange(2**40), ranks, name=name, lists=lists, only=only, dtype=dtype)

    several, order = "right only with one stage a rank", "right only where micro-batches come in their order"
    return [
        case("1F1B", 2, pp.one_f_one_b(2, 5)),
        case("GPipe", 2, pp.gpipe(2, 3)),
        case("1F1B, the micro-batches in another order", 2, renamed(pp.one_f_one_b(2, 5), [3, 0, 4, 2, 1]), order),
        case("a V", 2, whole(pp.zbv(2, 5)), several),
        case("one rank", 2, pp.one_f_one_b(1, 3), f"right only {ALONE}"),
        case("1F1B", 4, pp.one_f_one_b(4, 6)),
        case("1F1B", 4, pp.one_f_one_b(4, 2)),
        case("GPipe", 4, pp.gpipe(4, 3), dtype=torch.float32),
        case("interleaved", 4, pp.interleaved(4, 8), several),
        case("a V", 4, whole(pp.zbv(4, 6)), several),
    ]


def changed(lists: pp.Lists, change: Callable[[pp.Instruction], pp.Instruction | None]) -> pp.Lists:
    return [[new for x in order if (new := change(x))] for order in lists]


def renamed(lists: pp.Lists, names: list[int]) -> pp.Lists:
    return changed(lists, lambda x: type(x)(x.stage, names[x.microbatch]))


def whole(lists: pp.Lists) -> pp.Lists:
    """B in the place of I, and no W."""
    return changed(lists, lambda x: {pp.I: pp.B(x.stage, x.microbatch), pp.W: None}.get(type(x), x))
