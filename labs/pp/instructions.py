"""The instructions of a pipeline, and the instructions that each one needs.

    F    forward of a micro-batch through a stage       needs the F of the stage before
    B    the whole backward                             needs its own F, and the backward of the next stage
    I    backward: the input's gradient alone           needs what B needs; the stage before waits for this half
    W    backward: the weights' gradients alone         needs its own I; nothing waits for it

Instructions are written as in PyTorch: 2F0 is stage 2's forward of micro-batch 0.  A *schedule* is a list of
instructions for each rank, and nothing more:

    [[0F0, 0F1, 0B0, 0B1],          rank 0 has stage 0
     [1F0, 1B0, 1F1, 1B1]]          rank 1 has stage 1
"""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Instruction:
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"{self!r}: stages and micro-batches are counted from 0")

    def __repr__(self) -> str:
        return f"{self.stage}{type(self).__name__}{self.microbatch}"


class F(Instruction):
    """The forward of a micro-batch through a stage."""


class B(Instruction):
    """The whole backward of a micro-batch through a stage."""


class I(Instruction):  # noqa: E742
    """The half of a backward that computes the gradient of the stage's input."""


class W(Instruction):
    """The half of a backward that computes the gradients of the stage's weights."""


Lists = Sequence[Sequence[Instruction]]
KINDS = {kind.__name__: kind for kind in (F, B, I, W)}


def makes(instruction: Instruction) -> Instruction:
    """Return the instruction that others wait for: B in place of an I, which computes the same gradient of an input."""
    return B(instruction.stage, instruction.microbatch) if isinstance(instruction, I) else instruction


def needs(instruction: Instruction, stages: int) -> list[Instruction]:
    """Return the instructions that must have run before an instruction, in a pipeline of this many stages."""
    s, m = instruction.stage, instruction.microbatch
    match instruction:
        case F():
            return [F(s - 1, m)] if s > 0 else []
        case B() | I():
            return [F(s, m), B(s + 1, m)] if s < stages - 1 else [F(s, m)]
    return [B(s, m)]


def reader(instruction: Instruction, stages: int) -> Instruction | None:
    """Return the instruction of a neighbouring stage that needs the result of this one, or None."""
    s, m = instruction.stage, instruction.microbatch
    match instruction:
        case F() if s < stages - 1:
            return F(s + 1, m)
        case B() | I() if s > 0:
            return B(s - 1, m)
    return None


# ---- text ------------------------------------------------------------------------------------------------

WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")
# PyTorch's files also list messages, gathers and drops of shards, and, since 2.15, waits.  They follow from the rest.
FOLLOWS = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|((WAIT_)?SEND|RECV)_[FB]\d+)")
AT_ONCE = re.compile(r"\((.*)\)OVERLAP_F_B")


def read(text: str) -> Instruction:
    """Return the instruction that is written as 2F0; raise ValueError for any other text."""
    if not (written := WRITTEN.fullmatch(text.strip())):
        raise ValueError(f"{text!r} is no instruction: write stage, F, B, I or W, and micro-batch, as in 2F0")
    stage, kind, microbatch = written.groups()
    return KINDS[kind](int(stage), int(microbatch))


def read_csv(lines: Iterable[str]) -> list[list[Instruction]]:
    """Return the schedule in a CSV file of PyTorch, which has a row for each rank; `lines` may be the open file.

    Empty cells of the file, in which a rank waits, are left out.  A cell of two instructions that PyTorch runs at once,
    such as (0F4;3B0)OVERLAP_F_B, becomes two instructions.  Raises ValueError for a cell with any other text.
    """
    return [
        [read(word) for cell in row for word in words(cell.strip()) if word and not FOLLOWS.fullmatch(word)]
        for row in csv.reader(lines)
    ]


def words(cell: str) -> list[str]:
    pair = AT_ONCE.fullmatch(cell)
    return pair[1].split(";") if pair else [cell]
