"""clip: all gradients of all ranks are scaled by one factor, from the norm of all of them together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.by_script import Play, as_a_whole, checked, on_each_rank, wrong
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.exercises.engine.value import One, as_if, as_if_everywhere

NUMBER = 8  # bytes
TOLERANCE = {F64: 1e-5, F32: 1e-5, BF16: 1e-2}  # relative; room for the 1e-6 that torch adds to the norm
OF_NORM = 1e-5  # all dtypes of gradients: a norm that was added up in bfloat16 is 1e-3 off, or less by luck


@dataclass(frozen=True)
class Gradients(World):
    """A world whose ranks have gradients of some shards.

    times: max_norm, as a multiple of the norm of all gradients.
    sizes, scales: the elements of each shard, and the standard deviation of its gradient on rank 0.
    larger: the growth of that standard deviation from rank to rank.
    missing: the number of a shard without a gradient.
    bare: the ranks without any gradient.
    """

    times: float = 1
    sizes: tuple[int, ...] = ()
    scales: tuple[float, ...] = (1, 3, 5)
    larger: float = 1
    missing: int | None = None
    bare: tuple[int, ...] = ()

    def of(self, rank: int) -> dict[str, Tensor | None]:
        generator, found = self.generator(rank), {}
        for i, (size, scale) in enumerate(zip(self.sizes, self.scales, strict=True)):
            gradient = torch.randn(size, generator=generator, dtype=F64) * (scale + self.larger * rank)
            there = i != self.missing and rank not in self.bare
            found[f"the gradient of shard {i}"] = gradient.to(self.dtype) if there else None
        return found

    @cached_property
    def squares(self) -> Tensor:
        """The sums of squares: [ranks, shards]."""
        by_rank = [self.of(rank).values() for rank in self.members]
        sums = [[0.0 if x is None else float(x.double().square().sum()) for x in row] for row in by_rank]
        return torch.tensor(sums, dtype=F64)

    @property
    def norm(self) -> float:
        return float(self.squares.sum().sqrt())

    @property
    def max_norm(self) -> float:
        return self.times * (self.norm or 1.0)

    @property
    def factor(self) -> float:
        return min(1.0, self.times)

    def by(self, norms: Tensor) -> Tensor:
        """Return the factors that scale the gradients if each rank takes its number in `norms` for the global norm."""
        return (self.max_norm / norms.where(norms > 0, 1)).clamp(max=1)

    def __str__(self) -> str:
        return f"{self.who}, {self.dtype_name}, gradients of norm {self.norm:.6g} and max_norm {self.max_norm:.6g}"


def worlds(draw: Draw) -> dict[int, list[Gradients]]:
    def case(ranks: int, times: float, **options: Any) -> Gradients:
        sizes = tuple(draw.random.randrange(40, 90) for _ in range(3))
        return draw.world(Gradients, ranks, times=times, **{"sizes": sizes} | options)

    # The first shard is large, and a sum in bfloat16 would lose the hundred small ones beside it.
    crowded = {"dtype": BF16, "sizes": (1000,) + (8,) * 100, "scales": (1,) + (0.35,) * 100, "larger": 0}
    return {
        3: [case(3, 0.03), case(3, 2.5)],
        2: [case(2, 0.9, missing=1), case(2, 0.1, dtype=F32), case(2, 0.5, scales=(0, 0, 0), larger=0)],
        4: [
            case(4, 1.2),
            case(4, 0.6, missing=0),
            case(4, 0.5, dtype=F32),
            case(4, 0.8, bare=(draw.random.randrange(4),)),
            case(4, 0.7, bare=(0, 1, 2, 3)),
            case(4, 0.4, **crowded),
        ],
    }


def script(world: Gradients, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play one call of the learner's clip: yield before it, and then a look at the gradients and the norm."""
    given, max_norm = world.of(dist.get_rank()), world.max_norm
    shards = [nn.Parameter(torch.ones(size, dtype=world.dtype)) for size in world.sizes]
    for shard, gradient in zip(shards, given.values(), strict=True):
        shard.grad = gradient
    yield None
    norm = fn(shards, max_norm)
    if type(norm) in (float, int) or (isinstance(norm, Tensor) and norm.numel() == 1):
        norm = torch.tensor(float(norm), dtype=F64)
    after = {name: shard.grad for name, shard in zip(given, shards, strict=True)}
    facts = {"changed": any(bool((shard != 1).any()) for shard in shards), "replaced": places(after) != places(given)}
    yield Look(after | {"the norm": norm}, facts)


def places(gradients: dict[str, Tensor | None]) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in gradients.values()]


def scaled(world: Gradients, factors: float | Tensor) -> list[dict[str, Tensor | None]]:
    """Return the gradients multiplied by factors: [ranks, shards], or one number for all gradients."""
    each = torch.as_tensor(factors, dtype=F64).expand_as(world.squares)
    return [
        {name: None if x is None else (x.double() * f).to(x.dtype) for (name, x), f in zip(of.items(), fs, strict=True)}
        for of, fs in zip(map(world.of, world.members), each, strict=True)
    ]


def expected(world: Gradients) -> list[dict[str, Tensor | None]]:
    return scaled(world, world.factor)


def as_if_by(factors: Callable[[Gradients], float | Tensor], tolerance: float = 1e-3) -> Callable[[One], bool]:
    return as_if_everywhere(lambda world: scaled(world, factors(world)), tolerance)


def norms(world: Gradients) -> list[dict[str, Tensor]]:
    return [{"the norm": torch.tensor(world.norm, dtype=F64)}] * world.n


def by_some_factor_each(one: One) -> str | bool:
    """Return a sentence if each gradient, on all ranks, has been multiplied by some factor of its own; else False."""
    squares, factors = one.world.squares, torch.zeros_like(one.world.squares)
    for rank, i in squares.nonzero().tolist():
        before, found = ([*each.values()][i].double() for each in (one.world.of(rank), one.seen.done[rank].values))
        factors[rank, i] = (found * before).sum() / squares[rank, i]
    some = factors[squares > 0]
    sentence = f"The factors are {some.min():.4g} to {some.max():.4g}; {one.world.factor:.4g} is due."
    return as_if_by(lambda world: factors)(one) and sentence


def most(seen: StepOutcomes) -> int:
    """Return the largest number of bytes that a rank sent in the step."""
    return max(seen.sent.values())


# fmt: off
LENGTH = "How long is (3, 4), and how long are (3) and (4)?"
# Wrong norms: {name: (question, the norm from the squares [ranks, shards])}.
NORMS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "the norm of one rank's shards only":
        ("Where are the other elements of the gradient?", lambda x: x.sum(1, keepdim=True).sqrt()),
    "norms are added, and not their squares": (LENGTH, lambda x: x.sum(1).sqrt().sum()),
    "the root is missing": ("What is the length of (3, 4)?", lambda x: x.sum()),
    "the squares are averaged over the ranks":
        ("Is the square of the whole length the sum of the ranks' squares, or their mean?",
         lambda x: (x.sum() / len(x)).sqrt()),
}
ROUNDED = Mistake("rounded on the way", "In which dtype are the squares added up, and the norm handed over?",
                  lambda one: as_if_by(lambda world: world.factor, max(2e-2, 5 * one.tolerance))(one))
GRADIENT = (
    Mistake("None is not None any more", "What does the optimizer do with a gradient of zeros, and what with None?",
            lambda one: (one.received is None) != (one.expected is None)),
    Mistake("zero divided by zero", "By what do you divide, when all gradients are zero?",
            lambda one: not one.received.isfinite().all()),
    Mistake("nothing is clipped", "Which line writes into .grad?", as_if_by(lambda world: 1)),
    Mistake("small gradients are made larger", "What should happen to gradients shorter than max_norm?",
            as_if_by(lambda world: max(1, world.times))),
    *(Mistake(name, question, as_if_by(lambda world, of=of: world.by(of(world.squares))))
      for name, (question, of) in NORMS.items()),
    ROUNDED,
    Mistake("", "By what has each gradient been multiplied, and is it the same on all ranks?", by_some_factor_each),
    Mistake("the direction has changed", "What does clipping leave as it was: the length, or the direction?",
            lambda one: True),
)
LOG = "What would you like to see in a log?"
NORM = (
    Mistake("nothing is returned", LOG, lambda one: one.received is None),
    Mistake("not a number", LOG, lambda one: not isinstance(one.received, Tensor)),
    Mistake("the norm after clipping", "Which of the two norms shows that something has exploded?",
            as_if(lambda world: [x["the norm"] * min(1, world.times) for x in norms(world)])),
    *(Mistake(name, question, as_if(lambda world, of=of: list(of(world.squares).expand_as(world.squares)[:, 0])))
      for name, (question, of) in NORMS.items()),
    replace(ROUNDED, matches=lambda one: one.near(one.received, one.expected, 2e-2)),
    Mistake("a different norm", "What was the norm, before you changed anything?", lambda one: True),
)
# No rank needs to send more than one number to each other rank.
SENT = (
    Mistake("the gradients travel", "What must the other ranks know about your gradients, to know the norm of all?",
            lambda seen: most(seen) > 8 * NUMBER * len(seen.world.sizes) and f"a rank sent {most(seen):,} bytes"),
    Mistake("more than one number travels", "What can you add up before you ask the other ranks?",
            lambda seen: most(seen) > NUMBER * (seen.world.n - 1) and f"a rank sent {most(seen):,} bytes"),
    Mistake("less than the least possible", "How else did the norms get there?",
            lambda seen: not most(seen) and "nobody sent anything"),
)
PLAY = Play(
    worlds,
    script,
    tables=(
        (on_each_rank, (Mistake("the parameters have changed", "What is clipped?",
                                lambda done: done.facts["changed"] and "a shard itself has changed"),)),
        (wrong(expected, TOLERANCE), GRADIENT),
        (on_each_rank, (Mistake("not in place", "Who else may hold the tensor that was in .grad?",
                                lambda done: done.facts["replaced"] and "a gradient is right, but another tensor"),)),
        (wrong(norms, {F64: OF_NORM}, summands=lambda *_: [torch.ones(())]), NORM),  # the norm 0 has a tolerance, too
        (as_a_whole, SENT),
    ),
    question="By what has each gradient been multiplied, and is it the same on all ranks?",
)
# fmt: on


@answered
def clip(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(shards, max_norm) -> norm`: it scales all gradients, in place, to a global norm of at most max_norm.

    shards: this rank's shards, a list of nn.Parameters; a `.grad` may be None.
    norm: the global norm before scaling, the same on every rank.
    """
    last = checked(PLAY, (fn,), seed).seen[-1]
    return f"you sent {most(last)} bytes per rank at most, whatever the number of parameters; one number is enough"
