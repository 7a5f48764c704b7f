"""The agreement of the ranks before a save: their parts of the state are compared, and one plan is made of them.

    contribute            returns the values and tensors that this rank saves, without asking the other ranks
    agreed_plan           makes one index of all ranks' contributions, and decides which rank writes which piece
    require_equal_copies  checks that a piece that several ranks hold is equal on them, to the last bit

If ranks differ, the error names the tensor, the option or the value that differs, and two ranks.
"""

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import compare, everybodys, fingerprint, first_difference
from labs.checkpoint.index import FORMAT, Index, Stored, numbered, to_json
from labs.checkpoint.optimizer_state import Options
from labs.checkpoint.parts import Groups, Parts, Savable
from labs.checkpoint.tensor_blocks import Piece, assign_pieces, require_whole
from labs.dtensor.placement import Block

Described = dict[str, tuple[tuple[int, ...], torch.dtype, str, list[Block]]]  # shape, dtype, first key, blocks


@dataclass(frozen=True)
class Contribution:
    """A rank's description of the state that it saves, which it sends to the others.

    same: the arguments of `save` that must be the same on all ranks
    described: for each tensor, by key, its shape and the blocks of the tensor that this rank holds
    groups: the optimizer's options, and the names of the parameters that each set of options is for
    own: the values that the rank saves for itself, as JSON
    word: random letters; those of the first rank become part of the draft's name
    """

    same: dict[str, Any]
    described: Described
    groups: Groups
    own: str
    word: str


Share = tuple[Contribution, dict[Piece, Tensor]]


def contribute(folder: str | Path, step: int, held: Savable, values: Any, own: Any) -> Share:
    """Return this rank's contribution to a save, and the tensors in it, without asking the other ranks."""
    same = {"folder": str(Path(folder).expanduser()), "step": numbered(step), "values": to_json("values", values)}
    parts = held.parts()
    contribution = Contribution(same, describe(parts), held.groups(), to_json("own", own), secrets.token_hex(4))
    return contribution, tensors_in(parts)


@dataclass(frozen=True)
class SavePlan:
    """A plan of a save, on which all ranks agree.

    files, writes: for each rank, the name of its file, and the pieces of tensors that the rank writes to it
    """

    final: Path
    step: int
    values: Any
    own: list[Any]
    index: Index
    options: dict[str, Options]
    files: list[str]
    writes: list[list[Piece]]

    def record(self, checksums: Sequence[int]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "files": dict(zip(self.files, checksums, strict=True)),
            "tensors": {key: stored.as_json() for key, stored in self.index.items()},
            "options": self.options,
            "values": self.values,
            "own": self.own,
        }


def agreed_plan(contributions: Mapping[int, Contribution]) -> SavePlan:
    """Make the plan of a save from all ranks' contributions.  Raises ValueError if they contradict each other."""
    compare({rank: each.same for rank, each in contributions.items()}, differ_in_values)
    described = {rank: each.described for rank, each in contributions.items()}
    index = agreed(described)
    require_kept_alike(described)
    options = agreed_options({rank: each.groups for rank, each in contributions.items()})
    writes = assign_pieces([bytes_of(each.described) for each in contributions.values()])
    files = [f"rank-{rank}-of-{len(contributions)}.safetensors" for rank in range(len(contributions))]
    for name, pieces in zip(files, writes, strict=True):
        for key, block in pieces:
            index[key].files[block] = name
    first, *_ = (each.same for each in contributions.values())
    own = [json.loads(each.own) for each in contributions.values()]
    final = Path(first["folder"]) / f"step-{first['step']}"
    return SavePlan(final, first["step"], json.loads(first["values"]), own, index, options, files, writes)


def tensors_in(parts: Parts) -> dict[Piece, Tensor]:
    """Return every tensor that this rank holds; a tensor with several keys is included once, under the first."""
    first: dict[int, str] = {}
    return {
        (key, at): x
        for key, part in parts.items()
        if first.setdefault(id(part), key) == key
        for at, x in part.blocks.items()
    }


def describe(parts: Parts) -> Described:
    """Describe this rank's tensors and blocks; a tensor with several keys has its blocks under the first."""
    first, found = {}, {}
    for key, part in parts.items():
        mine = [] if id(part) in first else [*part.blocks]
        found[key] = part.shape, part.dtype, first.setdefault(id(part), key), mine
    return found


def agreed(found: Mapping[int, Described]) -> Index:
    """Return an index of all tensors of all ranks, in which no block has a file yet.

    Raises ValueError if two ranks have different tensors under one key, or if a part of a tensor is on no rank.
    """
    index: Index = {}
    others: dict[str, str] = {}  # other keys of a tensor: its first key
    for key in sorted({key for described in found.values() for key in described}):
        of_each = {rank: described[key] for rank, described in found.items() if key in described}
        compare({rank: each[:2] for rank, each in of_each.items()}, partial(differ_in, key))
        shape, dtype, first, _ = next(iter(of_each.values()))
        if all(each[2] != key for each in of_each.values()):
            others[key] = first
            continue
        require_whole(key, shape, {block for *_, blocks in of_each.values() for block in blocks})
        index[key] = Stored(key, shape, dtype, {})
    return index | {key: index[first] for key, first in others.items()}


def require_kept_alike(found: Mapping[int, Described]) -> None:
    """Raise ValueError if two ranks hold the same block of a parameter, but different optimizer state for it."""
    holders: dict[Piece, list[int]] = {}
    kept: dict[int, dict[str, set[str]]] = {rank: {} for rank in found}
    for rank, described in found.items():
        for key, (*_, blocks) in described.items():
            kind, _, name = key.partition("/")
            if kind == "optimizer":
                name, _, what = name.rpartition("/")
                kept[rank].setdefault(name, set()).add(what)
            for block in blocks if kind == "model" else ():
                holders.setdefault((name, block), []).append(rank)
    for (name, _), ranks in holders.items():
        compare({rank: kept[rank].get(name, set()) for rank in ranks}, partial(differ_in_kept, name))


def agreed_options(found: Mapping[int, Groups]) -> dict[str, Options]:
    """Return the optimizer's options for each parameter.  Raises ValueError if ranks have different options for one."""
    of_each: dict[str, dict[int, Options]] = {}
    for rank, groups in found.items():
        for options, parameters in groups:
            for name in chain.from_iterable(parameters):
                of_each.setdefault(name, {})[rank] = options
    for name, options_of in of_each.items():
        compare(options_of, partial(differ_in_options, name))
    return {name: next(iter(options_of.values())) for name, options_of in of_each.items()}


def require_equal_copies(
    held: Sequence[Iterable[Piece]], tensors: Mapping[Piece, Tensor], group: ProcessGroup | None
) -> None:
    """Raise ValueError if ranks that hold the same piece of a tensor have different numbers in it.

    held: for each rank, the pieces of tensors that the rank holds
    tensors: the numbers of this rank's pieces
    """
    holders = Counter(piece for pieces in held for piece in pieces)
    mine = held[dist.get_rank(group)]
    found = everybodys({piece: fingerprint(tensors[piece]) for piece in mine if holders[piece] > 1}, group)
    for piece in sorted({piece for each in found.values() for piece in each}, key=str):
        copies = {rank: each[piece] for rank, each in found.items() if piece in each}
        compare(copies, partial(differ_in_numbers, piece[0]))


def differ_in(key: str, rank: int, its: Any, other: int, others: Any) -> str:
    both = [f"{dtype} of shape {shape} on rank {rank}" for rank, (shape, dtype) in ((rank, its), (other, others))]
    return f"{key!r} is {' and '.join(both)}: save the same model on all ranks"


def differ_in_kept(name: str, rank: int, its: set[str], other: int, others: set[str]) -> str:
    what = min(its ^ others)
    has, lacks = (rank, other) if what in its else (other, rank)
    return (
        f"the optimizer keeps {what!r} of {name!r} on rank {has}, but not on rank {lacks}, which holds the same "
        "part of it: take the same steps on all replicas"
    )


def differ_in_numbers(key: str, rank: int, its: str, other: int, others: str) -> str:
    return (
        f"{key!r} differs on ranks {rank} and {other}, which both hold it, but a checkpoint stores it once: make it "
        "equal before (a buffer: broadcast or average it)"
    )


def differ_in_options(name: str, rank: int, its: Options, other: int, others: Options) -> str:
    what = first_difference(its, others)
    return (
        f"{what!r} of {name!r} is {its.get(what)} on rank {rank} and {others.get(what)} on rank {other}: give the "
        "optimizer the same options on all ranks"
    )


def differ_in_values(rank: int, its: dict[str, Any], other: int, others: dict[str, Any]) -> str:
    name = first_difference(its, others)
    return f"{name}= is {its[name]} on rank {rank} and {others[name]} on rank {other}: give the same on all ranks"


def bytes_of(described: Described) -> dict[Piece, int]:
    return {
        (key, block): prod(block.shape) * dtype.itemsize
        for key, (_, dtype, _, blocks) in described.items()
        for block in blocks
    }
