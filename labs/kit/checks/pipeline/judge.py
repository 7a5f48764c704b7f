"""Are these schedules, and does this obey one?

    gpipe          all forwards, then all backwards, in the order of the micro-batches
    one_f_one_b    the same bubble, and min(m, p - rank) micro-batches alive
    interleaved    v stages per rank in a loop: a bubble v times smaller, and no more alive than Narayanan et al. have
    zero_bubble    the backward split: a bubble no larger than ZB-H1's, and no more alive than with 1F1B
    obey           what F and B do on a rank, whatever the list

A list is judged by what it amounts to, not by how it is written: by the validator and the simulator, for 1 to 8 ranks,
micro-batches that nothing divides, fewer than ranks, and one.  Then the course's executor obeys the first of them
in a job.  `obey` is put in the executor's place, on 1, 2 and 4 ranks, for lists of all kinds: each thing is taken and
put once, by whom and when the list says, and is what the next one needs; nothing else is changed, or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labs import pp
from labs.kit.checks.answer import Mistake, Wrong, answered, first_fit, instead, refuse
from labs.kit.checks.case import close, isclose
from labs.kit.checks.launching import job
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.mixture import mixture
from labs.kit.checks.pipeline import body, mistakes
from labs.kit.checks.pipeline.body import Asked, Followed
from labs.kit.checks.pipeline.cases import FEW, LONG, Obeyed, Size, interleaved_sizes, many, obeyed, sizes
from labs.kit.drawing.gantt import schedule
from labs.pp.checker import nth

PROCESSES = 2  # which are asked for lists
TOLERANCE = {torch.float64: 1e-11, torch.bfloat16: 2e-2}

# ---- schedules -------------------------------------------------------------------------------------------


@answered
def gpipe(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""
    return scheduled(
        fn, sizes(seed), mistakes.GPIPE, lambda size: Target(fraction(size), [size.microbatches] * size.ranks)
    )


@answered
def one_f_one_b(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""

    def target(size: Size) -> Target:
        return Target(fraction(size), [min(size.microbatches, size.ranks - rank) for rank in range(size.ranks)])

    return scheduled(fn, sizes(seed, few=LONG), mistakes.ONE_F_ONE_B, target)


@answered
def interleaved(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches, stages_per_rank) -> lists` of F and B: stages r, r + p, r + 2 p, ... on rank r.

    Where the micro-batches are not a multiple of the ranks, or with one stage per rank, an error is right, too.
    """

    def target(size: Size) -> Target:
        p, m, v = size.ranks, size.microbatches, size.stages_per_rank
        return Target(fraction(size), [min(m * v, (v + 1) * p - 2 * rank - 1) for rank in range(p)])

    return scheduled(fn, interleaved_sizes(seed), mistakes.INTERLEAVED, target)


@answered
def zero_bubble(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F, I and W: stage r on rank r.  F, I and W take equally long."""

    def target(size: Size) -> Target:
        best = pp.simulate(pp.zb1p(size.ranks, size.microbatches)).bubble
        return Target(best, [min(size.microbatches, size.ranks)] * size.ranks)

    return scheduled(fn, sizes(seed), mistakes.ZERO_BUBBLE, target)


def fraction(size: Size) -> float:
    return (size.ranks - 1) / (size.stages_per_rank * size.microbatches)


def scheduled(
    fn: Callable[..., Any], asked: Sequence[Size], table: Sequence[Mistake], target: Callable[[Size], Target]
) -> str:
    first = Seen(asked[0], ask_all(fn, asked, table, target)[0], target)
    case = Obeyed(asked[0].stages, asked[0].ranks, name="", lists=first.lists)
    played = job(body.play, case, ranks=asked[0].ranks)
    for rank, pairs in enumerate(played):
        if not all(close(found, due, TOLERANCE[case.dtype]) for found, due in pairs):
            question = "In which order does each stage meet its micro-batches?"
            raise Wrong(f"{asked[0]}, run for real: rank {rank}'s gradients are not one process's", question)
    return (
        f"{asked[0]}: bubble {first.simulation.bubble:.1%}, activations alive at most "
        f"{' '.join(map(str, first.alive))}; run for real, the gradients are one process's{bits(chain(*played))}"
    )


def bits(pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    return ", bit for bit" if all(torch.equal(found, due) for found, due in pairs) else ", but for rounding"


def ask_all(
    fn: Callable[..., Any], asked: Sequence[Size], table: Sequence[Mistake], target: Callable[[Size], Target]
) -> list[Asked]:
    try:
        answers, another_time = job(body.ask, fn, list(asked), ranks=PROCESSES)
    except Wrong as wrong:
        raise wrong.also(only_of(wrong, asked, lambda few: ask_all(fn, few, table, target))) from None
    for size, answer, other in zip(asked, answers, another_time, strict=True):
        if answer.refused and other.refused:
            continue
        seen = Seen(size, answer, target)
        runs, amounts_to = (*mistakes.FORM, *mistakes.RUNS), () if size.refusable else table
        # A list that can be run has no warm-up that is too long for it.
        for rows, only in ((runs, size.only), (amounts_to, FEW if size.only == LONG else size.only)):
            try:
                refuse(rows, seen, f"{size}: ")
            except Wrong as wrong:
                raise pictured(wrong.also(only), seen) from None
        refuse(AFTERMATH, answer, f"{size}: ")
        if not (answer.again and other.again and answer.returned == other.returned):
            raise Wrong(
                f"{size}: a second call says something else", "What is kept between them?", "not the same twice"
            )
    return answers


def only_of(wrong: Wrong, asked: Sequence[Any], again: Callable[[Any], Any]) -> str:
    """Of that for which it raised; what is wrong with an earlier one tells more."""
    at = next((at for at, case in enumerate(asked) if f"(with {case})" in wrong.answer.text), 0)
    if at:
        again(asked[:at])
    return asked[at].only


def pictured(wrong: Wrong, seen: Seen) -> Wrong:
    """With the schedule as far as it goes, where it is one."""
    if not first_fit(mistakes.FORM, seen) and any(seen.lists):
        wrong.answer = replace(wrong.answer, picture=schedule(seen.lists))
    return wrong


class Target(NamedTuple):
    """At most; alive: by rank."""

    bubble: float
    alive: list[int]


class Seen:
    """What was returned for a size, and what it amounts to."""

    def __init__(self, size: Size, answer: Asked, target: Callable[[Size], Target]) -> None:
        self.size, self.lists, self.target = size, answer.returned, target(size)

    @cached_property
    def error(self) -> pp.WrongSchedule | None:
        """Why they cannot be run."""
        try:
            pp.validate(self.lists)
        except pp.WrongSchedule as error:
            return error
        return None

    @cached_property
    def simulation(self) -> pp.Simulation:
        return pp.simulate(self.lists)

    @cached_property
    def alive(self) -> list[int]:
        return [max(order) for order in pp.alive(self.lists)]

    def each(self, fits: Callable[[int, int, pp.Instruction], Any], then: str = "") -> str | None:
        """Of the first instruction that it fits: `rank 1 runs 1B0 at its 3rd place`, and `then`."""
        for rank, order in enumerate(self.lists):
            for place, x in enumerate(order):
                if fits(rank, place, x):
                    return self.at(rank, place) + then
        return None

    def at(self, rank: int, place: int) -> str:
        return f"rank {rank} runs {self.lists[rank][place]!r} at its {nth(place)} place"

    @cached_property
    def wait(self) -> str | None:
        """Of the bubble, if it is too large, and where a rank that has begun waits longest."""
        if self.simulation.bubble <= self.target.bubble + 1e-9:
            return None
        s, pauses = self.simulation, []
        for rank, order in enumerate(self.lists):
            pauses += [(s.start[y] - s.end[x], -rank, -place) for place, (x, y) in enumerate(pairwise(order), 1)]
        wait, rank, place = max(pauses)
        where = f": {self.at(-rank, -place)}, and has waited {wait:g} for it" if wait else ""
        return f"the bubble is {self.simulation.bubble:.1%}, but {self.target.bubble:.1%} is possible{where}"

    @cached_property
    def crowd(self) -> str | None:
        """Where a rank first holds too many."""
        for rank, (numbers, due) in enumerate(zip(pp.alive(self.lists), self.target.alive, strict=True)):
            for place, n in enumerate(numbers):
                if n > due:
                    return f"{self.at(rank, place)}, and holds {many(n, 'activation')} then; {due} are enough"
        return None


# ---- obeying ---------------------------------------------------------------------------------------------


@answered
def obey(fn: Callable[..., Any], seed: int) -> str:
    """`fn(instructions, stages, loss, xs, ys, take, put) -> losses`, of F and B.

    Of each micro-batch its own loss, in the order of micro-batches, on the rank of the last stage.
    """
    cases = obeyed(seed)
    found = [one for ranks in (2, 4) for one in follow(fn, [case for case in cases if case.ranks == ranks])]
    steps = [(one, step) for of_rank in found for one in of_rank for step in range(2)]
    pairs = ((one.gradients[step][number], due) for one, step in steps for number, due in one.due[step].items())
    return (
        f"{len(cases)} lists on 1, 2 and 4 ranks: losses and gradients are one process's{bits(pairs)}, and nothing is "
        "kept after its backward"
    )


def follow(fn: Callable[..., Any], cases: list[Obeyed]) -> list[list[Followed]]:
    try:
        results = job(body.obey, fn, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        only = only_of(wrong, cases, partial(follow, fn))
        if wrong.raised:
            try:
                refuse(mistakes.DISOBEYED, wrong.answer.text, wrong.answer.text)
            except Wrong as named:
                wrong = named
        raise wrong.also(only) from None
    for index, case in enumerate(cases):
        ranks = [of_rank[index] for of_rank in results]
        for rank, found in enumerate(ranks):
            refuse((*mistakes.STEPS, *AFTERMATH), found, f"{case}: on rank {rank} ")
        for step in range(2):
            ones = [One(case, rank, step, found) for rank, found in enumerate(ranks)]
            for one in sorted(ones, key=lambda one: -max(one.due)):  # as gradients come: from the end
                table = mistakes.LOSSES if one.wrong is None else mistakes.GRADIENTS
                refuse(table, one, f"{case}: on rank {one.rank} ")
    return results


class One:
    """What a rank did with a batch."""

    def __init__(self, case: Obeyed, rank: int, step: int, found: Followed) -> None:
        self.case, self.rank, self.step, self.outcome = case, rank, step, found
        self.losses, self.due_losses = found.losses[step], found.due_losses[step]
        self.gradients, self.due = found.gradients[step], found.due[step]
        self.has_last, self.tolerance = case.stages - 1 in self.due, TOLERANCE[case.dtype]

    @cached_property
    def wrong(self) -> int | None:
        """The last stage whose gradients are not one process's: a gradient comes from the end."""
        found, due = self.gradients, self.due
        return next((n for n in sorted(due, reverse=True) if not close(found[n], due[n], self.tolerance)), None)

    @property
    def first(self) -> str:
        found, due = self.gradients[self.wrong], self.due[self.wrong]
        at = int((~isclose(found, due, self.tolerance)).nonzero()[0])
        return f"in stage {self.wrong} element {at} of the gradients is {instead(found[at], due[at])}"

    @cached_property
    def times(self) -> float | None:
        """How many times too large all of them are."""
        found, due = self.gradients[self.wrong].double(), self.due[self.wrong].double()
        factor = float(found @ due / (due @ due))
        return factor if close(found, factor * due, 1e-4) else None

    @cached_property
    def made_of(self) -> list[float] | None:
        """Of each micro-batch of the batches until now: how often its gradient is in what was found."""
        found = mixture(self.gradients[self.wrong], self.case.sources(self.wrong, self.step))
        return None if found is None else found.tolist()
