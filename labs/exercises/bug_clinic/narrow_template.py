"""narrow_template: a checkpoint in float32 that is read into bfloat16 tensors, without a word."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn

SIZES = {"weight": 12, "bias": 3}


def faulty(template: dict[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name, x in template.items():
        x.copy_(saved[name])


def right(template: dict[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name in template:
        template[name] = saved[name].clone()


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    """Restart with a model that was made in bfloat16; return the optimizer's master copies."""
    template = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in SIZES.items()}
    fn(template, MappingProxyType(saved(seed)))
    return {name: x.float() for name, x in template.items()} | sizes(template)


def saved(seed: int) -> dict[str, Tensor]:
    return {name: drawn((size,), seed, size).float() for name, size in SIZES.items()}


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"the number of bytes of {name}": torch.tensor(x.nbytes) for name, x in tensors.items()}


def alone(seed: int) -> list[dict[str, Tensor]]:
    return RANKS * [saved(seed) | sizes(saved(seed))]


# fmt: off
narrow_template = clinic(
    "f", faulty, right, job, alone, number=12, tells={"numbers"},
    asks="`fn(template, saved)`, which puts all that was saved into the template, {name: tensor}, bit by bit",
    threads=("pytorch/pytorch/issues/187138 open 2026-06-12", "pytorch/pytorch/pull/187257 open 2026-06-13"),
    mistake="rounded to the template's dtype",
    question="Which dtype does the file have, and which dtype does copy_ write?",
)
# fmt: on
