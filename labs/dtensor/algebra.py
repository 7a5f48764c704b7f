"""The placements of an operation's result, given those of its inputs: a table of letters.

Give each dim of an operation's inputs and output a letter, and the same dim the same letter.  A dim that must stay
whole, or is repeated by broadcasting, is a dot.  A matrix product is "ik,kj->ij".  Along one axis of a mesh, a matrix
product can be computed

    on whole inputs                       Replicate(), Replicate() → Replicate()
    with a letter cut wherever it occurs  i:  Shard(0),    Replicate() → Shard(0)
                                          j:  Replicate(), Shard(1)    → Shard(1)
    and if the output lacks the letter,   k:  Shard(1),    Shard(0)    → Partial()
    every rank has a summand
    on summands, where that is linear         Partial(),   Replicate() → Partial()
                                              Replicate(), Partial()   → Partial()

There are no other ways to compute an operation on blocks (`ways` lists them).  With several outputs, as in "ab->a,b",
each output follows its own letters: if a is cut, the first is Shard(0), and the second, which lacks a, is Partial().
An operation takes the way for which the redistribution of its inputs sends the fewest elements (`choose`).  GSPMD does
the same for a whole program (Xu et al. 2021, arXiv 2105.04663, section 3).

A rule says in which inputs the operation is linear: in "each" input while the others are whole, as a product is; in all
inputs "together", as a sum is; or only in the "first" input.  If the rule says "shape", the result depends on the
input's shape alone.  The table of rules is in labs.dtensor.rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from labs.dtensor.placement import Block, Partial, Placement, Replicate, Shard, Spec
from labs.dtensor.redistribute import MOVES, plan, sent
from labs.mesh import Mesh


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    letters: "ik,kj->ij", or a function that returns such a string; its arguments are the output's shape and the
        operation's arguments, with a Spec in place of each tensor.  A capital letter marks a dim that may stay cut, but
        that no input is cut along for this operation.
    linear: the inputs in which the operation is linear: "each", "together", "first", "shape", or "" for none
    local: function of (Doing, arguments) that each rank calls with its blocks, if that is not the operation itself
    tensors: number of input tensors with which the operation is linear in all of them together, or None for any number;
        a sum of a tensor and a number is not linear
    """

    letters: str | Callable[..., str]
    linear: str = ""
    local: Callable[..., Tensor] | None = None
    tensors: int | None = 1


@dataclass(frozen=True)
class Way:
    """A way to compute an operation along one axis: the placements of its inputs, and those of its outputs.

    as_is: whether only inputs that have these placements already can take this way
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    as_is: bool = False

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.inputs))} → {', '.join(map(repr, self.outputs))}"


@dataclass(frozen=True)
class Doing:
    """An operation that is about to be carried out on blocks."""

    op: Callable[..., Tensor]
    inputs: list[Spec]
    outputs: list[Spec]
    mesh: Mesh

    @property
    def block(self) -> Block:
        """Return this rank's block of the operation's (first) result."""
        return self.outputs[0].block(self.mesh.get_coordinate())


def ways(letters: str, linear: str = "") -> list[Way]:
    """Return all ways to compute an operation along one axis, the way on whole inputs first."""
    left, right = letters.split("->")
    inputs, outputs = left.split(","), right.split(",")
    whole, summed = (Replicate(),) * len(inputs), (Partial(),) * len(outputs)
    cuts = [
        Way(
            tuple(where(letter, dims) or Replicate() for dims in inputs),
            tuple(where(letter, dims) or Partial() for dims in outputs),
            as_is=letter.isupper(),
        )
        for letter in dict.fromkeys(left)
        if letter.isalpha()
    ]
    summands = {
        "": [],
        "each": [(*whole[:i], Partial(), *whole[i + 1 :]) for i in range(len(inputs))],
        "first": [(Partial(), *whole[1:])],
        "together": [(Partial(),) * len(inputs)],
        "shape": [],
    }[linear]
    numberless = [Way((Partial(),), (Replicate(),))] if linear == "shape" else []
    return [Way(whole, (Replicate(),) * len(outputs)), *cuts, *(Way(some, summed) for some in summands), *numberless]


def where(letter: str, dims: str) -> Shard | None:
    return Shard(dims.index(letter)) if letter in dims else None


def choose(among: Sequence[Way], inputs: Sequence[Spec], fixed: bool) -> list[Way] | None:
    """Choose for each mesh axis the way to compute an operation that sends the fewest elements, the first of several.

    fixed: whether the operation writes to its first input, whose placement then must not change

    Returns None if an axis has no possible way.
    """
    chosen = []
    for axis in range(len(inputs[0].mesh)):
        now = tuple(spec.placements[axis] for spec in inputs)
        open_ = [way for way in among if way.inputs == now or (not way.as_is and all(map(reachable, now, way.inputs)))]
        if fixed:
            open_ = [way for way in open_ if way.inputs[0] == way.outputs[0] == now[0]]
        if not open_:
            return None
        chosen.append(min(open_, key=lambda way: cost(way, inputs, axis)))
    return chosen


def reachable(source: Placement, target: Placement) -> bool:
    return source == target or (type(source), type(target)) in MOVES


def cost(way: Way, inputs: Sequence[Spec], axis: int) -> tuple[int, int, int]:
    """Return a way's cost along an axis: elements that the first rank sends, collectives, redistributed inputs."""
    elements = messages = changed = 0
    for spec, placement in zip(inputs, way.inputs, strict=True):
        target = (*spec.placements[:axis], placement, *spec.placements[axis + 1 :])
        elements += sent(spec, target, (0,) * len(spec.mesh))
        messages += sum(step.move.collective is not None for step in plan(spec, target))
        changed += target != spec.placements
    return elements, messages, changed
