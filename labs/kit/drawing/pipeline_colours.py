"""The colours of a pipeline schedule: one per kind of instruction, and paler for the later stages of a rank."""

from labs.kit.drawing.palette import INSTRUCTIONS, paler
from labs.pp.instructions import Instruction, Lists

PALEST = 0.62  # the share of white in the colour of a rank's last stage


class Fills:
    """The colours of a schedule's instructions: Fills(lists)[instruction] is the colour of that instruction."""

    def __init__(self, lists: Lists):
        self.white: dict[int, float] = {}  # {stage: share of white}
        for order in lists:
            stages = sorted({x.stage for x in order})
            self.white |= {s: PALEST * k / max(1, len(stages) - 1) for k, s in enumerate(stages)}

    def __getitem__(self, x: Instruction) -> str:
        return paler(INSTRUCTIONS[type(x).__name__], self.white[x.stage])

    def by_shade(self) -> dict[str, list[int]]:
        """Return {colour of a forward: the stages whose forwards have that colour}."""
        found: dict[str, list[int]] = {}
        for stage, white in self.white.items():
            found.setdefault(paler(INSTRUCTIONS["F"], white), []).append(stage)
        return found
