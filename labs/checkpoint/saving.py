"""Save what all ranks hold between them: each writes its own share, side by side.

    tell each other what is there   a piece that several ranks hold must be equal on them, and one of them writes it
    write and flush                 each its file, into a draft
    commit                          one writes the index, flushes it, and renames the draft

So no rank ever holds the whole, and none waits for one that writes it all.

Source: torch.distributed.checkpoint, docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import ProcessGroup

from labs.agree import compare, everybodys, fingerprint, first_difference, on_all_ranks
from labs.checkpoint.extents import Piece, dealt, require_whole
from labs.checkpoint.index import FORMAT, Index, Stored, commit, drafted, entry, numbered, to_json
from labs.checkpoint.optimizer_state import Options
from labs.checkpoint.parts import Groups, Held, Parts
from labs.dtensor.placement import Block
from labs.memory.disk import checksum, flush

Described = dict[str, tuple[tuple[int, ...], torch.dtype, str, list[Block]]]  # shape, dtype, its first key


def save(
    folder: str | Path,
    step: int,
    held: Held,
    values: Any = None,
    own: Any = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write what all ranks hold to folder/step-<step>, and return that: by every rank of the group, at the same step.

    values: what else is to be remembered, the same on all ranks.  own: what each rank is to remember for itself.  Both
    as JSON has them.

    Raises, on all ranks, ValueError for ranks that differ in what they bring, for what JSON cannot have, for a step
    that is no integer or below 0, and where it is there already; OSError where the disk is full, or cannot be written.
    Earlier checkpoints are as they were then.
    """
    rank, parts = dist.get_rank(group), {}

    def bring() -> Brought:
        same = {"folder": str(Path(folder)), "step": numbered(step), "values": to_json("values", values)}
        parts.update(held.parts())
        return Brought(same, describe(parts), held.groups(), to_json("own", own), secrets.token_hex(4))

    brought = on_all_ranks(bring, group)
    plan = agreed_plan(dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), brought, strict=True)))
    require_equal_copies(parts, [bytes_of(each.described) for each in brought], group)
    final = Path(folder) / f"step-{plan.step}"
    draft = final.with_name(f"{final.name}.{brought[0].word}.draft")
    with ExitStack() as stack:
        on_all_ranks(lambda: stack.enter_context(drafted(final, draft)) if rank == 0 else None, group)
        checksums = on_all_ranks(lambda: write(draft / plan.files[rank], parts, plan.writes[rank]), group)
        on_all_ranks(lambda: commit(draft, final, plan.record(checksums)) if rank == 0 else None, group)
    return final


@dataclass(frozen=True)
class Brought:
    """What a rank tells the others: what must be the same on all, and what it has of its own."""

    same: dict[str, Any]
    described: Described
    groups: Groups
    own: str
    word: str


@dataclass(frozen=True)
class Plan:
    """What all have agreed on.  files, writes: by rank, its file, and the pieces that it writes there."""

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


def agreed_plan(brought: Mapping[int, Brought]) -> Plan:
    """Raises ValueError where ranks differ."""
    compare({rank: each.same for rank, each in brought.items()}, differ_in_values)
    index = agreed({rank: each.described for rank, each in brought.items()})
    options = agreed_options({rank: each.groups for rank, each in brought.items()})
    writes = dealt([bytes_of(each.described) for each in brought.values()])
    files = [f"rank-{rank}-of-{len(brought)}.safetensors" for rank in range(len(brought))]
    for name, pieces in zip(files, writes, strict=True):
        for key, block in pieces:
            index[key].files[block] = name
    first, *_ = (each.same for each in brought.values())
    own = [json.loads(each.own) for each in brought.values()]
    return Plan(first["step"], json.loads(first["values"]), own, index, options, files, writes)


def describe(parts: Parts) -> Described:
    """What has several keys is written under the first."""
    first, found = {}, {}
    for key, part in parts.items():
        mine = [] if id(part) in first else [*part.blocks]
        found[key] = part.shape, part.dtype, first.setdefault(id(part), key), mine
    return found


def agreed(found: Mapping[int, Described]) -> Index:
    """Every tensor that a rank has.  Raises ValueError where two have different ones, or not all of it is there."""
    index: Index = {}
    others: dict[str, str] = {}  # keys of what lies under its first one
    for key in sorted({key for described in found.values() for key in described}):
        of_each = {rank: described[key] for rank, described in found.items() if key in described}
        compare({rank: told[:2] for rank, told in of_each.items()}, partial(differ_in, key))
        shape, dtype, first, _ = next(iter(of_each.values()))
        if all(told[2] != key for told in of_each.values()):
            others[key] = first
            continue
        require_whole(key, shape, {block for *_, blocks in of_each.values() for block in blocks})
        index[key] = Stored(key, shape, dtype, {})
    return index | {key: index[first] for key, first in others.items()}


def agreed_options(found: Mapping[int, Groups]) -> dict[str, Options]:
    """By parameter.  Raises ValueError where two ranks have others."""
    of_each: dict[str, dict[int, Options]] = {}
    for rank, groups in found.items():
        for options, parameters in groups:
            for name in chain.from_iterable(parameters):
                of_each.setdefault(name, {})[rank] = options
    for name, told in of_each.items():
        compare(told, partial(differ_in_options, name))
    return {name: next(iter(told.values())) for name, told in of_each.items()}


def require_equal_copies(parts: Parts, held: Sequence[Mapping[Piece, int]], group: ProcessGroup | None) -> None:
    """Raise ValueError where ranks that have the same piece have other numbers in it; looks at no other pieces."""
    holders = Counter(piece for pieces in held for piece in pieces)
    mine = held[dist.get_rank(group)]
    prints = {(key, at): fingerprint(parts[key].blocks[at]) for key, at in mine if holders[key, at] > 1}
    found = everybodys(prints, group)
    for piece in sorted({piece for each in found.values() for piece in each}, key=str):
        copies = {rank: each[piece] for rank, each in found.items() if piece in each}
        compare(copies, partial(differ_in_numbers, piece[0]))


def differ_in(key: str, rank: int, its: Any, other: int, others: Any) -> str:
    told = [f"{dtype} of shape {shape} on rank {rank}" for rank, (shape, dtype) in ((rank, its), (other, others))]
    return f"{key!r} is {' and '.join(told)}: save one model"


def differ_in_numbers(key: str, rank: int, its: str, other: int, others: str) -> str:
    return (
        f"{key!r} differs on ranks {rank} and {other}, which both have it, and a checkpoint has it once: make it equal "
        "before (a buffer: broadcast or average it)"
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


def write(path: Path, parts: Parts, pieces: Sequence[Piece]) -> int:
    """The checksum of what is on the disk now."""
    numbers = {entry(key, block): parts[key].blocks[block].to("cpu").contiguous() for key, block in pieces}
    lie = {name: x.untyped_storage().data_ptr() for name, x in numbers.items()}
    lying = Counter(lie.values())  # safetensors refuses what may lie in the same memory
    try:
        save_file({name: x.clone() if lying[lie[name]] > 1 else x for name, x in numbers.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): make room, or save to another folder") from error
    flush(path)
    return checksum(path)
