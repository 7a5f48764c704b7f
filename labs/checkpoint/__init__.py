"""A training that survives: what all ranks hold between them, on disk, and back in any other layout.

In this order:

    extents     where a part of a tensor lies in the whole; who writes what
    parts       what this rank holds of a training, by name: under labs.ddp, zero, fsdp, tp, pp
    saving      save, load: each rank writes its own pieces, and reads only what it needs; PyTorch calls it
                torch.distributed.checkpoint
"""

# ruff: noqa: F401

from labs.checkpoint.parts import Held, HeldByZero, Part
from labs.checkpoint.saving import load, newest, save
