"""Exercises that are a function on ranks: f(what each rank brings) -> what each rank has.

    MEAN = Exercise(
        worlds=lambda draw: {4: [draw.given(4, (5,)), …], 3: […]},
        due=lambda world: [mean(world.xs)] + [None] * (world.n - 1),
        sends=lambda world: Sends(least=…, enough=…),
        question="Which numbers went into this one, and how often?",
        mistakes=(Mistake("everybody has it", "Who …?", as_if(lambda world: [mean(world.xs)] * world.n)), …),
    )

Most mistakes are another `due`: what every rank would have, had this been computed instead.  What holds everywhere
(rows.py) is asked as well: before them, whether what is there has the right form; after them, what a wrong number is
made of, then what is left behind, what was sent, and what is held.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, Wrong, refuse
from labs.exercises.engine.scripts import Functions, Look, Seen, World, held, played, same_numbers
from labs.exercises.engine.value import Dues, One
from labs.kit.record import Recording

BF16, F32, F64, I32, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
EXACT = {BF16: (1, 16), I64: (2**54, 2**56), I32: (2**24, 2**26)}  # numbers that these add up exactly, or float32 not
TOLERANCE = {F64: 1e-12, F32: 1e-5}


# ---- what it is tried on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(World):
    """Each rank brings a tensor of this shape, and what is in `args`, the same for all, by name."""

    shape: tuple[int, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    strided: bool = False  # not contiguous

    def tensor(self, rank: int) -> Tensor:
        """Numbers that bfloat16 adds up exactly, and that float32 cannot hold."""
        generator = self.generator(rank)
        if self.dtype in EXACT:
            x = torch.randint(*EXACT[self.dtype], self.shape, generator=generator).to(self.dtype)
        else:
            x = torch.randn(self.shape, generator=generator, dtype=F64).to(self.dtype)
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.strided else x

    @cached_property
    def xs(self) -> list[Tensor]:
        """By member."""
        return [self.tensor(rank) for rank in self.members]

    @cached_property
    def total(self) -> Tensor:
        return torch.stack(self.xs).sum(0, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return self.xs[0].nbytes

    def __str__(self) -> str:
        size = f"{self.shape[0]} elements" if len(self.shape) == 1 else f"a tensor of shape {self.shape}"
        args = [f"{name} {value}" for name, value in self.args.items()]
        return ", ".join([self.within, f"{size} of {self.dtype_name}", *args, *["not contiguous"] * self.strided])


class Draw:
    """By chance, but by the same for each seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def world(self, kind: Callable[..., World], ranks: int, **options: Any) -> Any:
        return kind(self.random.randrange(2**40), ranks, **options)

    def given(self, ranks: int, shape: tuple[int, ...], only: str = "", **options: Any) -> Given:
        return self.world(Given, ranks, shape=shape, only=only, **options)


# ---- an exercise -----------------------------------------------------------------------------------------


def call(world: Given, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """The script of most: one call."""
    x = world.tensor(world.members[world.index()])
    before = x.clone()
    yield None
    returned = fn(x, *world.args.values(), **world.process_group())
    memory = returned.untyped_storage().data_ptr() if isinstance(returned, Tensor) and returned.numel() else None
    facts = {"changed": not same_numbers(before, x), "shared": memory == x.untyped_storage().data_ptr()}
    yield Look({"": returned}, facts)


def two_calls(world: Given, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Each of them, and after it a step in which nothing happens, but that the result is there."""
    for _ in range(2):
        x = world.tensor(world.members[world.index()])  # another one: who keeps the first keeps memory
        yield None
        result = fn(x, *world.args.values())
        yield Look()
        yield None
        yield Look()
        del result


@dataclass(frozen=True)
class Exercise:
    """due: by member, of each value that the script looks at, by name; without one where there is only one.

    summands: of each member's value, those of whose sum, or mean, it is; pieces: of a value, each of which may be made
    of others.  tolerance: relative, by dtype; 0 elsewhere.  forms, mistakes, after: rows about a rank; sending: about a
    call.  raised: rows about what is told of an error.  asks: other questions for rows that hold everywhere.

    wide: where bytes held are looked at, in a script of two calls, of which each ends with a step in which nothing
    happens; besides what was there before, × its `nbytes`, most: in a call, kept: between forward and backward, rest:
    after it.
    """

    worlds: Callable[[Draw], Mapping[int, Sequence[World]]]
    expected: Callable[[Any], Sequence[Any]]
    question: str
    _: KW_ONLY
    script: Callable[..., Iterator[Look | None]] = call
    sends: Callable[[Any], rows.Sends] | None = None
    summands: Callable[[Any, int], Sequence[Tensor]] | None = None
    pieces: Callable[[Any, Tensor], Sequence[Tensor]] | None = None
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)
    forms: Sequence[Mistake] = ()
    mistakes: Sequence[Mistake] = ()
    after: Sequence[Mistake] = ()
    sending: Sequence[Mistake] = ()
    raised: Sequence[Mistake] = ()
    questions: Mapping[str, str] = field(default_factory=dict)
    wide: Callable[[Draw], World] | None = None
    twice: Callable[..., Iterator[Look | None]] = two_calls
    most: float = 0
    kept: float = inf
    rest: float = 0


@dataclass
class Passed:
    """recording: of the first job.  most: held in a call, × what a rank brings, besides it.  last: of all calls."""

    recording: Recording
    most: float
    last: Seen


def checked(exercise: Exercise, functions: Functions, seed: int) -> Passed:
    """Raise Wrong at the first thing that is not as it must be."""
    draw = Draw(seed)
    try:
        all_worlds = exercise.worlds(draw).values()
        jobs = [played(exercise.script, functions, worlds, judge_of(exercise)) for worlds in all_worlds]
        most = bytes_held(exercise, functions, draw) if exercise.wide else 0
        return Passed(jobs[0][1], most, jobs[-1][0][-1])
    except Wrong as wrong:
        raise wrong.told_by(exercise.raised).asking(exercise.questions) from None


def bytes_held(exercise: Exercise, functions: Functions, draw: Draw) -> float:
    world, most = exercise.wide(draw), 0.0
    world = replace(world, held=True, steps=2 * (world.steps + 1))
    for rank, steps in enumerate(held(exercise.twice, functions, world)):
        sizes = [[size / world.nbytes for size in step] for step in steps]
        first, second = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        peak, after = max(max(step) for step in (*first[:-1], *second[:-1])), first[-1][-1]
        between = second[0][-1] - after, exercise.kept
        one = rows.Held(peak, after, second[-1][-1], exercise.most, exercise.rest, world.whole, between)
        refuse(rows.HELD, one, f"{world}: rank {rank} ")
        most = max(most, peak)
    return most


# ---- what is judged --------------------------------------------------------------------------------------


def part_of(exercise: Exercise, seen: Seen, index: int, name: str, expected_by_name: Dues) -> One:
    expected = expected_by_name[index][name]
    tolerance = exercise.tolerance.get(expected.dtype, 0.0) if isinstance(expected, Tensor) else 0.0
    summands = exercise.summands(seen.world, index) if exercise.summands else ()
    return One(seen, index, name, expected_by_name, tolerance, summands, exercise.pieces)


def judge_of(exercise: Exercise) -> Callable[[Seen], None]:
    """What was sent in a world's steps is asked about when the values of all of them are right."""
    steps: list[Seen] = []

    def judge(seen: Seen) -> None:
        if not seen.refused:
            judge_values(exercise, seen)
            steps.append(seen)
        if seen.world.step == seen.world.steps - 1:
            for step in steps if exercise.sends else ():
                sent = rows.Sent(step, exercise.sends(step.world))
                refuse((*exercise.sending, *rows.SENT), sent, f"{step}: ", exercise.question)
            steps.clear()

    return judge


def judge_values(exercise: Exercise, seen: Seen) -> None:
    expected_by_name = [
        expected if isinstance(expected, Mapping) else {"": expected} for expected in exercise.expected(seen.world)
    ]
    ones = [
        part_of(exercise, seen, index, name, expected_by_name)
        for name in expected_by_name[0]
        for index in range(seen.world.n)
    ]

    def ask(table: Sequence[Mistake], about: Any, where: str) -> None:
        refuse(table, about, f"{seen}: {where}", exercise.question)

    for one in ones:
        ask((*exercise.forms, *rows.FORM), one, f"rank {one.rank} ")
    ask(rows.LUCK, seen, "")
    for one in ones:
        if not one.right:
            ask((*exercise.mistakes, *rows.VALUES), one, f"on rank {one.rank} {one.first_by_name}\n")
    for one in ones:
        ask((*exercise.after, *rows.AFTER), one, f"on rank {one.rank} ")
