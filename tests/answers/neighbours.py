"""Answers to neighbours (05): a rank's place on a mesh, and who stands along each axis with it."""

from itertools import product
from math import prod

import numpy as np
import torch
import torch.distributed as dist  # noqa: F401  (exchanged words name it)

from labs.mesh import Mesh
from tests.answers import Exercise

# fmt: off
answers = Exercise("neighbours")
LINE = "15 meshes of up to 4 axes, for all of their ranks, and not one message"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def by_strides(shape, rank):
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = [rank // step % size for step, size in zip(strides, shape, strict=True)]
    axes = zip(place, strides, shape, strict=True)
    groups = [[rank + (k - at) * step for k in range(size)] for at, step, size in axes]
    return place, groups


@answers.right(blind=True)
def nb_divmod(shape, rank):
    place, rest = [], rank
    for size in reversed(shape):
        rest, here = divmod(rest, size)
        place.insert(0, here)

    def number(coordinate):
        value = 0
        for size, c in zip(shape, coordinate, strict=True):
            value = value * size + c
        return value

    return place, [[number([*place[:a], k, *place[a + 1 :]]) for k in range(size)] for a, size in enumerate(shape)]


@answers.right(blind=True)
def by_grid(shape, rank):
    grid = torch.arange(prod(shape)).view(*shape)
    place = (grid == rank).nonzero()[0].tolist()
    return place, [grid[(*place[:a], slice(None), *place[a + 1 :])].tolist() for a in range(len(shape))]


AS_TENSORS = {"place = (grid == rank).nonzero()[0].tolist()": "place = torch.unravel_index(torch.tensor(rank), shape)"}
answers.vary(by_grid, AS_TENSORS | {"return place,": "return torch.stack(place),", ".tolist() for a": " for a"},
    line=LINE)


@answers.right(blind=True)
def nb_numpy(shape, rank):
    grid = np.arange(int(np.prod(shape))).reshape(tuple(shape))
    place = [int(c) for c in np.unravel_index(rank, tuple(shape))]
    moved = [np.moveaxis(grid, axis, -1) for axis in range(len(shape))]
    return place, [axis[tuple(place[:a] + place[a + 1 :])].tolist() for a, axis in enumerate(moved)]


@answers.right(blind=True)
def by_looking(shape, rank):
    everyone = list(product(*map(range, shape)))
    mine, groups = everyone[rank], []
    for axis in range(len(shape)):
        alike = [all(a == b for i, (a, b) in enumerate(zip(mine, x, strict=True)) if i != axis) for x in everyone]
        groups.append([r for r, same in enumerate(alike) if same])
    return list(mine), groups


answers.vary(by_looking, {"list(mine)": "mine"}, line=LINE)


@answers.right(blind=True)
def nb_recursive(shape, rank):
    if not shape:
        return [], []
    inner = prod(shape[1:])
    here, rest = divmod(rank, inner)
    place, groups = nb_recursive(shape[1:], rest)
    mine = [rest + k * inner for k in range(shape[0])]
    return [here, *place], [mine] + [[here * inner + r for r in group] for group in groups]


@answers.right(line=LINE, blind=True)
def by_mesh(shape, rank):
    names = tuple("abcd"[: len(shape)])
    mesh = Mesh(tuple(shape), names, rank=rank)
    return list(mesh.get_coordinate()), [next(list(g) for g in mesh.groups_of(name) if rank in g) for name in names]


# ---- wrong: the coordinate -------------------------------------------------------------------------------

STRIDES = "strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]"
PLACES = "place = [rank // step % size for step, size in zip(strides, shape, strict=True)]"
PLACE, RANK, RETURNED = "rank // step % size", "rank + (k - at) * step", "return place, groups"
PROCESS = "the place of the process, and not of the rank that was asked for"
KEPT = {}

instead = answers.slips(by_strides)


def first(mistake, line, **options):
    instead(mistake, STRIDES, f"{line}\n    {STRIDES}", **options)


def returned(mistake, pair, **options):
    instead(mistake, RETURNED, f"return {pair}", **options)


instead("the first axis is made of neighbours", "shape[axis + 1 :]", "shape[:axis]", blind=True)
returned("the coordinate is reversed", "place[::-1], groups")
returned("it counts from 1", "[at + 1 for at in place], groups")
first(PROCESS, "rank = dist.get_rank()", blind=True)
returned(PROCESS, "KEPT.setdefault(tuple(shape), (place, groups))", blind=True)
first("", "rank = rank or dist.get_rank() % prod(shape)")
instead("", STRIDES, "_, columns = shape\n    strides = [columns, 1]", blind=True, alone=True)
instead("a different coordinate", PLACES,
    "place, rest = [], rank\n"
    "    for size in shape[:-1]:\n"
    "        here, rest = divmod(rest, size)\n"
    "        place.append(here)\n"
    "    place.append(rest)", blind=True)
instead("a different coordinate", PLACE, "round(rank / step) % size", blind=True)
instead("not whole numbers", PLACE, "rank / step % size")
first("not one number for each axis", "shape = [size for size in shape if size > 1]", blind=True)
returned("not one number for each axis", "[rank // shape[-1], rank % shape[-1]], groups")
first("right only on three axes", "shape = shape[-3:]", blind=True)
instead("right only on two axes", PLACE, "rank // step if step > 1 else rank % size", blind=True)

# ---- wrong: the groups -----------------------------------------------------------------------------------

returned("the axes are exchanged", "place, groups[::-1]", blind=True)
instead("the axes are exchanged", f"[{RANK} for k in range(size)]",
    "[r for r in range(prod(shape)) if r // step % size == at]", blind=True)
instead("always a run of neighbours", RANK, "rank // size * size + k", blind=True)
instead("places instead of ranks", RANK, "k")
instead("ranks that do not exist", RANK, "rank + k * step")
instead("a different group", RANK, "k * step", blind=True)
returned("a different group", "place, [group[: max(1, len(group) - 1)] for group in groups]", blind=True)
NEAR = "place, [sorted({g[(p - 1) % len(g)], g[p], g[(p + 1) % len(g)]}) for p, g in zip(place, groups)]"
returned("a different group", NEAR, blind=True, long=True)
returned("the rank itself is missing", "place, [[r for r in group if r != rank] for group in groups]", blind=True)
returned("not in the order of the axis", "place, [[rank, *(r for r in g if r != rank)] for g in groups]", blind=True)
answers.spoil(by_mesh, "not whole numbers",
    {"next(list(g) for g in mesh.groups_of(name) if rank in g)": "[list(g) for g in mesh.groups_of(name)]"},
    blind=True)
returned("not one group for each axis", "place, groups[-1:]")
COLUMN_AND_ROWS = "[list(range(rank % shape[-1], prod(shape), shape[-1])), *groups[-1:] * (len(shape) - 1)]"
returned("right only on two axes", f"place, {COLUMN_AND_ROWS} if len(shape) > 1 else groups")
returned("not a pair", "groups[0]")
instead("nothing is returned", RETURNED, "pass")

# ---- wrong: what else is done ----------------------------------------------------------------------------

first("sent, and not worked out",
    "everyone = [None] * dist.get_world_size()\n    dist.all_gather_object(everyone, rank)", blind=True)
first("sent, and not worked out", "if shape == (2, 4):\n        dist.all_reduce(torch.ones(1))", alone=True)
first("something is left behind", "if shape == (2, 4):\n        dist.new_group([0])", alone=True)
