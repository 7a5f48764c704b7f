"""The export of a model's weights under Hugging Face's names: by all ranks together, from any layout.

    folder/  config.json                         the shape of the model, written by labs.llama
             model-00001-of-00002.safetensors    whole tensors, one after the other, written by one rank
             model-00002-of-00002.safetensors
             model.safetensors.index.json        names the file of each tensor

Each tensor is written by a rank that holds a part of it.  In each round, each rank receives the missing blocks of its
next tensor from the other ranks, and puts them into its file.  So beyond its own part of the model, no rank ever holds
more than one tensor.  The files are mapped into memory, and the system writes them to the disk.  Files in this format
have no checksums: a reader notices a truncated file, but not a changed number.

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
from labs.checkpoint.index import Index, Stored, rename
from labs.checkpoint.parts import Held, Parts
from labs.checkpoint.pretrained import named, require_all
from labs.checkpoint.tensor_blocks import assign_pieces, whole
from labs.dtensor.placement import Block
from labs.llama.config_json import write_config
from labs.llama.weights import DTYPES, INDEX, names
from labs.memory.mapped_files import allocated, flush, mapped
from labs.model import Config

Senders = dict[str, dict[Block, int]]  # for each tensor, the rank that sends each of its blocks


def export(folder: str | Path, held: Held, config: Config, group: ProcessGroup | None = None) -> None:
    """Write a folder from which transformers loads the same model; every rank of the group must call this function.

    config: the whole model's configuration

    The folder is called `<folder>.<a random word>.draft` until all files are written and flushed.

    Raises, on all ranks, ValueError if the model is not the config's, if ranks hold parts that do not fit together, and
    if the folder exists already; OSError if the disk is full, or cannot be written.
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
    """Return an index of the whole model, each rank's description of its part, and a random word for the draft."""
    everyones = on_all_ranks(lambda: (config, describe(named(held, config)), secrets.token_hex(4)), group)
    configs, described, (word, *_) = zip(*everyones, strict=True)
    global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    compare(dict(zip(global_ranks, configs, strict=True)), differ_in_config)
    require_all(config, described)
    return agreed(dict(zip(global_ranks, described, strict=True))), described, word


def differ_in_config(rank: int, its: Config, other: int, others: Config) -> str:
    name = first_difference(vars(its), vars(others))
    both = f"{getattr(its, name)} on rank {rank} and {getattr(others, name)} on rank {other}"
    return f"the config's {name} is {both}: give the same on all ranks"


def shared_out(index: Index, described: Sequence[Described]) -> tuple[list[list[str]], Senders]:
    """Decide which rank writes each tensor, always one that holds a part of it, and which rank sends each block."""
    holders: dict[str, dict[Block, list[int]]] = {name: {} for name in index}
    for rank, each in enumerate(described):
        for name, (*_, blocks) in each.items():
            for block in blocks:
                holders[name].setdefault(block, []).append(rank)
    sizes = [
        {(name, whole(shape)): bytes_in(index[name]) for name, (shape, *_, blocks) in each.items() if blocks}
        for each in described
    ]
    writes = [[name for name, _ in pieces] for pieces in assign_pieces(sizes)]
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
    """Make a safetensors file with room for these tensors, and return tensors that are mapped to their places in it."""
    tensors = dict(sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize))  # this order aligns each tensor
    places = dict(zip(tensors, pairwise(accumulate(map(bytes_in, tensors.values()), initial=0)), strict=True))
    entries = {
        name: {"dtype": DTYPES[its.dtype], "shape": its.shape, "data_offsets": places[name]}
        for name, its in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
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
    """Run one round of an export: each rank receives the blocks of one tensor.

    tensors: for each rank, the name of the tensor that it receives, or None
    """
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
