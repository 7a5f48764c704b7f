"""offloaded_step: an update overlaps with the fetch of the next parameter's state and the store of the one before.

The check provides the tier: a fetch returns a new tensor, and an update returns another one.  Nothing is judged by the
clock: an update waits until the next fetch has begun, and a store until the next update has.  A call that waits in
vain shows that nothing overlaps.  The tier also counts the parameters whose state is alive at the same time.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered, first, show
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_one_rank
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Look, World

IN_VAIN = 2.0  # s that a call waits for another one to begin, before it finds that nothing overlaps
GREEDY = 0.05  # s that a call takes longer, in which a thread may fetch more than it should
MOST = 3  # parameters whose state may be in memory: one is fetched, one is updated, one is stored
GIVES = {"fetch": 0.0, "update": 0.5}  # a call returns the number of the parameter plus this
BESIDE = {"update": "fetch", "store": "update"}  # the call that must begin meanwhile, for the next parameter
WRONG: set[int] = set()  # the ids of the functions that were wrong in an earlier world on this rank

Call = tuple[str, int]


@dataclass(frozen=True)
class OffloadedStep(World):
    """A step of the optimizer.

    expected: the numbers of the parameters that take the step, in order.
    fails: the call that raises an error, and the number of its parameter.
    """

    expected: tuple[int, ...] = ()
    fails: Call | None = None

    def __str__(self) -> str:
        words = f"parameters {', '.join(map(str, self.expected))}" if self.expected else "no parameter"
        return f"{words}, and {self.fails[0]} fails for {self.fails[1]}" if self.fails else words


def worlds(draw: Draw) -> dict[int, list[OffloadedStep]]:
    pick = draw.random.sample
    many = tuple(pick(range(20), 7))
    some = [tuple(pick(range(9), 3)), many, (), (draw.random.randrange(1, 9),), tuple(pick(range(9), 2))]
    failing = {("fetch", many[2]): 5, ("store", many[1]): 4, ("store", many[2]): 3}
    return {
        1: [
            *(draw.world(OffloadedStep, 1, expected=expected) for expected in some),
            *(draw.world(OffloadedStep, 1, expected=many[:n], fails=fails) for fails, n in failing.items()),
        ]
    }


def script(world: OffloadedStep, fn: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    if id(fn) in WRONG:
        yield Look()
    else:
        tier = Tier(world)
        tier.play(fn)
        if found := first_wrong(MISTAKES, [("", tier)]):
            WRONG.add(id(fn))
        yield Look(facts={"most": len(tier.most)} | found)


class Tier:
    """A tier for optimizer state; its fetch, update and store note their calls and the values that they are given."""

    def __init__(self, world: OffloadedStep) -> None:
        self.world, self.changed = world, threading.Condition()
        self.begun: list[Call] = []
        self.ended: list[Call] = []
        self.alone: list[Call] = []  # the calls that waited in vain
        self.given: list[tuple[str, str]] = []  # the call, and a sentence on the wrong values that it was given
        self.alive: dict[int, weakref.WeakSet] = {i: weakref.WeakSet() for i in range(20)}
        self.most: list[int] = []  # the parameters whose state was alive at once, when there were most of them
        self.raised = ""

    def play(self, fn: Callable[..., Any]) -> None:
        """Call the learner's function with this tier; note its error, the stores, and the threads that still run."""
        before = threading.active_count()
        try:
            fn(list(self.world.expected), *(partial(self.call, name) for name in ("fetch", "update", "store")))
        except Exception as error:
            if self.world.fails is None:
                raise
            self.raised = str(error)
        self.stored = [i for name, i in self.ended if name == "store"]  # without later ones
        self.threads = threading.active_count() - before
        if self.threads > 0 and not self.world.fails:  # a store that comes late is not a missing store
            with self.changed:
                self.changed.wait_for(lambda: set(self.of("store")) >= set(self.world.expected), IN_VAIN)

    def call(self, name: str, i: int, values: Any = None) -> dict[str, Tensor] | None:
        """Do the work of fetch, update or store, and note the call; return the new state, or None."""
        with self.changed:
            self.begun.append((name, i))
            self.changed.notify_all()
        if self.world.fails == (name, i):
            raise OSError("no room is left on this tier")
        self.count()
        if name in BESIDE:
            self.look(name, i, values)
            self.wait(name, i)
        made = None
        if name in GIVES:
            made = {"master": torch.full((4,), i + GIVES[name]), "mean": torch.full((4,), -float(i))}
            with self.changed:
                self.alive[i].add(made["master"])
            self.count()
        self.ended.append((name, i))
        return made

    def count(self) -> None:
        """Note the parameters whose state is alive, if there are more of them than ever before."""
        with self.changed:
            self.most = max(self.most, [i for i, tensors in self.alive.items() if len(tensors)], key=len)

    def look(self, name: str, i: int, values: Any) -> None:
        """Note an update or a store that was given wrong values."""
        matches = isinstance(values, dict) and isinstance(values.get("master"), Tensor)
        found = values["master"][0].item() if matches else None
        if found != i + GIVES["fetch" if name == "update" else "update"]:
            what = f"what {'update gave' if found % 1 else 'fetch gave'} for {int(found)}" if matches else show(values)
            self.given.append((name, f"{name}({i}, …) was given {what}"))

    def wait(self, name: str, i: int) -> None:
        """Wait until the call that should overlap with this one has begun, for the next parameter.

        No call waits any more once one has waited in vain, or in a step in which a call fails.
        """
        expected, hopeless = self.world.expected, self.alone or self.world.fails
        following = expected[expected.index(i) + 1 :][:1] if i in expected else ()
        if following:
            with self.changed:
                other = BESIDE[name], following[0]
                begun = self.changed.wait_for(lambda: other in self.begun, 0 if hopeless else IN_VAIN)
            if not begun and not hopeless:
                self.alone.append((name, i))
        if bool(following) == (name == "update"):
            time.sleep(GREEDY)

    def of(self, name: str) -> list[int]:
        """Return the parameters for which this call has begun, in order."""
        return [i for called, i in self.begun if called == name]


def in_vain(name: str, template: str) -> Callable[[Tier], str | None]:
    """Return a row's test, which fills the template for the first such call that waited in vain."""
    return lambda tier: first(template.format(i) for called, i in tier.alone if called == name)


def given(name: str) -> Callable[[Tier], str | None]:
    """Return a row's test: the sentence on the first such call that was given wrong values."""
    return lambda tier: first(told for called, told in tier.given if called == name)


def too_often(tier: Tier) -> str | None:
    for name, i in tier.begun:
        if i not in tier.world.expected:
            return f"{name} was called for {i}"
        if (times := tier.begun.count((name, i))) > 1:
            return f"{name} was called {times} times for {i}"
    return None


def unless_it_fails(matches: Callable[[Tier], str | bool | None]) -> Callable[[Tier], str | bool | None]:
    """Return the row's test for the steps in which no call fails."""
    return lambda tier: None if tier.world.fails else matches(tier)


# fmt: off
MISTAKES = (
    Mistake("an error is lost", "Who asks a future for its result, and what does it do if the call has raised?",
            lambda tier: tier.world.fails and not tier.raised
            and "{}({}) raised an OSError, and nobody heard of it".format(*tier.world.fails),
            symptom="a full disk, no error, and a training run that is lost"),
    Mistake("called too often, or for others", "Which parameters take this step, and how often does each?", too_often),
    Mistake("the wrong numbers are updated", "Whose values did the fetch that you waited for bring?",
            given("update")),
    Mistake("the wrong numbers are stored", "What does update return, and what becomes of it?", given("store"),
            symptom="a step that changes nothing on the tier"),
    Mistake("one is left out", "Which parameter has no other after it?",
            unless_it_fails(lambda tier: first(f"{name} was not called for {i}"
                                               for name in ("fetch", "update", "store")
                                               for i in tier.world.expected if (name, i) not in tier.begun))),
    Mistake("in another order", "In which order are the parameters due?",
            unless_it_fails(lambda tier: tier.of("update") != list(tier.world.expected)
                            and f"the updates were {tier.of('update')}")),
    Mistake("returned too early", "Who waits for the last store?",
            unless_it_fails(lambda tier: first(f"when your function returned, {i} was not stored"
                                               for i in tier.world.expected if i not in tier.stored)),
            symptom="numbers of the step before, now and then, in the last parameter"),
    Mistake("too much at once", "How many parameters may be here: one that comes, one that is updated, one that goes?",
            unless_it_fails(lambda tier: len(tier.most) > MOST
                            and f"at one moment the state of {len(tier.most)} parameters was here: {tier.most}"),
            symptom="the next one is fetched in time, and the memory is what it was without offloading"),
    Mistake("nothing is fetched during an update", "Which call must have begun before update is called?",
            in_vain("update", "during the update of {} the next fetch did not begin"),
            symptom="the step takes as long as all fetches, updates and stores together"),
    Mistake("the next update waits for a store",
            "Who waits for a store, and when must somebody wait for it at the earliest?",
            in_vain("store", "while {} was stored, the next update did not begin")),
    Mistake("threads are left behind", "Which threads are still there after a thousand steps?",
            lambda tier: tier.threads > 0
            and f"there are {tier.threads} more than before your function was called"),
)
PLAY = Play(worlds, script, ((on_one_rank, as_found(MISTAKES)),), "Which parameter is on its way now?")
# fmt: on


@answered
def offloaded_step(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(due, fetch, update, store)`: it fetches, updates and stores each parameter in `due`, with overlap.

    Returns the text of the ✓ line, with the most parameters whose state was in memory at once.
    """
    most = max(seen.done[0].facts["most"] for seen in checked(PLAY, (fn,), seed).seen)
    return f"each fetch, and each store, beside an update; the state of {most} parameters at most (budget {MOST})"
