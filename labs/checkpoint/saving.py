"""Save and load what all ranks hold between them: each its own, side by side.

    step-12/  rank-0-of-4.safetensors    the pieces that rank 0 wrote
              rank-1-of-4.safetensors
              ...
              index.json                 of each tensor, the shape, and which piece lies in which file; the checksum
                                         of each file; what else is to be remembered, and the checksum of the index

    save    tell each other what is there   a piece that several ranks hold must be equal on them, and one writes it
            write and flush                 into step-12.draft, which nobody loads
            commit                          write the index, flush it, and rename the folder: it has happened or not
    load    look                            all files there, all checksums right?  each rank reads its share of them
            tell each other what is wanted  every tensor, in its shape and its dtype, and no tensor is left over
            read                            of each piece, what lies in this rank's blocks, wherever it was cut

So a checkpoint of four ranks under one strategy is read by three under another, and what is not as it was written is
told before a single tensor has changed.  Nothing from a file is ever run: tensors in the safetensors format, the rest
in JSON.

Source: torch.distributed.checkpoint's design, docs.pytorch.org; github.com/huggingface/safetensors.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import compare, everybodys, fingerprint, on_all_ranks
from labs.checkpoint.extents import Piece, common, dealt, require_whole, said, within
from labs.checkpoint.parts import Entry, Held, Kept, Parts
from labs.dtensor.placement import Block
from labs.memory.disk import checksum, flush, sealed

FORMAT, INDEX, MOST = 1, "index.json", 5  # of differences that are named
FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")
STEP, DRAFT = re.compile(r"step-(\d+)"), re.compile(r"step-(\d+)\.\w+\.draft")


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint: in which file each piece lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    files: dict[Block, str]

    def as_json(self) -> dict[str, Any]:
        pieces = [[block.offset, block.shape, name] for block, name in self.files.items()]
        return {"shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), "pieces": pieces}

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> "Stored":
        files = {Block(tuple(offset), tuple(shape)): name for offset, shape, name in said["pieces"]}
        return cls(tuple(said["shape"]), getattr(torch, said["dtype"]), files)


Index = dict[str, Stored]
Described = dict[str, tuple[tuple[int, ...], torch.dtype, dict[Block, str]]]  # shape, dtype, fingerprints


# ---- save ------------------------------------------------------------------------------------------------


def save(folder: str | Path, step: int, held: Held, values: Any = None, group: ProcessGroup | None = None) -> Path:
    """Write what all ranks hold to folder/step-<step>, and return that: by every rank of the group, at the same step.

    values: what else is to be remembered, as JSON has it, the same on all ranks.

    Raises, on all ranks, ValueError for ranks that differ in what they bring, and where this step is there already;
    OSError where the disk is full, or cannot be written.  Earlier checkpoints are as they were then.
    """
    folder, parts, ranks = Path(folder), held.parts(), dist.get_world_size(group)
    found = everybodys((describe(parts), json.dumps(values), secrets.token_hex(4)), group)
    compare({rank: told for rank, (_, told, _) in found.items()}, differ_in_values)
    index = agreed({rank: described for rank, (described, *_) in found.items()})
    word = next(iter(found.values()))[2]
    final, draft = folder / f"step-{step}", folder / f"step-{step}.{word}.draft"
    writes = dealt([bytes_of(described) for described, *_ in found.values()])
    rank = dist.get_rank(group)
    names = [f"rank-{other}-of-{ranks}.safetensors" for other in range(ranks)]
    try:
        on_all_ranks(lambda: prepare(final, draft) if rank == 0 else None, group)
        checksums = on_all_ranks(lambda: write(draft / names[rank], parts, writes[rank]), group)
        for name, pieces in zip(names, writes, strict=True):
            for key, block in pieces:
                index[key].files[block] = name
        record = {
            "format": FORMAT,
            "step": step,
            "files": dict(zip(names, checksums, strict=True)),
            "tensors": {key: stored.as_json() for key, stored in index.items()},
            "values": values,
        }
        on_all_ranks(lambda: commit(draft, final, record) if rank == 0 else None, group)
    finally:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
    return final


def describe(parts: Parts) -> Described:
    return {
        key: (part.shape, part.dtype, {block: fingerprint(x) for block, x in part.blocks.items()})
        for key, part in parts.items()
    }


def agreed(found: Mapping[int, Described]) -> Index:
    """Every tensor that a rank has.  Raises ValueError where two have different ones, or not all of it is there."""
    index: Index = {}
    for key in sorted({key for described in found.values() for key in described}):
        of_each = {rank: described[key] for rank, described in found.items() if key in described}
        compare({rank: told[:2] for rank, told in of_each.items()}, partial(differ_in, key))
        shape, dtype, _ = next(iter(of_each.values()))
        pieces = {block for *_, prints in of_each.values() for block in prints}
        for block in pieces:
            equal = {rank: prints[block] for rank, (*_, prints) in of_each.items() if block in prints}
            compare(equal, partial(differ_in_numbers, key))
        require_whole(key, shape, pieces)
        index[key] = Stored(shape, dtype, {})
    return index


def differ_in(key: str, rank: int, its: Any, other: int, others: Any) -> str:
    told = [f"{dtype} of shape {shape} on rank {rank}" for rank, (shape, dtype) in ((rank, its), (other, others))]
    return f"{key!r} is {' and '.join(told)}: save one model"


def differ_in_numbers(key: str, rank: int, its: str, other: int, others: str) -> str:
    return (
        f"{key!r} differs on ranks {rank} and {other}, which both have it, and a checkpoint has it once: make it equal "
        "before (a buffer: broadcast or average it)"
    )


def differ_in_values(rank: int, its: str, other: int, others: str) -> str:
    return f"values= is {its} on rank {rank} and {others} on rank {other}: give the same on all ranks"


def bytes_of(described: Described) -> dict[Piece, int]:
    return {
        (key, block): prod(block.shape) * dtype.itemsize
        for key, (_, dtype, prints) in described.items()
        for block in prints
    }


def prepare(final: Path, draft: Path) -> None:
    if final.exists():
        raise ValueError(f"{final} is there already: give another folder, or go on from it")
    draft.mkdir(parents=True)


def write(path: Path, parts: Parts, pieces: Sequence[Piece]) -> int:
    """The checksum of what is on the disk now."""
    numbers = {entry(key, block): parts[key].blocks[block].to("cpu", copy=True) for key, block in pieces}
    try:
        save_file({name: x.contiguous() for name, x in numbers.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): make room, or save to another folder") from error
    flush(path)
    return checksum(path)


def entry(key: str, block: Block) -> str:
    """The name of a piece in its file."""
    return f"{key}{said(block)}"


def commit(draft: Path, final: Path, record: dict[str, Any]) -> None:
    for name in record["files"]:
        if not (draft / name).exists():
            raise ValueError(f"rank 0 does not see {draft / name}: save to a folder that all ranks have in common")
    (draft / INDEX).write_text(json.dumps(sealed(record)))
    flush(draft / INDEX)
    flush(draft)
    os.rename(draft, final)
    flush(final.parent)
    for other in final.parent.glob("step-*.draft"):  # of jobs that were killed while they saved
        if int(DRAFT.fullmatch(other.name)[1]) <= record["step"]:
            shutil.rmtree(other)


# ---- load ------------------------------------------------------------------------------------------------


def newest(folder: str | Path) -> Path | None:
    """The checkpoint of the last step in a folder; None where there is none."""
    steps = {int(found[1]): path for path in Path(folder).glob("step-*") if (found := STEP.fullmatch(path.name))}
    return steps[max(steps)] if steps else None


def load(where: str | Path, held: Held, group: ProcessGroup | None = None) -> Any:
    """Take this rank's part of a checkpoint; returns the values that were given to `save`.

    Raises ValueError, on all ranks, before any tensor has changed: for what is no checkpoint, or no longer as it was
    written; for a newer format; and for another model, with the names that differ.
    """
    where, rank, ranks = Path(where), dist.get_rank(group), dist.get_world_size(group)

    def look() -> dict[str, Any]:
        record = opened(where)
        for name, written in [*record["files"].items()][rank::ranks]:
            require_as_written(where / name, written)
        return record

    record, *_ = on_all_ranks(look, group)
    index = {key: Stored.of_json(told) for key, told in record["tensors"].items()}
    if held.optimizer is None:
        index = {key: stored for key, stored in index.items() if key.startswith("model/")}
    mine = {key: (part.shape, part.dtype) for key, part in held.parts().items() if key.startswith("model/")}
    require_fitting(where, index, everybodys(mine, group))
    held.make_room(kept(index))
    with ExitStack() as stack, torch.no_grad():
        files = {name: stack.enter_context(safe_open(where / name, "pt")) for name in record["files"]}
        for key, part in held.parts().items():
            for block, x in part.blocks.items():
                for piece, name in index[key].files.items():
                    if (both := common(block, piece)) is not None:
                        x[within(both, block)] = read(files[name], entry(key, piece), within(both, piece))
    held.loaded()
    return record["values"]


def read(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    """Only these elements of a piece are read."""
    return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def opened(where: Path) -> dict[str, Any]:
    try:
        found = json.loads((where / INDEX).read_bytes())
        record = found["record"]
        if found != sealed(record):
            raise ValueError("its checksum is another")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{where} is no checkpoint, or not a whole one ({error}): load another one") from error
    if record["format"] != FORMAT:
        raise ValueError(f"{where} has format {record['format']}, and this course reads {FORMAT}: update it")
    return record


def require_as_written(path: Path, written: int) -> None:
    if not FILE.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is missing, or no file of a checkpoint: put back what was there, or load another one")
    if checksum(path) != written:
        raise ValueError(f"{path} does not hold what was written there: put back what was there, or load another one")


def require_fitting(where: Path, index: Index, found: Mapping[int, Mapping[str, tuple[Any, Any]]]) -> None:
    """Every tensor that a rank asks for is there as it is asked for, and all that is there is asked for."""
    asked = {key: told for wanted in found.values() for key, told in wanted.items()}
    model = {key: stored for key, stored in index.items() if key.startswith("model/")}
    differ = [f"{key!r} is not in it" for key in sorted(asked.keys() - model.keys())]
    differ += [f"nobody asks for its {key!r}" for key in sorted(model.keys() - asked.keys())]
    for key in sorted(asked.keys() & model.keys()):
        (shape, dtype), stored = asked[key], model[key]
        if (stored.shape, stored.dtype) != (shape, dtype):
            differ.append(f"{key!r} is {stored.dtype} of shape {stored.shape} in it and {dtype} of shape {shape} here")
    if differ:
        more = f"; and {len(differ) - MOST} more" if len(differ) > MOST else ""
        raise ValueError(f"{where} is of another model: {'; '.join(differ[:MOST])}{more}")


def kept(index: Index) -> Kept:
    """By parameter, what its optimizer kept of it."""
    found: dict[str, dict[str, Entry]] = {}
    for key, stored in index.items():
        if key.startswith("optimizer/"):
            name, _, what = key.removeprefix("optimizer/").rpartition("/")
            found.setdefault(name, {})[what] = stored.shape, stored.dtype
    return found
