"""The challenge of 08: the cheapest save that survives a power cut, after it and during it.

Four ranks save their state eight times.  A write takes bytes / bandwidth, a flush takes a latency, and from one meeting
to the next all wait for the slowest.  `_shared_disk` derives the possible contents of the disk at each moment from the
calls: the tensors that the file "index" names must be the state of one step, bit by bit.

The bound: all ranks write in parallel the tensors that changed since the last save, and flush them; then one flush is
left for the names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.checkpoint._shared_disk import (
    BANDWIDTH,
    LATENCY,
    TORN,
    Call,
    Files,
    NotingDisk,
    cuts,
    require_own,
    seconds,
)
from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job

RANKS, WIDTH, SAVES, ROOM = 4, 16, 8, 2.25  # ROOM: the size of the disk, × the state
State = Mapping[str, Tensor]


class StateToSave(NamedTuple):
    """The state that four ranks save: tensors, some of them frozen, and some copied on several ranks.

    rows: the rows of each tensor.
    copies: the number of ranks that hold each tensor.
    frozen: the number of tensors that never change; they come first.
    trained: the number of the other tensors that change from save to save.
    """

    rows: tuple[int, ...]
    copies: int = RANKS
    frozen: int = 0
    trained: int = 99


CASES = {
    "copies": StateToSave((128, 4, 48, 48, 4, 96, 4, 48, 4)),
    "halves": StateToSave((72, 72, 4, 4, 32, 32, 4, 4, 80, 80), copies=2),
    "shards": StateToSave((64,) * 4 + (24,) * 4 + (8,) * 4, copies=1),
    "adapters": StateToSave((48,) * 7 + (6,) * 8, frozen=7),
    "experts": StateToSave((24,) * 16, trained=4),
}


def held(case: StateToSave) -> dict[str, tuple[int, list[int]]]:
    """Return {tensor: (its rows, the ranks that hold it)}."""
    first = [i * case.copies % RANKS for i in range(len(case.rows))]
    return {f"tensor {i}": (rows, list(range(first[i], first[i] + case.copies))) for i, rows in enumerate(case.rows)}


def states(case: StateToSave, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield the state at each save: always the same tensors, changed in place."""
    generator, order = torch.Generator().manual_seed(seed), random.Random(0)
    changing = range(case.frozen, len(case.rows))
    state = {name: torch.empty(rows, WIDTH, dtype=torch.float64) for name, (rows, _) in held(case).items()}
    for save in range(SAVES):
        some = order.sample(changing, min(case.trained, len(changing)))
        for number in some if save else range(len(case.rows)):
            state[f"tensor {number}"].normal_(generator=generator)
        yield state


def bound(case: StateToSave) -> float:
    """Return the least seconds that all saves can take; frozen tensors are written only once."""
    everything, trained = sum(case.rows), sum(sorted(case.rows[case.frozen :])[: case.trained])
    return SAVES * 2 * LATENCY + (everything + (SAVES - 1) * trained) * WIDTH * 8 / RANKS / BANDWIDTH


def on_a_rank(fn: Function, cases: Sequence[StateToSave], seeds: Sequence[int]) -> list[list[list[list[Call]]]]:
    """Return this rank's calls to the disk: for each case and each save, lists of calls between two meetings."""
    rank, found = dist.get_rank(), []
    for case, seed in zip(cases, seeds, strict=True):
        disk, memo, saves = NotingDisk(room(case)), {}, []
        for step, state in enumerate(states(case, seed)):
            tensors = held(case)
            fn(disk, step, {name: x for name, x in state.items() if rank in tensors[name][1]}, tensors, memo)
            disk.meet()
            saves.append(disk.meetings[:-1])
            del disk.meetings[:-1]
        found.append(saves)
    return found


def room(case: StateToSave) -> int:
    return int(ROOM * sum(case.rows) * WIDTH * 8)


def judge(fn: Function) -> Judged:
    took = seconds_of_saves(fn, CASES)
    return Judged.of({called: 100 * bound(case) / took[called] for called, case in CASES.items()})


def measured(fn: Function, called: str) -> float:
    """Return the seconds that eight saves of one state take, computed and cut by power failures as the judge does."""
    return seconds_of_saves(fn, {called: CASES[called]})[called]


def seconds_of_saves(fn: Function, cases: Mapping[str, StateToSave]) -> dict[str, float]:
    """Return the seconds that the saves of each state take; raise Wrong if one does not survive a power failure."""
    seeds = [int(torch.randint(1 << 30, (), generator=chance())) for _ in cases]
    results, by_case = job(on_a_rank, fn, [*cases.values()], seeds, ranks=RANKS, record=None), {}
    for number, (called, case) in enumerate(cases.items()):
        files, before, took = Files(), None, 0.0
        for step, state in enumerate(states(case, seeds[number])):
            where, after = f"{called}, save {step}", {name: x.clone() for name, x in state.items()}
            for calls in zip(*(found[number][step] for found in results), strict=True):
                require_own(calls)
                for moment, left in cuts(files, calls):
                    require(left, [before, after], f"{where}, {moment}")
                files = left
                if (most := files.nbytes()) > room(case):
                    raise Wrong(f"{where}: {most:,} bytes on the disk, with room for {room(case):,}", "What is left?")
                files.meet()
                took += max(map(seconds, calls))
            require(files, [after], f"{where}, all ranks have returned,")
            before = after
        by_case[called] = took
    return by_case


def require(files: Files, allowed: Sequence[State | None], when: str) -> None:
    for left in files.left():
        wrong = [difference(left, state) for state in allowed]
        if all(wrong):
            raise Wrong(f"{when} the power fails\n{wrong[-1]}", "What is on the disk at this moment, by which name?")


def difference(left: Mapping[str, Any], state: State | None) -> str:
    """Return the first difference between the files that are left and this state, or "" if there is none.

    state: the tensors by name, or None for a disk on which nothing was saved yet.
    """
    index = left.get("index")
    if state is None or index is None or index == TORN:
        return "" if state is index else f"'index' is {'not there' if index is None else 'not that of a step'}"
    rows = dict.fromkeys(state, 0)
    for (name, start), file in sorted(index.items()):
        content = left.get(file, "not there")
        if isinstance(content, str) or (name, start) not in content:
            why = f"is {content}" if content == TORN else "does not have it"
            return f"{(name, start)} is expected in {file!r}, which {why}"
        piece = content[name, start]
        if start != rows[name] or not same(piece, state[name][start : start + len(piece)]):
            return f"{(name, start)} in {file!r} is not that of the step"
        rows[name] += len(piece)
    short = [name for name, x in state.items() if rows[name] < len(x)]
    return f"the index has only {rows[short[0]]} rows of {short[0]}" if short else ""


def same(piece: Any, expected: Tensor) -> bool:
    return type(piece) is Tensor and piece.dtype == expected.dtype and torch.equal(piece, expected)


cheap_save = Challenge(
    "cheap_save",
    "08",
    "The cheapest save that survives",
    "Four ranks hold a state, each all of it or a part, and save it eight times. The power may fail at any moment, and "
    "the last save, or the one that was going on, must be there. All wait for the slowest; five states, little room.",
    judge,
    floor=41.7,
    course=65.4,
    possible=95.2,
    cases=CASES,
    bound=bound,
    measured=measured,
)
