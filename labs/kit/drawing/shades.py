"""The colours of a schedule's instructions: one per kind, and on a rank with several stages paler stage by stage."""

from labs.kit.drawing.palette import INSTRUCTIONS, paler
from labs.pp.instructions import Instruction, Lists

PALEST = 0.62  # the share of white in a rank's last stage


class Fills:
    """The colours of all instructions of these lists; fills[instruction] is the colour of one."""

    def __init__(self, lists: Lists):
        self.white: dict[int, float] = {}  # by stage
        for order in lists:
            stages = sorted({x.stage for x in order})
            self.white |= {s: PALEST * k / max(1, len(stages) - 1) for k, s in enumerate(stages)}

    def __getitem__(self, x: Instruction) -> str:
        return paler(INSTRUCTIONS[type(x).__name__], self.white[x.stage])

    def by_shade(self) -> dict[str, list[int]]:
        """Return {colour of a forward: the stages that have it}."""
        found: dict[str, list[int]] = {}
        for stage, white in self.white.items():
            found.setdefault(paler(INSTRUCTIONS["F"], white), []).append(stage)
        return found
