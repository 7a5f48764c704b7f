"""A training that survives: what all ranks hold between them, on disk, and back in any other layout.

In this order:

    extents          where a part of a tensor lies in the whole; who writes what
    optimizer_state  what an optimizer keeps of each parameter, whichever that is
    parts            what this rank holds of a training, by name: under labs.ddp, zero, fsdp, tp, pp
    index            a checkpoint on disk: its files, and what lies in which
    agreement        what each rank brings to a save, compared; and the plan that follows
    saving           each rank writes its share, and then all of it has happened, or nothing
    loading          each rank reads only what it needs, after all of it has been looked at
    randomness       where a rank's generators of random numbers stand
    background       training waits for a copy alone, and a thread saves it
    llamas           weights alone, in from a folder as Hugging Face's libraries have them
    exporting        and out to one

PyTorch calls it torch.distributed.checkpoint.
"""

# ruff: noqa: F401

from labs.checkpoint.background import Saver
from labs.checkpoint.exporting import export
from labs.checkpoint.index import newest
from labs.checkpoint.llamas import load_pretrained
from labs.checkpoint.loading import Remembered, load
from labs.checkpoint.parts import Held, HeldByZero
from labs.checkpoint.randomness import random_state, set_random_state
from labs.checkpoint.saving import save
