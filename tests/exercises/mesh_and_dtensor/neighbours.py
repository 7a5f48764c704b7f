"""Answers to neighbours (05): a rank's place on a mesh, and who stands along each axis with it."""

from math import prod

import torch.distributed as dist  # noqa: F401  (exchanged words name it)

from tests.answers import Exercise

# fmt: off
answers = Exercise("neighbours")
LINE = "15 meshes of up to 4 axes, for all of their ranks, and not one message"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def by_strides(shape, rank):
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = [rank // step % size for step, size in zip(strides, shape, strict=True)]
    axes = zip(place, strides, shape, strict=True)
    groups = [[rank + (k - at) * step for k in range(size)] for at, step, size in axes]
    return place, groups


@answers.right
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


# ---- wrong: the coordinate -------------------------------------------------------------------------------

STRIDES = "strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]"
PLACES = "place = [rank // step % size for step, size in zip(strides, shape, strict=True)]"
PLACE, RANK, RETURNED = "rank // step % size", "rank + (k - at) * step", "return place, groups"
PROCESS = "the place of the process, and not of the rank that was asked for"

instead = answers.slips(by_strides)


def first(mistake, line, **options):
    instead(mistake, STRIDES, f"{line}\n    {STRIDES}", **options)


def returned(mistake, pair, **options):
    instead(mistake, RETURNED, f"return {pair}", **options)


instead("the first axis is made of neighbours", "shape[axis + 1 :]", "shape[:axis]")
first(PROCESS, "rank = dist.get_rank()")
instead("a different coordinate", PLACES,
    "place, rest = [], rank\n"
    "    for size in shape[:-1]:\n"
    "        here, rest = divmod(rest, size)\n"
    "        place.append(here)\n"
    "    place.append(rest)")
instead("not whole numbers", PLACE, "rank / step % size")
first("not one number for each axis", "shape = [size for size in shape if size > 1]")
first("right only on three axes", "shape = shape[-3:]")
instead("right only on two axes", PLACE, "rank // step if step > 1 else rank % size")

# ---- wrong: the groups -----------------------------------------------------------------------------------

returned("the axes are exchanged", "place, groups[::-1]")
instead("always a run of neighbours", RANK, "rank // size * size + k")
instead("a different group", RANK, "k * step")
returned("the rank itself is missing", "place, [[r for r in group if r != rank] for group in groups]")
returned("not in the order of the axis", "place, [[rank, *(r for r in g if r != rank)] for g in groups]")
returned("not a pair", "groups[0]")

# ---- wrong: what else is done ----------------------------------------------------------------------------

first("sent, and not worked out",
    "everyone = [None] * dist.get_world_size()\n    dist.all_gather_object(everyone, rank)")
