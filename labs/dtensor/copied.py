"""Parts of a DTensor that are copies, although parts of a plain tensor would share its memory.

A slice, a chunk or a view of a tensor shares the tensor's memory.  A part of a DTensor does so, too, block by block, if
no number has to move to another rank, as in w[:, :2] of a `w` that is placed as Shard(0).  For w[:2], numbers move to
other ranks, and the part is a copy.  In one process, a write to a part would change w, and a write to w would change
the part, but a copied part does not follow.  So writing to a copied part is refused, and so is reading a copied part of
w after a write to w, as long as w exists.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def mark_copies(whole: Tensor, parts: Sequence[Tensor]) -> None:
    """Tell copied parts the version and spec of the whole tensor, and whether it is a parameter, while it exists."""
    memory = StorageWeakRef(whole._local_tensor.untyped_storage())
    now = version(whole), whole.spec, whole.is_leaf and whole.requires_grad
    for part in parts:
        if whole.copied() or StorageWeakRef(part._local_tensor.untyped_storage()) != memory:
            part.copied = whole.copied if whole.copied() else lambda: None if memory.expired() else now


def require_as_shared(x: Tensor, written_by: str = "") -> None:
    """Raise RuntimeError if `x` is a copied part that is about to be written to, or whose whole tensor was written to.

    written_by: name of the operation that is about to write to `x`, if any
    """
    if not (whole := x.copied()) or (not written_by and version(x) == whole[0]):
        return
    what = f"{written_by}_ writes to" if written_by else "the whole was written to before a use of"
    raise RuntimeError(
        f"{what} a part of a DTensor, a copy of shape {tuple(x.shape)}, since numbers of the whole, {whole[1].shape} "
        f"as {list(whole[1].placements)}, had to move for it: neither sees what is written to the other. Write to "
        "full_tensor() of the whole, then whole.copy_(distribute_tensor(it, mesh, placements)), or before tensors are "
        "laid out (before fully_shard); clone() a part that is to be a tensor of its own"
    )


def require_no_part_of_parameter(x: Tensor) -> None:
    """Raise RuntimeError if to_local() is called on a copied part of a parameter while autograd is off.

    A write to the memory of a copy would not reach the parameter.
    """
    if not torch.is_grad_enabled() and (whole := x.copied()) and whole[2]:
        raise RuntimeError(
            f"to_local() of a part of a parameter, a copy of shape {tuple(x.shape)}: what is written there would not "
            "reach the parameter. To read it, part.clone().to_local(); to write, parameter.to_local() has this rank's "
            "rows, or change tensors before they are laid out (before fully_shard)"
        )


def version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
