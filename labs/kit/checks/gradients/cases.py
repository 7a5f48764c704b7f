"""An awkward model, its batches, and the cases of the three exercises on gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labs.kit.checks import case as shared

WIDE = 64  # dimensions of the model whose bytes held are measured
SHORT, LONG = 5, 6  # tokens of a sequence
Gradients = dict[str, Tensor | None]
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case(shared.Case):
    """One model and what it is trained on."""

    micro_batches: int = 1
    steps: int = 1
    sizes: tuple[int, int, int] = (11, 7, 13)  # vocabulary, dim, hidden
    spare: bool = False  # a trainable parameter that nobody uses,
    late: bool = False  # or nobody before the second step
    mixed: bool = False  # parameters of another dtype
    strided: bool = False  # a gradient that is not contiguous: an error is a right answer, too
    equal: bool = True  # replicas start equal
    evaluating: bool = False
    buffers: bool = False
    repeated: bool = False  # the first micro-batch is the last one, too
    overlapped: bool = False

    def model(self, rank: int = 0) -> Awkward:
        return Awkward(self, self.generator(0 if self.equal else rank))

    def batch(self, rank: int, step: int) -> list[MicroBatch]:
        """The micro-batches of a rank, of 2 sequences each: (inputs, targets).  Rank 0 never reads token 0."""
        shape = self.micro_batches, 2, (LONG if self.late and step else SHORT) + 1
        tokens = torch.randint(1, self.sizes[0], shape, generator=self.generator(rank, step + 1))
        if rank:
            tokens[..., 0] = 0
        batch = [(x[:, :-1], x[:, 1:]) for x in tokens]
        return [batch[-1], *batch[1:]] if self.repeated else batch

    def __str__(self) -> str:
        times = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        odd = ", a gradient that is not contiguous" * self.strided + ", and parameters of float32" * self.mixed
        odd += ", in evaluation mode" * self.evaluating + ", the first micro-batch also the last" * self.repeated
        odd += ", and a buffer" * self.buffers + ", and a parameter that is used from step 1 on" * self.late
        return f"{self.who}{times}, {self.dtype_name}{odd}"


class Awkward(nn.Module):
    """Tied, frozen and (on request) unused parameters, odd sizes, a parameter without dimensions, one without elements.

    The gradient of `rare` is zero on rank 0, and nowhere else; where dtypes are mixed it has a bucket of its own.
    In evaluation mode the model computes something else, as it would with dropout.

    `model(tokens_BT, targets_BT)` is the mean cross-entropy loss, as of the course's GPT.
    """

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        super().__init__()
        self.case = case
        vocabulary, dim, hidden = case.sizes
        self.embed = nn.Embedding(vocabulary, dim)
        self.hidden = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.square = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, dim))
        self.rare = nn.Parameter(torch.ones(dim))
        if case.spare:
            self.spare = nn.Linear(dim, dim)
        if case.buffers:
            self.register_buffer("running", torch.zeros(64))
        if case.strided:
            self.square.weight = nn.Parameter(self.square.weight.detach().t())
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(case.dtype)
        for p in (self.out.weight, self.rare) if case.mixed else ():
            p.data = p.data.float()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
        self.train(not case.evaluating)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.nothing.sum(0)
        x = x + self.rare.to(x.dtype) * (tokens_BT == 0)[..., None]
        if tokens_BT.shape[1] == LONG:
            x = x + self.spare(x)
        hidden = torch.tanh(self.frozen(self.square(torch.tanh(self.hidden(x)))))
        if not self.training:
            hidden = hidden / 2  # as dropout would do
        x = x + self.scale * nn.functional.linear(hidden, self.out.weight.to(x.dtype), self.out.bias)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets_BT.flatten())

    def gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def copied(self) -> Awkward:
        """The same parameters in a model that nobody has hung a hook on."""
        other = self.case.model()
        with torch.no_grad():
            for mine, theirs in zip(other.parameters(), self.parameters(), strict=True):
                mine.copy_(theirs)
        return other


class Draw:
    """Cases by chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def case(self, ranks: int, **options: Any) -> Case:
        sizes = tuple(self.random.choice(odd) for odd in ((9, 11, 13), (5, 7), (11, 13, 17)))
        return Case(self.random.randrange(2**40), ranks, sizes=sizes, **options)

    def budget(self, ranks: int, **options: Any) -> Case:
        """The case of the line of success: always the same sizes, so that the line is."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, **options)

    def wide(self, ranks: int, **options: Any) -> Case:
        """The case whose bytes held are measured: parameters outweigh everything else."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, sizes=(WIDE, WIDE, WIDE), **options)

    def average_gradients(self) -> dict[int, list[Case]]:
        return {
            3: [self.case(3), self.case(3, spare=True, buffers=True), self.case(3, steps=2, spare=True, late=True)],
            2: [self.case(2), self.case(2, spare=True), self.case(2, dtype=torch.float32, evaluating=True)],
            4: [
                self.case(4),
                self.case(4, spare=True),
                self.case(4, mixed=True),
                self.case(4, dtype=torch.bfloat16),
                self.case(4, strided=True),
                self.budget(4),
            ],
            1: [self.case(1)],
            **self.many(steps=2),
        }

    def accumulation(self) -> dict[int, list[Case]]:
        return {
            3: [self.case(3, micro_batches=5, steps=2), self.case(3, micro_batches=4, overlapped=True, steps=2)],
            2: [
                self.case(2),
                self.case(2, micro_batches=3, buffers=True),
                self.case(2, micro_batches=3, overlapped=True, repeated=True),
            ],
            4: [
                self.case(4, micro_batches=3, dtype=torch.float32),
                self.case(4, micro_batches=2, dtype=torch.bfloat16),
                self.budget(4, micro_batches=4),
            ],
            1: [self.case(1, micro_batches=2)],
            **self.many(micro_batches=2),
        }

    def data_parallel(self) -> dict[int, list[Case]]:
        return {
            3: [self.case(3, steps=3), self.case(3, micro_batches=3, steps=2)],
            2: [
                self.case(2, micro_batches=2, steps=3),
                self.case(2, steps=2, dtype=torch.float32, evaluating=True),
            ],
            4: [
                self.case(4, micro_batches=2, steps=2),
                self.case(4, steps=2, mixed=True),
                self.case(4, dtype=torch.bfloat16),
                self.budget(4, steps=3),
            ],
            1: [self.case(1, steps=2)],
            **self.many(steps=2),
        }

    def buckets(self) -> dict[int, list[Case]]:
        cases = self.data_parallel()
        cases[2].append(self.case(2, steps=2, strided=True))
        return cases

    def overlap(self) -> dict[int, list[Case]]:
        return {
            2: [self.case(2, micro_batches=3, steps=3)],
            3: [self.case(3, steps=2, evaluating=True), self.case(3, steps=2, mixed=True)],
            4: [self.case(4, dtype=torch.bfloat16), self.budget(4, micro_batches=3, steps=2)],
        }

    def own_group(self) -> Case:
        """Of three ranks; in buckets of 128 KiB, too, there are several."""
        return Case(self.random.randrange(2**40), 3, sizes=(WIDE, WIDE, 2 * WIDE), mixed=True, steps=2)

    def many(self, **options: Any) -> dict[int, list[Case]]:
        ranks = self.random.choice((5, 6, 7, 8))
        return {ranks: [self.case(ranks, **options)]}
