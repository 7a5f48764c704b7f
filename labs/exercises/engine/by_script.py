"""Exercises with a script, which calls the learner's functions and yields the values that are judged.

    Play(
        worlds=lambda draw: {2: [draw.world(Group, 2, …)], …},
        script=come_and_go,
        tables=((on_each_rank, STEP), (wrong(expected, TOLERANCE), VALUES), (as_a_whole, SENT)),
        question="What does each rank bring, and where does it go?",
    )

Tables of mistakes judge each step in their order; the last table is the engine's own, about what a step leaves behind.
A table is a pair: a function that yields parts of a step, such as the outcome on each rank, and rows (mistakes) that
are tried on each of these parts.  `first_wrong` judges a rank's state on the rank itself, before the state changes;
`as_found` then makes the rows that report this judgement.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, Wrong, first_fit, refuse
from labs.exercises.engine.around_a_call import AFTERMATH
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import (
    Done,
    Functions,
    Script,
    StepOutcomes,
    World,
    held_by_step,
    play_worlds,
    record_held,
)
from labs.exercises.engine.value import One
from labs.kit.record import KINDS

Parts = Callable[
    [StepOutcomes], Iterator[tuple[str, Any]]
]  # yields (the place in words, the part that rows are tried on)


@dataclass(frozen=True)
class Play:
    """An exercise: the worlds that a script is played in, and the tables that judge its steps.

    worlds: `worlds(draw)` returns a list of worlds for each number of ranks; each list is a job.
    tables: (parts of a step, rows), in their order.
    question: the question for rows that have none.
    raised: rows about the text of an error that the function raised.
    questions: the exercise's own questions for rows that all exercises share, as `{name: question}`.
    memory: what a rank may hold in a world of equal steps, beyond what it held before the first of them.
    """

    worlds: Callable[[Draw], Mapping[int, Sequence[World]]]
    script: Script
    tables: Sequence[tuple[Parts, Sequence[Mistake]]]
    question: str
    _: KW_ONLY
    raised: Sequence[Mistake] = ()
    questions: Mapping[str, str] = field(default_factory=dict)
    memory: rows.Memory | None = None


@dataclass
class Passed:
    """The measurements of an answer that is right.

    seen: the outcomes of each step of all worlds.
    most, rest: the bytes held in a step, and after it, in the unit of the play's `memory`.
    peaks: the peak of each kind of memory, in the same unit.
    """

    seen: list[StepOutcomes]
    most: float = 0
    rest: float = 0
    peaks: dict[str, float] = field(default_factory=dict)


def checked(play: Play, functions: Functions, seed: int) -> Passed:
    """Return the measurements of an answer that is right; raise Wrong for the first mistake."""
    try:
        return play_exercise(play, functions, seed)
    except Wrong as wrong:
        raise wrong.with_row(play.raised).with_questions(play.questions) from None


def play_exercise(play: Play, functions: Functions, seed: int) -> Passed:
    draw, passed = Draw(seed), Passed([])

    def judge(seen: StepOutcomes) -> None:
        for parts, table in (*play.tables, (on_each_rank, AFTERMATH)) if not seen.refused else ():
            for where, part in parts(seen):
                refuse(table, part, f"{seen}: {where}", play.question)

    for worlds in play.worlds(draw).values():
        passed.seen += play_worlds(play.script, functions, worlds, judge)[0]
    if memory := play.memory:
        world = replace(memory.world(draw), held=True)
        recording = record_held(memory.script or play.script, functions, world)
        for rank, steps in enumerate(held_by_step(recording, world)):
            # The first step may allocate what then stays; sometimes a backend's thread keeps a tensor a moment longer.
            most, rest = min(map(max, steps[1:])) / world.nbytes, min(x[-1] for x in steps[1:][-2:]) / world.nbytes
            refuse(
                memory.mistakes or rows.HELD,
                rows.HeldBeyond(memory, world.whole, most, rest, rest),
                f"{world}: rank {rank} ",
            )
            passed.most, passed.rest = max(passed.most, most), max(passed.rest, rest)
        for kind in KINDS:
            by_rank = held_by_step(recording, world, (kind,))
            passed.peaks[kind] = max(min(map(max, steps[1:])) for steps in by_rank) / world.nbytes
    return passed


# ---- the parts of a step ---------------------------------------------------------------------------------


def as_a_whole(seen: StepOutcomes) -> Iterator[tuple[str, StepOutcomes]]:
    yield "", seen


def on_one_rank(seen: StepOutcomes) -> Iterator[tuple[str, Done]]:
    yield "", seen.done[0]


def on_each_rank(seen: StepOutcomes) -> Iterator[tuple[str, Done]]:
    for rank, done in seen.ranks:
        yield f"on rank {rank} ", done


def each_after(call: str) -> Parts:
    """Return a function that yields the states that a call has left on each rank: the fact with the call's name.

    A state is a dictionary, whose item `of` names the tensor, or other object, whose state was noted.
    """

    def parts(seen: StepOutcomes) -> Iterator[tuple[str, SimpleNamespace]]:
        for where, done in on_each_rank(seen):
            for state in done.facts.get(call, ()):
                yield f"{where}after {call}, {state['of']}: ", SimpleNamespace(**state)

    return parts


def wrong(
    expected: Callable[[Any], Sequence[Mapping[str, Any]]],
    tolerance: Mapping[torch.dtype, float],
    summands: Callable[[Any, int, str], Sequence[Tensor]] = lambda world, index, name: (),
) -> Parts:
    """Return a function that yields the wrong values of a step, each of them a One.

    expected: `expected(world)` returns `{name: value}` per member.
    tolerance: relative, per dtype; 0 for other dtypes.
    summands: `summands(world, index, name)` returns the tensors whose sum, or mean, a value is.
    """

    def parts(seen: StepOutcomes) -> Iterator[tuple[str, One]]:
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
    """Return a function that yields one part of a step: its messages, beside those that it may send."""

    def parts(seen: StepOutcomes) -> Iterator[tuple[str, rows.Sent]]:
        yield "", rows.Sent(seen, sends(seen.world))

    return parts


# ---- judged on the rank ----------------------------------------------------------------------------------


def first_wrong(table: Sequence[Mistake], parts: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return, on a rank, the facts for `as_found`: the first row that matches one of the parts, or {}."""
    for where, part in parts:
        if found := first_fit(table, part):
            mistake, sentence = found
            return {"mistake": mistake.name, "sentence": where + sentence}
    return {}


def as_found(table: Sequence[Mistake]) -> tuple[Mistake, ...]:
    """Return the rows of this table, for ranks on which `first_wrong` has already tried them."""

    def matches(name: str) -> Callable[[Done], str | None]:
        return lambda done: (done.facts["sentence"] or True) if done.facts.get("mistake") == name else None

    return tuple(replace(row, matches=matches(row.name)) for row in table)
