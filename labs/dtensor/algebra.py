"""What becomes of placements in an operation: a table of letters.

Give each dim of the inputs and the output a letter, the same where it is the same dim; a dim that must stay whole, or
is repeated by broadcasting, is a dot.  A matrix product is "ik,kj->ij".  Along one axis of a mesh, it can be computed

    on whole inputs                       Replicate(), Replicate() → Replicate()
    with a letter cut, wherever it is     i:  Shard(0),    Replicate() → Shard(0)
                                          j:  Replicate(), Shard(1)    → Shard(1)
    and if the output lacks the letter,   k:  Shard(1),    Shard(0)    → Partial()
    every rank has a summand
    on summands, where that is linear         Partial(),   Replicate() → Partial()
                                              Replicate(), Partial()   → Partial()

That is all (`ways`).  With several outputs, as in "ab->a,b", each follows its own letters: if a is cut, the first is
Shard(0), and the second, which lacks a, Partial().  An operation takes the way whose redistribution of inputs sends the
least (`choose`); GSPMD does the same for a whole program (Xu et al. 2021, arXiv 2105.04663, section 3).

What an operation is linear in: in "each" input, the others whole, as products are; in all inputs "together", as sums
are; only in the "first".  "shape": the input's numbers do not matter.  The table of rules is in labs.dtensor.rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from labs.dtensor.placement import Block, Partial, Placement, Replicate, Shard, Spec
from labs.dtensor.redistribute import MOVES, plan, sent
from labs.mesh import Mesh


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    letters: "ik,kj->ij", or a function that gives them: (the output's shape, arguments; for a tensor its Spec).
        A capital: the dim may be cut already, but must not be cut for this.
    local: what each rank does with its blocks, where that is not the operation itself: (Doing, arguments).
    tensors: linear together only if it is given this many (None: any number); a sum with a number is not.
    """

    letters: str | Callable[..., str]
    linear: str = ""
    local: Callable[..., Tensor] | None = None
    tensors: int | None = 1


@dataclass(frozen=True)
class Way:
    """Along one axis: placements that the inputs must have, and those that the outputs then have.

    as_is: only if the inputs are placed like this already.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    as_is: bool = False

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.inputs))} → {', '.join(map(repr, self.outputs))}"


@dataclass(frozen=True)
class Doing:
    """An operation about to be done on blocks."""

    op: Callable[..., Tensor]
    inputs: list[Spec]
    outputs: list[Spec]
    mesh: Mesh

    @property
    def block(self) -> Block:
        """What this rank holds of the (first) result."""
        return self.outputs[0].block(self.mesh.get_coordinate())


def ways(letters: str, linear: str = "") -> list[Way]:
    """All ways to compute an operation along one axis; the one on whole inputs first."""
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
    """For each axis the way that sends the least, the first of equals; `fixed`: the first input is written to.

    None if there is no such way: what is written to must stay where it is.
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
    """Cost of placing inputs like this along one axis: elements that the first rank sends, messages, inputs changed."""
    elements = messages = changed = 0
    for spec, placement in zip(inputs, way.inputs, strict=True):
        target = (*spec.placements[:axis], placement, *spec.placements[axis + 1 :])
        elements += sent(spec, target, (0,) * len(spec.mesh))
        messages += sum(step.move.collective is not None for step in plan(spec, target))
        changed += target != spec.placements
    return elements, messages, changed
