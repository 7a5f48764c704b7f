"""The quickest schedule that there is, found by search; with one stage per rank, and a limit of activations alive.

    search(4, 6, most_alive=[4, 3, 2, 1])                 time 27: with its activations alive, nothing beats 1F1B
    search(4, 6, most_alive=[4, 3, 2, 1], split=True)     time 24: unless each backward is split

**Micro-batches are alike, so at each stage the first to come is the first to go.**  In any other lists, make the k-th F
of every stage that of micro-batch k, and the k-th backward, too: what they need is there in time, and nothing begins
later.  So a rank has two queues, of F's and of B's, or three with I's and W's, and lists are ways to merge them.  The
limit is a need like others, then: where 4 may be alive, the F of micro-batch 6 needs the B of micro-batch 2.

**Branch** (Giffler and Thompson 1960).  Of all instructions that have what they need, look at the one that could end
first.  What its rank does next begins before that end: otherwise there would be time to do this one before it.

**Bound** (Carlier and Pinson 1989).  Each instruction has a head, before which it cannot begin, and a tail, what others
still have to do when it has ended.  If a rank might interrupt its instructions, it would do best to turn to the longest
tail always (Jackson 1955), and how long that takes is soon computed: no lists take less.  A beginning of lists whose
bound is not below the time of the best ones is dropped.

**Compare.**  Of two beginnings with the same instructions done, where one has no head later than the other, the other
is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import le

from labs.pp.instructions import B as Backward
from labs.pp.instructions import F as Forward
from labs.pp.instructions import I as Input
from labs.pp.instructions import Instruction, makes, needs
from labs.pp.instructions import W as Weights
from labs.pp.schedules import Schedule, require
from labs.pp.simulation import Cost, Simulation, by_stage, simulate

ROUNDING = 1e-9  # lists that are quicker by so small a part are not quicker


@dataclass(frozen=True, repr=False)
class Best:
    """The quickest lists found.  None take less time than `at_least`."""

    schedule: Schedule
    simulation: Simulation
    at_least: float
    looked_at: int  # beginnings

    @property
    def proven(self) -> bool:
        """Whether no others are quicker."""
        return self.at_least >= self.simulation.time * (1 - ROUNDING)

    def __repr__(self) -> str:
        told = f"no lists take less time (beginnings looked at: {self.looked_at})"
        if not self.proven:
            told = (
                f"the search stopped at {self.looked_at} beginnings: there may be lists that take less time, down to "
                f"{self.at_least:g}; give it more `beginnings`, or a smaller case"
            )
        return f"{self.simulation!r}\n{told}"


def search(
    ranks: int,
    microbatches: int,
    most_alive: int | Sequence[int],
    split: bool = False,
    F: Cost = 1,
    B: Cost = 2,
    I: Cost = 1,  # noqa: E741
    W: Cost = 1,
    send: Cost = 0,
    beginnings: int = 10_000,
) -> Best:
    """Of all lists in which no rank ever has more activations alive than this (one number, or one per rank), the
    quickest.

    split: each backward is an I and a W.  Costs: as for `simulate`.  beginnings: how many to look at.
    """
    require("search", ranks, microbatches, stages_per_rank=1)
    costs = {"F": F, "B": B, "I": I, "W": W, "send": send}
    work = Work(ranks, microbatches, limits(most_alive, ranks), split, costs)
    left, seen, best, looked_at = [work.nothing_done()], {}, None, 0
    while left and (best is None or looked_at < beginnings):
        beginning = left.pop()
        if (best and beginning.bound >= best.bound * (1 - ROUNDING)) or not is_new(beginning, seen):
            continue
        looked_at += 1
        if len(beginning.order) == len(work.all):
            best = beginning
        else:
            left += sorted(work.branches(beginning), key=lambda branch: branch.bound, reverse=True)
    lists = work.lists(best)
    return Best(lists, simulate(lists, **costs), min(each.bound for each in (best, *left)), looked_at)


@dataclass(frozen=True)
class Beginning:
    """order: of what is done.  free: by rank, from when on.  heads: of all that there is; where it is done, its begin.
    bound: no lists that begin so take less time."""

    order: tuple[int, ...]
    free: tuple[float, ...]
    heads: tuple[float, ...]
    bound: float


class Work:
    """All that there is to do: instructions, each behind what it needs, and from here on known by their numbers.

    needs: by instruction, of what it needs, and for how long that is under way.
    """

    def __init__(self, ranks: int, microbatches: int, most_alive: Sequence[int], split: bool, costs: dict[str, Cost]):
        costs = {name: by_stage(name, cost, ranks) for name, cost in costs.items()}
        kinds = (Forward, Input, Weights) if split else (Forward, Backward)
        stages = {kind: range(ranks) if kind is Forward else range(ranks)[::-1] for kind in kinds}
        self.all = [kind(s, m) for m in range(microbatches) for kind in kinds for s in stages[kind]]
        self.rank = [x.stage for x in self.all]
        self.cost = [costs[type(x).__name__][x.stage] for x in self.all]
        number = {makes(x): i for i, x in enumerate(self.all)}
        self.needs = []
        for x in self.all:
            s, m, behind = x.stage, x.microbatch, most_alive[x.stage]
            all_needs = needs(x, ranks)
            if m > 0:
                all_needs.append(type(x)(s, m - 1))
            if type(x) is Forward and m >= behind:
                all_needs.append(kinds[-1](s, m - behind))
            self.needs.append([(number[makes(y)], costs["send"][y.stage] if y.stage != s else 0) for y in all_needs])
        self.tails = [0.0] * len(self.all)
        for i in reversed(range(len(self.all))):
            for need, under_way in self.needs[i]:
                self.tails[need] = max(self.tails[need], under_way + self.cost[i] + self.tails[i])

    def nothing_done(self) -> Beginning:
        return self.beginning((), (0.0,) * (1 + max(self.rank)), [0.0] * len(self.all))

    def branches(self, of: Beginning) -> list[Beginning]:
        done = set(of.order)
        ready = [i for i in range(len(self.all)) if i not in done and all(need in done for need, _ in self.needs[i])]
        ends = {i: of.heads[i] + self.cost[i] for i in ready}
        first = min(ready, key=ends.get)
        return [
            self.followed_by(i, of)
            for i in ready
            if i == first or (self.rank[i] == self.rank[first] and of.heads[i] < ends[first])
        ]

    def followed_by(self, i: int, of: Beginning) -> Beginning:
        free = list(of.free)
        free[self.rank[i]] = of.heads[i] + self.cost[i]
        return self.beginning((*of.order, i), tuple(free), list(of.heads))

    def beginning(self, order: tuple[int, ...], free: tuple[float, ...], heads: list[float]) -> Beginning:
        done, waiting = set(order), [[] for _ in free]
        for i, rank in enumerate(self.rank):
            if i not in done:
                arrivals = [heads[need] + self.cost[need] + under_way for need, under_way in self.needs[i]]
                heads[i] = max([free[rank], *arrivals])
                waiting[rank].append((heads[i], self.cost[i], self.tails[i]))
        return Beginning(order, free, tuple(heads), max([*free, *map(interrupted, waiting)]))

    def lists(self, of: Beginning) -> Schedule:
        lists: list[list[Instruction]] = [[] for _ in of.free]
        for i in of.order:
            lists[self.rank[i]].append(self.all[i])
        return Schedule(lists)


def interrupted(waiting: list[tuple[float, float, float]]) -> float:
    """When a rank's work, (head, cost, tail) each, and all behind it, are over, if the rank always turns to the longest
    tail."""
    waiting, begun, now, over = sorted(waiting, reverse=True), [], 0.0, 0.0
    while waiting or begun:
        if not begun:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, cost, tail = waiting.pop()
            heappush(begun, (-tail, cost))
        minus_tail, cost = heappop(begun)
        until = min(now + cost, waiting[-1][0] if waiting else inf)
        if until < now + cost:
            heappush(begun, (minus_tail, now + cost - until))
        else:
            over = max(over, until - minus_tail)
        now = until
    return over


def is_new(beginning: Beginning, seen: dict[frozenset[int], list[tuple[float, ...]]]) -> bool:
    """Whether none that was seen has the same done, and nothing later; from now on this one is seen, too."""
    done = frozenset(beginning.order)
    times = (max(beginning.free), *(head for i, head in enumerate(beginning.heads) if i not in done))
    others = seen.setdefault(done, [])
    if any(all(map(le, other, times)) for other in others):
        return False
    others.append(times)
    return True


def limits(most_alive: int | Sequence[int], ranks: int) -> Sequence[int]:
    most = most_alive if isinstance(most_alive, Sequence) else [most_alive] * ranks
    if len(most) != ranks or min(most) < 1:
        raise ValueError(f"most_alive={most_alive!r}: give 1 or more, or a number for each of {ranks} ranks")
    return most
