"""The collectives of a program, read from what XLA has compiled: its text in HLO, an operation a line.

    %all-reduce.3 = f32[8,64]{1,0} all-reduce(%dot), replica_groups={{0,1},{2,3}}, ...
     kind, bytes of the result, and the groups of devices, which come in five spellings:
        {{0,1},{2,3}}                    one by one
        [2,2]<=[4]                       numbered on, row by row:                       {{0,1},{2,3}}
        [2,2]<=[2,2]T(1,0)               the grid's axes exchanged first:               {{0,2},{1,3}}
        mesh['a'=2,'b'=2] {'b'}          along these axes of a grid, row by row:        {{0,1},{2,3}}
        mesh[...], device_ids=([2,2]T(1,0)) {'b'}                                       {{0,2},{1,3}}

What a device sends follows from the kind, as in labs.collectives: a collective is taken for the ring that sends the
least.  It is the text of one device; a collective in a loop stands there once, however often the loop turns.

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
# How often a device sends the bytes of its result, in a group of n.
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
    """bytes: of a device's result; of all arrays, where several travel together.  groups: of devices.

    For a collective-permute, the groups are pairs: from which device, to which.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> int:
        """Bytes that a device sends."""
        return round(SENDS[self.kind](len(self.groups[0])) * self.bytes)

    def axis(self, grid: Grid) -> str:
        """The axis of the mesh that a group lies along; "all" for all of it, "" where it is none of these."""
        groups = sorted(sorted(group) for group in self.groups)
        for axis in grid.mesh_dim_names:
            if sorted(grid.groups_of(axis)) == groups:
                return axis
        return "all" if groups == [list(range(grid.size()))] else ""


def collectives(text: str) -> list[Collective]:
    """In the order of the program; those within a group of one device, which send nothing, left out.

    Raises ValueError for a line whose groups or dtypes are written in a way that this file does not know.
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
    """Of a shape, "f32[8,64]{1,0}", or of several in brackets."""
    shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
    if unknown := {dtype for dtype, _ in shapes} - BYTES.keys():
        raise ValueError(f"the size of {', '.join(unknown)} in {result!r} is not known: add it to BYTES")
    return sum(BYTES[dtype] * prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes)


def groups_of(line: str) -> tuple[tuple[int, ...], ...]:
    match = GROUPS.search(line)
    if match is None or match[1] == "{}":
        raise ValueError(f"which devices take part cannot be read in {line.strip()!r:.200}")
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
    """The devices, as "[2,2]T(1,0)" says it: numbered on in a grid, whose axes are then exchanged."""
    shape, *exchanged = map(numbers_in, order.split("T"))
    numbers = torch.arange(prod(shape)).view(shape)
    return numbers.permute(*exchanged) if exchanged else numbers


def numbers_in(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def in_rows(numbers: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, numbers.tolist()))


def counted(found: Iterable[Collective]) -> dict[str, int]:
    """How many of each kind."""
    return dict(Counter(one.kind for one in found))
