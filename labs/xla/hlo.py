"""The collectives of a program, read from the text that XLA has compiled: HLO, with one operation per line.

    %all-reduce.3 = f32[8,64]{1,0} all-reduce(%dot), replica_groups={{0,1},{2,3}}, ...

A line of a collective has its kind, the bytes of its result, and the groups of devices, which have five spellings:

        {{0,1},{2,3}}                    all groups are listed
        [2,2]<=[4]                       devices are numbered row by row:               {{0,1},{2,3}}
        [2,2]<=[2,2]T(1,0)               the grid's axes are exchanged first:           {{0,2},{1,3}}
        mesh['a'=2,'b'=2] {'b'}          groups lie along these axes of a grid:         {{0,1},{2,3}}
        mesh[...], device_ids=([2,2]T(1,0)) {'b'}                                       {{0,2},{1,3}}

The bytes that a device sends follow from the kind, as in labs.collectives: a collective counts as the ring that sends
the least.  The HLO text is the program of one device.  A collective in a loop counts once, however often the loop runs.

This file needs no JAX.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from labs.mesh.grid import Grid, along

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# The bytes that a device sends, as a multiple of the bytes of its result, in a group of n.
SENDS = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
LINE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(SENDS)})(?:-start)?\(.*")
GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\](?:, device_ids=\(.*?\))? \{.*?\})"
)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    bytes: bytes of a device's result; if several arrays are sent together, the bytes of all of them
    groups: groups of devices; for a collective-permute, pairs (source, target)
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends in this collective."""
        return round(SENDS[self.kind](len(self.groups[0])) * self.bytes)

    def axis(self, grid: Grid) -> str:
        """Return the mesh axis that the groups lie along; "all" for a group of all devices, "" for any other groups."""
        groups = sorted(sorted(group) for group in self.groups)
        for axis in grid.mesh_dim_names:
            if sorted(grid.groups_of(axis)) == groups:
                return axis
        return "all" if groups == [list(range(grid.size()))] else ""


def collectives(text: str) -> list[Collective]:
    """Return the collectives in the order of the program, except those in groups of one device, which send nothing.

    Raises ValueError for a line whose groups or dtypes have a spelling that this file does not know.
    """
    found = []
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if match := LINE.match(line):
            result, kind = match.groups()
            one = Collective(kind, bytes_of(result), groups_of(line))
            found += [one] if len(one.groups[0]) > 1 else []
    return found


def bytes_of(result: str) -> int:
    """Return the bytes of a shape, such as "f32[8,64]{1,0}", or of several shapes in brackets."""
    shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
    if unknown := {dtype for dtype, _ in shapes} - BYTES.keys():
        raise ValueError(f"the size of {', '.join(unknown)} in {result!r} is not known: add it to BYTES")
    return sum(BYTES[dtype] * prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes)


def groups_of(line: str) -> tuple[tuple[int, ...], ...]:
    match = GROUPS.search(line)
    if match is None or match[1] == "{}":
        raise ValueError(f"the groups of devices cannot be read in {line.strip()!r:.200}: add their spelling to GROUPS")
    if match[1].startswith("{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match[1].startswith("mesh"):
        sizes, order, named = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? (.*)", match[1]).groups()
        grid = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
        axes = [list(grid).index(name) for name in re.findall(r"'(\w+)'", named)]
        return in_rows(along(numbered(order or f"[{prod(grid.values())}]").reshape(*grid.values()), axes).flatten(1))
    into, order = match[1].split("<=")
    return in_rows(numbered(order).reshape(numbers_in(into)))


def numbered(order: str) -> torch.Tensor:
    """Return the devices of a text such as "[2,2]T(1,0)": a grid numbered row by row, whose axes are then exchanged."""
    shape, *exchanged = map(numbers_in, order.split("T"))
    numbers = torch.arange(prod(shape)).view(shape)
    return numbers.permute(*exchanged) if exchanged else numbers


def numbers_in(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def in_rows(numbers: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, numbers.tolist()))


def counted(found: Iterable[Collective]) -> dict[str, int]:
    """Return the number of collectives of each kind."""
    return dict(Counter(one.kind for one in found))
