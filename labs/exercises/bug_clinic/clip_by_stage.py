"""clip_by_stage: each stage of a pipeline clips by the norm of its own gradients, and of no others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn

SIZE, MOST = 6, (1.0, 1.0, 100.0)  # max_norm in each step; the last gradients are shorter


def faulty(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    for g in gradients:
        g *= torch.clamp(max_norm / norm, max=1)
    return norm


def right(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    squares = torch.stack([g.square().sum() for g in gradients]).sum()
    dist.all_reduce(squares)
    for g in gradients:
        g *= torch.clamp(max_norm / squares.sqrt(), max=1)
    return squares.sqrt()


def trained(stages: Sequence[int], clip: Callable[..., Any], seed: int) -> tuple[Tensor, list[Tensor]]:
    """Train these stages; return the norm of each step, and each stage's parameters."""
    parameters, norms = [torch.zeros(SIZE, dtype=torch.float64) for _ in stages], []
    for most in MOST:
        gradients = [(1 + s) * (x - drawn((SIZE,), seed, s)) for s, x in zip(stages, parameters, strict=True)]
        pieces = [piece for s, g in zip(stages, gradients, strict=True) for piece in g.chunk(1 + s % 2)]
        norms.append(torch.as_tensor(clip(pieces, most)))
        parameters = [x - 0.5 * g for x, g in zip(parameters, gradients, strict=True)]
    return torch.stack(norms), parameters


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    norms, (own,) = trained([dist.get_rank()], fn, seed)
    return {"norms": norms, "parameters": own}


def alone(seed: int) -> list[dict[str, Tensor]]:
    norms, every = trained(range(RANKS), faulty, seed)  # one process has all stages, and is right
    return [{"norms": norms, "parameters": own} for own in every]


# fmt: off
clip_by_stage = clinic(
    "b", faulty, right, job, alone, number=8, tells={"numbers"},
    asks="`fn(gradients, max_norm) -> norm`, which clips a stage's gradients in place by the norm of all stages'",
    threads=("pytorch/torchtitan/issues/596 closed 2024-10-01", "pytorch/torchtitan/pull/649 merged 2024-10-24"),
    mistake="each stage has a norm of its own",
    question="Of which vector is max_norm the length, and where are its other elements?",
)
# fmt: on
