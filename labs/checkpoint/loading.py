"""Load a checkpoint into any layout: each rank reads what lies in its blocks, wherever it was cut.

    look                            are all files there, and all checksums right?  each rank looks at its share of them
    tell each other what is wanted  every tensor, in its shape and its dtype, and no tensor is left over
    read                            of each piece, what this rank has a block for

What is not as it was written, or another model's, is told before a single tensor has changed.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import everybodys, on_all_ranks
from labs.checkpoint.extents import common, within
from labs.checkpoint.index import Index, Stored, entry, opened, require_as_written
from labs.checkpoint.parts import Entry, Held, Kept

MOST = 5  # differences that are named


@dataclass(frozen=True)
class Remembered:
    """What a checkpoint has beside tensors: own is what each of the ranks that saved gave as its own, by rank."""

    step: int
    values: Any
    own: list[Any]


def load(where: str | Path, held: Held, group: ProcessGroup | None = None) -> Remembered:
    """Take this rank's part of a checkpoint; returns what else was given to `save`.

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
    found = everybodys((mine, held.optimized()), group)
    require_fitting(where, index, found)
    held.make_room(kept(index))
    with ExitStack() as stack, torch.no_grad():
        files = {name: stack.enter_context(safe_open(where / name, "pt")) for name in record["files"]}
        for key, part in held.parts().items():
            for block, x in part.blocks.items():
                for piece, name in index[key].files.items():
                    if (both := common(block, piece)) is not None:
                        x[within(both, block)] = read(files[name], entry(key, piece), within(both, piece))
    held.loaded()
    return Remembered(record["step"], record["values"], record["own"])


def read(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    """Only these elements of a piece are read."""
    return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def require_fitting(where: Path, index: Index, found: Mapping[int, tuple[Mapping[str, Any], set[str]]]) -> None:
    """Every tensor that a rank asks for is there as it is asked for, and all that is there is asked for."""
    asked = {key: told for wanted, _ in found.values() for key, told in wanted.items()}
    optimized = {name for _, names in found.values() for name in names}
    model = {key: stored for key, stored in index.items() if key.startswith("model/")}
    differ = [f"{key!r} is not in it" for key in sorted(asked.keys() - model.keys())]
    differ += [f"nobody asks for its {key!r}" for key in sorted(model.keys() - asked.keys())]
    differ += [f"no optimizer has its {name!r}" for name in sorted(kept(index).keys() - optimized) if not differ]
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
