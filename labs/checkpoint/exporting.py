"""A model's weights out under Hugging Face's names, from any layout, by all ranks together.

    folder/  config.json                         as labs.llama writes it
             model-00001-of-00002.safetensors    whole tensors, one behind the other: what one rank wrote
             model-00002-of-00002.safetensors
             model.safetensors.index.json        which tensor is in which file

Each tensor is written by a rank that has some of it; in rounds, in which each rank gets from the others what it lacks
of its next tensor, and puts it into its file.  So beside its own part of the model, no rank ever has more than one
tensor.  The files are mapped: what is in them, the system has written or is about to.  They have no checksums: a file
that is cut short is told, a changed number is not.

Source: github.com/huggingface/safetensors, "Format".
"""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from labs.agree import compare, first_difference, on_all_ranks
from labs.checkpoint.agreement import Described, agreed, bytes_of, describe, require_equal_copies, tensors_in
from labs.checkpoint.extents import dealt, whole
from labs.checkpoint.index import Index, Stored, rename
from labs.checkpoint.llamas import named, require_all
from labs.checkpoint.parts import Held, Parts
from labs.dtensor.placement import Block
from labs.llama.config_json import write_config
from labs.llama.weights import DTYPES, INDEX, names
from labs.memory.mapped_files import allocated, flush, mapped
from labs.model import Config

Senders = dict[str, dict[Block, int]]  # by tensor, the rank that sends each block of it


def export(folder: str | Path, held: Held, config: Config, group: ProcessGroup | None = None) -> None:
    """Write a folder from which transformers makes the same model: by every rank of the group.

    config: the whole model's.  Until all is written and flushed, the folder is called `<folder>.<a random word>.draft`.

    Raises, on all ranks, ValueError for another model than the config's, for ranks that differ in what they bring, and
    where the folder is there already; OSError where the disk is full, or cannot be written.
    """
    folder, rank = Path(folder).expanduser(), dist.get_rank(group)
    index, described, word = compared(held, config, group)
    parts, room = named(held, config), {}
    require_equal_copies([bytes_of(each) for each in described], tensors_in(parts), group)
    writes, senders = shared_out(index, described)
    writers = [other for other, tensors in enumerate(writes) if tensors]
    files = {other: f"model-{i:05}-of-{len(writers):05}.safetensors" for i, other in enumerate(writers, 1)}
    draft = folder.with_name(f"{folder.name}.{word}.draft")
    try:
        on_all_ranks(lambda: prepare(folder, draft) if rank == 0 else None, group)
        mine = {name: index[name] for name in writes[rank]}
        on_all_ranks(lambda: room.update(room_for(draft / files[rank], mine)) if mine else None, group)
        for tensors in zip_longest(*writes):
            collect(tensors, senders, parts, room, group)
        on_all_ranks(lambda: flush(draft / files[rank]) if mine else None, group)
        file_of = {name: files[other] for other in writers for name in writes[other]}
        on_all_ranks(lambda: commit(draft, folder, config, index, file_of) if rank == 0 else None, group)
    finally:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)


def compared(held: Held, config: Config, group: ProcessGroup | None) -> tuple[Index, list[Described], str]:
    """The whole model, of which each rank has brought its part; what each has brought; and a random word."""
    everyones = on_all_ranks(lambda: (config, describe(named(held, config)), secrets.token_hex(4)), group)
    configs, described, (word, *_) = zip(*everyones, strict=True)
    global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    compare(dict(zip(global_ranks, configs, strict=True)), differ_in_config)
    require_all(config, described)
    return agreed(dict(zip(global_ranks, described, strict=True))), described, word


def differ_in_config(rank: int, its: Config, other: int, others: Config) -> str:
    name = first_difference(vars(its), vars(others))
    told = f"{getattr(its, name)} on rank {rank} and {getattr(others, name)} on rank {other}"
    return f"the config's {name} is {told}: give the same on all ranks"


def shared_out(index: Index, described: Sequence[Described]) -> tuple[list[list[str]], Senders]:
    """By rank, the tensors that it writes, of those that it has some of; and who sends it each block."""
    holders: dict[str, dict[Block, list[int]]] = {name: {} for name in index}
    for rank, each in enumerate(described):
        for name, (*_, blocks) in each.items():
            for block in blocks:
                holders[name].setdefault(block, []).append(rank)
    sizes = [
        {(name, whole(shape)): bytes_in(index[name]) for name, (shape, *_, blocks) in each.items() if blocks}
        for each in described
    ]
    writes = [[name for name, _ in pieces] for pieces in dealt(sizes)]
    senders = {
        name: {block: writer if writer in its else its[writer % len(its)] for block, its in holders[name].items()}
        for writer, tensors in enumerate(writes)
        for name in tensors
    }
    return writes, senders


def bytes_in(stored: Stored) -> int:
    return prod(stored.shape) * stored.dtype.itemsize


def prepare(folder: Path, draft: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} is there already: export to another folder")
    draft.mkdir(parents=True)


def room_for(path: Path, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """A new file, with a header that names these tensors; what is written to those returned is in the file."""
    tensors = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))  # so that each one is aligned
    places = dict(zip(tensors, pairwise(accumulate(map(bytes_in, tensors.values()), initial=0)), strict=True))
    told = {
        name: {"dtype": DTYPES[its.dtype], "shape": its.shape, "data_offsets": places[name]}
        for name, its in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | told).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    layout = [["file", "uint8", [len(header) + sum(map(bytes_in, tensors.values()))]]]
    try:
        file = mapped(allocated(path, layout), layout, shared=True)["file"]
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error}): make room, or export to another folder") from error
    file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    data = file[len(header) :]
    return {name: data[slice(*places[name])].view(its.dtype).view(its.shape) for name, its in tensors.items()}


def collect(
    tensors: Sequence[str | None],
    senders: Senders,
    parts: Parts,
    room: Mapping[str, Tensor],
    group: ProcessGroup | None,
) -> None:
    """One round.  tensors: by rank, the one that it gets, from all that have some of it."""
    rank, messages, arriving = dist.get_rank(group), [], []
    for writer, name in enumerate(tensors):
        for block, sender in senders[name].items() if name else ():
            if writer == sender == rank:
                room[name][block.slices] = parts[name].blocks[block]
            elif sender == rank:
                x = parts[name].blocks[block].contiguous()
                messages.append(P2POp(dist.isend, x, group=group, group_peer=writer))
            elif writer == rank:
                its, *_ = parts[name].blocks.values()
                x = its.new_empty(block.shape)
                arriving.append((room[name][block.slices], x))
                messages.append(P2POp(dist.irecv, x, group=group, group_peer=sender))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    for place, x in arriving:
        place.copy_(x)


def commit(draft: Path, folder: Path, config: Config, index: Index, file_of: Mapping[str, str]) -> None:
    write_config(config, index[names(config)["embed.weight"]].dtype, draft)
    record = {"metadata": {"total_size": sum(map(bytes_in, index.values()))}, "weight_map": file_of}
    (draft / INDEX).write_text(json.dumps(record, indent=2), encoding="utf-8")
    for name in ("config.json", INDEX):
        flush(draft / name)
    rename(draft, folder, {*file_of.values()})
