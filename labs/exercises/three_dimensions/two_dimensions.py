"""two_dimensions: a linear layer that is split by rows along tp and sharded along dp, forward and backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Sends, Sent
from labs.exercises.engine.on_axes import OnMesh, ring
from labs.exercises.engine.on_ranks import F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, same_numbers
from labs.exercises.engine.value import One, as_if

Y, GRADIENT = "y", "the gradient"


@dataclass(frozen=True)
class LinearOnMesh(OnMesh):
    """A world with a linear layer on a mesh of dp × tp.

    size: the sequences of a rank, the rows of a piece, and the outputs.
    """

    axes: tuple[str, ...] = ("dp", "tp")

    def drawn(self, kind: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator(step=kind), dtype=F64).to(self.dtype)

    @cached_property
    def x(self) -> Tensor:
        """Return the inputs of all ranks, [dp, tp, sequences, rows of a part]."""
        return self.drawn(0, *self.shape, self.size[0], self.shape[0] * self.size[1])

    @cached_property
    def pieces(self) -> Tensor:
        """Return the pieces of the weight, [dp, tp, rows of a piece, outputs]."""
        return self.drawn(1, *self.shape, *self.size[1:])

    @cached_property
    def dy(self) -> Tensor:
        """Return the gradients of y, [dp, sequences, outputs]."""
        return self.drawn(2, self.shape[0], self.size[0], self.size[2])

    def brings(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        d, t = self.place(rank)
        return self.x[d, t].clone(), self.pieces[d, t].clone(), self.dy[d].clone()

    def ys(self) -> Tensor:
        """Return each rank's summand of y, [dp, tp, sequences, outputs]."""
        return self.x @ self.pieces.movedim(0, 1).flatten(1, 2)

    def gradients(self) -> Tensor:
        """Return each rank's own gradients of all pieces of its part, [dp, tp, pieces, rows of a piece, outputs]."""
        return (self.x.transpose(-1, -2) @ self.dy[:, None]).unflatten(2, (self.shape[0], -1))

    def each(self, name: str, numbers: Tensor) -> list[dict[str, Tensor]]:
        """Return `{name: value}` for each rank: the y at its place, or its own piece of the gradient there."""
        found = numbers.expand(*self.shape, *numbers.shape[2:])
        return [{name: found[p] if name == Y else found[p][p[0]]} for p in map(self.place, range(prod(self.shape)))]

    @property
    def sent(self) -> float:
        (dp, tp), (sequences, rows, outputs) = self.shape, self.size
        of_y = 2 * ring(sequences * outputs, tp)
        return self.dtype.itemsize * (2 * (dp - 1) * rows * outputs + of_y)

    @property
    def nbytes(self) -> int:
        return self.pieces[0, 0].nbytes


def expected(world: LinearOnMesh) -> list[dict[str, Tensor]]:
    ys, gradients = (
        world.each(Y, world.ys().sum(1, True)),
        world.each(GRADIENT, world.gradients().mean(0, True)),
    )
    return [y | gradient for y, gradient in zip(ys, gradients, strict=True)]


def worlds(draw: Draw) -> dict[int, list[LinearOnMesh]]:
    def layer(*shape: int, **options: Any) -> LinearOnMesh:
        size = draw.random.randrange(3, 6), draw.random.randrange(2, 5), draw.random.randrange(3, 7)
        return draw.world(LinearOnMesh, prod(shape), **{"shape": shape, "size": size} | options)

    return {
        6: [layer(2, 3)],
        4: [layer(2, 2), layer(4, 1), layer(1, 4), layer(2, 2, dtype=F32, size=(40, 60, 50)), layer(2, 2)],
    }


def script(world: LinearOnMesh, fn: Callable[..., Any]) -> Iterator[Look | None]:
    given, before = world.brings(world.index()), world.brings(world.index())
    yield None
    returned = fn(*given, world.mesh)
    y, gradient = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
    changed = any(not same_numbers(now, then) for now, then in zip(given, before, strict=True))
    yield Look({Y: y, GRADIENT: gradient}, {"changed": changed})


def ys(make: Callable[[LinearOnMesh], Tensor]) -> Callable[[One], bool]:
    """Return a function that tells whether the layer's output y equals what the mistake `make` computes."""
    return lambda one: one.name == Y and as_if(lambda w: w.each(Y, make(w)))(one)


def gradients(make: Callable[[LinearOnMesh], Tensor]) -> Callable[[One], bool]:
    """Return a function that tells whether the piece's gradient equals what the mistake `make` computes."""
    return lambda one: one.name == GRADIENT and as_if(lambda w: w.each(GRADIENT, make(w)))(one)


def reduced_whole(sent: Sent) -> str | None:
    twice = sum(event.op == "all_reduce" for event in sent.seen.of(0)) > 1
    return sent.too_much if twice else None


# fmt: off
AXES = "Which axis has the rest of this matrix's rows, and which other sequences?"
EXERCISE = Exercise(
    worlds,
    Expected(expected, tolerance={F64: 1e-10, F32: 1e-4}),
    question=AXES,
    script=script,
    sends=lambda world: Sends(least=world.n * (0.9 * world.sent - 64), enough=lambda rank: 1.02 * world.sent + 64),
    mistakes=Mistakes((
        Mistake("y is only a summand", "Each rank along tp has multiplied a part of x by a part of the rows. And then?",
                ys(lambda w: w.ys())),
        Mistake("y is added up over the data's ranks",
                "Which axis has other sequences: does their y belong to this one?",
                lambda one: any(ys(make)(one) for make in (lambda w: w.ys().sum((0, 1), True),
                                                           lambda w: w.ys().sum(0, True)))),
        Mistake("the gradient is not averaged over the data's ranks", "Whose sequences has it seen?",
                gradients(lambda w: w.gradients()),
                symptom="replicas of a shard that does not exist: pieces that have each seen other data"),
        Mistake("dy is added up along tp",
                "dy is the same on every rank along tp, as y is. What is the sum of copies?",
                lambda one: gradients(lambda w: w.gradients().mean(0, True) * w.shape[1])(one)
                and (not one.done.facts["changed"] or "dy, which it was given, has changed")),
        Mistake("summed instead of averaged", "By what must the sum be divided?",
                gradients(lambda w: w.gradients().sum(0, True))),
    ), form=(
        Mistake("not a pair", "Which two does the docstring name?",
                lambda one: one.name == GRADIENT and one.received is None),
        Mistake("the gradient of more than the piece", "Which rows does this rank's optimizer step?",
                lambda one: one.name == GRADIENT and isinstance(one.received, Tensor)
                and one.received.numel() > one.expected.numel() and f"returned {one.description}"),
    ), sent=(
        Mistake("the whole gradient is reduced", "Which rows of it does this rank need?", reduced_whole,
                symptom="right, but twice the bytes along dp"),
        Mistake("more than this part is gathered", "Which rows does this rank multiply by?", lambda sent: sent.too_much,
                symptom="right, but each rank gathers the whole matrix: what tp has split is put together again"),
    )),
)
# fmt: on


@answered
def two_dimensions(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(x, piece, dy, mesh) -> (y, gradient of the piece)`, which may not change its arguments.

    mesh: a mesh with the axes dp and tp

    Returns the text of the ✓ line, with the bytes sent.
    """
    last = checked(EXERCISE, (fn,), seed).last
    most = max(last.sent.values())
    return f"on 2 × 2 ranks you sent {most / last.world.sent:.2f} × the least possible"
