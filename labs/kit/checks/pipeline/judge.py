"""Are these schedules, and does this obey one?

    gpipe          all forwards, then all backwards
    one_f_one_b    the same bubble, and min(m, p - rank) micro-batches alive
    interleaved    v stages a rank in a loop: a bubble v times smaller, and no more alive than Narayanan et al. have
    zero_bubble    the backward split: a bubble no larger than ZB-H1's, and no more alive than with 1F1B
    obey           what F and B do on a rank, whatever the list

A list is judged by what it comes to, not by how it is written: by the validator and the simulator, for 1 to 8 ranks,
micro-batches that divide by nothing, fewer than ranks, and one.  Then the course's executor obeys the first of them
in a job.  `obey` is put in the executor's place, on 1, 2 and 4 ranks, for four kinds of lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from labs import pp
from labs.kit.checks.answer import Mistake, Wrong, answered, first_fit, instead, refuse
from labs.kit.checks.case import close, isclose
from labs.kit.checks.job import job
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.mixture import mixture
from labs.kit.checks.pipeline import body, mistakes
from labs.kit.checks.pipeline.body import Asked, Followed
from labs.kit.checks.pipeline.cases import Obeyed, Size, interleaved_sizes, many, obeyed, sizes
from labs.kit.drawing.schedules import schedule
from labs.pp.checker import nth

PROCESSES = 2  # which are asked for lists
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}

# ---- schedules -------------------------------------------------------------------------------------------


@answered
def gpipe(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""
    return scheduled(fn, sizes(seed), mistakes.GPIPE, lambda size: Target(size, fraction(size), [size.microbatches]))


@answered
def one_f_one_b(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F and B: stage r on rank r."""

    def target(size: Size) -> Target:
        return Target(size, fraction(size), [min(size.microbatches, size.ranks - rank) for rank in range(size.ranks)])

    return scheduled(fn, sizes(seed, few="the warm-up is not clamped"), mistakes.ONE_F_ONE_B, target)


@answered
def interleaved(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches, stages_per_rank) -> lists` of F and B: stages r, r + p, r + 2 p, ... on rank r.

    For micro-batches that are no multiple of the ranks, or one stage a rank, a ValueError is as right.
    """

    def target(size: Size) -> Target:
        p, m, v = size.ranks, size.microbatches, size.stages_per_rank
        # (Of as many micro-batches as ranks Narayanan et al. run all forwards first.)
        alive = [min(m * v, (v + 1) * p - 2 * rank - 1 if m > p else m * v) for rank in range(p)]
        return Target(size, fraction(size), alive)

    return scheduled(fn, interleaved_sizes(seed), mistakes.INTERLEAVED, target, several=True)


@answered
def zero_bubble(fn: Callable[..., Any], seed: int) -> str:
    """`fn(ranks, microbatches) -> lists` of F, I and W: stage r on rank r.  F, I and W take equally long."""

    def target(size: Size) -> Target:
        best = pp.simulate(pp.zb1p(size.ranks, size.microbatches)).bubble
        return Target(size, best, [min(size.microbatches, size.ranks)] * size.ranks)

    return scheduled(fn, sizes(seed), mistakes.ZERO_BUBBLE, target)


def fraction(size: Size) -> float:
    return (size.ranks - 1) / (size.stages_per_rank * size.microbatches)


def scheduled(
    fn: Callable[..., Any],
    asked: Sequence[Size],
    table: Sequence[Mistake],
    target: Callable[[Size], Target],
    several: bool = False,
) -> str:
    """several: stages a rank."""
    answers = ask_all(fn, asked, table, target, several)
    first = Seen(asked[0], answers[0], target)
    case = Obeyed(asked[0].stages, first.size.ranks, name="", lists=first.lists)
    exact = True
    for rank, pairs in enumerate(job(body.play, case, ranks=first.size.ranks)):
        for found, due in pairs:
            exact &= torch.equal(found, due)
            if not close(found, due, TOLERANCE[torch.float64]):
                raise Wrong(f"{first.size}, run for real: rank {rank}'s gradients are not one process's", ORDER)
    alive = " ".join(map(str, first.alive))
    return (
        f"{first.size}: bubble {first.bubble:.1%}, activations alive at most {alive}; run for real, the gradients are "
        f"one process's{', bit by bit' if exact else ', but for rounding'}"
    )


ORDER = "In which order does each stage meet its micro-batches?"


def ask_all(
    fn: Callable[..., Any],
    asked: Sequence[Size],
    table: Sequence[Mistake],
    target: Callable[[Size], Target],
    several: bool,
) -> list[Asked]:
    try:
        answers, another_time = job(body.ask, fn, list(asked), several, ranks=PROCESSES)
    except Wrong as wrong:
        at = next((at for at, size in enumerate(asked) if f"(with {size})" in wrong.answer.text), 0)
        if at:  # what is wrong with an earlier one tells more than what it raises for this one
            ask_all(fn, asked[:at], table, target, several)
        raise wrong.also(asked[at].only) from None
    for size, answer, other in zip(asked, answers, another_time, strict=True):
        if answer.refused and other.refused:
            continue
        seen = Seen(size, answer, target)
        try:
            refuse((*mistakes.FORM, *mistakes.RUNS, *(() if size.refusable else table)), seen, f"{size}: ")
        except Wrong as wrong:
            raise pictured(wrong.also(size.only), seen) from None
        refuse(AFTERMATH, answer, f"{size}: ")
        if not (answer.again and other.again and answer.returned == other.returned):
            raise Wrong(f"{size}: a second call says something else", "What is kept between them?", "not twice alike")
    return answers


def pictured(wrong: Wrong, seen: Seen) -> Wrong:
    """With the schedule as far as it goes, where it is one."""
    if not first_fit(mistakes.FORM, seen) and any(seen.lists):
        wrong.answer = replace(wrong.answer, picture=schedule(seen.lists))
    return wrong


class Target:
    """bubble: at most; alive: by rank, at most, or one for all of them."""

    def __init__(self, size: Size, bubble: float, alive: Sequence[int]) -> None:
        self.bubble, self.alive = bubble, list(alive) * (size.ranks if len(alive) == 1 else 1)


class Seen:
    """What was returned for a size, and what it comes to."""

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

    @property
    def bubble(self) -> float:
        return self.simulation.bubble

    @cached_property
    def alive(self) -> list[int]:
        return [max(order) for order in pp.alive(self.lists)]

    def each(self, fits: Callable[[int, int, pp.Instruction], Any]) -> str | None:
        """Of the first instruction that it fits: `rank 1 runs 1B0 at its 3rd place`."""
        for rank, order in enumerate(self.lists):
            for place, x in enumerate(order):
                if fits(rank, place, x):
                    return self.at(rank, place)
        return None

    def at(self, rank: int, place: int) -> str:
        return f"rank {rank} runs {self.lists[rank][place]!r} at its {nth(place)} place"

    @property
    def waits(self) -> bool:
        return self.bubble > self.target.bubble + 1e-9

    @property
    def longest_wait(self) -> str:
        """Of the bubble, and where a rank that has begun waits longest."""
        told = f"the bubble is {self.bubble:.1%}, and {self.target.bubble:.1%} is possible"
        s, pauses = self.simulation, []
        for rank, order in enumerate(self.lists):
            for place, (x, y) in enumerate(pairwise(order), 1):
                pauses.append((s.start[y] - s.end[x], -rank, -place))
        if not pauses or not max(pauses)[0]:
            return told
        wait, rank, place = max(pauses)
        return f"{told}: {self.at(-rank, -place)}, and has waited {wait:g} for it"

    @cached_property
    def crowded(self) -> int | None:
        """The first rank that holds too many."""
        return next((r for r, (n, due) in enumerate(zip(self.alive, self.target.alive, strict=True)) if n > due), None)

    @property
    def crowd(self) -> str:
        rank = self.crowded
        numbers, due = pp.alive(self.lists)[rank], self.target.alive[rank]
        place = next(place for place, n in enumerate(numbers) if n > due)
        return f"{self.at(rank, place)}, and holds {many(numbers[place], 'activation')} then; {due} are enough"

    def warmup(self, rank: int) -> int:
        """Forwards before the first backward."""
        order = self.lists[rank]
        return next(place for place, x in enumerate(order) if not isinstance(x, pp.F))


# ---- obeying ---------------------------------------------------------------------------------------------


@answered
def obey(fn: Callable[..., Any], seed: int) -> str:
    """`fn(instructions, stages, loss, xs, ys, take, put) -> losses`, of F and B.

    Of each micro-batch its own loss, in the order of micro-batches, on the rank of the last stage.
    """
    cases = obeyed(seed)
    found = [one for ranks in (2, 4) for one in follow(fn, [case for case in cases if case.ranks == ranks])]
    exact = all(
        torch.equal(one.gradients[step][number], one.due[step][number])
        for of_rank in found
        for one in of_rank
        for step in range(2)
        for number in one.due[step]
    )
    return (
        f"{len(cases)} lists on 1, 2 and 4 ranks: losses and gradients are one process's"
        f"{', bit by bit' if exact else ', but for rounding'}, and nothing is kept after its backward"
    )


def follow(fn: Callable[..., Any], cases: list[Obeyed]) -> list[list[Followed]]:
    try:
        results = job(body.obey, fn, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        at = next((at for at, case in enumerate(cases) if f"(with {case})" in wrong.answer.text), 0)
        if at:
            follow(fn, cases[:at])
        if wrong.raised:
            try:
                refuse(mistakes.DISOBEYED, wrong.answer.text, wrong.answer.text)
            except Wrong as named:
                raise named if named.answer.mistake else named.also(cases[at].only) from None
        raise wrong.also(cases[at].only) from None
    for index, case in enumerate(cases):
        ranks = [of_rank[index] for of_rank in results]
        for step in range(2):
            ones = [One(case, rank, step, found) for rank, found in enumerate(ranks)]
            for one in sorted(ones, key=lambda one: -max(one.due)):  # as gradients come: from the end
                refuse(mistakes.OBEYED, one, f"{case}: on rank {one.rank} ")
        for rank, found in enumerate(ranks):
            refuse(AFTERMATH, found, f"{case}: on rank {rank} ")
    return results


class One:
    """What a rank did with a batch."""

    def __init__(self, case: Obeyed, rank: int, step: int, found: Followed) -> None:
        self.case, self.rank, self.step, self.outcome = case, rank, step, found
        self.order = list(case.lists[rank if len(case.lists) > 1 else 0])
        self.done, self.losses = found.done[step], found.losses[step]
        self.gradients, self.due = found.gradients[step], found.due[step]
        self.due_losses = found.due_losses[step]

    @property
    def has_last(self) -> bool:
        return self.case.stages - 1 in self.due

    def right(self, number: int) -> bool:
        return close(self.gradients[number], self.due[number], TOLERANCE[self.case.dtype])

    @cached_property
    def wrong(self) -> int | None:
        """The last stage whose gradients are not one process's: a gradient comes from the end."""
        return next((number for number in sorted(self.due, reverse=True) if not self.right(number)), None)

    @property
    def first(self) -> str:
        found, due = self.gradients[self.wrong], self.due[self.wrong]
        at = int((~isclose(found, due, TOLERANCE[self.case.dtype])).nonzero()[0])
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
        sources = [each[self.wrong] for step in range(self.step + 1) for each in self.case.gradients(step)]
        found = mixture(self.gradients[self.wrong], sources)
        return None if found is None else found.tolist()
