"""Scripts that are played in real jobs: what is looked at after each step, and which case is blamed if a job fails.

    world     the case that a script is played on: a number of ranks and the inputs of each; many worlds share a job
    script    runs on each rank of a world; for each step, it prepares and yields, then calls the learner's function and
              yields a look
    look      the values after a step, which are copied at that moment, and facts, both by name
    seen      the looks of all ranks of a world after one step, with the messages of that step

Between the two yields a step is watched: its messages go over a network on which nothing is right by luck
and the traces that it leaves in the process are noted (both in around_a_call.py).

A job that fails as a whole is played again in parts, because a wrong value in an earlier world tells more than an error
in a later one.  If the report does not say in which world a job hangs, the worlds with one name are played by
themselves, and then halves of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import NOT_DONE, Wrong, show
from labs.exercises.engine.around_a_call import Aftermath, Late, Outcome
from labs.exercises.engine.learner_job import NEVER_ENDS, blame_luck, job, noted
from labs.kit.launch import Results
from labs.kit.record import KINDS, Event, Recording, mark

Functions = Sequence[Callable[..., Any]]
SETTLED = 0.05  # s after which a backend's thread has released the tensors that it sent, even on a busy machine


@dataclass(frozen=True)
class World:
    """The case that a script is played on, on `ranks` ranks; subclasses add awkward inputs of each rank.

    only: the name of the mistake if this world alone is wrong.
    group: the global ranks that take part, or () for all of them.
    refusable: whether an error is a right answer, too.
    held: whether only the bytes held are looked at, and not the values.
    traced: whether the bytes that Python and NumPy hold are measured, too.
    seconds: the processor time of its job, if it takes more than others.
    steps: how many steps the script plays.
    step: the number of the step that is looked at.
    """

    seed: int
    ranks: int
    _: KW_ONLY
    dtype: torch.dtype = torch.float64
    only: str = ""
    group: tuple[int, ...] = ()
    refusable: bool = False
    held: bool = False
    traced: bool = False
    seconds: float | None = None
    steps: int = 1
    step: int = 0

    whole: ClassVar[str] = "the tensor"  # the name of the unit in which bytes held are counted

    def generator(self, rank: int = 0, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(4096 * self.seed + 64 * step + rank)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def who(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def members(self) -> tuple[int, ...]:
        return self.group or tuple(range(self.ranks))

    @property
    def n(self) -> int:
        return len(self.members)

    @property
    def within(self) -> str:
        return f"the group of ranks {self.group}" if self.group else self.who

    @property
    def when(self) -> str:
        """The words for the step that is looked at."""
        return f", step {self.step}" * (self.steps > 1)

    def at(self, step: int) -> Self:
        """Return this world at the step with this number."""
        return replace(self, step=step)

    def index(self) -> int:
        """Return the place, among the world's members, of the rank that calls this method."""
        return self.members.index(dist.get_rank())

    def process_group(self) -> dict[str, dist.ProcessGroup]:
        """Return the learner's function's keyword arguments on a rank: {} or {"group": the process group}."""
        return {"group": group_of(self.group)} if self.group else {}


@cache
def group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(members))


@dataclass
class Look:
    """A rank's view after a step: values, which may be tensors, and facts, which must be picklable; both by name.

    If the world is `held`, nothing of it is copied.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Done(Outcome):
    """The outcome of a step on one rank, with a copy of its look.

    overwritten: the names of the values that a later step or world has changed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    overwritten: list[str] = field(default_factory=list)


Script = Callable[..., Iterator[Look | None]]

# ---- on a rank -------------------------------------------------------------------------------------------


def play_all(script: Script, functions: Functions, worlds: list[World]) -> list[list[Done]]:
    """Return the outcomes of all steps of each world; an empty list for a world in which this rank has no part."""
    for world in worlds:
        world.process_group()  # all ranks make each group, in the same order
    played: list[tuple[Done, Mapping[str, Any]]] = []
    found = [list(play_one(script, functions, world, played)) for world in worlds]
    for done, values in played:
        done.overwritten = [
            name for name, x in values.items() if isinstance(x, Tensor) and changed(x, done.values[name])
        ]
    return found


def play_one(script: Script, functions: Functions, world: World, played: list[Any]) -> Iterator[Done]:
    """Play all steps of one world; yield the outcome of each, and add it to `played` with the values of its look."""
    rank = dist.get_rank()
    if rank not in world.members:
        for _ in range(world.steps):
            mark("step")
        return
    steps = script(world, *functions)
    for _ in range(world.steps):
        next(steps, None)  # a refusal ends the script, and later steps count as refused, too
        with (
            nullcontext() if world.held else Late(rank, world.seed) as wire,
            Aftermath(trace=world.traced) as aftermath,
        ):
            mark("step")
            look, refused = take_look(world, steps)
            if world.held:
                time.sleep(SETTLED)
            mark("end")
        if not world.held:
            done = Done(values=copied(dict(look.values)), facts=copied(dict(look.facts)))
            done.touched, done.refused = wire.touched, refused
            aftermath.write_to(done)
            played.append((done, look.values))
            yield done
        del look


def take_look(world: World, steps: Iterator[Look]) -> tuple[Look, bool]:
    """Return (look, False), or (an empty look, True) if the learner's function raised an error that it may raise."""
    try:
        return noted(world, next, steps), False
    except NotImplementedError:
        raise
    except Exception:  # any kind of error: a function that may refuse chooses its own
        if not world.refusable:
            raise
        return Look(), True


def copied(value: Any) -> Any:
    """Return a copy of a value as it is now.

    Tensors, numbers, strings and None, and lists and dicts of them, are copied; anything else becomes a few words.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else show(value)


def changed(now: Tensor, before: Tensor) -> bool:
    return not same_numbers(now.detach(), before)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


# ---- jobs ------------------------------------------------------------------------------------------------


def play_worlds(
    script: Script, functions: Functions, worlds: Sequence[World], judge: Callable[[StepOutcomes], None]
) -> tuple[list[StepOutcomes], Recording]:
    """Play a script in all worlds, which have the same number of ranks, and judge all ranks after each step.

    Return the StepOutcomes of each step, and the recording of the job; raise Wrong for the first mistake.
    """
    ranks = worlds[0].ranks
    try:
        results = job(play_all, script, functions, list(worlds), ranks=ranks, seconds=worlds[0].seconds)
    except Wrong as wrong:
        if wrong.untouched or wrong.answer.mistake in (NEVER_ENDS, NOT_DONE):
            raise
        at = next((i for i, world in enumerate(worlds) if f"(with {world})" in wrong.answer.text), None)
        if at:
            play_worlds(script, functions, worlds[:at], judge)
        elif at is None and len(worlds) > 1:
            for part in parts(worlds):
                play_worlds(script, functions, part, judge)
        raise wrong.with_name(worlds[at or 0].only) from None
    looks = list(all_seen(worlds, results))
    for seen in looks:
        try:
            judge(seen)
        except Wrong as wrong:
            raise blame_luck(wrong, seen.events).with_name(seen.world.only) from None
    return looks, results.recording


def parts(worlds: Sequence[World]) -> list[Sequence[World]]:
    """Return the worlds of a failed job in parts: the first world, and the others by name.

    If all have one name, return two halves of them, so that the world that hangs is found in few jobs.
    """
    names = dict.fromkeys(world.only for world in worlds[1:])
    if set(names) == {worlds[0].only}:
        return [worlds[: len(worlds) // 2], worlds[len(worlds) // 2 :]]
    return [worlds[:1], *([world for world in worlds[1:] if world.only == name] for name in names)]


def all_seen(worlds: Sequence[World], results: Results) -> Iterator[StepOutcomes]:
    """Yield the StepOutcomes of each step of each world."""
    number = 0
    for index, world in enumerate(worlds):
        for step in range(world.steps):
            done = [results[rank][index][step] for rank in world.members]
            events = [e for e in results.recording.events if e.step == number and e.rank in world.members]
            yield StepOutcomes(world.at(step), done, events)
            number += 1


def measure_held(
    script: Script, functions: Functions, world: World, kinds: Sequence[str] = KINDS
) -> list[list[list[float]]]:
    """Play a script in one world; return the bytes held, as `held_by_step` does."""
    return held_by_step(record_held(script, functions, world), world, kinds)


def record_held(script: Script, functions: Functions, world: World) -> Recording:
    """Play a script in one world; return the recording of the bytes held."""
    return job(play_all, script, functions, [world], ranks=world.ranks, record="memory").recording


def held_by_step(recording: Recording, world: World, kinds: Sequence[str] = KINDS) -> list[list[list[float]]]:
    """Return [rank][step]: the bytes of these kinds at all moments of the step, beyond those before the first step."""
    found = []
    for rank in world.members:
        base = recording.during(rank, 0, kinds)[0][1]
        found.append([[size - base for _, size in recording.during(rank, step, kinds)] for step in range(world.steps)])
    return found


# ---- all ranks of a world --------------------------------------------------------------------------------


class StepOutcomes:
    """The outcomes of a step on all ranks of its world, which tables judge as a whole or rank by rank."""

    def __init__(self, world: World, done: list[Done], events: list[Event]) -> None:
        self.world, self.done, self.events = world, done, events

    def __str__(self) -> str:
        return f"{self.world}{self.world.when}"

    @property
    def refused(self) -> bool:
        return all(done.refused for done in self.done)

    @property
    def ranks(self) -> list[tuple[int, Done]]:
        return list(zip(self.world.members, self.done, strict=True))

    @cached_property
    def sent(self) -> dict[int, int]:
        """The bytes that each rank sent."""
        return {rank: sum(e.sent for e in self.events if e.rank == rank) for rank in self.world.members}

    @cached_property
    def messages(self) -> list[Event]:
        """The sends of at least one byte."""
        return [event for event in self.events if event.op == "send" and event.bytes_in]

    def of(self, rank: int) -> list[Event]:
        """Return the messages and collectives of one rank."""
        return [event for event in self.events if event.rank == rank]
