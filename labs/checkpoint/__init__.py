"""Checkpoints: a training's state, saved by all ranks, and loaded in the same or any other layout.

In this order:

    tensor_blocks    the place of a block in a tensor; the assignment of blocks to the ranks that write them
    optimizer_state  the state and the options that any optimizer keeps for each parameter
    parts            the part of a training that this rank holds, by name: under labs.ddp, zero, fsdp, tp, pp
    index            a checkpoint on disk: its files, and the index that says which file holds which block
    agreement        the comparison of the ranks' parts before a save, and the plan of which rank writes which block
    saving           each rank writes its share of the blocks, and one rename commits the checkpoint
    loading          each rank reads only the blocks that it needs, after all files have been checked
    randomness       the state of a rank's random number generators
    background       training waits only for a copy of its state, which a thread saves
    pretrained       weights alone, loaded from a folder in Hugging Face's format
    exporting        weights alone, written to a folder in Hugging Face's format

PyTorch's own version of this chapter is torch.distributed.checkpoint.
"""

# ruff: noqa: F401

from labs.checkpoint.background import Saver
from labs.checkpoint.exporting import export
from labs.checkpoint.index import newest
from labs.checkpoint.loading import Remembered, load
from labs.checkpoint.parts import Held, HeldByZero
from labs.checkpoint.pretrained import load_pretrained
from labs.checkpoint.randomness import random_state, set_random_state
from labs.checkpoint.saving import save
