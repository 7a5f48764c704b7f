"""first_epoch_again: a run that is resumed in its second epoch, and reads in the order of the first."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.data import order
from labs.exercises.bug_clinic._case import RANKS, clinic, drawn

WINDOWS, DONE = 24, 2  # windows in an epoch; batches of the second epoch before the restart
EPOCH = WINDOWS // RANKS  # batches


def faulty(make: Callable[..., Tensor], step: int) -> Tensor:
    batches = make(epoch=0)
    return batches[step % len(batches) :]


def right(make: Callable[..., Tensor], step: int) -> Tensor:
    epoch, done = divmod(step, len(make(epoch=0)))
    return make(epoch=epoch)[done:]


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    """Train from the restart to the end of the epoch; a batch has one window of each rank."""

    def rest(step: int) -> Tensor:
        return fn(lambda epoch: order(WINDOWS, seed, epoch).view(-1, RANKS), step)

    return values(rest, dist.get_rank(), seed)


def values(rest: Callable[[int], Tensor], rank: int, seed: int) -> dict[str, Tensor]:
    batches = rest(EPOCH + DONE)
    others = {f"windows after {step} steps": rest(step)[:, rank] for step in (EPOCH, 3 * EPOCH + 1)}
    before = torch.cat([order(WINDOWS, seed, epoch).view(-1, RANKS) for epoch in (0, 1)])[: EPOCH + DONE]
    return {"windows": batches[:, rank], "losses": losses(torch.cat([before, batches]), seed)} | others


def losses(batches: Tensor, seed: int) -> Tensor:
    """Return the loss of each batch before its step: each window asks for another number."""
    targets, x, found = drawn((WINDOWS,), seed), 0.0, []
    for batch in batches:
        found.append((x - targets[batch]).square().mean())
        x = x - 0.2 * (x - targets[batch]).mean()
    return torch.stack(found)


def alone(seed: int) -> list[dict[str, Tensor]]:
    def rest(step: int) -> Tensor:
        return order(WINDOWS, seed, step // EPOCH).view(-1, RANKS)[step % EPOCH :]

    return [values(rest, rank, seed) for rank in range(RANKS)]


# fmt: off
first_epoch_again = clinic(
    "f", faulty, right, job, alone, number=6, tells={"numbers"},
    asks="`fn(make, step) -> batches`, the rest of the epoch after so many steps; make: `make(epoch=2)` returns "
         "the windows of all batches of an epoch, in its order",
    threads=("huggingface/accelerate/issues/2016 open 2023-10-01",
             "huggingface/accelerate/pull/4071 merged 2026-06-10"),
    mistake="every epoch in the order of the first",
    question="In which epoch was the run when it was saved, and in which order does that epoch read?",
)
# fmt: on
