"""Exercises whose function runs on ranks: f(this rank's inputs) -> the value that this rank must have.

    MEAN = Exercise(
        worlds=lambda draw: {4: [draw.given(4, (5,)), …], 3: […]},
        expected=Expected(lambda world: [mean(world.xs)] + [None] * (world.n - 1)),
        question="Which numbers went into this one, and how often?",
        sends=lambda world: Sends(least=…, enough=…),
        mistakes=Mistakes((Mistake("everybody has it", "Who …?", as_if(lambda world: [mean(world.xs)] * world.n)), …)),
    )

Most mistakes are other expected values: those that every rank would have if something else were computed.  The rows
that all exercises share (common_mistakes.py) are tried as well.  They ask whether a value has the right form, which
summands a wrong number is made of, and then about traces in the process, about messages, and about bytes held.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, Wrong, refuse
from labs.exercises.engine.scripts import (
    Functions,
    Look,
    Script,
    StepOutcomes,
    World,
    measure_held,
    play_worlds,
    same_numbers,
)
from labs.exercises.engine.value import One, Values
from labs.kit.record import Recording

BF16, F32, F64, I32, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
# Ranges of integers: bfloat16 adds up its range exactly; float64 cannot hold int64's, nor float32 int32's.
EXACT = {BF16: (1, 16), I64: (2**54, 2**56), I32: (2**24, 2**26)}
TOLERANCE = {F64: 1e-12, F32: 1e-5}


# ---- worlds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given(World):
    """A world in which each rank's input is a tensor of one shape.

    args: further arguments of the function, the same on all ranks.
    strided: whether the tensor is not contiguous.
    """

    shape: tuple[int, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    strided: bool = False

    def tensor(self, rank: int) -> Tensor:
        """Return a rank's random input: bfloat16 numbers with an exact sum, or integers too large for float32."""
        generator = self.generator(rank)
        if self.dtype in EXACT:
            x = torch.randint(*EXACT[self.dtype], self.shape, generator=generator).to(self.dtype)
        else:
            x = torch.randn(self.shape, generator=generator, dtype=F64).to(self.dtype)
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.strided else x

    @cached_property
    def xs(self) -> list[Tensor]:
        """The inputs of all members."""
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
    """A source of random worlds, which are the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def world(self, kind: Callable[..., World], ranks: int, **options: Any) -> Any:
        return kind(self.random.randrange(2**40), ranks, **options)

    def given(self, ranks: int, shape: tuple[int, ...], only: str = "", **options: Any) -> Given:
        return self.world(Given, ranks, shape=shape, only=only, **options)


# ---- an exercise -----------------------------------------------------------------------------------------


def call(world: Given, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play the script of most exercises, one call: yield before it, and then a look."""
    x = world.tensor(world.members[world.index()])
    before = x.clone()
    yield None
    returned = fn(x, *world.args.values(), **world.process_group())
    memory = returned.untyped_storage().data_ptr() if isinstance(returned, Tensor) and returned.numel() else None
    facts = {"changed": not same_numbers(before, x), "shared": memory == x.untyped_storage().data_ptr()}
    yield Look({"": returned}, facts)


def two_calls(world: Given, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play a script of two calls: yield a look after each call, and after a step that only holds its result."""
    for _ in range(2):
        x = world.tensor(world.members[world.index()])  # a new one: a function that keeps the first holds more memory
        yield None
        result = fn(x, *world.args.values())
        yield Look()
        yield None
        yield Look()
        del result


@dataclass(frozen=True)
class Expected:
    """The values that each rank must have.

    values: `values(world)` returns them, as `{name: value}` per member; a bare value if the script looks at only one.
    summands: `summands(world, index)` returns the tensors whose sum, or mean, the value of a member is; with them, a
        check says which ranks' numbers a wrong value is made of.
    pieces: `pieces(world, value)` cuts a value into pieces that may be made of different summands.
    tolerance: relative, per dtype; 0 for other dtypes.
    """

    values: Callable[[Any], Sequence[Any]]
    summands: Callable[[Any, int], Sequence[Tensor]] = lambda world, index: ()
    pieces: Callable[[Any, Tensor], Sequence[Tensor]] | None = None
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)


@dataclass(frozen=True)
class Mistakes:
    """An exercise's own rows, each tried before those that all exercises share.

    form: about the form of a value on a rank (a One), before its numbers are compared.
    values: about a wrong value, mostly another computation (`as_if`).
    after: about a right value, and what the call has changed.
    sent: about the messages of a step (a Sent).
    raised: about the text of an error that the function raised.
    """

    form: Sequence[Mistake] = field(default=(), kw_only=True)
    values: Sequence[Mistake] = ()
    _: KW_ONLY
    after: Sequence[Mistake] = ()
    sent: Sequence[Mistake] = ()
    raised: Sequence[Mistake] = ()


@dataclass(frozen=True)
class Exercise:
    """An exercise: what a function is tried on, what is expected, and what a wrong answer is told.

    worlds: `worlds(draw)` returns a list of worlds for each number of ranks; each list is a job.
    question: the question for rows that have none.
    script: plays a world; one call if it is left out.
    sends: `sends(world)` returns what a step may send; any messages are right if it is left out.
    memory: what a rank may hold; two calls are measured, and after each a step in which nothing happens.
    questions: the exercise's own questions for rows that all exercises share, as `{name: question}`.
    """

    worlds: Callable[[Draw], Mapping[int, Sequence[World]]]
    expected: Expected
    question: str
    _: KW_ONLY
    script: Script = call
    sends: Callable[[Any], rows.Sends] | None = None
    memory: rows.Memory | None = None
    mistakes: Mistakes = Mistakes()
    questions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Passed:
    """The measurements of an answer that is right.

    recording: the recording of the first job.
    most: the most bytes held in a call, beyond those before it, as a multiple of the world's `nbytes`.
    last: the last step of all.
    """

    recording: Recording
    most: float
    last: StepOutcomes


def checked(exercise: Exercise, functions: Functions, seed: int) -> Passed:
    """Return the measurements of an answer that is right; raise Wrong for the first mistake."""
    draw = Draw(seed)
    try:
        all_worlds = exercise.worlds(draw).values()
        jobs = [play_worlds(exercise.script, functions, worlds, judge_of(exercise)) for worlds in all_worlds]
        most = bytes_held(exercise.memory, functions, draw) if exercise.memory else 0
        return Passed(jobs[0][1], most, jobs[-1][0][-1])
    except Wrong as wrong:
        raise wrong.with_row(exercise.mistakes.raised).with_questions(exercise.questions) from None


def bytes_held(memory: rows.Memory, functions: Functions, draw: Draw) -> float:
    """Return the most bytes held in a call, in the unit of `memory`; raise Wrong if a rank holds too much."""
    world, most = memory.world(draw), 0.0
    world = replace(world, held=True, steps=2 * (world.steps + 1))
    for rank, steps in enumerate(measure_held(memory.script or two_calls, functions, world)):
        sizes = [[size / world.nbytes for size in step] for step in steps]
        first, second = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        peak, after = max(max(step) for step in (*first[:-1], *second[:-1])), first[-1][-1]
        held = rows.HeldBeyond(memory, world.whole, peak, after, second[-1][-1], second[0][-1] - after)
        refuse(memory.mistakes or rows.HELD, held, f"{world}: rank {rank} ")
        most = max(most, peak)
    return most


# ---- the judges ------------------------------------------------------------------------------------------


def part_of(expected: Expected, seen: StepOutcomes, index: int, name: str, expected_by_name: Values) -> One:
    """Return the value of this name on one rank, beside the expected one."""
    value = expected_by_name[index][name]
    tolerance = expected.tolerance.get(value.dtype, 0.0) if isinstance(value, Tensor) else 0.0
    return One(seen, index, name, expected_by_name, tolerance, expected.summands(seen.world, index), expected.pieces)


def judge_of(exercise: Exercise) -> Callable[[StepOutcomes], None]:
    """Return the judge of a step, which looks at messages only once the values of all steps of a world are right."""
    steps: list[StepOutcomes] = []

    def judge(seen: StepOutcomes) -> None:
        if not seen.refused:
            judge_values(exercise, seen)
            steps.append(seen)
        if seen.world.step == seen.world.steps - 1:
            for step in steps if exercise.sends else ():
                sent = rows.Sent(step, exercise.sends(step.world))
                refuse((*exercise.mistakes.sent, *rows.SENT), sent, f"{step}: ", exercise.question)
            steps.clear()

    return judge


def judge_values(exercise: Exercise, seen: StepOutcomes) -> None:
    """Raise Wrong for the first rank whose value is wrong, or on which the call has left something behind."""
    expected_by_name = [
        each if isinstance(each, Mapping) else {"": each} for each in exercise.expected.values(seen.world)
    ]
    ones = [
        part_of(exercise.expected, seen, index, name, expected_by_name)
        for name in expected_by_name[0]
        for index in range(seen.world.n)
    ]

    own = exercise.mistakes

    def ask(table: Sequence[Mistake], about: Any, where: str) -> None:
        refuse(table, about, f"{seen}: {where}", exercise.question)

    for one in ones:
        ask((*own.form, *rows.FORM), one, f"rank {one.rank} ")
    ask(rows.LUCK, seen, "")
    for one in ones:
        if not one.right:
            ask((*own.values, *rows.VALUES), one, f"on rank {one.rank} {one.first_by_name}\n")
    for one in ones:
        ask((*own.after, *rows.AFTER), one, f"on rank {one.rank} ")
