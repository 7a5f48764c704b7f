"""In which order of the axes does a redistribution send least?  The ranks obey the order; what they send is recorded.

Each axis goes from its placement to the wanted one in one step; no dim is cut along two axes, so every order is
right.  What an order sends is compared with the least of all orders, which are tried on paper; SLACK is for padding, of
which some orders have a little more where dims do not divide.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
from labs.kit.checks.acts import Play, checked, on_each_rank, wrong
from labs.kit.checks.answer import Mistake, answered, show
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.ranks import F32, F64, Draw
from labs.kit.checks.scripts import Look, Seen, World
from labs.mesh import Mesh

SLACK = 1.1
BUDGET = (16, 12)  # the shape whose bytes stand in the line of success
NAMES = ("a", "b", "c")
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


@dataclass(frozen=True)
class Change(World):
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
        return torch.randn(self.spec.shape, generator=self.generator(), dtype=F64).to(self.dtype)

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


def worlds(draw: Draw) -> dict[int, list[Change]]:
    pick = draw.random.randrange
    odd = (pick(5, 9), pick(4, 8), pick(5, 9))

    def case(mesh: Sequence[int], source: Sequence[Placement], target: Sequence[Placement], **options: Any) -> Change:
        spec = Spec(tuple(options.pop("shape", (12, 24, 12))), tuple(mesh), tuple(source))
        return draw.world(Change, prod(mesh), spec=spec, target=tuple(target), **options)

    square = [
        case((2, 2), (P, R), (R, S0), shape=BUDGET),
        *(case((2, 2), *pair) for pair in (
            ((R, P), (S0, R)), ((P, P), (S0, R)), ((P, P), (R, S1)), ((S0, R), (R, S1)), ((R, S0), (S1, R)),
            ((P, R), (S0, S1)), ((R, P), (S2, S0)), ((S0, P), (R, R)), ((P, S1), (R, R)), ((P, S0), (S1, R)),
            ((S0, R), (S1, S2)), ((R, S0), (S1, S2)), ((S0, P), (S0, R)), ((S0, S1), (S0, S1)), ((S0, S1), (R, S2)),
            ((S0, S1), (S2, R)), ((S0, P), (S1, S2)), ((P, S0), (S2, S1)),
        )),
        case((2, 2), (P, R), (R, S0), shape=odd),
        case((2, 2), (S0, R), (R, S1), shape=odd, dtype=F32),
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


def ordered_and_obeyed(world: Change, fn: Callable[..., Any]) -> Iterator[Look | None]:
    mesh = mesh_of(world.spec.mesh)
    coordinate = mesh.get_coordinate()
    local, orders = world.local(coordinate), [None] * world.n
    yield None
    order, again = (written(fn(world.spec, world.target)) for _ in range(2))
    dist.all_gather_object(orders, [order, again])
    alike = all(other == order for pair in orders for other in pair)
    for step, line in world.walk(order, coordinate) if alike and valid(world, order) else ():
        local = step.move.move(local, replace(line, group=mesh.get_group(step.axis)), step.source, step.target)
    yield Look({"": local}, {"order": order, "alike": alike})


@cache
def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return Mesh(shape, NAMES[: len(shape)])


def written(order: Any) -> Any:
    if not isinstance(order, list | tuple | Tensor | range):
        return show(order)
    return [int(x) if is_whole(x) else show(x) for x in order]


def is_whole(x: Any) -> bool:
    return type(x) is int or (isinstance(x, Tensor) and not x.is_floating_point())


def valid(world: Change, order: Any) -> bool:
    axes = range(len(world.spec.mesh))
    return (
        isinstance(order, list)
        and all(axis in axes for axis in order)
        and len(set(order)) == len(order)
        and set(world.changed) <= set(order)
    )


@dataclass(frozen=True)
class Order:
    """sent: elements, by all ranks; alike: on all of them."""

    world: Change
    order: Any
    alike: bool
    sent: int

    @property
    def too_much(self) -> bool:
        return self.sent > SLACK * self.world.sent(self.world.best)

    @property
    def told(self) -> str:
        best = self.world.best
        return (
            f"in the order {self.order} the ranks sent {self.sent:,} elements; in the order {list(best)} it is "
            f"{self.world.sent(best):,}"
        )

    def pays(self, pattern: str) -> str:
        """Too much, and its steps are like this: `SR RS` where a shard is gathered before what is whole is cut."""
        placements, axes = self.world.spec.placements, [axis for axis in self.order if axis in self.world.changed]
        steps = " ".join(type(placements[a]).__name__[0] + type(self.world.target[a]).__name__[0] for a in axes)
        return self.told if self.too_much and re.search(pattern, steps) else ""


def elements_sent(seen: Seen, rank: int) -> int:
    """Of the tensor: that the ranks tell each other their orders is not counted."""
    tensors = [event.sent for event in seen.of(rank) if event.dtype == seen.world.dtype_name]
    return sum(tensors) // seen.world.dtype.itemsize


def orders(seen: Seen) -> Iterator[tuple[str, Order]]:
    facts, sent = seen.done[0].facts, sum(elements_sent(seen, rank) for rank in seen.world.members)
    yield "", Order(seen.world, facts["order"], facts["alike"], sent)


def due(world: Change) -> list[dict[str, Tensor]]:
    """The blocks."""
    places = product(*map(range, world.spec.mesh))
    blocks = [world.whole()[world.spec.but(world.target).block(place).slices] for place in places]
    return [{"": block} for block in blocks]


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
            lambda seen: not valid(seen.world, seen.order) and f"it returned {seen.order}"),
)
LARGER = "How large is the block that travels in each of the two steps, in either order?"
COST = (
    Mistake("gathered first", "Which step makes the block larger, and who has to send the larger one?",
            lambda seen: seen.pays("SR ."),
            shows="right, but N times the bytes: gathered whole, then reduced or cut"),
    Mistake("cut too late", "Which step costs nothing, and makes all that comes after it smaller?",
            lambda seen: seen.pays(".. RS"),
            shows="right, but N times the bytes: the whole travels, and then each rank throws most of it away"),
    Mistake("reduce-scattered too late", LARGER, lambda seen: seen.pays(".. PS")),
    Mistake("another order sends less", LARGER, lambda seen: seen.too_much and seen.told),
)
PLAY = Play(
    worlds,
    ordered_and_obeyed,
    tables=(
        (orders, (*FORM, *COST)),
        (on_each_rank, AFTERMATH),
        (wrong(due, {F64: 1e-5, F32: 1e-5}), (Mistake("", "What changed the spec?", lambda one: True),)),
    ),
    question=LARGER,
)
# fmt: on


@answered
def order_of_axes(fn: Callable[..., Any], seed: int) -> str:
    """`fn(spec, target) -> axes`: the order, from spec.placements to target, in which least is sent."""
    first = checked(PLAY, (fn,), seed).seen[0]
    world, whole = first.world, prod(BUDGET)
    return (
        f"from (Partial(), Replicate()) to (Replicate(), Shard(0)) a rank sends "
        f"{elements_sent(first, 0) / whole:.2f} × the tensor; in the other order it is "
        f"{world.sent(world.best[::-1]) / world.n / whole:.2f} ×"
    )
