"""What each rank does in a check of gradients.

A step's reference is plain: before it, each rank takes the gradient of each of its micro-batches on a copy of its own
that nobody has wrapped.  Then comes what is done with the exercise's function, by its name:

    average_gradients    backward; then, watched, fn(model)
    accumulation         watched: fn(wrapped, batch)
    data_parallel        once wrap(model); then, watched, the backwards of all micro-batches, and sync()
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.ddp import Naive, Overlapped
from labs.kit.checks.answer import show
from labs.kit.checks.case import Step
from labs.kit.checks.gradients.cases import Awkward, Case, Gradients, MicroBatch
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.wire import Cargo
from labs.kit.record import mark

LEARNING_RATE = 0.1
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks", "_forward_pre_hooks")


@dataclass
class Seen(Step):
    """A step, and what is particular about one of gradients; values and gradients are by the parameter's name."""

    found: Gradients = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)  # the wrapper's, the copy's
    lacks: str = ""  # what the wrapper lacks
    given: Gradients = field(default_factory=dict)  # the parameters' values before they were wrapped
    kept: int = 0  # how many more elements the wrapper's own lists have than after the step before
    thawed: str = ""  # a parameter whose requires_grad has changed
    idle: bool = False  # no longer in training mode
    hooks: int = 0  # how many more there are
    parameters_sent: int = 0  # collectives that were given a parameter's own memory
    begun: int = 0  # collectives
    replaced: str = ""  # a parameter whose gradient is another tensor now
    taken: bool = False  # the list of micro-batches has changed
    asleep: bool = False  # nothing had begun when the wrapper's sync() was called


def train(name: str, fn: Callable[..., Any], cases: list[Case]) -> list[list[Seen]]:
    return [list(train_one(EXERCISES[name], fn, case, dist.get_rank())) for case in cases]


def train_unseen(name: str, fn: Callable[..., Any], case: Case) -> None:
    """For the bytes held: what was seen of a step would be among them from then on."""
    for _ in train_one(EXERCISES[name], fn, case, dist.get_rank()):
        pass


def train_one(exercise: Exercise, fn: Callable[..., Any], case: Case, rank: int) -> Iterator[Seen]:
    model = case.model(rank)
    given = model.values()
    wrapped = exercise.wrap(fn, model)
    if lacks := not_a_wrapper(wrapped, model) if exercise.step is backward_of_all else "":
        for _ in range(case.steps):
            mark("step")
            yield Seen(lacks=lacks)
        return
    wrapped.train(not case.evaluating)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    kept = 0
    for number in range(case.steps):
        batch = case.batch(rank, number)
        step = Seen(plain=plain(model, batch), before=model.values(), given=given if number == 0 else {})
        expected, hooks = plain_losses(model, batch), count_hooks(model)
        optimizer.zero_grad(set_to_none=number % 2 == 0 or exercise.prepare is backward_once)
        exercise.prepare(model, batch)
        tensors, handed_over = {name: p.grad for name, p in model.named_parameters()}, list(batch)
        with Cargo(model.parameters(), case.seed + 64 * number + rank) as cargo, Aftermath() as aftermath:
            mark("step")
            losses = watched(exercise, fn, wrapped, batch, case, step)
            mark("end")
        aftermath.tell(step)
        look_at(model, step, cargo)
        step.replaced = moved_elsewhere(model, tensors) if exercise.in_place else ""
        step.taken = len(batch) != len(handed_over) or any(a is not b for a, b in zip(batch, handed_over, strict=True))
        step.asleep = isinstance(wrapped, Noting) and not wrapped.begun
        step.hooks = count_hooks(model) - hooks if number or exercise.step is not backward_of_all else 0
        step.kept, kept = count_kept(wrapped) - kept if number > 1 else 0, count_kept(wrapped)
        step.losses = list(zip(losses, expected, strict=True)) if losses else []
        optimizer.step()
        yield step


def watched(
    exercise: Exercise, fn: Callable[..., Any], wrapped: nn.Module, batch: list[MicroBatch], case: Case, step: Seen
) -> list[float]:
    """The losses, where the exercise has any."""
    try:
        return noted(case, exercise.step, fn, wrapped, batch)
    except Exception:  # what is not contiguous may be refused; anything else is raised again
        if not case.strided:
            raise
        step.refused = True
        return []


def look_at(model: Awkward, step: Seen, cargo: Cargo) -> None:
    step.found, step.after = model.gradients(), model.values()
    step.parameters_sent, step.begun = cargo.count, cargo.begun
    step.idle = not model.case.evaluating and not all(module.training for module in model.modules())
    for name, p in model.named_parameters():
        if p.requires_grad == name.startswith("frozen"):
            step.thawed = name


def moved_elsewhere(model: Awkward, before: Gradients) -> str:
    """A parameter that had a gradient before, and has it in other memory now."""
    for name, p in model.named_parameters():
        if before[name] is not None and p.grad is not None and p.grad.data_ptr() != before[name].data_ptr():
            return name
    return ""


def count_hooks(model: nn.Module) -> int:
    return sum(len(getattr(x, name, None) or ()) for x in (*model.parameters(), *model.modules()) for name in HOOKS)


def count_kept(wrapped: nn.Module) -> int:
    """Elements of the lists and the like that are attributes of the wrapper or a module in it."""
    attributes = (value for module in wrapped.modules() for value in vars(module).values())
    return sum(len(value) for value in attributes if isinstance(value, (list, dict, set, deque)))


# ---- the exercises ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exercise:
    """`wrap(fn, model)` once; in each step `prepare(model, batch)` and, watched, `step(fn, wrapped, batch)`."""

    wrap: Callable[[Callable[..., Any], Awkward], Any]
    prepare: Callable[[Awkward, list[MicroBatch]], None]
    step: Callable[[Callable[..., Any], Any, list[MicroBatch]], list[float]]
    in_place: bool = True  # a gradient that is there stays the tensor that it is


def backward_once(model: Awkward, batch: list[MicroBatch]) -> None:
    model(*batch[0]).backward()


def average(fn: Callable[..., Any], model: Awkward, batch: list[MicroBatch]) -> list[float]:
    fn(model)
    return []


class Noting(Overlapped):
    """Notes how many all-reduces have begun when sync() is called."""

    begun = 0

    def sync(self) -> None:
        if self.syncing:
            self.begun = len(self.works)
        super().sync()


def ours(fn: Callable[..., Any], model: Awkward) -> nn.Module:
    return Noting(model, bucket_bytes=500) if model.case.overlapped else Naive(model)


def accumulate(fn: Callable[..., Any], wrapped: nn.Module, batch: list[MicroBatch]) -> list[float]:
    fn(wrapped, batch)
    return []


def backward_of_all(fn: Callable[..., Any], wrapped: nn.Module, batch: list[MicroBatch]) -> list[float]:
    losses = []
    for i, micro_batch in enumerate(batch):
        last = i == len(batch) - 1
        with contextlib.nullcontext() if last else wrapped.no_sync():
            loss = wrapped(*micro_batch)
            (loss / len(batch)).backward()
            if hasattr(wrapped, "sync"):
                wrapped.sync()  # within no_sync() it sends nothing
        losses.append(float(loss.detach()))
    return losses


def nothing(model: Awkward, batch: list[MicroBatch]) -> None:
    pass


EXERCISES = {
    "average_gradients": Exercise(lambda fn, model: model, backward_once, average),
    "accumulation": Exercise(ours, nothing, accumulate, in_place=False),
    "data_parallel": Exercise(lambda fn, model: fn(model), nothing, backward_of_all),
}


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


# ---- the reference ---------------------------------------------------------------------------------------


def plain(model: Awkward, batch: list[MicroBatch]) -> list[Gradients]:
    """The gradient of each micro-batch alone."""
    gradients = []
    for micro_batch in batch:
        copied = model.copied()
        copied(*micro_batch).backward()
        gradients.append(copied.gradients())
    return gradients


def plain_losses(model: Awkward, batch: list[MicroBatch]) -> list[float]:
    copied = model.copied()
    with torch.no_grad():
        return [float(copied(*micro_batch)) for micro_batch in batch]
