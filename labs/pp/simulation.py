"""Simulation of a schedule: the times at which each instruction begins and ends, for given costs.

    simulate(gpipe(2, 2))            rank 0   0F0 0F1  ·   ·   ·  0B0──── 0B1────
                                     rank 1    ·  1F0 1F1 1B0──── 1B1────

An instruction begins as soon as the instruction before it on its rank has ended, and the tensors that it needs have
been computed, and received if they come from another rank.  Ranks compute while messages are in flight.

    time      the time at which the last instruction ends
    ideal     the time that the busiest rank computes; with these stages on these ranks, no schedule takes less
    bubble    time / ideal - 1; source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2
    alive     the number of micro-batches whose activations each rank holds, over time
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from labs.pp.checker import alive, in_order, ranks_of, stages_of, validate
from labs.pp.instructions import F as Forward
from labs.pp.instructions import Instruction, Lists, makes, needs

Cost = float | Sequence[float]  # one for all stages, or one for each


@dataclass(frozen=True, repr=False)
class Simulation:
    """The times at which each instruction of `lists` starts and ends, in the unit of the costs."""

    lists: Lists
    start: dict[Instruction, float]
    end: dict[Instruction, float]

    @property
    def time(self) -> float:
        return max(self.end.values())

    @property
    def busy(self) -> list[float]:
        """Return the time that each rank computes."""
        return [sum(self.end[x] - self.start[x] for x in order) for order in self.lists]

    @property
    def ideal(self) -> float:
        return max(self.busy)

    @property
    def bubble(self) -> float:
        return self.time / self.ideal - 1

    @cached_property
    def alive(self) -> list[list[tuple[float, int]]]:
        """Return, for each rank, (time, number of micro-batches whose activations the rank holds from then on)."""
        return [
            [(self.start[x] if isinstance(x, Forward) else self.end[x], n) for x, n in zip(order, numbers, strict=True)]
            for order, numbers in zip(self.lists, alive(self.lists), strict=True)
        ]

    def __repr__(self) -> str:
        """Draw a line for each rank, and print the totals."""
        most = " ".join(str(max((n for _, n in rank), default=0)) for rank in self.alive)
        totals = (
            f"time {self.time:g}, ideal {self.ideal:g}, bubble {self.bubble:.1%}; activations alive at most: {most}"
        )
        return "\n".join([*grid(self), totals])


def simulate(
    lists: Lists,
    F: Cost = 1,
    B: Cost = 2,
    I: Cost = 1,  # noqa: E741
    W: Cost = 1,
    send: Cost = 0,
) -> Simulation:
    """Compute the times at which each instruction of a schedule begins and ends.

    F, B, I, W: the time of each kind of instruction; one number, or one per stage.
    send: the time that a stage's result is in flight to a stage on another rank.

    Raises WrongSchedule for lists that cannot be run, and ValueError for costs that are negative or all 0.
    """
    validate(lists)
    of = as_far_as_it_goes(lists, stages_of(lists), F=F, B=B, I=I, W=W, send=send)
    if of.ideal == 0:
        raise ValueError(
            "all instructions take 0: the bubble is a fraction of their time, so give one kind of instruction a time"
        )
    return of


def as_far_as_it_goes(lists: Lists, stages: int, **given: Cost) -> Simulation:
    """Simulate those instructions of unchecked lists that can be run, in a pipeline of this many stages."""
    costs = {name: by_stage(name, cost, stages) for name, cost in given.items()}
    ranks, ran = ranks_of(lists), [[] for _ in lists]
    free, start, end, made = [0] * len(lists), {}, {}, {}
    for rank, x in in_order(lists, stages):
        there = [
            made[need] + (costs["send"][need.stage] if ranks[need.stage] != rank else 0) for need in needs(x, stages)
        ]
        start[x] = max([free[rank], *there])
        end[x] = made[makes(x)] = free[rank] = start[x] + costs[type(x).__name__][x.stage]
        ran[rank].append(x)
    return Simulation(ran, start, end)


def by_stage(name: str, cost: Cost, stages: int) -> Sequence[float]:
    costs = cost if isinstance(cost, Sequence) else [cost] * stages
    if len(costs) != stages or not all(0 <= each < inf for each in costs):
        raise ValueError(f"{name}={cost!r}: give a time of at least 0, or one for each of the {stages} stages")
    return costs


# ---- the picture -----------------------------------------------------------------------------------------


def grid(of: Simulation) -> list[str]:
    """Draw a line for each rank; a column is as long as the shortest instruction; a dot is a column of waiting."""
    lasts = [of.end[x] - of.start[x] for x in of.end]
    unit = min((each for each in lasts if each > 0), default=1)
    width = 1 + max(len(repr(x)) for x in of.end)
    lines = []
    for rank, order in enumerate(of.lists):
        line = "·".center(width) * round(of.time / unit)
        for x in order:
            first, last = (width * round(each / unit) for each in (of.start[x], of.end[x]))
            cell = f"{x!r:{width - 1}}".ljust(last - first - 1, "─") + " "
            line = line[:first] + cell + line[first + len(cell) :]
        lines.append(f"rank {rank}   {line}".rstrip(" ·"))
    return lines
