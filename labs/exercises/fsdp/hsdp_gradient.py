"""hsdp_gradient: this rank's shard of the mean gradient over all ranks of HSDP, with the fewest bytes sent."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sends, Sent, in_another_dtype
from labs.exercises.engine.on_axes import OnMesh
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import StepOutcomes
from labs.exercises.engine.value import One, all_are, as_if
from labs.mesh import Mesh


@dataclass(frozen=True)
class Grid(OnMesh):
    """A world of HSDP: a mesh of replicas × shards.

    shape: (replicas, shards).
    size: elements of the gradient, a multiple of the shards.
    """

    axes: tuple[str, ...] = ("replicate", "shard")

    whole: ClassVar[str] = "the gradient"

    @property
    def args(self) -> dict[str, Mesh]:
        return {"mesh": self.mesh}

    @cached_property
    def gradients(self) -> Tensor:
        """The gradients: [replicas, shards, pieces, elements of a piece]."""
        return self.brought.view(*self.shape, self.shape[1], -1)

    @property
    def mean(self) -> Tensor:
        """The mean gradient: [pieces, elements of a piece]."""
        return self.gradients.mean((0, 1))

    def each(self, numbers: Tensor) -> list[Tensor]:
        """Return the piece of each rank, from [replicas, shards, elements of a piece]."""
        return list(numbers.to(self.dtype).expand(*self.shape, -1).flatten(0, 1))

    def within_replicas(self) -> Iterator[list[Tensor]]:
        """Yield the pieces of all ranks if gradients are averaged over the shards alone, and if they are summed."""
        if self.shape[0] > 1:
            yield self.each(self.gradients.mean(1))
            yield self.each(self.gradients.sum(1))

    @property
    def crossing(self) -> float:
        """The least bytes that a rank must send to other replicas."""
        return 2 * (1 - 1 / self.shape[0]) * self.nbytes / self.shape[1]

    @property
    def sent(self) -> float:
        """The least bytes that a rank must send in all."""
        return (1 - 1 / self.shape[1]) * self.nbytes + self.crossing

    def __str__(self) -> str:
        return f"{self.shape[0]} × {self.shape[1]} ranks, {self.size[0]} elements of {self.dtype_name}"


def worlds(draw: Draw) -> dict[int, list[Grid]]:
    def grid(*shape: int, by: int = 0, **options: Any) -> list[Grid]:
        size = shape[1] * (by or draw.random.randrange(7, 12))
        return [draw.world(Grid, prod(shape), shape=shape, size=(size,), **options) for _ in range(2)]

    return {
        6: [*grid(2, 3, by=2 * draw.random.randrange(4, 7)), *grid(3, 2, by=9, dtype=F32)],
        2: [*grid(1, 2), *grid(2, 1)],
        4: [
            *(*grid(2, 2), *grid(2, 2, dtype=BF16), *grid(4, 1), *grid(1, 4, dtype=F32)),
            *(*grid(2, 2, by=1000, dtype=BF16), *grid(2, 2, by=30)),  # the line of success is about the last one
        ],
    }


def cut(one: One, parts: int) -> str | bool:
    """Return a phrase if the gradient was cut into this number of parts, and not one per shard; else False."""
    wrong = isinstance(one.received, Tensor) and parts != one.world.shape[1]
    return wrong and one.received.numel() * parts == one.world.size[0] and f"returned {one.description}"


def times(factors: Callable[[int, int], set[float]]) -> Callable[[One], str | None]:
    """Return a row's test, which describes a piece that is the mean × one of `factors(replicas, shards)`."""
    return lambda one: one.describe_times(lambda found: any(all_are(found, x) for x in factors(*one.world.shape) - {1}))


def unlike(one: One) -> str | bool:
    """Return a phrase if replicas of a gradient's piece differ in their bits; else False."""
    row = one.world.shape[1]
    replicas = [done.values[""] for done in one.seen.done[one.index % row :: row]]
    return any(not torch.equal(one.received, x) for x in replicas) and "differs from other replicas in its last bits"


def crossed(seen: StepOutcomes, rank: int) -> int:
    """Return the bytes that a rank sent to other replicas, by any operation."""
    row = seen.world.shape[1]
    return sum(size for e in seen.of(rank) for to, size in e.to.items() if to // row != rank // row)


def too_much_crossed(sent: Sent) -> str | bool:
    """Return a phrase if some rank sends too many bytes to other replicas; else False.

    The maximum counts, since a ring over all ranks crosses between replicas at a few places only.
    """
    enough, most = sent.world.crossing, max(crossed(sent.seen, rank) for rank in sent.world.members)
    too_much = sent.world.shape[1] > 1 and most > some_more(enough)
    return too_much and f"a rank sent {most:,} bytes to other replicas; {enough:,.0f} are enough"


def some_more(size: float) -> float:
    """Return a number of bytes, with room for padding."""
    return 1.02 * size + 64


# fmt: off
PLACE = "Which piece does the optimizer of this rank step, and who else steps it?"
EXERCISE = Exercise(
    worlds,
    Expected(
        lambda world: world.each(world.mean),
        summands=lambda world, i: list(world.gradients[:, :, i % world.shape[1]].flatten(0, 1) / world.n),
        tolerance={F64: 1e-10, F32: 1e-5, BF16: 3e-2},
    ),
    question="Which gradients went into this piece, and how often?",
    sends=lambda world: Sends(
        least=world.n * (0.9 * world.sent - 64), enough=lambda rank: some_more(world.sent),
    ),
    # Enough for all that is received, a piece, and one more piece; another copy of the gradient would make 2.5.
    memory=Memory(lambda draw: draw.world(Grid, 4, shape=(2, 2), size=(40_000,), dtype=F32), during=2.25, after=0.5),
    mistakes=Mistakes((
        Mistake("never averaged over the replicas",
                "Who steps the same piece with a different gradient, and how long do the copies stay equal?",
                as_if(Grid.within_replicas),
                symptom="the loss goes down on every rank, and the replicas drift apart"),
        Mistake("averaged twice", "Who divides, by how many, and how often?",
                times(lambda r, s: {1 / r, 1 / s, 1 / (r * s)}),
                symptom="as if the learning rate were smaller, by the size of an axis"),
        Mistake("divided by one axis only", "How many gradients were added up, over both axes?",
                times(lambda r, s: {r, s} if min(r, s) > 1 else set()),
                symptom="as if the learning rate were larger, by the size of the other axis"),
    ), form=(
        Mistake("nothing is sharded", PLACE, lambda one: cut(one, 1),
                symptom="right, but each rank holds the whole gradient"),
        Mistake("sharded along the wrong axis", "Over which axis is a parameter cut, and over which is it copied?",
                lambda one: cut(one, one.world.shape[0])),
    ), after=(
        Mistake("not the same bits on every replica",
                "Does every replica add up in the same order? Replicas that differ by a bit drift apart.", unlike),
    ), sent=(
        Mistake("reduced in the wrong dtype", "Who needs the extra digits?", in_another_dtype),
        Mistake("whole gradients cross the replicas",
                "Which axis goes first, so that the other one has less to carry?", too_much_crossed,
                symptom="more bytes between the nodes than DDP with a shard would send"),
        Mistake("too many bytes", "How often does each number travel, and who needs it?", lambda sent: sent.too_much),
    )),
    questions={
        "not a tensor": PLACE,
        "another shape": PLACE,
        "the dtype changed": "In which dtype was the gradient?",
        "rounded on the way": "In which dtype do the gradients travel?",
        "what was given has changed":
            "Which line writes into the memory that you were given, and who may still read it?",
        "a later call writes into what this one returned": "Whose memory is the piece, once you have returned it?",
        "less than the least possible": "How else did the gradients get there?",
        "something is kept from every call": "Which of your variables still refers to what was there a step ago?",
        "full copies are kept": "One copy arrives, and another is added up: what is the third?",
    },
)
# fmt: on


@answered
def hsdp_gradient(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(gradient, mesh) -> piece`: this rank's piece of the mean of all ranks' gradients.

    gradient: [n], which stays as it is; the piece has [n / shards].
    mesh: a labs.mesh.Mesh with the axes "replicate" and "shard"; the size of "shard" divides n.
    """
    last = checked(EXERCISE, (fn,), seed).last
    crossing, sent = max((crossed(last, rank), last.sent[rank]) for rank in last.world.members)
    return (
        f"on 2 × 2 ranks you sent {sent / last.world.nbytes:.2f} × the gradient, of that "
        f"{crossing / last.world.nbytes:.2f} × between replicas; the least possible is 1.00 × and 0.50 ×"
    )
