"""Layers as flat vectors, and what each rank does with them in a check of ZeRO.

A layer's weight, bias and padding lie in one vector, `full`; the layer computes with views of it.  Between the calls of
the learner's functions comes what training does.  A rank notes what was there before and after each step, the plain
gradient of each of its micro-batches on copies that nobody has hung a hook on, and looks at what each call left behind.

    partition    builds a step for each layer; all backwards, then each layer's step
    scatter      a hook at each layer's vector; all backwards, then the optimizer of the shards
    come_and_go  each layer in turn, forward and back: gather, look, use, drop, look
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.group import all_gather
from labs.kit.checks import case as shared
from labs.kit.checks.answer import show
from labs.kit.checks.case import Complaint, Step
from labs.kit.checks.late_wire import Late
from labs.kit.checks.launching import noted
from labs.kit.record import mark

LEARNING_RATE = 0.1
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=LEARNING_RATE),
    "SGD with momentum": partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1),
}
FADING = -0.5  # × the parameters in each step of stage 3: exact in every dtype
UNSEEN = "Which attribute of full has the same numbers, unseen by autograd?"
THAWED = ("the requires_grad of full has changed", "Who decides what is trained?", "requires_grad has changed")
SETTLED = 0.002  # s in which a backend's thread lets go of what it sent
L = TypeVar("L")


@dataclass(frozen=True)
class Case(shared.Case):
    """Some layers, and how they are trained.  Layer i maps dims[i] numbers to dims[i + 1]."""

    dims: tuple[int, ...] = (5, 7, 6, 5)
    micro_batches: int = 1
    steps: int = 2
    shards: torch.dtype = torch.float64
    optimizer: str = "SGD"
    tied: bool = False  # the first layer is used once more at the end
    frozen: bool = False  # the second layer is
    idle: bool = False  # the last rank has no rows: its gradients are zeros
    held: bool = False  # bytes held are measured: nothing else is noted

    def sizes(self) -> list[int]:
        """Elements of each layer's vector: weight and bias, padded to a multiple of N."""
        return [-(-out * (inside + 1) // self.ranks) * self.ranks for inside, out in pairwise(self.dims)]

    def values(self) -> list[Tensor]:
        """What the layers' vectors hold at first, on every rank."""
        generator = self.generator()
        draws = (torch.randn(size, generator=generator, dtype=torch.float64) for size in self.sizes())
        return [(x * inside**-0.5).to(self.shards) for x, inside in zip(draws, self.dims, strict=False)]

    def batch(self, rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """A rank's micro-batches, each of one or two rows: (inputs, targets)."""
        generator = self.generator(rank, step + 1)
        rows = (self.micro_batches, 0 if self.idle and rank == self.ranks - 1 else 1 if self.held else 2)
        x = torch.randn(*rows, self.dims[0], generator=generator, dtype=torch.float64).to(self.dtype)
        y = torch.randn(*rows, self.dims[1 if self.tied else -1], generator=generator, dtype=torch.float64)
        return list(zip(x, y.to(self.dtype), strict=True))

    def __str__(self) -> str:
        words = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        words += [f"no rows on rank {self.ranks - 1}"] * self.idle
        return ", ".join([self.who, *words, self.dtype_name])


class Stack(nn.Module):
    """tanh layers, one after the other; `model(x, y)` is the mean squared error, zero where there are no rows."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.fulls = nn.ParameterList(
            nn.Parameter(x.to(case.dtype), requires_grad=not (case.frozen and i == 1))
            for i, x in enumerate(case.values())
        )
        self.trained = [full for full in self.fulls if full.requires_grad]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss(self.case, list(self.fulls), x, y)


def loss(case: Case, fulls: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    layers = list(zip(fulls, pairwise(case.dims), strict=True))
    for full, (inside, out) in layers + (layers[:1] if case.tied else []):
        weight, bias, _ = full.split([out * inside, out, len(full) - out * (inside + 1)])
        x = torch.tanh(nn.functional.linear(x, weight.view(out, inside), bias))
    return ((x - y) ** 2).sum() / max(1, y.numel())


def plain(stack: Stack, batch: list[tuple[Tensor, Tensor]]) -> list[list[Tensor]]:
    """The gradients of each micro-batch alone, of copies."""
    gradients, trained = [], set(stack.trained)
    for x, y in batch:
        copies = [full.detach().clone().requires_grad_(full in trained) for full in stack.fulls]
        gradients.append(
            list(torch.autograd.grad(loss(stack.case, copies, x, y), [c for c in copies if c.requires_grad]))
        )
    return gradients


def backward_of_all(stack: Stack, batch: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batch:
        (stack(x, y) / len(batch)).backward()


def look_for_thawed(stack: Stack, step: Step) -> None:
    if not all(full.requires_grad for full in stack.trained):
        step.complain(*THAWED)
        for full in stack.trained:
            full.requires_grad_()


def snapshots(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.detach().clone() for x in tensors]


def wire_of(case: Case, rank: int) -> AbstractContextManager[Late]:
    """Slow, but where bytes held are measured: it keeps what it looks at."""
    wire = Late(rank, case.seed)
    return nullcontext(wire) if case.held else wire


def end_of_step(case: Case) -> None:
    if case.held:
        time.sleep(5 * SETTLED)
    mark("end")


# ---- stage 1 ---------------------------------------------------------------------------------------------


@dataclass
class Optimizers:
    """What the learner had made on one rank."""

    elements: list[int] = field(default_factory=list)  # of the parameters of each, in the order of their making
    built: int = 0  # how many there were before the first step, and
    first: int = 0  # after it
    steps: list[Step] = field(default_factory=list)


def partition(fn: Callable[..., Any], cases: list[Case]) -> list[Optimizers]:
    """The building of each case is a step of the recording, too: its first."""
    return [partition_one(fn, case) for case in cases]


def partition_one(fn: Callable[..., Any], case: Case) -> Optimizers:
    rank, found = dist.get_rank(), Optimizers()

    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = OPTIMIZERS[case.optimizer](params)
        found.elements.append(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))
        return optimizer

    stack = Stack(case)
    mark("step")
    updates = [noted(case, fn, full, make) for full in stack.trained]
    mark("end")
    if not all(map(callable, updates)):
        found.steps = [Step(complaint=no_step(updates))] * case.steps
        for _ in range(case.steps):
            mark("step")
        return found
    for number in range(case.steps):
        batch, step = case.batch(rank, number), Step()
        if not case.held:
            step = Step(plain=plain(stack, batch), before=snapshots(stack.trained))
        for full in stack.trained:
            full.grad = None
        memory = [full.untyped_storage()._cdata for full in stack.trained]
        with wire_of(case, rank) as wire:
            mark("step")
            backward_of_all(stack, batch)
            for update in updates:
                noted(case, update)
            end_of_step(case)
        look_for_thawed(stack, step)
        if memory != [full.untyped_storage()._cdata for full in stack.trained]:
            step.complain(
                "step() put different memory in the place of full's",
                "The layer computes with views of full. Of which memory are they views?",
                "not in place",
            )
        step.touched, step.after = wire.touched, [] if case.held else snapshots(stack.trained)
        found.first = found.first or len(found.elements)
        found.steps.append(step)
    return found


def no_step(updates: list[Any]) -> Complaint:
    given = next(update for update in updates if not callable(update))
    return (
        f"partition_optimizer returned {show(given)}, and not a function",
        "What will the training loop call after backward?",
        "no step is returned",
    )


# ---- stage 2 ---------------------------------------------------------------------------------------------


def scatter(fn: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    return [scatter_one(fn, case) for case in cases]


def scatter_one(fn: Callable[..., Any], case: Case) -> list[Step]:
    rank, stack, steps = dist.get_rank(), Stack(case), [Step()]
    stack.shards = nn.ParameterList(nn.Parameter(full.data.chunk(case.ranks)[rank]) for full in stack.trained)
    optimizer = OPTIMIZERS[case.optimizer](stack.shards)

    def ready(shard: nn.Parameter, full: nn.Parameter) -> None:
        noted(case, fn, full, shard)
        look_at_gradients(full, shard, steps[-1])
        look_for_thawed(stack, steps[-1])
        if case.held:
            time.sleep(SETTLED)

    for full, shard in zip(stack.trained, stack.shards, strict=True):
        full.register_post_accumulate_grad_hook(partial(ready, shard))
    for number in range(case.steps):
        batch, steps[number:] = case.batch(rank, number), [Step()]
        step, before = steps[-1], [] if case.held else snapshots(list(stack.fulls))
        if not case.held:
            step.plain = plain(stack, batch)
        optimizer.zero_grad(set_to_none=number % 2 == 0 or case.held)
        with wire_of(case, rank) as wire:
            mark("step")
            backward_of_all(stack, batch)
            end_of_step(case)
        step.touched, step.after = wire.touched, [] if case.held else snapshots([s.grad for s in stack.shards])
        if not all(map(torch.equal, before, stack.fulls)):
            step.complain(
                "the parameters themselves have changed, before the optimizer",
                "Which of the four may change here: full, full.grad, shard, shard.grad?",
                "the parameters have changed",
            )
        optimizer.step()
        for full, shard in zip(stack.trained, stack.shards, strict=True):
            all_gather(full.data, shard.data.clone())
    return steps


def look_at_gradients(full: nn.Parameter, shard: nn.Parameter, step: Step) -> None:
    """Straight after gradient_ready."""
    n = full.numel()
    if full.grad is not None:
        step.complain(
            f"after gradient_ready, full.grad still holds {full.grad.numel()} elements",
            "Who needs the whole gradient, once its shard has been reduced?",
            "the whole gradient is kept",
        )
        full.grad = None
    if shard.grad is None:
        step.complain(
            "after gradient_ready, shard.grad is None", "Where will the optimizer look?", "the shard has no gradient"
        )
    elif shard.grad.untyped_storage().nbytes() > shard.grad.nbytes:
        size = shard.grad.untyped_storage().nbytes() // shard.grad.itemsize
        step.complain(
            f"shard.grad has {shard.grad.numel()} elements, but is a view of {size}; the whole gradient has {n}",
            "When is memory freed if a view of it is left?",
            "a view keeps the whole gradient",
        )


# ---- stage 3 ---------------------------------------------------------------------------------------------


def come_and_go(gather: Callable[..., Any], drop: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    return [come_and_go_one(gather, drop, case) for case in cases]


def come_and_go_one(gather: Callable[..., Any], drop: Callable[..., Any], case: Case) -> list[Step]:
    rank, stack, steps = dist.get_rank(), Stack(case), []
    shards = [nn.Parameter(x.chunk(case.ranks)[rank].clone()) for x in case.values()]
    stack.shards = nn.ParameterList(shards)
    visits = [Visit(case, full, shard) for full, shard in zip(stack.fulls, shards, strict=True)]
    for _ in range(case.steps):
        step = Step()
        with wire_of(case, rank) as wire:
            mark("step")
            for visit, forward in passes(case, visits):
                with torch.set_grad_enabled(forward):
                    visit(gather, drop, step, forward)
            end_of_step(case)
        step.touched = wire.touched
        steps.append(step)
        for shard in shards:
            shard.data.mul_(FADING)
    return steps


def passes(case: Case, layers: list[L]) -> Iterator[tuple[L, bool]]:
    """(layer, whether it is forward): there, and back."""
    there = layers + (layers[:1] if case.tied else [])
    yield from ((layer, True) for layer in there)
    yield from ((layer, False) for layer in reversed(there))


class Visit:
    """One layer's vector: gathered, looked at, used, dropped, looked at."""

    def __init__(self, case: Case, full: nn.Parameter, shard: nn.Parameter) -> None:
        self.case, self.full, self.shard = case, full, shard
        self.view = full.data  # what the layer computes with, whatever becomes of full.data
        self.storage = self.view.untyped_storage()
        self.storage.resize_(0)
        self.trained, self.version = full.requires_grad, full._version

    def __call__(self, gather: Callable[..., Any], drop: Callable[..., Any], step: Step, forward: bool) -> None:
        before = None if self.case.held else self.shard.detach().clone()
        noted(self.case, gather, self.full, self.shard)
        self.look(step, "gather")
        if self.storage.nbytes() == self.view.nbytes:
            if not self.case.held:
                step.after.append(self.view.clone())
            self.view.fill_(float("nan"))  # or the same memory might come back with the right numbers in it
            if self.trained and not forward and not self.case.held:
                self.full.grad = torch.zeros_like(self.view)  # backward has been here, and reduce-scatter has not
        noted(self.case, drop, self.full)
        self.look(step, "drop")
        self.full.grad = None
        if before is not None and not (before.dtype == self.shard.dtype and torch.equal(before, self.shard)):
            step.complain(
                f"the shard has changed: it was {show(before)}, and is {show(self.shard.detach())}",
                "What will the optimizer update in the next step?",
                "the shard has changed",
            )
        if self.case.held:
            time.sleep(SETTLED)

    def look(self, step: Step, name: str) -> None:
        full, due = self.full, self.view.nbytes if name == "gather" else 0
        found = full.untyped_storage()
        if full.dtype != self.view.dtype:
            step.complain(
                f"after {name}, full is {show(full.detach())}; the layer computes in {show(self.view)}",
                "In which dtype was full, before it was dropped?",
                "the compute dtype is ignored",
            )
        elif found._cdata != self.storage._cdata:
            step.complain(
                f"after {name}, full has different memory than before; the layer's views still look at the old one, "
                f"of {self.storage.nbytes()} bytes",
                "How can a storage change its size, and stay the same storage?",
                "full parameters are never freed" if name == "drop" else "full has other memory",
            )
        elif found.nbytes() != due:
            step.complain(
                f"after {name}, full's storage has {found.nbytes()} bytes; {due} are due",
                "What does untyped_storage().resize_ take: elements, or bytes?" if due else "What holds the memory?",
                "storage of another size" if due else "full parameters are never freed",
            )
        elif full.requires_grad != self.trained:
            step.complain(*THAWED)
            full.requires_grad_(self.trained)
        elif full._version != self.version:
            step.complain(
                f"{name} wrote into full as autograd sees it: backward will refuse what forward has kept",
                UNSEEN,
                "autograd sees the change",
            )
            self.version = full._version
        if found._cdata != self.storage._cdata or full.dtype != self.view.dtype:
            full.data = self.view
