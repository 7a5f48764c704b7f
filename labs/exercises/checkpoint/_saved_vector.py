"""A vector that some ranks have saved in files, and the elements that each rank of another job loads from the files.

All numbers of the vector differ, so a loaded number tells its place in the vector.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import ceil, floor
from typing import ClassVar

import torch
from torch import Tensor

from labs.exercises.engine.by_script import on_each_rank
from labs.exercises.engine.scripts import StepOutcomes, World


@dataclass(frozen=True)
class Saved(World):
    """A vector that was saved in files.

    files: the number of the vector's elements in each file; the files follow one another in the vector.
    """

    files: tuple[int, ...] = ()

    whole: ClassVar[str] = "the part"

    @property
    def vector(self) -> Tensor:
        """Return the numbers 1, 2, 3, ..., shuffled."""
        return (torch.randperm(sum(self.files), generator=self.generator()) + 1).to(self.dtype)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return for each file the place in the vector of the file's first element, and the file's length."""
        return list(zip(accumulate(self.files, initial=0), self.files, strict=False))

    @property
    def names(self) -> list[str]:
        return [f"rank-{i}-of-{len(self.files)}" for i in range(len(self.files))]

    @property
    def parts(self) -> list[range]:
        """Return the part of the vector that each member must load."""
        size = sum(self.files) // self.n
        return [range(i * size, (i + 1) * size) for i in range(self.n)]

    @property
    def nbytes(self) -> int:
        return len(self.parts[0]) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.within}, files of {', '.join(map(str, self.files))} elements of {self.dtype_name}"


class Lay:
    """The places in the vector of the numbers that one rank has (at), and that each rank has (everywhere).

    The place of a number that is not the vector's is -1.
    """

    def __init__(self, seen: StepOutcomes, place: int) -> None:
        self.world, self.own = seen.world, list(seen.world.parts[place])
        places = {x: at for at, x in enumerate(seen.world.vector.tolist())}
        self.everywhere = [[places.get(x, -1) for x in done.values[""].tolist()] for done in seen.done]
        self.at = self.everywhere[place]


def elements(seen: StepOutcomes) -> Iterator[tuple[str, Lay]]:
    """Yield, for each rank that has loaded wrong elements, a sentence about the elements, and their places."""
    for place, (where, _) in enumerate(on_each_rank(seen)):
        its = Lay(seen, place)
        if its.at != its.own:
            yield f"{where}elements {runs(its.at)} of the vector are there; {runs(its.own)} are due\n", its


def runs(at: list[int]) -> str:
    """Return the runs of consecutive places, in words: "0:3, 7:9" for [0, 1, 2, 7, 8]."""
    at = [i for i in at if i >= 0]
    begins = [i for i, x in enumerate(at) if not i or x != at[i - 1] + 1]
    return ", ".join(f"{at[i]}:{at[j - 1] + 1}" for i, j in pairwise([*begins, len(at)])) or "0:0"


def as_if(others: Callable[[Saved], Iterable[Sequence[Iterable[int]]]]) -> Callable[[Lay], bool]:
    """Return a row's test: whether all ranks have the elements of one of these wrong divisions of the vector."""
    return lambda its: any(list(map(list, other)) == its.everywhere for other in others(its.world))


def of_other_ranks(world: Saved) -> Iterator[list[range]]:
    """Yield divisions in which ranks have other ranks' parts: shifted by some ranks, all of one rank, or in reverse."""
    for rank in range(1, world.n):
        yield world.parts[rank:] + world.parts[:rank]
        yield [world.parts[rank]] * world.n
    yield world.parts[::-1]


def as_they_were_saved(world: Saved) -> Iterator[list[range]]:
    """Yield the divisions in which rank r has file r, or the r-th of as many parts as there are files."""
    size = sum(world.files) // len(world.files)
    yield [range(a, a + n) for a, n in world.places][: world.n]
    yield [range(r * size, (r + 1) * size) for r in range(world.n)]


def begun_anew(world: Saved) -> Iterator[list[list[int]]]:
    """Yield the division in which each rank looks for its places of the vector in each file anew."""
    yield [[a + i for a, n in world.places for i in range(n) if i in own] for own in world.parts]


def of_equal_size(world: Saved) -> Iterator[list[list[int]]]:
    """Yield divisions as if all files were as large as the first file, or as the mean of all files.

    The elements of a file beyond that size are left out in some of these divisions.
    """
    mean = sum(world.files) / len(world.files)
    for size, most in product((world.files[0], floor(mean), ceil(mean)), (True, False)):
        files = [(i * size, a, min(n, size) if most else n) for i, (a, n) in enumerate(world.places)]
        yield [[a + i for first, a, n in files for i in range(n) if first + i in own] for own in world.parts]


def in_another_order(world: Saved) -> Iterator[list[list[int]]]:
    """Yield divisions as if the files were ordered by name, by size, or from the last file to the first."""
    by_name = [place for _, place in sorted(zip(world.names, world.places, strict=True))]
    for places in (by_name, sorted(world.places, key=lambda place: place[1]), world.places[::-1]):
        vector = [a + i for a, n in places for i in range(n)]
        yield [vector[own.start : own.stop] for own in world.parts]


def off_by_one(world: Saved) -> Iterator[list[range]]:
    """Yield divisions whose parts begin, or end, one element too early or too late."""
    vector = range(sum(world.files))
    for more, less in product((-1, 0, 1), repeat=2):
        yield [vector[max(own.start + more, 0) : own.stop + less] for own in world.parts]
