"""Is this clipping by the global norm?  Jobs, and where they go wrong: whose norm was taken instead.

All gradients of all ranks must have become `factor` × what they were.  Where they have not, the factors of the usual
mistakes are tried, one mistake after the other: by the norm of a shard, of a rank, of a layer, a sum of norms, ...
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Wrong, answered, instead, show
from labs.kit.checks.case import Outcome, close, isclose
from labs.kit.checks.late_wire import Late
from labs.kit.checks.launching import blame_luck, job, noted
from labs.kit.record import mark

NUMBER = 8  # bytes
TOLERANCE = 1e-5  # torch's own 1e-6 beside the norm must fit
ROUNDED, ADDED_IN = "rounded on the way", "In which dtype are the squares added up, and the norm handed over?"
OF_NORM = 1e-4  # whatever the gradients' dtype: a norm that was added up in bfloat16 is 1e-3 off


@dataclass(frozen=True)
class Case(shared.Case):
    """The gradients of some shards on each rank, and `max_norm` as a multiple of their norm."""

    sizes: tuple[int, ...]
    times: float
    missing: int | None = None  # a shard without a gradient
    bare: tuple[int, ...] = ()  # ranks without any
    zero: bool = False
    crowded: bool = False  # beside the first shard there are a hundred small ones, which bfloat16 would not add to it

    def gradients(self, rank: int) -> list[Tensor | None]:
        """Larger from rank to rank, and from shard to shard (where they are not crowded)."""
        generator = self.generator(rank)
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in self.sizes]
        times = [(1 + rank) * (0.35 if i else 1) if self.crowded else 1 + rank + 2 * i for i in range(len(drawn))]
        larger = [x * (0 if self.zero else each) for x, each in zip(drawn, times, strict=True)]
        return [None if i == self.missing or rank in self.bare else x.to(self.dtype) for i, x in enumerate(larger)]

    def squares(self) -> Tensor:
        """[ranks, shards]: the sum of squares of each."""
        return torch.tensor(
            [
                [0.0 if x is None else float(x.double().square().sum()) for x in self.gradients(r)]
                for r in range(self.ranks)
            ],
            dtype=torch.float64,
        )

    @cached_property
    def norm(self) -> float:
        return math.sqrt(float(self.squares().sum()))

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.dtype is torch.bfloat16 else TOLERANCE

    @property
    def max_norm(self) -> float:
        return self.times * (self.norm or 1.0)

    def __str__(self) -> str:
        return f"{self.who}, {self.dtype_name}, gradients of norm {self.norm:.6g} and max_norm {self.max_norm:.6g}"


@dataclass
class Clipped(Outcome):
    replaced: bool = False  # the gradients are in other memory than before


@answered
def clip(fn: Callable[..., Any], seed: int) -> str:
    """`fn(shards, max_norm) -> norm`: scales all gradients, in place, so that their global norm is at most max_norm.

    shards: this rank's, a list of nn.Parameters; a `.grad` may be None.  norm: what it was before, on every rank.
    """
    draw = random.Random(seed)

    def case(ranks: int, times: float, **options: Any) -> Case:
        sizes = (1000,) + (8,) * 100 if options.get("crowded") else tuple(draw.randrange(40, 90) for _ in range(3))
        return Case(draw.randrange(2**40), ranks, sizes, times, **options)

    cases = {
        3: [case(3, 0.03), case(3, 2.5)],
        2: [case(2, 0.9, missing=1), case(2, 0.1, dtype=torch.float32), case(2, 0.5, zero=True)],
        4: [
            case(4, 1.2),
            case(4, 0.6, missing=0),
            case(4, 0.5, dtype=torch.float32),
            case(4, 0.8, bare=(draw.randrange(4),)),
            case(4, 0.7, bare=(0, 1, 2, 3)),
            case(4, 0.4, dtype=torch.bfloat16, crowded=True),
        ],
    }
    for ranks in cases:
        results = job(clip_all, fn, cases[ranks], ranks=ranks)
        for step, case in enumerate(cases[ranks]):
            outcomes = [results[rank][step] for rank in range(ranks)]
            events = [event for event in results.recording.events if event.step == step]
            try:
                judge(case, outcomes)
            except Wrong as wrong:
                raise blame_luck(wrong, events) from None
            most = max(results.recording.sent(rank, step) for rank in range(ranks))
            few_bytes(case, most)
    return f"you sent {most} bytes per rank at most, whatever the number of parameters; one number is enough"


def clip_all(fn: Callable[..., Any], cases: list[Case]) -> list[Outcome]:
    return [clip_once(fn, case) for case in cases]


def clip_once(fn: Callable[..., Any], case: Case) -> Clipped:
    rank = dist.get_rank()
    shards = [nn.Parameter(torch.ones(size, dtype=case.dtype)) for size in case.sizes]
    for shard, gradient in zip(shards, case.gradients(rank), strict=True):
        shard.grad = gradient
    places = [place_of(shard.grad) for shard in shards]
    with Late(rank, case.seed) as wire:
        mark("step")
        returned = noted(case, fn, shards, case.max_norm)
        mark("end")
    moved = any(bool((shard != 1).any()) for shard in shards)
    returned = float(returned) if isinstance(returned, float | int | Tensor) and is_number(returned) else show(returned)
    after, left = [shard.grad for shard in shards], "a shard itself" if moved else ""
    return Clipped(after, returned, wire.touched, left=left, replaced=places != [place_of(x) for x in after])


def place_of(gradient: Tensor | None) -> int | None:
    return None if gradient is None else gradient.data_ptr()


def is_number(value: float | Tensor) -> bool:
    return not isinstance(value, bool) and (not isinstance(value, Tensor) or value.numel() == 1)


# ---- what is judged --------------------------------------------------------------------------------------


def few_bytes(case: Case, most: int) -> None:
    """One number is known to all: no rank sends it to more than all the others."""
    text = f"{case}: a rank sent {most:,} bytes"
    if most > NUMBER * (case.ranks - 1):
        if most > 8 * NUMBER * len(case.sizes):
            question = "What must the other ranks know about your gradients, to know the norm of all?"
            raise Wrong(text, question, "the gradients travel")
        raise Wrong(text, "What can you add up before you ask the other ranks?", "more than one number travels")
    if not most:
        raise Wrong(text, "How else did the norms get there?", "less than the least possible")


def judge(case: Case, outcomes: list[Clipped]) -> None:
    for rank, outcome in enumerate(outcomes):
        if outcome.left:
            raise Wrong(
                f"{case}: on rank {rank} {outcome.left} has changed", "What is clipped?", "the parameters have changed"
            )
    factor = min(1.0, case.max_norm / (case.norm or 1.0))
    pairs = [list(zip(case.gradients(rank), o.after, strict=True)) for rank, o in enumerate(outcomes)]
    for rank, of_rank in enumerate(pairs):
        for i, (before, found) in enumerate(of_rank):
            where = f"{case}: on rank {rank}, the gradient of shard {i}"
            if (before is None) != (found is None):
                had, has = ("None", "a tensor") if before is None else ("a tensor", "None")
                question = "What does the optimizer do with a gradient of zeros, and what with None?"
                raise Wrong(f"{where} was {had}, and is {has} now", question, "None is not None any more")
            if before is not None and not near(found, before, factor, case.tolerance):
                due = before.double() * factor
                at = int((~isclose(found, due, case.tolerance)).nonzero()[0])
                mistake, more, question = misscaled(case, pairs, factor)
                raise Wrong(f"{where} at element {at} is {instead(found[at], due[at])}{more}", question, mistake)
    for rank, outcome in enumerate(outcomes):
        if outcome.replaced:
            text = f"{case}: on rank {rank}, a gradient is right, but a different tensor than before"
            raise Wrong(text, "Who else may hold the tensor that was in .grad?", "not in place")
        right_norm(case, rank, outcome.returned)


def near(found: Tensor, before: Tensor, factor: float, tolerance: float) -> bool:
    return close(found, before.double() * factor, tolerance)


def misscaled(case: Case, pairs: list[list[tuple[Tensor | None, Tensor | None]]], due: float) -> tuple[str, str, str]:
    """(name, a sentence, a question): which factor would explain all gradients of all ranks."""
    present = [(r, i, b, f) for r, row in enumerate(pairs) for i, (b, f) in enumerate(row) if b is not None]

    def explained(factor: Callable[[int, int], float]) -> bool:
        return all(near(found, before, factor(r, i), max(1e-3, case.tolerance)) for r, i, before, found in present)

    if not all(found.isfinite().all() for _, _, _, found in present):
        return "zero divided by zero", "", "By what do you divide, when all gradients are zero?"
    if explained(lambda r, i: 1.0):
        return "nothing is clipped", "", "Which line writes into .grad?"
    if case.times > 1 and explained(lambda r, i: case.times):
        return "small gradients are made larger", "", "What should happen to gradients shorter than max_norm?"
    if explained(lambda r, i: due**2):
        return "scaled twice", "", "How often does your loop meet each gradient?"
    for name, (norm, question) in wrong_norms(case).items():
        if explained(lambda r, i, norm=norm: min(1.0, case.max_norm / (norm(r, i) or 1.0))):
            return name, "", question
    if all(near(found, before, due, max(2e-2, 5 * case.tolerance)) for _, _, before, found in present):
        return ROUNDED, "", ADDED_IN
    factors = [float((f.double() * b.double()).sum() / b.double().square().sum()) for _, _, b, f in present]
    if all(near(f, b, factor, 1e-3) for factor, (_, _, b, f) in zip(factors, present, strict=True)):
        told = f"\nThe factors are {min(factors):.4g} to {max(factors):.4g}; {due:.4g} is due."
        return "", told, "By what has each gradient been multiplied, and is it the same on all ranks?"
    return "the direction has changed", "", "What does clipping leave as it was: the length, or the direction?"


def wrong_norms(case: Case) -> dict[str, tuple[Callable[[int, int], float], str]]:
    """By name: what may have been taken for the norm on a rank, for a shard of it; and what to ask then."""
    x = case.squares()
    length = "How long is (3, 4), and how long are (3) and (4)?"
    return {
        "the norm of one rank's shards only": (
            lambda r, i: x[r].sum().sqrt().item(),
            "Where are the other elements of the gradient?",
        ),
        "clipped by the norm of each shard": (
            lambda r, i: x[r, i].sqrt().item(),
            "If each part of a vector is scaled by a different factor, where does the vector point?",
        ),
        "clipped by the norm of each layer": (
            lambda r, i: x[:, i].sum().sqrt().item(),
            "The global norm is the length of how many vectors?",
        ),
        "norms are added, and not their squares": (lambda r, i: x.sum(1).sqrt().sum().item(), length),
        "the norms of all shards are added": (lambda r, i: x.sqrt().sum().item(), length),
        "the norms of a rank's shards are added": (lambda r, i: x.sqrt().sum(1).square().sum().sqrt().item(), length),
        "the norms of the layers are added": (lambda r, i: x.sum(0).sqrt().sum().item(), length),
        "the root is missing": (lambda r, i: x.sum().item(), "What is the length of (3, 4)?"),
        "the squares are averaged over the ranks": (
            lambda r, i: (x.sum() / case.ranks).sqrt().item(),
            "Is the square of the whole length the sum of the ranks' squares, or their mean?",
        ),
    }


def right_norm(case: Case, rank: int, returned: Any) -> None:
    if not isinstance(returned, float):
        name = "nothing is returned" if returned == "None" else "not a number"
        raise Wrong(f"{case}: rank {rank} returned {returned}", "What would you like to see in a log?", name)
    if math.isclose(returned, case.norm, rel_tol=min(case.tolerance, OF_NORM), abs_tol=1e-5):
        return
    text = f"{case}: the gradients are right, but rank {rank} returned {returned:.6g}"
    if math.isclose(returned, case.norm * min(1.0, case.times), rel_tol=1e-3):
        raise Wrong(text, "Which of the two norms shows that something has exploded?", "the norm after clipping")
    for name, (norm, question) in wrong_norms(case).items():
        if math.isclose(returned, norm(rank, 0), rel_tol=1e-3):
            raise Wrong(text, question, name)
    text += f"; {case.norm:.6g} is due"
    if math.isclose(returned, case.norm, rel_tol=2e-2):
        raise Wrong(text, ADDED_IN, ROUNDED)
    raise Wrong(text, "What was the norm, before you changed anything?", "a different norm")
