"""my_part: a rank's layers, sequences, heads and piece of the state, by the rank's place on a mesh of four axes.

The check asks about some ranks of each mesh.  Some meshes have four axes longer than 1, and others lack some.
"""

import random
from collections.abc import Callable
from math import prod
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, answer_is, on_paper, part_as_if, part_is
from labs.mesh import Mesh
from labs.parallel import AXES

MOST = 12  # ranks of a mesh that the check asks about
Sizes = tuple[int, ...]
SIZES = ((2, 1, 2, 2), (2, 2, 3, 2), (3, 2, 2, 4), (1, 1, 4, 8), (4, 1, 1, 2), (2, 4, 1, 1), (1, 2, 2, 1), (1, 1, 1, 1))


def part(whole: int, parts: int, number: int) -> tuple[int, int]:
    return number * whole // parts, (number + 1) * whole // parts


def right(sizes: Sizes, rank: int, layers: int, sequences: int, heads: int) -> dict[str, Any]:
    at = dict(zip(AXES, Mesh(sizes, AXES, rank=rank).get_coordinate(), strict=True))
    return parts_at(at, sizes, layers, sequences, heads)


def parts_at(at: dict[str, int], sizes: Sizes, layers: int, sequences: int, heads: int) -> dict[str, Any]:
    pp, replicate, shard, tp = sizes
    return {
        "layers": part(layers, pp, at["pp"]),
        "sequences": part(sequences, replicate * shard, at["replicate"] * shard + at["shard"]),
        "heads": part(heads, tp, at["tp"]),
        "piece": at["shard"],
    }


def columns_first(sizes: Sizes, rank: int, *wholes: int) -> dict[str, Any]:
    """Return the rank's parts as if consecutive ranks were neighbours along the mesh's first axis."""
    turned = Mesh(sizes[::-1], AXES[::-1], rank=rank).get_coordinate()
    return parts_at(dict(zip(AXES[::-1], turned, strict=True)), sizes, *wholes)


def read_by(*axes: str) -> Callable[..., Any]:
    """Return a function that computes a rank's sequences as if they were split along these axes."""

    def sequences(sizes: Sizes, rank: int, layers: int, whole: int, heads: int) -> Any:
        mesh = Mesh(sizes, AXES, rank=rank)
        number = 0
        for axis in axes:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        return part(whole, prod(mesh.size(axis) for axis in axes), number)

    return sequences


def without_the_end(job: tuple[Any, ...], name: str) -> tuple[int, int]:
    first, end = right(*job)[name]
    return first, end - 1


def sheets(seed: int) -> list[Sheet]:
    draw, found = random.Random(seed), []
    for sizes in SIZES:
        each = [draw.randrange(2, 6) for _ in range(3)]
        # There is at least one sequence per rank, so that a split that is too fine is wrong and does not fail.
        wholes = sizes[0] * each[0], prod(sizes) * each[1], sizes[3] * each[2]
        words = f"{' × '.join(f'{axis} {size}' for axis, size in zip(AXES, sizes, strict=True))}, {{}} layers, {{}} "
        words = (words + "sequences, {} heads: rank").format(*wholes)
        ranks = range(prod(sizes))
        asked = sorted(draw.sample(ranks, min(MOST, len(ranks))))
        found += [Sheet((sizes, r, *wholes), right(sizes, r, *wholes), f"{words} {r}") for r in asked]
    return found


# fmt: off
READS = "Two ranks have the same layers, and each has a part of every matrix. Do they read the same sequences?"
MISTAKES = (
    Mistake("not all parts, by these names", "Which four does the docstring name?",
            answer_is(lambda found, expected: isinstance(found, dict) and found.keys() != expected.keys())),
    Mistake("the first axis is made of neighbours", "Rank 1 stands beside rank 0: along which axis?",
            part_as_if("layers", lambda *job: columns_first(*job)["layers"]),
            symptom="tensor parallelism between the nodes, and everything slow"),
    Mistake("every rank reads its own sequences", READS, part_as_if("sequences", read_by(*AXES)),
            symptom="a loss that goes down, of a model whose ranks compute parts of different sequences"),
    Mistake("ranks along tp read different sequences", READS,
            part_as_if("sequences", read_by("replicate", "shard", "tp"))),
    Mistake("replicas read the same sequences", "What do two replicas do that one could not do alone?",
            part_as_if("sequences", read_by("shard")), symptom="as many GPUs, and a batch of half the size"),
    *(Mistake(f"{name}: the last instead of the end", "Which number does range(first, end) end before?",
              part_as_if(name, lambda *job, name=name: without_the_end(job, name)))
      for name in ("layers", "sequences", "heads")),
    Mistake("other layers", "Which ranks have the same layers?", part_is("layers")),
    Mistake("other heads", "Along which axis is a layer split, and how many ranks are there along it?",
            part_is("heads")),
    Mistake("another piece", "Over which ranks is a parameter sharded, and where among them is this one?",
            part_is("piece")),
    Mistake("other sequences", READS, part_is("sequences")),
)
# fmt: on


@answered
def my_part(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(sizes, rank, layers, sequences, heads)`; return the ✓ line.

    It returns {"layers": (first, end), "sequences": (first, end), "heads": (first, end), "piece": number}.

    sizes: the sizes of the axes pp, replicate, shard and tp
    """
    return on_paper(fn, sheets(seed), MISTAKES, READS) + f", on {len(SIZES)} meshes"
