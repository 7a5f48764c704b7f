"""Save what all ranks hold between them: each writes its own share, side by side.

    tell each other what is there   a piece that several ranks hold must be equal on them, and one of them writes it
    write and flush                 each its file, into a draft
    commit                          one writes the index, flushes it, and renames the draft

So no rank ever holds the whole, and none waits for one that writes it all.

Source: torch.distributed.checkpoint, docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import on_all_ranks
from labs.checkpoint.agreement import Brought, Share, agreed_plan, bring, bytes_of, require_equal_copies
from labs.checkpoint.index import commit, drafted, entry
from labs.checkpoint.parts import Savable
from labs.memory.mapped_files import checksum, flush


def save(
    folder: str | Path,
    step: int,
    held: Savable,
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
    return finish(partial(bring, folder, step, held, values, own), group)


def finish(share: Callable[[], Share], group: ProcessGroup | None) -> Path:
    """All of a save that is done with other ranks, and on the disk: by whichever thread.

    share: gives what this rank has for it; what it raises, all ranks raise.
    """
    rank, tensors = dist.get_rank(group), {}

    def tell() -> Brought:
        mine, its_tensors = share()
        tensors.update(its_tensors)
        return mine

    brought = on_all_ranks(tell, group)
    plan = agreed_plan(dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), brought, strict=True)))
    require_equal_copies([bytes_of(each.described) for each in brought], tensors, group)
    final, draft = plan.final, plan.final.with_name(f"{plan.final.name}.{brought[0].word}.draft")
    with ExitStack() as stack:
        on_all_ranks(lambda: stack.enter_context(drafted(final, draft)) if rank == 0 else None, group)
        mine = {entry(*piece): tensors[piece] for piece in plan.writes[rank]}
        checksums = on_all_ranks(lambda: write(draft / plan.files[rank], mine), group)
        on_all_ranks(lambda: commit(draft, final, plan.record(checksums)) if rank == 0 else None, group)
    return final


def write(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """The checksum of what is on the disk now."""
    numbers = {name: x.to("cpu").contiguous() for name, x in tensors.items()}
    lie = {name: x.untyped_storage().data_ptr() for name, x in numbers.items()}
    lying = Counter(lie.values())  # safetensors refuses what may lie in the same memory
    try:
        save_file({name: x.clone() if lying[lie[name]] > 1 else x for name, x in numbers.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): make room, or save to another folder") from error
    flush(path)
    return checksum(path)
