"""Exercises whose answer is a schedule: a function that returns a list for each rank, where many lists are right.

    GPIPE = Listed(sizes, bubble=fraction, alive=lambda p, m: [m] * p, mistakes=(SPLIT, …))

A list is judged by what it does, not by how it is written: by the validator and the simulator, for 1 to 8 ranks, with
one micro-batch, with fewer than ranks, and with numbers that nothing divides.  Then the course's executor obeys the
first lists in a job.  Two tables of mistakes come before those of the exercise:

FORM    is the returned value a list of instructions for each rank?
RUNS    can these lists be run, with these stages and micro-batches?
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs import pp
from labs.exercises.engine.answer import Mistake, Wrong, first, refuse, show
from labs.exercises.engine.learner_job import job
from labs.exercises.engine.on_paper import Sheet, each_judged
from labs.exercises.engine.value import close
from labs.exercises.pipeline._stages_run_by_lists import TOLERANCE, Stacked, bits, flat, many, mean_loss, total
from labs.kit.drawing.pipeline_gantt import schedule
from labs.pp.checker import nth
from labs.pp.instructions import makes
from labs.pp.messages import Receive, Send

MOST = 300  # instructions of a rank that are read; no right list has more than 200
FEW = "right only with no fewer micro-batches than ranks"
LONG = "the warm-up is longer than there are micro-batches"
MESSAGE = re.compile(r"(\w+)(→|←)(\d+)")

# ---- what is asked for -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked(Sheet):
    """A sheet that expects lists with some properties, and not one right list."""

    def read(self, returned: Any) -> Any:
        """Return what can be iterated as lists, an instruction as text (0F0), and anything else in a few words."""
        if isinstance(returned, pp.Instruction | Send | Receive):
            return repr(returned)
        if isinstance(returned, Iterable) and not isinstance(returned, str | dict | set | Tensor):
            return [self.read(item) for item in islice(returned, MOST)]
        return show(returned)


@dataclass(frozen=True)
class Listed:
    """An exercise whose answer is a schedule.

    sizes: returns the sheets for a seed; the lists of the first one are run in a job
    bubble: returns the bubble that is small enough, for p ranks and m micro-batches
    alive: returns for each rank the activations alive that are enough, for p ranks and m micro-batches
    mistakes: the rows of this exercise
    """

    sizes: Callable[[int], list[Asked]]
    bubble: Callable[[int, int], float]
    alive: Callable[[int, int], list[int]]
    mistakes: Sequence[Mistake]


def checked(exercise: Listed, fn: Callable[..., Any], seed: int) -> str:
    """Return the text of the ✓ line; raise Wrong at the first thing that is wrong."""
    seen, *_ = each_judged(fn, exercise.sizes(seed), partial(judged, exercise))
    world = Stacked(0, seen.p, name=str(seen.sheet), lists=tuple(map(tuple, seen.lists)))
    so = run_for_real(world, "In which order does each stage meet its micro-batches?")
    return (
        f"{seen.sheet}: bubble {seen.simulation.bubble:.1%}, activations alive at most "
        f"{' '.join(str(max(of_rank)) for of_rank in seen.alive)}; run for real, the gradients are one process's{so}"
    )


def judged(exercise: Listed, sheet: Asked, returned: Any) -> ReturnedLists:
    seen, only = ReturnedLists(exercise, sheet, written(returned)), sheet.only
    # A list that can be run has no warm-up that is too long for it.
    tables = (FORM, only), (RUNS, only), (exercise.mistakes, FEW if only == LONG else only)
    for table, name in tables:
        try:
            refuse(table, seen, f"{sheet}: ")
        except Wrong as wrong:
            named = wrong.with_name(name)
            if table is not FORM:
                named.answer = replace(named.answer, picture=schedule(seen.lists))
            raise named from None
    return seen


def written(value: Any) -> Any:
    """Return the value with instructions and messages in the place of their text; other text stays."""
    if isinstance(value, list):
        return [written(each) for each in value]
    if found := MESSAGE.fullmatch(value):
        message, arrow, end = found.groups()
        return {"→": Send, "←": Receive}[arrow](written(message), int(end))
    try:
        return pp.read(value)
    except ValueError:
        return value


# ---- run for real ----------------------------------------------------------------------------------------


def run_for_real(world: Stacked, question: str, plans: Sequence[Sequence[Any]] = ()) -> str:
    """Run the lists; return in words how near the gradients are to one process's, or raise Wrong if they differ.

    plans: the lists with messages; without them the executor makes its own
    """
    found = [pair for of_rank in job(run, world, plans, ranks=world.ranks) for pair in of_rank]
    if not all(close(*pair, TOLERANCE[world.dtype]) for pair in found):
        raise Wrong(f"{world.name}, run for real: the gradients are not one process's", question)
    return bits(found)


def run(world: Stacked, plans: Sequence[Sequence[Any]] = ()) -> list[tuple[Tensor, Tensor]]:
    """Run the lists on a rank; return for each of its stages a pair: the gradients here, and those of one process.

    plans: the lists with messages; without them the executor makes its own
    """
    pipeline = pp.Pipeline(world.model(), world.lists, mean_loss)
    pipeline.plan = plans[dist.get_rank()] if plans else pipeline.plan
    pipeline.forward_backward(*map(torch.cat, world.batch()))
    return [(flat(stage), total(world.summands(number))) for number, stage in pipeline.stages.items()]


# ---- what is seen ----------------------------------------------------------------------------------------


class Returned:
    """The lists that a learner's schedule returned for p ranks, of instructions alone or with messages."""

    def __init__(self, sheet: Asked, p: int, lists: Any) -> None:
        self.sheet, self.p, self.lists = sheet, p, lists

    @cached_property
    def every(self) -> list[tuple[int, int, Any]]:
        """Return (rank, place in its list, instruction or message) for each entry of the lists, rank by rank."""
        return [(rank, place, x) for rank, order in enumerate(self.lists) for place, x in enumerate(order)]

    def at(self, rank: int, place: int) -> str:
        x = self.lists[rank][place]
        return f"rank {rank} {'runs' if isinstance(x, pp.Instruction) else 'has'} {x!r} at its {nth(place)} place"

    def first(self, matches: Callable[[int, int, Any], Any], then: str = "") -> str | None:
        """Return a sentence about the first (rank, place, instruction) that matches, or None.

        It reads `rank 1 runs 1B0 at its 3rd place`, and ends with `then`.
        """
        return first(self.at(rank, place) + then for rank, place, x in self.every if matches(rank, place, x))


class ReturnedLists(Returned):
    """The lists of a schedule and their properties, if rank r has stage r.

    kinds: the kinds of each rank's instructions (FFBFBB).
    """

    def __init__(self, exercise: Listed, sheet: Asked, lists: Any) -> None:
        super().__init__(sheet, sheet.arguments[0], lists)
        self.exercise, self.m = exercise, sheet.arguments[1]

    @cached_property
    def error(self) -> str:
        """Return why the lists cannot be run, or "" if they can."""
        try:
            pp.validate(self.lists)
        except pp.WrongSchedule as error:
            return str(error)
        return ""

    @cached_property
    def simulation(self) -> pp.Simulation:
        return pp.simulate(self.lists)

    @cached_property
    def alive(self) -> list[list[int]]:
        return pp.alive(self.lists)

    @cached_property
    def kinds(self) -> list[str]:
        return ["".join(type(x).__name__ for x in order) for order in self.lists]

    def like(self, pattern: str, then: str = "") -> str | None:
        """Return a sentence about the first place where the kinds of a rank match a pattern, or None."""
        found = [(rank, re.search(pattern, kinds)) for rank, kinds in enumerate(self.kinds)]
        return first(self.at(rank, match.start()) + then for rank, match in found if match)

    @cached_property
    def wait(self) -> str | None:
        """Return a sentence if the bubble is too large, with the place where a rank that has begun waits longest."""
        s, enough = self.simulation, self.exercise.bubble(self.p, self.m)
        if s.bubble <= enough + 1e-9:
            return None
        pairs = [(rank, *pair) for rank, order in enumerate(self.lists) for pair in enumerate(pairwise(order), 1)]
        wait, rank, place = max((s.start[y] - s.end[x], -rank, -place) for rank, place, (x, y) in pairs)
        where = f": {self.at(-rank, -place)}, and has waited {wait:g} for it" if wait else ""
        return f"the bubble is {s.bubble:.1%}, but {enough:.1%} is possible{where}"

    @cached_property
    def crowd(self) -> str | None:
        """Return a sentence about the first place where a rank holds too many activations, or None."""
        enough = self.exercise.alive(self.p, self.m)
        for rank, place, _ in self.every:
            if (n := self.alive[rank][place]) > enough[rank]:
                return f"{self.at(rank, place)}, and holds {many(n, 'activation')} then; {enough[rank]} are enough"
        return None


# ---- is it a schedule? -----------------------------------------------------------------------------------


def ragged(seen: Returned) -> str | bool:
    kinds = [order if isinstance(order, str) else f"a list of {len(order)}" for order in seen.lists]
    wrong = len(kinds) != seen.p or any(isinstance(order, str) for order in seen.lists)
    return wrong and f"returned {len(kinds)} items: {', '.join(kinds[:4])}"


RANKS = "What is the schedule of one rank, and how many ranks are there?"
# fmt: off
FORM = (
    Mistake("nothing is returned", "Who will obey the lists?",
            lambda seen: seen.lists == "None" or (isinstance(seen.lists, list) and not any(seen.lists))),
    Mistake("not a list for each rank", RANKS,
            lambda seen: not isinstance(seen.lists, list) and f"returned {seen.lists}"),
    Mistake("it does not come to an end", "When has a rank done its last backward?",
            lambda seen: any(isinstance(each, list) and len(each) == MOST for each in (seen.lists, *seen.lists))),
    Mistake("one list for all ranks", RANKS,
            lambda seen: any(isinstance(each, pp.Instruction) for each in seen.lists)
            and f"returned one list, of {len(seen.lists)} items"),
    Mistake("not a list for each rank", RANKS, ragged),
    Mistake("not an instruction", "How is the forward of stage 0 and micro-batch 0 written: F(0, 0)?",
            lambda seen: seen.first(lambda rank, place, x: not isinstance(x, pp.Instruction))),
)
# fmt: on

# ---- can it be run? --------------------------------------------------------------------------------------


def wrong_rank(seen: ReturnedLists) -> str | None:
    return seen.first(lambda rank, place, x: x.stage != rank, "; rank r has stage r")


def in_reverse(seen: ReturnedLists) -> str | bool | None:
    return all(seen.p - 1 - x.stage == rank for rank, _, x in seen.every) and wrong_rank(seen)


def beyond(seen: ReturnedLists) -> str | None:
    m = seen.m
    return seen.first(lambda rank, place, x: x.microbatch >= m, f"; the micro-batches are 0 to {m - 1}")


def missing(kind: type[pp.Instruction]) -> Callable[[ReturnedLists], str | None]:
    """Return a row's test: which instruction of this kind comes first of those that are in no list.

    An I counts as a B here, since both make the gradient of the stage's input.
    """

    def matches(seen: ReturnedLists) -> str | None:
        made = {makes(x) for _, _, x in seen.every}
        expected = product(range(seen.p), range(seen.m))
        lacks = next((at for at in expected if kind(*at) not in made), None)
        written = pp.I if kind is pp.B and seen.like("I") else kind
        return lacks and f"{written(*lacks)!r} is missing in the list of rank {lacks[0]}"

    return matches


def says(pattern: str) -> Callable[[ReturnedLists], str | None]:
    """Return a row's test: the validator's error, if it matches the pattern."""
    return lambda seen: seen.error if re.search(pattern, seen.error) else None


NEEDS = "What does this instruction need, and where in the list does that stand?"
# fmt: off
RUNS = (
    Mistake("the stages are in reverse", "Which rank reads the tokens?", in_reverse),
    Mistake("a stage on another rank", "Which stages does rank r have?", wrong_rank),
    Mistake("micro-batches are counted from 1", "Which micro-batch is the first?",
            lambda seen: min(x.microbatch for _, _, x in seen.every) == 1 and beyond(seen)),
    Mistake("a micro-batch that does not exist",
            "How often does each of your loops run, and which micro-batch does its last iteration take?", beyond),
    Mistake("the same work twice", "How often is each forward and each backward to be done?", says("the same work")),
    Mistake("a forward is missing", "How many forwards come before the first backward, and how many after?",
            missing(pp.F)),
    Mistake("a backward is missing", "How many backwards are left when the last forward is done?", missing(pp.B),
            symptom="gradients that lack the last micro-batches: a warm-up without its cool-down"),
    Mistake("a W is missing", "When does each stage's last W come?", says("the other half")),
    Mistake("both a whole backward and a half of it", "B is I and W together: which of them are written here?",
            says("one too many")),
    Mistake("W before its I", "W multiplies by the gradient of the product. Who makes that?",
            says(r"runs \d+W.* which it needs"), symptom="a list that the validator refuses at a W"),
    Mistake("a backward before its forward", NEEDS, says(r"runs \d+[BI].* which it needs"),
            symptom="a list that the validator refuses at a B"),
    Mistake("the ranks wait in a circle", "Go round the circle: which of these ranks could do something else first?",
            says("wait for each other"), symptom="a schedule that would hang; the validator names the circle"),
    Mistake("", NEEDS, lambda seen: seen.error),
)
