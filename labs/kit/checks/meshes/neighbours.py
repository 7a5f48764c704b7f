"""Where is a rank on a mesh, and which ranks are along each axis with it?

Arithmetic on meshes of one to four axes, of one rank up to some hundred, each asked about all of its ranks: on four
processes, each of which is asked about other ranks than its own.  Nothing is sent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, Wrong, answered, refuse, show
from labs.kit.checks.case import Outcome
from labs.kit.checks.job import job, noted
from labs.kit.checks.left import AFTERMATH, Aftermath
from labs.kit.record import mark

PROCESSES = 4
MOST = 64  # ranks of a mesh that are asked
Place = tuple[list[int], list[list[int]]]  # a coordinate, and the group along each axis


@dataclass(frozen=True)
class Case(shared.Case):
    shape: tuple[int, ...]

    @cached_property
    def mesh(self) -> Tensor:
        return torch.arange(prod(self.shape)).view(self.shape)

    @property
    def asked(self) -> range:
        return range(0, prod(self.shape), -(-prod(self.shape) // MOST))

    def due(self, rank: int) -> Place:
        place = (self.mesh == rank).nonzero()[0].tolist()
        lines = [self.mesh[(*place[:axis], slice(None), *place[axis + 1 :])].tolist() for axis in range(len(place))]
        return place, lines

    def __str__(self) -> str:
        return f"a mesh of {' × '.join(map(str, self.shape))}"


@dataclass
class Found(Outcome):
    """On one process: by rank of the mesh, what was returned; whether a second call said the same."""

    places: dict[int, Any] = None
    again: bool = True


@answered
def neighbours(fn: Callable[..., Any], seed: int) -> str:
    """`fn(shape, rank) -> (coordinate, groups)`: the rank's place on the mesh, and by axis, the ranks along it."""
    cases = drawn(seed)
    results = job(all_meshes, fn, cases, ranks=PROCESSES)
    for step, case in enumerate(cases):
        outcomes = [results[process][step] for process in range(PROCESSES)]
        try:
            judge(case, outcomes)
        except Wrong as wrong:
            raise wrong.also(case.only) from None
        for process in range(PROCESSES):
            if results.recording.sent(process, step):
                raise Wrong(f"{case}: bytes were sent", "What would the others tell you?", "sent, and not worked out")
    return f"{len(cases)} meshes of up to 4 axes, for all of their ranks, and not one message"


def drawn(seed: int) -> list[Case]:
    draw = random.Random(seed)
    two, three, four, wide = "", "right only on two axes", "right only on three axes", "right only on small meshes"
    shapes = [
        *(((a, b), two) for a, b in ((2, 4), (4, 2), (2, 3), (3, 3), (1, 4), (4, 1))),
        *(((n,), "") for n in (8, draw.randrange(2, 8), 1)),
        *((shape, three) for shape in ((2, 2, 2), (3, 1, 2), (2, 3, draw.randrange(2, 5)))),
        *((shape, four) for shape in ((2, 1, 2, 2), (2, 2, 3, 2))),
        ((draw.randrange(5, 9), 16, 8), wide),
    ]
    return [Case(draw.randrange(2**40), PROCESSES, shape=shape, only=only) for shape, only in shapes]


# ---- on a process ----------------------------------------------------------------------------------------


def all_meshes(fn: Callable[..., Any], cases: list[Case]) -> list[Found]:
    return [one_mesh(fn, case) for case in cases]


def process_of(rank: int) -> int:
    """The one that is asked where this rank is: never the one of the same number."""
    return (rank + 1) % PROCESSES


def one_mesh(fn: Callable[..., Any], case: Case) -> Found:
    ranks = [rank for rank in case.asked if process_of(rank) == dist.get_rank()]
    mark("step")
    with Aftermath() as aftermath:
        returned = {rank: noted(case, fn, case.shape, rank) for rank in ranks}
    again = all(plain(noted(case, fn, case.shape, rank)) == plain(returned[rank]) for rank in ranks)
    mark("end")
    found = Found(places={rank: plain(value) for rank, value in returned.items()}, again=again)
    aftermath.tell(found)
    return found


def plain(value: Any) -> Any:
    """Lists of numbers, of what can be read as such; anything else in words."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float) else show(value)


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """All that was found on one mesh."""

    case: Case
    found: dict[int, Any]

    def all(self, fits: Callable[[int, Any], bool]) -> bool:
        return all(fits(rank, place) for rank, place in self.found.items())

    @cached_property
    def wrong(self) -> int | None:
        """The first rank for which it is wrong."""
        return next((rank for rank, place in self.found.items() if place != list(self.case.due(rank))), None)

    @property
    def told(self) -> str:
        return f"for rank {self.wrong} it says {self.found[self.wrong]}"

    def coordinates(self, other: Callable[[int], Iterable[int]]) -> bool:
        return self.wrong is not None and self.all(lambda rank, place: place[0] == list(other(rank)))

    def groups(self, other: Callable[[int], list[list[int]]]) -> bool:
        return self.wrong is not None and self.all(lambda rank, place: place[1] == other(rank))


def judge(case: Case, outcomes: list[Found]) -> None:
    found = dict(sorted(item for outcome in outcomes for item in outcome.places.items()))
    refuse(FORM, Seen(case, found), f"{case}: ")
    refuse(PLACES, Seen(case, found), f"{case}: ", "Write the ranks down as rows of the last axis: where is this one?")
    for process, outcome in enumerate(outcomes):
        refuse(AFTERMATH, outcome, f"{case}: on process {process} ")
        if not outcome.again:
            raise Wrong(
                f"{case}: a second call says something else", "What is kept between them?", "not the same twice"
            )


def form(bad: Callable[[Any], bool]) -> Callable[[Seen], str | None]:
    """Of the first rank whose answer is so."""

    def fits(seen: Seen) -> str | None:
        return next((f"for rank {rank} it says {place}" for rank, place in seen.found.items() if bad(place)), None)

    return fits


def is_pair(place: Any) -> bool:
    return isinstance(place, list) and len(place) == 2 and all(isinstance(part, list) for part in place)


def whole(place: Any) -> bool:
    lists = all(isinstance(group, list) for group in place[1])
    return lists and all(type(n) is int for n in [*place[0], *(n for group in place[1] for n in group)])


FORM = (
    Mistake("nothing is returned", "What does the caller want to know?", form(lambda place: place == "None")),
    Mistake(
        "not a pair", "A coordinate, and a list of groups: in which order?", form(lambda place: not is_pair(place))
    ),
    Mistake(
        "not whole numbers",
        "What does / make of two whole numbers, and what does //?",
        form(lambda place: not whole(place)),
    ),
)


def columns_first(seen: Seen) -> bool:
    """As if the first axis were made of neighbours."""
    turned = torch.arange(prod(seen.case.shape)).view(seen.case.shape[::-1])
    turned = turned.permute(*reversed(range(turned.ndim)))
    return seen.coordinates(lambda rank: (turned == rank).nonzero()[0].tolist())


def other_groups(change: Callable[[Seen, int, int, list[int]], list[int]]) -> Callable[[Seen], str | None]:
    """Whether each due group has become this: (seen, rank, axis, group)."""

    def fits(seen: Seen) -> str | None:
        as_changed = seen.groups(
            lambda rank: [change(seen, rank, axis, group) for axis, group in enumerate(seen.case.due(rank)[1])]
        )
        return seen.told if as_changed else None

    return fits


def beside(seen: Seen, rank: int, axis: int, group: list[int]) -> list[int]:
    """A run of consecutive ranks of the axis's size."""
    size = len(group)
    return list(range(rank // size * size, rank // size * size + size))


def differs(part: int, test: Callable[[list, list], bool]) -> Callable[[Seen], str | None]:
    """Whether, of the first wrong rank, this part is wrong in this way: (found, due)."""

    def fits(seen: Seen) -> str | None:
        if seen.wrong is None:
            return None
        found, due = seen.found[seen.wrong][part], seen.case.due(seen.wrong)[part]
        return seen.told if found != due and test(found, due) else None

    return fits


ROWS = "Rank 1 stands beside rank 0: along which axis?"
PLACES = (
    Mistake(
        "the first axis is made of neighbours",
        ROWS,
        lambda seen: columns_first(seen) and seen.told,
        shows="the right groups, on the wrong axes: what should stay inside a node leaves it",
    ),
    Mistake(
        "the coordinate is reversed",
        "Which axis does the first number of a coordinate belong to?",
        lambda seen: seen.coordinates(lambda rank: seen.case.due(rank)[0][::-1]) and seen.told,
    ),
    Mistake(
        "it counts from 1",
        "What is the coordinate of rank 0?",
        lambda seen: seen.coordinates(lambda rank: [n + 1 for n in seen.case.due(rank)[0]]) and seen.told,
    ),
    Mistake(
        "the place of the process, and not of the rank that was asked for",
        "Whose place does the caller want to know?",
        lambda seen: (
            seen.coordinates(lambda rank: seen.case.due(process_of(rank) % prod(seen.case.shape))[0]) and seen.told
        ),
    ),
    Mistake(
        "not one number for each axis",
        "How many axes does the mesh have, and so how many numbers does a coordinate have?",
        differs(0, lambda found, due: len(found) != len(due)),
    ),
    Mistake("a different coordinate", "", differs(0, lambda found, due: True)),
    Mistake(
        "not one group for each axis",
        "Of how many groups is a rank a member?",
        differs(1, lambda found, due: len(found) != len(due)),
    ),
    Mistake(
        "the axes are exchanged",
        "Along an axis, which number of the coordinate changes?",
        lambda seen: seen.groups(lambda rank: seen.case.due(rank)[1][::-1]) and seen.told,
    ),
    Mistake(
        "always a run of neighbours",
        "How far apart are two ranks that follow each other along an axis?",
        other_groups(beside),
    ),
    Mistake(
        "places instead of ranks",
        "Which rank is at this place of the axis?",
        other_groups(lambda seen, rank, axis, group: list(range(len(group)))),
    ),
    Mistake(
        "the rank itself is missing",
        "Who takes part in a collective?",
        other_groups(lambda seen, rank, axis, group: [n for n in group if n != rank]),
    ),
    Mistake(
        "not in the order of the axis",
        "Who is first along the axis?",
        differs(1, lambda found, due: [sorted(group) for group in found] == due),
    ),
    Mistake(
        "ranks that do not exist",
        "What is the largest rank of this mesh?",
        lambda seen: (
            any(n >= prod(seen.case.shape) for place in seen.found.values() for group in place[1] for n in group)
            and seen.told
        ),
    ),
    Mistake(
        "a different group",
        "Along an axis one number of the coordinate changes. Which ranks are those?",
        differs(1, lambda found, due: True),
    ),
)
