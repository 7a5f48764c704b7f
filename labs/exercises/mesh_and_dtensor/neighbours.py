"""neighbours: where is a rank on a mesh, and which ranks share each axis with it?

The function is tried on meshes of one to four axes and of one rank up to some thousand, for many ranks of each.  It
runs on a process whose own rank tells nothing about the answer.
"""

import random
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, WrongSheet, on_paper

MOST = 64  # ranks of a mesh that the function is called for
Shape = tuple[int, ...]
Place = tuple[list[int], list[list[int]]]  # a coordinate, and the group along each axis


def place(mesh: Tensor, rank: int) -> Place:
    """Return the coordinate of a rank, and the group of ranks along each axis."""
    at = (mesh == rank).nonzero()[0].tolist()
    return at, [mesh[(*at[:axis], slice(None), *at[axis + 1 :])].tolist() for axis in range(len(at))]


def right(shape: Shape, rank: int) -> Place:
    return place(torch.arange(prod(shape)).view(shape), rank)


def columns_first(shape: Shape, rank: int) -> Place:
    """Return the place on a mesh whose first axis has consecutive ranks."""
    turned = torch.arange(prod(shape)).view(shape[::-1])
    return place(turned.permute(*reversed(range(turned.ndim))), rank)


def sheets(seed: int) -> list[Sheet]:
    draw = random.Random(seed)
    three, four, wide = "right only on two axes", "right only on three axes", "right only on small meshes"
    shapes: list[tuple[Shape, str]] = [
        *(((a, b), "") for a, b in ((2, 4), (4, 2), (2, 3), (3, 3), (1, 4), (4, 1))),
        *(((n,), "") for n in (8, draw.randrange(2, 8), 1)),
        *((shape, three) for shape in ((2, 2, 2), (3, 1, 2), (2, 3, draw.randrange(2, 5)))),
        *((shape, four) for shape in ((2, 1, 2, 2), (2, 2, 3, 2))),
        ((draw.randrange(5, 9), 16, 8), wide),
    ]
    return [
        Sheet((shape, rank), right(shape, rank), f"a mesh of {' × '.join(map(str, shape))}, rank {rank}", only=only)
        for shape, only in shapes
        for rank in range(0, prod(shape), -(-prod(shape) // MOST))
    ]


def form(bad: Callable[[Any], bool]) -> Callable[[WrongSheet], str | None]:
    return lambda seen: seen.description if bad(seen.received) else None


def is_pair(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(part, list) for part in found)


def whole(found: Any) -> bool:
    lists = all(isinstance(group, list) for group in found[1])
    return lists and all(type(n) is int for n in [*found[0], *(n for group in found[1] for n in group)])


def part_as_if(part: int, other: Callable[[Shape, int], Any]) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether this part of the answer is `other(shape, rank)` on all meshes with as many axes."""

    def matches(seen: WrongSheet) -> str | None:
        axes = len(seen.sheet.arguments[0])
        pairs = [(sheet, found) for sheet, found in seen.written if len(sheet.arguments[0]) == axes]
        return seen.description if all(found[part] == list(other(*sheet.arguments)) for sheet, found in pairs) else None

    return matches


def groups_as_if(change: Callable[[int, list[int]], list[int]]) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether each group in the answer is `change(rank, expected group)`."""
    return part_as_if(1, lambda shape, rank: [change(rank, group) for group in right(shape, rank)[1]])


def differs(part: int, test: Callable[[list, list], bool]) -> Callable[[WrongSheet], str | None]:
    """Return a row's test: whether this part of the answer is wrong and passes `test(received, expected)`."""

    def matches(seen: WrongSheet) -> str | None:
        found, expected = seen.received[part], list(seen.sheet.expected[part])
        return seen.description if found != expected and test(found, expected) else None

    return matches


def beside(rank: int, group: list[int]) -> list[int]:
    """Return the run of consecutive ranks around this rank, as long as the axis."""
    first = rank // len(group) * len(group)
    return list(range(first, first + len(group)))


# fmt: off
MISTAKES = (
    Mistake("nothing is returned", "What does the caller want to know?", form(lambda found: found is None)),
    Mistake("not a pair", "A coordinate, and a list of groups: in which order?",
            form(lambda found: not is_pair(found))),
    Mistake("not whole numbers", "What does / make of two whole numbers, and what does //?",
            form(lambda found: not whole(found))),
    Mistake("the first axis is made of neighbours", "Rank 1 stands beside rank 0: along which axis?",
            part_as_if(0, lambda shape, rank: columns_first(shape, rank)[0]),
            symptom="the right groups, on the wrong axes: what should stay inside a node leaves it"),
    Mistake("the place of the process, and not of the rank that was asked for",
            "Whose place does the caller want to know?", part_as_if(0, lambda shape, rank: [0] * len(shape))),
    Mistake("not one number for each axis",
            "How many axes does the mesh have, and so how many numbers does a coordinate have?",
            differs(0, lambda found, expected: len(found) != len(expected))),
    Mistake("a different coordinate", "", differs(0, lambda found, expected: True)),
    Mistake("the axes are exchanged", "Along an axis, which number of the coordinate changes?",
            part_as_if(1, lambda shape, rank: right(shape, rank)[1][::-1])),
    Mistake("always a run of neighbours", "How far apart are two ranks that follow each other along an axis?",
            groups_as_if(beside)),
    Mistake("the rank itself is missing", "Who takes part in a collective?",
            groups_as_if(lambda rank, group: [n for n in group if n != rank])),
    Mistake("not in the order of the axis", "Who is first along the axis?",
            differs(1, lambda found, expected: [sorted(group) for group in found] == expected)),
    Mistake("a different group", "Along an axis one number of the coordinate changes. Which ranks are those?",
            differs(1, lambda found, expected: True)),
)
# fmt: on


@answered
def neighbours(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(shape, rank) -> (coordinate, groups)`: the rank's place on the mesh, and the ranks along each axis."""
    asked = sheets(seed)
    on_paper(fn, asked, MISTAKES, "Write the ranks down as rows of the last axis: where is this one?")
    meshes = len({sheet.arguments[0] for sheet in asked})
    return f"{meshes} meshes of up to 4 axes, for all of their ranks, and not one message"
