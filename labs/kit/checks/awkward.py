"""An awkward model, its batches, and what each rank does with them in a check of gradients.

A step's reference is plain: before it, each rank takes the gradient of each of its micro-batches on a copy of its own
that nobody has wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.ddp import Naive, Overlapped
from labs.kit.checks.answer import show
from labs.kit.checks.wire import Cargo
from labs.kit.record import mark

LEARNING_RATE = 0.1
Gradients = dict[str, Tensor | None]
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One model and what it is trained on."""

    seed: int
    ranks: int
    micro_batches: int = 1
    steps: int = 1
    dtype: torch.dtype = torch.float64
    sizes: tuple[int, int, int] = (11, 7, 13)  # vocabulary, dim, hidden
    spare: bool = False  # a trainable parameter that nobody uses
    equal: bool = True  # replicas start equal
    overlapped: bool = False

    def model(self, rank: int = 0) -> Awkward:
        return Awkward(self, seed=self.seed if self.equal else self.seed + rank)

    def batch(self, rank: int, step: int) -> list[MicroBatch]:
        """The micro-batches of a rank, each of 2 sequences of 5 tokens: (inputs, targets)."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + rank)
        tokens = torch.randint(0, self.sizes[0], (self.micro_batches, 2, 6), generator=generator)
        return [(x[:, :-1], x[:, 1:]) for x in tokens]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        times = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.ranks} ranks{times}, {dtype}"


class Awkward(nn.Module):
    """Tied, frozen and (on request) unused parameters, odd sizes, a parameter without dimensions.

    `model(tokens_BT, targets_BT)` is the mean cross-entropy loss, as of the course's GPT.
    """

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self.case = case
        vocabulary, dim, hidden = case.sizes
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, dim)
        self.hidden = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.square = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(()))
        if case.spare:
            self.spare = nn.Linear(dim, 3)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(case.dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        x = x + self.scale * self.out(torch.tanh(self.frozen(self.square(torch.tanh(self.hidden(x))))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets_BT.flatten())

    def gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


@dataclass
class Step:
    """What one rank saw of one step."""

    plain: list[Gradients]  # by micro-batch, on the copy; unscaled
    found: Gradients = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)  # the parameters, before the optimizer moves them
    losses: list[tuple[float, float]] = field(default_factory=list)  # the wrapper's, the copy's
    complaint: str = ""
    thawed: str = ""  # a parameter whose requires_grad has changed
    parameters_sent: int = 0  # collectives that were given a parameter's own memory

    def look_at(self, model: Awkward, cargo: Cargo) -> None:
        self.found, self.after, self.parameters_sent = model.gradients(), model.values(), cargo.count
        for name, p in model.named_parameters():
            if p.requires_grad == name.startswith("frozen"):
                self.thawed = name


# ---- what runs on each rank ------------------------------------------------------------------------------


def average_once(fn: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model()
        batch = case.batch(rank, 0)
        step = Step(plain(model, batch), before=model.values())
        model(*batch[0]).backward()
        with Cargo(model.parameters(), case.seed + rank) as cargo:
            mark("step")
            fn(model)
            mark("end")
        step.look_at(model, cargo)
        return [step]

    return [one(case) for case in cases]


def accumulate_once(fn: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model()
        batch = case.batch(rank, 0)
        step = Step(plain(model, batch), before=model.values())
        wrapped = Overlapped(model, bucket_bytes=500) if case.overlapped else Naive(model)
        with Cargo(model.parameters(), case.seed + rank) as cargo:
            mark("step")
            fn(wrapped, batch)
            mark("end")
        step.look_at(model, cargo)
        return [step]

    return [one(case) for case in cases]


def train(wrap: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    def one(case: Case) -> list[Step]:
        rank = dist.get_rank()
        model = case.model(rank)
        wrapped = wrap(model)
        if complaint := not_a_wrapper(wrapped, model):
            for _ in range(case.steps):
                mark("step")
            return [Step([], complaint=complaint)] * case.steps
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
        steps = []
        for number in range(case.steps):
            batch = case.batch(rank, number)
            step = Step(plain(model, batch), before=model.values())
            expected = plain_losses(model, batch)
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with Cargo(model.parameters(), case.seed + 64 * number + rank) as cargo:
                mark("step")
                losses = backward_of_all(wrapped, batch)
                mark("end")
            step.look_at(model, cargo)
            step.losses = list(zip(losses, expected, strict=True))
            optimizer.step()
            steps.append(step)
        return steps

    return [one(case) for case in cases]


def backward_of_all(wrapped: nn.Module, batch: list[MicroBatch]) -> list[float]:
    losses = []
    for i, micro_batch in enumerate(batch):
        last = i == len(batch) - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            loss = wrapped(*micro_batch)
            (loss / len(batch)).backward()
        losses.append(float(loss.detach()))
    if hasattr(wrapped, "sync"):
        wrapped.sync()
    return losses


def not_a_wrapper(wrapped: Any, model: nn.Module) -> str:
    """What the wrapper lacks, in words, or ""."""
    if not isinstance(wrapped, nn.Module):
        return f"wrap(model) returned {show(wrapped)}, and not an nn.Module"
    if not hasattr(wrapped, "no_sync"):
        return f"{type(wrapped).__name__} has no no_sync()"
    missing = {id(p) for p in model.parameters()} - {id(p) for p in wrapped.parameters()}
    if missing:
        names = [name for name, p in model.named_parameters() if id(p) in missing]
        return f"{type(wrapped).__name__}.parameters() lacks {names[0]!r}: is the model one of its attributes?"
    return ""


def plain(model: Awkward, batch: list[MicroBatch]) -> list[Gradients]:
    """The gradient of each micro-batch alone, on a copy without any hook."""
    gradients = []
    for micro_batch in batch:
        copied = copy_of(model)
        copied(*micro_batch).backward()
        gradients.append(copied.gradients())
    return gradients


def plain_losses(model: Awkward, batch: list[MicroBatch]) -> list[float]:
    copied = copy_of(model)
    with torch.no_grad():
        return [float(copied(*micro_batch)) for micro_batch in batch]


def copy_of(model: Awkward) -> Awkward:
    """The same parameters in a model that nobody has hung a hook on."""
    copied = Awkward(model.case, seed=0)
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return copied
