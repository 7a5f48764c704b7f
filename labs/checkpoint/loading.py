"""The loading of a checkpoint into any layout: each rank reads its own blocks, however the tensors were cut.

    look       each rank checks its share of the files: are they all there, and are their checksums right?
    compare    the checkpoint must have the ranks' tensors in their shapes and dtypes, and no others; the optimizer must
               be of the same kind, with a place for all state that was saved
    read       each rank reads, of each piece in the files, the part that lies in its own blocks

A damaged file or another model is found before any tensor changes.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import compare, fingerprint, first_difference, on_all_ranks
from labs.checkpoint.index import Index, Stored, entry, opened, require_as_written
from labs.checkpoint.optimizer_state import Entries, Entry, Kept, Options
from labs.checkpoint.parts import Groups, Held, Parts
from labs.checkpoint.tensor_blocks import common, within
from labs.dtensor.placement import Block
from labs.memory.disk import sealed

MOST = 5  # the largest number of differences that an error names


@dataclass(frozen=True)
class Remembered:
    """The values that a checkpoint holds besides tensors.

    values: the values that all ranks saved together
    own: the values that each rank saved for itself, in the order of the ranks that saved
    """

    step: int
    values: Any
    own: list[Any]


def load(where: str | Path | None, held: Held, group: ProcessGroup | None = None) -> Remembered:
    """Load this rank's part of a checkpoint into its tensors, and return the other values that were given to `save`.

    where: the checkpoint's folder, as `save` or `newest` returns it
    held: the state that this rank holds, in any layout
    group: the ranks that load; by default all ranks

    Raises ValueError, on all ranks and before any tensor changes: if `where` is not a checkpoint, or was damaged; if
    its files do not have what its index says; if its format is another one; and if it has another model or optimizer,
    with the names that differ.
    """
    record, index = looked_at(where, group)
    where = Path(where).expanduser()

    def ask() -> tuple[dict[str, Entry], Groups]:
        return {key: (part.shape, part.dtype) for key, part in held.parts({}).items()}, held.groups()

    asked, groups = zip(*on_all_ranks(ask, group), strict=True)
    require_fitting(where, index, asked)
    if any(groups):
        require_optimizer(where, kept(index), record["options"], [*chain.from_iterable(groups)])

    room: Entries = {}
    parts: Parts = {}
    files: dict[str, Any] = {}
    with ExitStack() as stack, torch.no_grad():

        def prepare() -> None:
            room.update(held.room(kept(index)))
            parts.update(held.parts(room))
            files.update((name, stack.enter_context(safe_open(where / name, "pt"))) for name in record["files"])
            require_equal_where_one(where, index, files, parts)

        def take() -> None:
            for part, key in {id(part): (part, key) for key, part in parts.items()}.values():
                for block, x in part.blocks.items():
                    fill(x, block, index[key], files)
            held.give_back(parts)

        on_all_ranks(prepare, group)
        on_all_ranks(take, group)
        held.loaded(room, record["options"])
    return Remembered(record["step"], record["values"], record["own"])


def looked_at(where: str | Path | None, group: ProcessGroup | None) -> tuple[dict[str, Any], Index]:
    """Return a checkpoint's record and index, after each rank has checked its share of the files.

    Raises ValueError, on all ranks, if a file of the checkpoint is damaged, or if ranks find different checkpoints.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    record: dict[str, Any] = {}
    index: Index = {}

    def look() -> int:
        if where is None:
            raise ValueError(
                "there is no checkpoint: newest(folder) returns None before the first save, so check for it"
            )
        path = Path(where).expanduser()
        found, its = opened(path)
        pieces = in_files(its)
        for name, written in [*found["files"].items()][rank::ranks]:
            require_as_written(path / name, written)
            require_entries(path / name, pieces.get(name, {}))
        record.update(found), index.update(its)
        return sealed(found)["checksum"]

    checksums = dict(enumerate(on_all_ranks(look, group)))
    compare(checksums, partial(differ_in_index, where))
    return record, index


def differ_in_index(where: Any, rank: int, its: int, other: int, others: int) -> str:
    return f"ranks {rank} and {other} found two different checkpoints at {where}: load one that all ranks see alike"


def in_files(index: Index) -> dict[str, dict[str, Entry]]:
    """Return, for each file, the names, shapes and dtypes of the pieces that the index expects in it."""
    found: dict[str, dict[str, Entry]] = {}
    for stored in index.values():
        for block, name in stored.files.items():
            found.setdefault(name, {})[entry(stored.key, block)] = block.shape, stored.dtype
    return found


def require_entries(path: Path, pieces: Mapping[str, Entry]) -> None:
    try:
        with safe_open(path, "pt") as file:
            names = {*file.keys()}
            for name, (shape, dtype) in pieces.items():
                if name not in names or tuple(file.get_slice(name).get_shape()) != shape:
                    raise ValueError(f"it has no {name} of shape {shape}")
                none = (slice(0, 0),) * len(shape)  # reads the dtype without the numbers; a 0-dim tensor is read whole
                if (file.get_slice(name)[none] if none else file.get_tensor(name)).dtype != dtype:
                    raise ValueError(f"its {name} is not {dtype}")
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not what the index says ({error}): load another checkpoint") from error


def fill(x: Tensor, block: Block, stored: Stored, files: Mapping[str, Any]) -> Tensor:
    """Copy a block of a stored tensor into `x`, and return `x`."""
    for piece, name in stored.files.items():
        if (both := common(block, piece)) is not None:
            x[within(both, block)] = read(files[name], entry(stored.key, piece), within(both, piece))
    return x


def read(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    """Read the elements in `slices` of a piece in a file, and no others."""
    return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def require_fitting(where: Path, index: Index, found: Sequence[Mapping[str, Entry]]) -> None:
    """Raise ValueError unless the ranks' tensors and the checkpoint's are the same, in names, shapes and dtypes."""
    asked = {key: each for wanted in found for key, each in wanted.items()}
    model = {key: stored for key, stored in index.items() if key.startswith("model/")}
    differ = [f"{key!r} is not in it" for key in sorted(asked.keys() - model.keys())]
    differ += [f"nobody asks for its {key!r}" for key in sorted(model.keys() - asked.keys())]
    for key in sorted(asked.keys() & model.keys()):
        (shape, dtype), stored = asked[key], model[key]
        if (stored.shape, stored.dtype) != (shape, dtype):
            differ.append(f"{key!r} is {stored.dtype} of shape {stored.shape} in it and {dtype} of shape {shape} here")
    refuse(f"{where} is of another model", differ)


def require_optimizer(where: Path, kept: Kept, options: Mapping[str, Options], groups: Groups) -> None:
    """Raise ValueError unless the job's optimizer can take the state and the options in the checkpoint.

    Each parameter with saved state must have an optimizer of the same kind, parameters in one group must have had equal
    options, and the names of a tied parameter must have had the same kinds of state.
    """
    optimized = {name for _, parameters in groups for names in parameters for name in names}
    if not options:
        raise ValueError(f"{where} was saved without an optimizer: load it into Held(model), before one is made")
    differ = [f"no optimizer has its {name!r}" for name in sorted(kept.keys() - optimized)]
    for own, parameters in groups:
        names = [name for names in parameters for name in names if name in options]
        for name, other in pairwise(names):
            if options[name] != options[other]:
                what = first_difference(options[name], options[other])
                differ.append(f"{name!r} and {other!r} have different values of {what!r} in it, but share one here")
        for name in names:
            if options[name]["optimizer"] != own["optimizer"]:
                differ.append(f"{name!r} was trained with {options[name]['optimizer']}, not {own['optimizer']}")
        for name, other in (pair for names in parameters for pair in pairwise(names)):
            if kept.get(name, {}).keys() != kept.get(other, {}).keys():
                differ.append(
                    f"{name!r} and {other!r} are one parameter here, but have different optimizer state in it"
                )
    refuse(f"{where} is of another training", differ)


def refuse(what: str, differ: Sequence[str]) -> None:
    if differ:
        more = f"; and {len(differ) - MOST} more" if len(differ) > MOST else ""
        raise ValueError(f"{what}: {'; '.join(differ[:MOST])}{more}")


def require_equal_where_one(where: Path, index: Index, files: Mapping[str, Any], parts: Parts) -> None:
    """Raise ValueError if one tensor of the job's model is two tensors with different numbers in the checkpoint.

    A tied parameter is stored as two tensors if the stages of a pipeline saved it; these two must be equal.
    """
    first: dict[Any, str] = {}
    for key, part in parts.items():
        memory = tuple((x.data_ptr(), x.shape, x.stride()) for x in part.blocks.values() if x.numel())
        other = first.setdefault(memory or id(part), key)
        for block, x in part.blocks.items() if index[key].key != index[other].key else ():
            one, two = (fingerprint(fill(torch.empty_like(x), block, index[each], files)) for each in (other, key))
            if one != two:
                refuse(f"{where} is of another model", [f"{other!r} and {key!r} are one tensor here, and differ in it"])


def kept(index: Index) -> Kept:
    """Return `{parameter: {state: (shape, dtype)}}` for all optimizer state in a checkpoint."""
    found: dict[str, dict[str, Entry]] = {}
    for key, stored in index.items():
        if key.startswith("optimizer/"):
            name, _, what = key.removeprefix("optimizer/").rpartition("/")
            found.setdefault(name, {})[what] = stored.shape, stored.dtype
    return found
