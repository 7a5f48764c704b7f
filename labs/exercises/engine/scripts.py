"""Scripts that are played in real jobs: what of them is looked at, and who is blamed where a job fails.

    world     what a script is played on: so many ranks, and what each of them brings; many worlds share a job
    script    on a rank of a world, for each step: prepares, yields; calls what the learner wrote, and yields a look
    look      what is there after a step: values, copied as they are at that moment, and facts, by name
    seen      a look on all ranks of its world, with what was sent in that step

Between the two yields a step is watched: what is sent, on a wire on which nothing is right by luck (late_wire.py), and
what is left behind (left.py).

A job that fails as a whole is played again in parts: what is wrong in an earlier world tells more than an error in a
later one; where nobody says in which world it hangs, those that have one name are played by themselves, then halves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.aftermath import Aftermath
from labs.exercises.engine.answer import NOT_DONE, Wrong, show
from labs.exercises.engine.case import SETTLED, Case, Outcome
from labs.exercises.engine.late_wire import Late
from labs.exercises.engine.launching import NEVER_ENDS, blame_luck, job, noted
from labs.kit.launch import Results
from labs.kit.record import KINDS, Event, Recording, mark

Functions = Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class World(Case):
    """A family adds what each rank brings.  group: the global ranks that take part, all of them if it is left out.

    refusable: any error is a right answer, too.  held: only its bytes held are looked at.  traced: so is what Python
    and NumPy hold.  steps: how many the script plays; step: the one that is looked at.
    """

    _: KW_ONLY
    group: tuple[int, ...] = ()
    refusable: bool = False
    held: bool = False
    traced: bool = False
    steps: int = 1
    step: int = 0

    whole: ClassVar[str] = "the tensor"  # what it is of which bytes held are counted, in words

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
        """In words: the step that is looked at."""
        return f", step {self.step}" * (self.steps > 1)

    def at(self, step: int) -> Self:
        return replace(self, step=step)

    def index(self) -> int:
        """On a rank: its place among the members."""
        return self.members.index(dist.get_rank())

    def process_group(self) -> dict[str, dist.ProcessGroup]:
        """On a rank: what a function is given besides."""
        return {"group": group_of(self.group)} if self.group else {}


@cache
def group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(members))


@dataclass
class Look:
    """By name: values, tensors or not; facts, whatever can be sent.  Of a world that is `held` nothing is copied."""

    values: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Done(Outcome):
    """A look on one rank.  overwritten: the names of values that have changed since, in a later step or world."""

    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    overwritten: list[str] = field(default_factory=list)


Script = Callable[..., Iterator[Look | None]]

# ---- on a rank -------------------------------------------------------------------------------------------


def play_all(script: Script, functions: Functions, worlds: list[World]) -> list[list[Done]]:
    """By world and step; nothing where this rank does not take part."""
    for world in worlds:
        world.process_group()  # all ranks make each, in one order
    played: list[tuple[Done, Mapping[str, Any]]] = []
    found = [list(play_one(script, functions, world, played)) for world in worlds]
    for done, values in played:
        done.overwritten = [
            name for name, x in values.items() if isinstance(x, Tensor) and changed(x, done.values[name])
        ]
    return found


def play_one(script: Script, functions: Functions, world: World, played: list[Any]) -> Iterator[Done]:
    rank = dist.get_rank()
    if rank not in world.members:
        for _ in range(world.steps):
            mark("step")
        return
    steps = script(world, *functions)
    for _ in range(world.steps):
        next(steps, None)  # after a refusal there is nothing left, and the steps that follow are refused, too
        with (
            nullcontext() if world.held else Late(rank, world.seed) as wire,
            Aftermath(trace=world.traced) as aftermath,
        ):
            mark("step")
            look, refused = looked(world, steps)
            if world.held:
                time.sleep(SETTLED)
            mark("end")
        if not world.held:
            done = Done(values=copied(dict(look.values)), facts=copied(dict(look.facts)))
            done.touched, done.refused = wire.touched, refused
            aftermath.tell(done)
            played.append((done, look.values))
            yield done
        del look


def looked(world: World, steps: Iterator[Look]) -> tuple[Look, bool]:
    try:
        return noted(world, next, steps), False
    except NotImplementedError:
        raise
    except Exception:  # whichever: where it may refuse, the learner chooses how
        if not world.refusable:
            raise
        return Look(), True


def copied(value: Any) -> Any:
    """As it is now; what is neither numbers, words nor tensors, nor made of them, in a few words."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else show(value)


def changed(now: Tensor, before: Tensor) -> bool:
    return now.shape != before.shape or not same_numbers(now.detach(), before)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


# ---- jobs ------------------------------------------------------------------------------------------------


def played(
    script: Script, functions: Functions, worlds: Sequence[World], judge: Callable[[Seen], None]
) -> tuple[list[Seen], Recording]:
    """Play it in all worlds, which have as many ranks, and judge each look; raises Wrong.  The looks, the recording."""
    ranks = worlds[0].ranks
    try:
        results = job(play_all, script, functions, list(worlds), ranks=ranks)
    except Wrong as wrong:
        if wrong.untouched or wrong.answer.mistake in (NEVER_ENDS, NOT_DONE):
            raise
        at = next((i for i, world in enumerate(worlds) if f"(with {world})" in wrong.answer.text), None)
        if at:
            played(script, functions, worlds[:at], judge)
        elif at is None and len(worlds) > 1:
            for part in parts(worlds):
                played(script, functions, part, judge)
        raise wrong.also(worlds[at or 0].only) from None
    looks = list(all_seen(worlds, results))
    for seen in looks:
        try:
            judge(seen)
        except Wrong as wrong:
            raise blame_luck(wrong, seen.events).also(seen.world.only) from None
    return looks, results.recording


def parts(worlds: Sequence[World]) -> list[Sequence[World]]:
    """The first one, and the others by name; halves of those that have one name, so that one is found in few jobs."""
    names = dict.fromkeys(world.only for world in worlds[1:])
    if set(names) == {worlds[0].only}:
        return [worlds[: len(worlds) // 2], worlds[len(worlds) // 2 :]]
    return [worlds[:1], *([world for world in worlds[1:] if world.only == name] for name in names)]


def all_seen(worlds: Sequence[World], results: Results) -> Iterator[Seen]:
    number = 0
    for index, world in enumerate(worlds):
        for step in range(world.steps):
            done = [results[rank][index][step] for rank in world.members]
            events = [e for e in results.recording.events if e.step == number and e.rank in world.members]
            yield Seen(world.at(step), done, events)
            number += 1


def held(script: Script, functions: Functions, world: World, kinds: Sequence[str] = KINDS) -> list[list[list[float]]]:
    return sizes(watched(script, functions, world), world, kinds)


def watched(script: Script, functions: Functions, world: World) -> Recording:
    """Its bytes held."""
    return job(play_all, script, functions, [world], ranks=world.ranks, record="memory").recording


def sizes(recording: Recording, world: World, kinds: Sequence[str] = KINDS) -> list[list[list[float]]]:
    """By rank and step: bytes of these kinds held at all moments of the step, beyond those before the first step."""
    found = []
    for rank in world.members:
        base = recording.during(rank, 0, kinds)[0][1]
        found.append([[size - base for _, size in recording.during(rank, step, kinds)] for step in range(world.steps)])
    return found


# ---- what is seen ----------------------------------------------------------------------------------------


class Seen:
    """A look, on all ranks of its world.  Tables are asked about it as a whole, or about one rank's part of it."""

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
        """Bytes, by rank."""
        return {rank: sum(e.sent for e in self.events if e.rank == rank) for rank in self.world.members}

    @cached_property
    def messages(self) -> list[Event]:
        """Sends that carry something."""
        return [event for event in self.events if event.op == "send" and event.bytes_in]

    def of(self, rank: int) -> list[Event]:
        return [event for event in self.events if event.rank == rank]
