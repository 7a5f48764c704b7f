"""In which order of the axes does a redistribution send least?  The ranks obey the order; what they send is recorded.

Each axis goes from its placement to the wanted one in one step; no dim is cut along two axes, so every order is
right.  What an order sends is compared with the least of all orders, which are tried on paper; SLACK is for padding, of
which some orders have a little more where dims do not divide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import Line, Step
from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, Wrong, answered, refuse, show
from labs.kit.checks.case import Outcome, close
from labs.kit.checks.launching import job, noted
from labs.kit.checks.left import AFTERMATH, Aftermath
from labs.kit.record import mark
from labs.mesh import Mesh

SLACK = 1.1
BUDGET = (16, 12)  # the shape whose bytes stand in the line of success
NAMES = ("a", "b", "c")
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


@dataclass(frozen=True)
class Case(shared.Case):
    spec: Spec
    target: tuple[Placement, ...]

    @property
    def changed(self) -> list[int]:
        pairs = enumerate(zip(self.spec.placements, self.target, strict=True))
        return [axis for axis, (now, then) in pairs if now != then]

    def walk(self, order: Sequence[int], coordinate: Sequence[int]) -> list[tuple[Step, Line]]:
        """The steps in this order, and the line of ranks that the one at this place is in."""
        now, steps = list(self.spec.placements), []
        for axis in (axis for axis in order if axis in self.changed):
            step = Step(axis, now[axis], self.target[axis])
            now[axis] = R
            block = self.spec.but(now).block(coordinate)
            steps.append((step, Line(block.shape, self.spec.mesh[axis], coordinate[axis])))
            now[axis] = step.target
        return steps

    def sent(self, order: Sequence[int]) -> int:
        """Elements that all ranks send."""
        places = product(*map(range, self.spec.mesh))
        walks = (pair for place in places for pair in self.walk(order, place))
        return sum(step.move.sent(line, step.source, step.target) for step, line in walks)

    @property
    def best(self) -> tuple[int, ...]:
        return min(permutations(self.changed), key=self.sent)

    def whole(self) -> Tensor:
        return torch.randn(self.spec.shape, generator=self.generator(), dtype=torch.float64).to(self.dtype)

    def local(self, coordinate: Sequence[int]) -> Tensor:
        """This rank's block; along an axis with Partial(), the summands have the shares 1, 2, ... of 1 + 2 + ..."""
        share = 1.0
        for placement, ranks, place in zip(self.spec.placements, self.spec.mesh, coordinate, strict=True):
            share *= 2 * (place + 1) / (ranks * (ranks + 1)) if placement == P else 1
        return share * self.whole()[self.spec.block(coordinate).slices].clone()

    def __str__(self) -> str:
        mesh = " × ".join(map(str, self.spec.mesh))
        source, target = (", ".join(map(repr, x)) for x in (self.spec.placements, self.target))
        return f"{self.spec.shape} on {mesh}, from ({source}) to ({target})"


@dataclass
class Obeyed(Outcome):
    """The order that was returned; `returned` is the block that came of it, where it could be obeyed."""

    order: Any = None
    alike: bool = True  # on all ranks


@answered
def order_of_axes(fn: Callable[..., Any], seed: int) -> str:
    """`fn(spec, target) -> axes`: the order, from spec.placements to target, in which least is sent."""
    for ranks, cases in drawn(seed).items():
        results = job(obey_all, fn, cases, ranks=ranks)
        for step, case in enumerate(cases):
            sent = [results.recording.sent(rank, step) // case.dtype.itemsize for rank in range(ranks)]
            judge(case, [results[rank][step] for rank in range(ranks)], sum(sent))
            if (ranks, step) == (4, 0):
                each, other = (size / prod(BUDGET) for size in (sent[0], case.sent(case.best[::-1]) / 4))
    return (
        f"from (Partial(), Replicate()) to (Replicate(), Shard(0)) a rank sends {each:.2f} × the tensor; in the other "
        f"order it is {other:.2f} ×"
    )


def drawn(seed: int) -> dict[int, list[Case]]:
    draw = random.Random(seed)
    odd = (draw.randrange(5, 9), draw.randrange(4, 8), draw.randrange(5, 9))

    def case(mesh: Sequence[int], source: Sequence[Placement], target: Sequence[Placement], **options: Any) -> Case:
        spec = Spec(tuple(options.pop("shape", (12, 24, 12))), tuple(mesh), tuple(source))
        ranks = torch.Size(mesh).numel()
        return Case(draw.randrange(2**40), ranks, spec=spec, target=tuple(target), **options)

    square = [
        case((2, 2), (P, R), (R, S0), shape=BUDGET),
        *(case((2, 2), *pair) for pair in (
            ((R, P), (S0, R)), ((P, P), (S0, R)), ((P, P), (R, S1)), ((S0, R), (R, S1)), ((R, S0), (S1, R)),
            ((P, R), (S0, S1)), ((R, P), (S2, S0)), ((S0, P), (R, R)), ((P, S1), (R, R)), ((P, S0), (S1, R)),
            ((S0, R), (S1, S2)), ((R, S0), (S1, S2)), ((S0, P), (S0, R)), ((S0, S1), (S0, S1)), ((S0, S1), (R, S2)),
            ((S0, S1), (S2, R)), ((S0, P), (S1, S2)), ((P, S0), (S2, S1)),
        )),
        case((2, 2), (P, R), (R, S0), shape=odd),
        case((2, 2), (S0, R), (R, S1), shape=odd, dtype=torch.float32),
        case((4,), (P,), (S1,), shape=(5, 3)),
    ]  # fmt: skip
    wide = [
        case((2, 3), (P, R), (S1, S0)), case((2, 3), (S1, P), (R, S0)), case((2, 3), (R, P), (S2, R), shape=odd),
        case((2, 3), (P, P), (R, S0)),
    ]  # fmt: skip
    cube = "right only on two axes"
    three = [
        case((2, 2, 2), (S0, P, R), (R, R, S1), only=cube), case((2, 2, 2), (R, P, S2), (S0, S1, R), only=cube),
        case((2, 2, 2), (S1, R, P), (R, S0, R), only=cube, shape=odd),
    ]  # fmt: skip
    return {4: square, 6: wide, 8: three, 1: [case((1, 1), (P, R), (R, S0))]}


# ---- on a rank -------------------------------------------------------------------------------------------


def obey_all(fn: Callable[..., Any], cases: list[Case]) -> list[Obeyed]:
    found = [ordered(fn, case) for case in cases]
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, [one.order for one in found])
    for number, (case, one) in enumerate(zip(cases, found, strict=True)):
        one.alike &= all(other[number] == one.order for other in orders)
        one.returned = obey(case, one, mesh_of(case.spec.mesh))
    return found


@cache
def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return Mesh(shape, NAMES[: len(shape)])


def ordered(fn: Callable[..., Any], case: Case) -> Obeyed:
    with Aftermath() as aftermath:
        returned = noted(case, fn, case.spec, case.target)
        again = noted(case, fn, case.spec, case.target)
    order, second = ([int(x) if is_whole(x) else show(x) for x in listed(value)] for value in (returned, again))
    found = Obeyed(order=order if is_listed(returned) else show(returned), alike=order == second)
    aftermath.tell(found)
    return found


def obey(case: Case, found: Obeyed, mesh: Mesh) -> Tensor:
    coordinate = mesh.get_coordinate()
    local = case.local(coordinate)
    mark("step")
    for step, line in case.walk(found.order, coordinate) if found.alike and valid(case, found.order) else ():
        line = replace(line, group=mesh.get_group(step.axis))
        local = step.move.move(local, line, step.source, step.target)
    mark("end")
    return local


def is_listed(value: Any) -> bool:
    return isinstance(value, list | tuple | Tensor | range)


def listed(value: Any) -> list[Any]:
    return list(value) if is_listed(value) else []


def is_whole(x: Any) -> bool:
    return type(x) is int or (isinstance(x, Tensor) and not x.is_floating_point())


def valid(case: Case, order: Any) -> bool:
    axes = range(len(case.spec.mesh))
    return (
        isinstance(order, list)
        and all(axis in axes for axis in order)
        and len(set(order)) == len(order)
        and set(case.changed) <= set(order)
    )


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    case: Case
    order: Any
    sent: int = 0  # elements, by all ranks
    alike: bool = True

    @property
    def too_much(self) -> bool:
        return self.sent > SLACK * self.case.sent(self.case.best)

    @property
    def told(self) -> str:
        best = self.case.best
        return (
            f"in the order {self.order} the ranks sent {self.sent:,} elements; in the order {list(best)} it is "
            f"{self.case.sent(best):,}"
        )

    def pays(self, first: Callable[[Placement, Placement], bool], then: Callable[[Placement, Placement], bool]) -> str:
        """Too much, and one step of the first kind stands before one of the second."""
        order = [axis for axis in self.order if axis in self.case.changed]
        kinds = [(self.case.spec.placements[axis], self.case.target[axis]) for axis in order]
        pairs = [(a, b) for number, a in enumerate(kinds) for b in kinds[number + 1 :]]
        return self.told if self.too_much and any(first(*a) and then(*b) for a, b in pairs) else ""


def judge(case: Case, found: list[Obeyed], sent: int) -> None:
    try:
        for rank, one in enumerate(found):
            refuse(FORM, Seen(case, one.order, alike=one.alike), f"{case}: ")
            refuse(AFTERMATH, one, f"{case}: on rank {rank} ")
        refuse(COST, Seen(case, found[0].order, sent), f"{case}: ")
    except Wrong as wrong:
        raise wrong.also(case.only) from None
    for rank, one in enumerate(found):
        due = case.whole()[case.spec.but(case.target).block(place(case, rank)).slices]
        if not close(one.returned, due, 1e-5):
            raise Wrong(f"{case}: on rank {rank} the block is not what it should be", "What changed the spec?")


def place(case: Case, rank: int) -> list[int]:
    return (torch.arange(case.ranks).view(case.spec.mesh) == rank).nonzero()[0].tolist()


def cuts(before: Placement, after: Placement) -> bool:
    return before.is_replicate() and after.is_shard()


def scatters(before: Placement, after: Placement) -> bool:
    return before.is_partial() and after.is_shard()


def gathers(before: Placement, after: Placement) -> bool:
    return before.is_shard() and after.is_replicate()


def anything(before: Placement, after: Placement) -> bool:
    return True


# fmt: off
FORM = (
    Mistake("nothing is returned", "Who will follow the order?", lambda seen: seen.order == "None"),
    Mistake("not a list of axes", "Axes have numbers, from 0. In which order?",
            lambda seen: (isinstance(seen.order, str) or any(isinstance(x, str) for x in seen.order))
            and f"it returned {seen.order}"),
    Mistake("not the same on every rank", "What would happen to a collective to which ranks come along different axes?",
            lambda seen: not seen.alike
            and f"it returned {seen.order}, and something else on another rank or in a second call"),
    Mistake("not every axis once", "How often must each axis change its placement?",
            lambda seen: not valid(seen.case, seen.order) and f"it returned {seen.order}"),
)
# fmt: on
LARGER = "How large is the block that travels in each of the two steps, in either order?"
# fmt: off
COST = (
    Mistake("gathered first", "Which step makes the block larger, and who has to send the larger one?",
            lambda seen: seen.pays(gathers, anything),
            shows="right, but N times the bytes: gathered whole, then reduced or cut"),
    Mistake("cut too late", "Which step costs nothing, and makes all that comes after it smaller?",
            lambda seen: seen.pays(anything, cuts),
            shows="right, but N times the bytes: the whole travels, and then each rank throws most of it away"),
    Mistake("reduce-scattered too late", LARGER, lambda seen: seen.pays(anything, scatters)),
    Mistake("another order sends less", LARGER, lambda seen: seen.too_much and seen.told),
)
# fmt: on
