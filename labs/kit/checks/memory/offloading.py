"""Is the next state on its way while this one is updated?  A step of an optimizer whose state lives on another tier.

The tier is made here: what it hands out is a new tensor, and what an update gives is another one.  Nothing is judged by
the clock: an update waits until the next fetch has begun, and a store until the next update has; one that waits in
vain shows that nothing overlaps.  It counts the parameters whose state is alive at the same time.

With none, one and many parameters, in any order, some missing; with a tier that fails in a fetch, and in a store.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, answered, refuse, show
from labs.kit.checks.launching import job, noted
from labs.kit.checks.left import AFTERMATH, Aftermath

IN_VAIN = 2.0  # s that one waits for another to begin, before nothing overlaps
GREEDY = 0.05  # s in which a thread may fetch more than it should
MOST = 3  # parameters whose state is here: one comes, one is updated, one goes


@dataclass(frozen=True)
class Case(shared.Case):
    """due: the numbers of the parameters that take the step, in order.  fails: the call that raises, and of whom."""

    due: tuple[int, ...] = ()
    fails: tuple[str, int] | None = None

    def __str__(self) -> str:
        words = f"parameters {', '.join(map(str, self.due))}" if self.due else "no parameter"
        return f"{words}, and {self.fails[0]} fails for {self.fails[1]}" if self.fails else words


@dataclass
class Outcome(shared.Outcome):
    """What the tier saw."""

    calls: list[tuple[str, int]] = field(default_factory=list)  # as they began
    ended: tuple[tuple[str, int], ...] = ()  # by the time when the function had returned
    alone: list[tuple[str, int]] = field(default_factory=list)  # those that waited in vain
    wrong: list[tuple[str, int, str]] = field(default_factory=list)  # given something else than they should be
    most: tuple[int, ...] = ()  # the parameters whose state was alive at once
    raised: str = ""
    threads: int = 0  # more than before


@answered
def offloaded_step(fn: Callable[..., Any], seed: int) -> str:
    """`fn(due, fetch, update, store)`: every parameter in `due` is fetched, updated and stored, with overlap."""
    draw = random.Random(seed)
    many = tuple(draw.sample(range(20), 7))
    cases = [
        Case(seed, 1, due=tuple(draw.sample(range(9), 3))),
        Case(seed, 1, due=many),
        Case(seed, 1, due=()),
        Case(seed, 1, due=(draw.randrange(1, 9),)),
        Case(seed, 1, due=tuple(draw.sample(range(9), 2))),
        Case(seed, 1, due=many[:5], fails=("fetch", many[2])),
        Case(seed, 1, due=many[:4], fails=("store", many[1])),
        Case(seed, 1, due=many[:3], fails=("store", many[2])),
    ]
    outcomes = job(all_cases, fn, cases, ranks=1, record=None, when="on one rank")[0]
    for case, outcome in zip(cases, outcomes, strict=False):  # it ends with the first that is wrong
        refuse(MISTAKES, Seen(case, outcome), f"{case}: ")
        refuse(AFTERMATH, outcome, f"{case}: ")
    most = max(len(outcome.most) for outcome in outcomes)
    return f"each fetch, and each store, beside an update; the state of {most} parameters at most (budget {MOST})"


# ---- on the rank -----------------------------------------------------------------------------------------


class Tier:
    """fetch, update and store, and what they see."""

    def __init__(self, case: Case) -> None:
        self.case, self.outcome = case, Outcome()
        self.changed, self.ended = threading.Condition(), []
        self.alive: dict[int, weakref.WeakSet] = {i: weakref.WeakSet() for i in range(20)}
        self.numbers: dict[int, list[float]] = {}

    def fetch(self, i: int) -> dict[str, Tensor]:
        self.begin("fetch", i)
        values = self.new(i, float(i))
        self.end("fetch", i)
        return values

    def update(self, i: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        self.begin("update", i)
        self.look("update", i, values, float(i))
        if following := self.behind(i):
            self.wait_for("fetch", following[0], of="update", i=i)
            time.sleep(GREEDY)
        updated = self.new(i, i + 0.5)
        self.end("update", i)
        return updated

    def store(self, i: int, values: dict[str, Tensor]) -> None:
        self.begin("store", i)
        self.look("store", i, values, i + 0.5)
        if following := self.behind(i):
            self.wait_for("update", following[0], of="store", i=i)
        else:
            time.sleep(GREEDY)
        self.end("store", i)

    def new(self, i: int, number: float) -> dict[str, Tensor]:
        values = {"master": torch.full((4,), number), "mean": torch.full((4,), -number)}
        with self.changed:
            self.alive[i].add(values["master"])
        self.count()
        return values

    def look(self, name: str, i: int, values: Any, number: float) -> None:
        fits = isinstance(values, dict) and isinstance(values.get("master"), Tensor)
        if not fits or values["master"][0].item() != number:
            what = show(values) if not fits else self.whose(values["master"][0].item())
            self.outcome.wrong.append((name, i, what))

    def whose(self, number: float) -> str:
        return f"what {'update gave' if number % 1 else 'fetch gave'} for {int(number)}"

    def begin(self, name: str, i: int) -> None:
        with self.changed:
            self.outcome.calls.append((name, i))
            self.changed.notify_all()
        if self.case.fails == (name, i):
            raise OSError("no room is left on this tier")
        self.count()

    def end(self, name: str, i: int) -> None:
        with self.changed:
            self.ended.append((name, i))

    def count(self) -> None:
        with self.changed:
            alive = tuple(i for i, tensors in self.alive.items() if len(tensors))
            self.outcome.most = max(self.outcome.most, alive, key=len)

    def behind(self, i: int) -> tuple[int, ...]:
        return self.case.due[self.case.due.index(i) + 1 :] if i in self.case.due else ()

    def wait_for(self, name: str, other: int, of: str, i: int) -> None:
        """Until that call has begun; once something waited in vain, or fails, nobody waits any more."""
        hopeless = self.outcome.alone or self.case.fails
        with self.changed:
            begun = self.changed.wait_for(lambda: (name, other) in self.outcome.calls, 0 if hopeless else IN_VAIN)
        if not begun and not hopeless:
            self.outcome.alone.append((of, i))


def all_cases(fn: Callable[..., Any], cases: list[Case]) -> list[Outcome]:
    """Up to the first that is wrong."""
    outcomes = []
    for case in cases:
        outcomes.append(one_case(fn, case))
        if any(mistake.fits(Seen(case, outcomes[-1])) for mistake in MISTAKES):
            break
    return outcomes


def one_case(fn: Callable[..., Any], case: Case) -> Outcome:
    tier, before = Tier(case), threading.active_count()
    with Aftermath() as aftermath:
        try:
            noted(case, fn, list(case.due), tier.fetch, tier.update, tier.store)
        except Exception as error:
            if case.fails is None:
                raise
            tier.outcome.raised = str(error)
    tier.outcome.ended = tuple(tier.ended)  # and not what comes later
    tier.outcome.threads = threading.active_count() - before
    aftermath.tell(tier.outcome)
    return tier.outcome


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    case: Case
    outcome: Outcome

    def of(self, name: str) -> list[int]:
        return [i for called, i in self.outcome.calls if called == name]

    def in_vain(self, name: str, told: str) -> str | None:
        return next((told.format(i) for called, i in self.outcome.alone if called == name), None)

    def given(self, name: str) -> str | None:
        return next((f"{name}({i}, …) was given {what}" for n, i, what in self.outcome.wrong if n == name), None)

    def missing(self) -> str | None:
        for name in ("fetch", "update", "store"):
            if gone := [i for i in self.case.due if i not in self.of(name)]:
                return f"{name} was not called for {gone[0]}"
        return None

    def more(self) -> str | None:
        for name in ("fetch", "update", "store"):
            found = self.of(name)
            if others := [i for i in found if i not in self.case.due]:
                return f"{name} was called for {others[0]}"
            if twice := [i for i in found if found.count(i) > 1]:
                return f"{name} was called {found.count(twice[0])} times for {twice[0]}"
        return None

    def crowded(self) -> str | None:
        most = self.outcome.most
        return f"at one moment the state of {len(most)} parameters was here: {list(most)}" if len(most) > MOST else None

    def unfinished(self) -> str | None:
        late = [i for i in self.case.due if ("store", i) not in self.outcome.ended]
        return f"when your function returned, {late[0]} was not stored" if late else None


def unless_it_fails(fits: Callable[[Seen], str | None]) -> Callable[[Seen], str | None]:
    return lambda seen: None if seen.case.fails else fits(seen)


def swallowed(seen: Seen) -> str | None:
    if seen.case.fails and not seen.outcome.raised:
        name, i = seen.case.fails
        return f"{name}({i}) raised an OSError, and nobody heard of it"
    return None


# fmt: off
MISTAKES = (
    Mistake("an error is lost", "Who asks a future for its result, and what does it do if the call has raised?",
            swallowed,
            shows="a full disk, no error, and a training run that is lost"),
    Mistake("called too often, or for others", "Which parameters take this step, and how often does each?", Seen.more),
    Mistake("the wrong numbers are updated", "Whose values did the fetch that you waited for bring?",
            lambda seen: seen.given("update")),
    Mistake("the wrong numbers are stored", "What does update return, and what becomes of it?",
            lambda seen: seen.given("store"),
            shows="a step that changes nothing on the tier"),
    Mistake("one is left out", "Which parameter has no other after it?", unless_it_fails(Seen.missing)),
    Mistake("in another order", "In which order are the parameters due?",
            unless_it_fails(lambda seen: seen.of("update") != list(seen.case.due)
            and f"the updates were {seen.of('update')}")),
    Mistake("returned too early", "Who waits for the last store?",
            unless_it_fails(Seen.unfinished),
            shows="numbers of the step before, now and then, in the last parameter"),
    Mistake("too much at once", "How many parameters may be here: one that comes, one that is updated, one that goes?",
            unless_it_fails(Seen.crowded),
            shows="the next one is fetched in time, and the memory is what it was without offloading"),
    Mistake("nothing is fetched during an update", "Which call must have begun before update is called?",
            lambda seen: seen.in_vain("update", "during the update of {} the next fetch did not begin"),
            shows="the step takes as long as all fetches, updates and stores together"),
    Mistake("the next update waits for a store",
            "Who waits for a store, and when must somebody wait for it at the earliest?",
            lambda seen: seen.in_vain("store", "while {} was stored, the next update did not begin")),
    Mistake("threads are left behind", "Which threads are still there after a thousand steps?",
            lambda seen: seen.outcome.threads > 0
            and f"there are {seen.outcome.threads} more than before your function was called"),
)
# fmt: on
