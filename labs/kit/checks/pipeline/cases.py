"""What the checks of pipelines are tried on.

Size      ranks, micro-batches, stages per rank: a list for each rank is asked for, and judged on paper
Obeyed    lists, and a model of as many stages, of which each rank obeys its list
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs import pp
from labs.kit.checks import case as shared
from labs.pp.checker import microbatches_of, ranks_of, stages_of

VOCABULARY, DIM, SEQUENCES, TOKENS = 11, 6, 3, 7
ALONE = "right only on more than one rank"
FEW = "right only with no fewer micro-batches than ranks"
LONG = "the warm-up is longer than there are micro-batches"
NO_MULTIPLE = "right only for a multiple of the ranks"
OWN_ORDERS = "0F2 0F0 0F3 0F1 0B1 0B0 0B2 0B3", "1F1 1F3 1F2 1F0 1B3 1B0 1B1 1B2"


@dataclass(frozen=True)
class Size:
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    only: str = ""  # the name of what is right everywhere but here
    refusable: bool = False  # nobody asked for this: an error is as right as a list that can be run

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def __str__(self) -> str:
        each = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        return f"{many(self.ranks, 'rank')}, {many(self.microbatches, 'micro-batch', 'es')}{each}"


def many(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural * (n != 1)}"


def sizes(seed: int, few: str = FEW) -> list[Size]:
    """The one that is drawn in the notebook comes first, and those with fewer micro-batches than ranks last."""
    draw, found = random.Random(seed), [Size(4, 8)]
    for p in range(1, 9):
        for m in {1, 2, p - 1, p, p + 1, 2 * p, draw.randrange(2 * p, 4 * p)} - {0}:
            found.append(Size(p, m, only=ALONE if p == 1 else few if m < p else ""))
    return sorted(found, key=lambda size: ["", ALONE, few].index(size.only))


def interleaved_sizes(seed: int) -> list[Size]:
    draw = random.Random(seed)
    three, every = "right only with two stages per rank", range(2, 9)
    odd = [(4, 6, 2), (4, 2, 2), (3, 1, 3), (2, 4, 1)]
    return [
        *(Size(p, m, 2) for p, m in [(4, 8), *((p, p * k) for p in every for k in (1, 2 + p % 2))]),
        *(Size(p, p * draw.randrange(1, 4), 3 + p % 2, only=three) for p in every),
        *(Size(1, m, v, only=ALONE) for m, v in ((3, 2), (1, 3))),
        *(Size(*size, only=NO_MULTIPLE, refusable=True) for size in odd),
    ]


# ---- a model that obeys ----------------------------------------------------------------------------------


class Stage(nn.Module):
    """tokens, floats, or what the stage before makes -> what the next one takes, or logits."""

    def __init__(self, number: int, stages: int, case: Obeyed):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM) if number == 0 and not case.floats else None
        self.linear = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY) if number == stages - 1 else None
        self.linear.bias.requires_grad_(not (case.frozen and number % 2))
        self.to(case.dtype)
        generator = torch.Generator().manual_seed(case.seed % 2**40 + number)
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
    frozen: bool = False  # a parameter of every second stage
    floats: bool = False  # come in, in the place of tokens

    @cached_property
    def stages(self) -> int:
        return stages_of(self.lists)

    @cached_property
    def microbatches(self) -> int:
        return microbatches_of(self.lists)

    def model(self) -> list[Stage]:
        return [Stage(number, self.stages, self) for number in range(self.stages)]

    def batch(self, step: int) -> list[list[Tensor]]:
        """Tokens (or floats, [3, 7, 6]) and targets of each micro-batch, [3, 7] each."""
        generator, size = self.generator(step=step), (self.microbatches * SEQUENCES, TOKENS)
        xs, ys = torch.randint(VOCABULARY, (2, *size), generator=generator)
        if self.floats:
            xs = torch.randn(*size, DIM, generator=generator, dtype=self.dtype)
        return [list(each.chunk(self.microbatches)) for each in (xs, ys)]

    def rank_of(self, stage: int) -> int:
        return ranks_of(self.lists)[stage]

    @cached_property
    def by_itself(self) -> list[list[tuple[Tensor, list[Tensor]]]]:
        """On one process, of each micro-batch of each batch by itself: the loss, and the gradients by stage."""
        return [[self.alone(x, y) for x, y in zip(*self.batch(step), strict=True)] for step in range(2)]

    def alone(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        stages = self.model()
        loss = mean_loss(nn.Sequential(*stages)(x), y)
        (loss / self.microbatches).backward()
        return loss.detach(), [flat(stage) for stage in stages]

    def sources(self, stage: int, step: int) -> list[Tensor]:
        """Of what the gradients of a stage are the sum after so many batches, in the order of its backwards."""
        lists = self.lists[self.rank_of(stage)]
        order = [x.microbatch for x in lists if x.stage == stage and isinstance(x, pp.B | pp.I)]
        return [batch[m][1][stage] for batch in self.by_itself[: step + 1] for m in order]

    def due(self, stage: int, step: int) -> Tensor:
        return reduce(torch.add, self.sources(stage, step))

    def __str__(self) -> str:
        return f"{self.name}, {many(len(self.lists), 'rank')}, {many(self.microbatches, 'micro-batch', 'es')}"


def flat(stage: nn.Module) -> Tensor:
    """The gradients of the parameters that are trained, in one vector; NaN where there is none."""
    gradients = [
        torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in stage.parameters() if p.requires_grad
    ]
    return torch.cat([gradient.flatten() for gradient in gradients])


def obeyed(seed: int) -> list[Obeyed]:
    """Those of 2 ranks first."""
    draw = random.Random(seed)

    def case(name: str, ranks: int, lists: pp.Lists, only: str = "", **options: Any) -> Obeyed:
        return Obeyed(draw.randrange(2**40), ranks, name=name, lists=lists, only=only, **options)

    several, order = "right only with one stage per rank", "right only where micro-batches come in their order"
    trained = "right only where all parameters are trained"
    return [
        case("1F1B", 2, pp.one_f_one_b(2, 5)),
        case("GPipe, each rank in an order of its own", 2, [[*map(pp.read, x.split())] for x in OWN_ORDERS], order),
        case("1F1B, the micro-batches in another order", 2, renamed(pp.one_f_one_b(2, 5), [3, 0, 4, 2, 1]), order),
        case("a V", 2, whole(pp.zbv(2, 5)), several),
        case("1F1B of floats", 2, pp.one_f_one_b(2, 3), "right only where tokens come in", floats=True),
        case("one rank", 2, pp.one_f_one_b(1, 3), ALONE),
        case("1F1B", 4, pp.one_f_one_b(4, 6)),
        case("1F1B, some parameters frozen", 4, pp.one_f_one_b(4, 2), trained, frozen=True),
        case("GPipe in bfloat16", 4, pp.gpipe(4, 1), "right only in float64", dtype=torch.bfloat16),
        case("interleaved", 4, pp.interleaved(4, 8), several),
        case("a V", 4, whole(pp.zbv(4, 6)), several),
    ]


def renamed(lists: pp.Lists, names: list[int]) -> pp.Lists:
    return [[type(x)(x.stage, names[x.microbatch]) for x in order] for order in lists]


def whole(lists: pp.Lists) -> pp.Lists:
    """B in the place of I, and no W."""
    kinds = {pp.F: pp.F, pp.B: pp.B, pp.I: pp.B}
    return [[kinds[type(x)](x.stage, x.microbatch) for x in order if type(x) in kinds] for order in lists]
