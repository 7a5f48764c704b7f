"""Exercises that are played: a script calls what the learner wrote, and yields what is to be looked at.

    Play(
        worlds=lambda draw: {2: [draw.world(Group, 2, …)], …},
        script=come_and_go,
        tables=((on_each_rank, STEP), (wrong(due), VALUES), (as_a_whole, SENT)),
        question="What does each rank bring, and where does it go?",
    )

Each step is judged by the tables in their order: a table is asked about every part of it that its function names.
What changes as things go on is judged on the rank, by `first_wrong`; the table is then `as_found` there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, Wrong, first_fit, refuse
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Done, Functions, Script, Seen, World, played, sizes, watched
from labs.exercises.engine.value import One
from labs.kit.record import KINDS

Parts = Callable[[Seen], Iterator[tuple[str, Any]]]  # (where it is, in words; what a table is asked about)


@dataclass(frozen=True)
class Play:
    """tables: (parts of a step, rows), in their order.  raised: rows about what is told of an error.

    asks: other questions for rows that hold everywhere.

    wide: a world in which bytes held are looked at, of steps that do the same; its `nbytes` are the unit.  At the most,
    and when a step is over, beyond what was there before the first one; holds: rows, instead of those of `rows`.
    """

    worlds: Callable[[Draw], Mapping[int, Sequence[World]]]
    script: Script
    tables: Sequence[tuple[Parts, Sequence[Mistake]]]
    question: str
    _: KW_ONLY
    raised: Sequence[Mistake] = ()
    questions: Mapping[str, str] = field(default_factory=dict)
    wide: Callable[[Draw], World] | None = None
    most: float = 0
    rest: float = 0
    holds: Sequence[Mistake] = ()


@dataclass
class Passed:
    """seen: of each step, of all worlds.  most: held in a step, × the unit; rest: when it is over; peaks: by kind."""

    seen: list[Seen]
    most: float = 0
    rest: float = 0
    peaks: dict[str, float] = field(default_factory=dict)


def checked(play: Play, functions: Functions, seed: int) -> Passed:
    """Raise Wrong at the first thing that is not as it must be."""
    try:
        return all_played(play, functions, seed)
    except Wrong as wrong:
        raise wrong.told_by(play.raised).asking(play.questions) from None


def all_played(play: Play, functions: Functions, seed: int) -> Passed:
    draw, passed = Draw(seed), Passed([])

    def judge(seen: Seen) -> None:
        for parts, table in play.tables if not seen.refused else ():
            for where, part in parts(seen):
                refuse(table, part, f"{seen}: {where}", play.question)

    for worlds in play.worlds(draw).values():
        passed.seen += played(play.script, functions, worlds, judge)[0]
    if play.wide:
        world = replace(play.wide(draw), held=True)
        recording = watched(play.script, functions, world)
        for rank, steps in enumerate(sizes(recording, world)):
            # The first step may set up what stays; now and then a backend's thread keeps a tensor a moment longer.
            most, rest = min(map(max, steps[1:])) / world.nbytes, min(x[-1] for x in steps[1:][-2:]) / world.nbytes
            kept = rows.Held(most, rest, rest, play.most, play.rest, world.whole)
            refuse(play.holds or rows.HELD, kept, f"{world}: rank {rank} ")
            passed.most, passed.rest = max(passed.most, most), max(passed.rest, rest)
        for kind in KINDS:
            by_rank = sizes(recording, world, (kind,))
            passed.peaks[kind] = max(min(map(max, steps[1:])) for steps in by_rank) / world.nbytes
    return passed


# ---- the parts of a step ---------------------------------------------------------------------------------


def as_a_whole(seen: Seen) -> Iterator[tuple[str, Seen]]:
    yield "", seen


def on_one_rank(seen: Seen) -> Iterator[tuple[str, Done]]:
    yield "", seen.done[0]


def on_each_rank(seen: Seen) -> Iterator[tuple[str, Done]]:
    for rank, done in seen.ranks:
        yield f"on rank {rank} ", done


def each_after(call: str) -> Parts:
    """What a call has left of each of several things: the states in the fact of its name, `of` what they are."""

    def parts(seen: Seen) -> Iterator[tuple[str, SimpleNamespace]]:
        for where, done in on_each_rank(seen):
            for state in done.facts.get(call, ()):
                yield f"{where}after {call}, {state['of']}: ", SimpleNamespace(**state)

    return parts


def wrong(
    expected: Callable[[Any], Sequence[Mapping[str, Any]]],
    tolerance: Mapping[torch.dtype, float],
    summands: Callable[[Any, int, str], Sequence[Tensor]] = lambda world, index, name: (),
) -> Parts:
    """Every value on every rank that is not what is due there: a One.  due: by member and name."""

    def parts(seen: Seen) -> Iterator[tuple[str, One]]:
        expected_by_name = expected(seen.world)
        for name in expected_by_name[0]:
            for index, rank in enumerate(seen.world.members):
                value = expected_by_name[index][name]
                within = tolerance.get(value.dtype, 0.0) if isinstance(value, Tensor) else 0.0
                one = One(seen, index, name, expected_by_name, within, summands(seen.world, index, name))
                if not one.right:
                    yield f"on rank {rank} {one.first_by_name}\n", one

    return parts


def budgeted(sends: Callable[[Any], rows.Sends]) -> Parts:
    """The step, and what may be sent in it."""

    def parts(seen: Seen) -> Iterator[tuple[str, rows.Sent]]:
        yield "", rows.Sent(seen, sends(seen.world))

    return parts


# ---- what is judged where it happens ---------------------------------------------------------------------


def first_wrong(table: Sequence[Mistake], parts: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """On a rank, before things go on and change: the first part that a row fits, as facts for `as_found`."""
    for where, part in parts:
        if found := first_fit(table, part):
            mistake, sentence = found
            return {"mistake": mistake.name, "told": where + sentence}
    return {}


def as_found(table: Sequence[Mistake]) -> tuple[Mistake, ...]:
    """These rows, asked about a rank that has looked for them itself."""

    def matches(name: str) -> Callable[[Done], str | None]:
        return lambda done: done.facts["told"] if done.facts.get("mistake") == name else None

    return tuple(replace(row, matches=matches(row.name)) for row in table)
