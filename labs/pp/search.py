"""The fastest schedule of all, found by search, with one stage per rank and a limit on the activations alive.

    search(4, 6, most_alive=[4, 3, 2, 1])                 time 27: with the activations of 1F1B, nothing is faster
    search(4, 6, most_alive=[4, 3, 2, 1], split=True)     time 24: a split backward is faster

**Micro-batches are alike, so every stage can take them in the same order.**  In lists with another order, rename the
k-th F of every stage as that of micro-batch k, and do the same with the backwards: each instruction still has in time
what it needs, and none begins later.  So a rank has two queues, of F's and of B's, or three with I's and W's, and its
list merges them.  The limit on activations is one more need: if those of 4 micro-batches may be alive, the F of
micro-batch 6 needs the B of micro-batch 2.

The search extends *beginnings*, lists that are not complete yet, by one instruction at a time.

**Branch** (Giffler and Thompson 1960).  Of all instructions whose needs are met, look at the one that could end first.
The next instruction of its rank begins before that end: otherwise there would be time to run the one looked at before.

**Bound** (Carlier and Pinson 1989).  Each instruction has a head, the earliest time at which it can begin, and a tail,
the time that other instructions still need when it has ended.  If a rank could interrupt its instructions, it would do
best to always work on the one with the longest tail (Jackson 1955).  The time of such interrupted work is computed
quickly, and no lists take less: it is the bound.  A beginning is dropped if its bound is not below the time of the best
lists so far.

**Compare.**  Take two beginnings in which the same instructions are done.  If no head in the first beginning is later
than in the second, the second is dropped.
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

ROUNDING = 1e-9  # a smaller relative difference of times is none


@dataclass(frozen=True, repr=False)
class Best:
    """The result of a search: the fastest lists that were found; no lists at all take less time than `at_least`."""

    schedule: Schedule
    simulation: Simulation
    at_least: float
    looked_at: int  # the number of beginnings

    @property
    def proven(self) -> bool:
        """Return whether the search has proven that no lists can be faster."""
        return self.at_least >= self.simulation.time * (1 - ROUNDING)

    def __repr__(self) -> str:
        verdict = f"no lists take less time (beginnings looked at: {self.looked_at})"
        if not self.proven:
            verdict = (
                f"the search stopped at {self.looked_at} beginnings: there may be lists that take less time, down to "
                f"{self.at_least:g}; give it more `beginnings`, or fewer ranks or micro-batches"
            )
        return f"{self.simulation!r}\n{verdict}"


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
    """Find the fastest schedule in which no rank holds the activations of more than `most_alive` micro-batches.

    most_alive: one number, or one per rank.
    split: whether each backward is an I and a W.
    F, B, I, W, send: costs, as for `simulate`.
    beginnings: the number of beginnings of lists after which the search stops.
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
    """A beginning: lists that are not complete yet.

    order: the numbers of the instructions that are done, in order.
    free: the time from which each rank is free.
    heads: the earliest time at which each instruction can begin; if it is done, the time at which it began.
    bound: a time that no lists with this beginning can undercut.
    """

    order: tuple[int, ...]
    free: tuple[float, ...]
    heads: tuple[float, ...]
    bound: float


class Work:
    """All instructions of a schedule, each after those that it needs; the search knows instructions by their indices.

    needs: for each instruction, pairs (index of an instruction that it needs, time of the message between them).
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
    """Return the time at which a rank's instructions and all their tails end, if it always works on the longest tail.

    waiting: (head, cost, tail) of each instruction that the rank has yet to run.
    """
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
    """Return whether no beginning in `seen` has the same instructions done and no later times; add it if so."""
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
