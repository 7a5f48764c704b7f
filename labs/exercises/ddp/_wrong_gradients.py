"""Mistakes in the gradients of data parallelism, as tables of rows, in the order in which the tables are tried.

STEP        a rank in a step: has anything changed that must not?
KIND        a parameter on a rank: does it have a gradient, of its own shape and dtype?
VALUES      a parameter whose gradient is not the mean: which gradients is it made of (mixture.py)?
BITS        a parameter on all ranks: are its gradients equal to the bit?
TRAFFIC     a step: did it send more than needed, or less than possible?
LEFT        a rank after a step: what is different from before?
HELD        a rank's steps: how many bytes do they hold?

The expected gradients are the means of an unwrapped model's (_awkward_training.py).  The expected bytes are a ring's:
2 (N - 1) / N of the gradients per rank and step, for any number of micro-batches.  No rank may hold copies of all
ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from labs.exercises.ddp._awkward_training import wide
from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, first, first_fit, refuse, show
from labs.exercises.engine.by_script import Draw, Parts, Passed, Script, as_a_whole, on_each_rank
from labs.exercises.engine.mixture import COEFFICIENTS, NOTHING, ONE_RANK, TIED, Made
from labs.exercises.engine.scripts import Done, StepOutcomes, measure_held
from labs.exercises.engine.value import One, mixture

QUESTION = "Which gradients went into this one, and how often?"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}

# ---- changes ---------------------------------------------------------------------------------------------


def describe(name: str, text: str) -> Callable[[Done], str | None]:
    """Return a row's test, which fills `text` with a look's fact of this name, or its first item, if there is one."""

    def matches(done: Done) -> str | None:
        fact = done.facts.get(name)
        return text.format(fact[0] if isinstance(fact, list) else fact) if fact else None

    return matches


def changed(done: Done) -> str | None:
    """Return a sentence about the first parameter that has changed, or None."""
    names = (name for name, x in done.facts["before"].items() if not torch.equal(x, done.facts["after"][name]))
    return first(f"the parameter {name!r} itself has changed, before optimizer.step()" for name in names)


WHOSE = "What must be equal on all ranks before optimizer.step(): the parameters, or their gradients?"
# fmt: off
STEP = (
    replace(rows.FORM[0], matches=lambda done: done.refused and "raised an error, and others did not"),
    Mistake("not a wrapper", "What does a training loop call on the wrapper, besides forward?", describe("lacks",
    "{}")),
    AVERAGED := Mistake("parameters averaged instead of gradients", WHOSE,
            lambda done: done.facts["parameters sent"] and changed(done),
            symptom="replicas differ after the first step"),
    Mistake("the parameters have changed", WHOSE, changed),
    Mistake("requires_grad has changed", "Who decides which parameters are trained?",
            describe("thawed", "the requires_grad of {!r} has changed")),
    Mistake("no longer in training mode", "What does dropout do there?",
            describe("idle", "the model is in evaluation mode")),
)
# fmt: on

# ---- a parameter's gradient on a rank --------------------------------------------------------------------


def trained(seen: StepOutcomes) -> list[str]:
    """Return the names of the parameters that have gradients."""
    return [name for name, gradient in seen.done[0].facts["plain"][0].items() if gradient is not None]


class Gradient(One):
    """The gradient of a parameter on a rank; a wrong one is taken apart together with all wrong ones on its rank."""

    def __init__(self, seen: StepOutcomes, index: int, name: str) -> None:
        plain = [own[name] for done in seen.done for own in done.facts["plain"]] if name in trained(seen) else []
        expected = mean(plain) if plain else None
        tolerance = TOLERANCE[expected.dtype] if plain else 0
        super().__init__(seen, index, name, [{name: expected}] * seen.world.n, tolerance, plain)
        self.value, self.wanted = self.done.facts["before"][name], bool(plain)

    @cached_property
    def parts(self) -> tuple[list[Gradient], list[Gradient]]:
        """The gradients on this rank that have elements: (the right ones, the wrong ones)."""
        all_of_them = [Gradient(self.seen, self.index, name) for name in trained(self.seen)]
        some = [one for one in all_of_them if one.received.numel()]
        return [one for one in some if one.right], [one for one in some if not one.right]

    @property
    def names(self) -> str:
        right, wrong = (", ".join(repr(one.name) for one in part) for part in self.parts)
        return f"Right: {right}; wrong: {wrong}. " if right else ""

    @cached_property
    def made(self) -> Made | None:
        """The linear combination of micro-batches' gradients that this rank's wrong gradients are, or None."""
        wrong, n = self.parts[1], self.world.n
        columns = [flat(each) for each in zip(*(one.summands for one in wrong), strict=True)]
        times = mixture(flat(one.received for one in wrong), columns)
        return None if times is None else Made((times * len(columns)).view(n, -1), self.index)

    @cached_property
    def called(self) -> str | None:
        """The name of the mistake that the coefficients show; None if there are no coefficients."""
        return first_fit(COEFFICIENTS, self.made)[0].name if self.made else None

    @property
    def nothing_of_others(self) -> str | bool:
        return self.called == NOTHING.name and self.made.description


def mean(tensors: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(tensors))
    return stacked.double().mean(0).to(stacked.dtype)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.double().flatten() for x in tensors])


def unlike(one: Gradient, what: str) -> str | bool:
    """Return a sentence if the gradient has another shape, or dtype, than its parameter; else False."""
    differs = one.wanted and getattr(one.received, what) != getattr(one.value, what)
    return differs and f"the gradient of {one.name!r} is {one.description}; the parameter is {show(one.value)}"


def unasked(one: Gradient, why: str) -> str | bool:
    """Return a sentence if there is a gradient where none is expected; else False."""
    return not one.wanted and one.received is not None and f"{one.name!r} {why}, but has a gradient"


ZEROS = "What would AdamW with momentum and weight decay do with a gradient of zeros, and what with None?"
# fmt: off
KIND = (
    Mistake("a gradient is gone", "Who took it away?",
            lambda one: one.wanted and one.received is None and f"{one.name!r} has no gradient any more"),
    Mistake("a frozen parameter has a gradient", ZEROS,
            lambda one: one.name.startswith("frozen") and unasked(one, "is frozen (requires_grad is False)")),
    Mistake("zeros where nobody has a gradient", ZEROS, lambda one: unasked(one, "is used by nobody")),
    Mistake("the dtype changed", "What does the optimizer expect?", lambda one: unlike(one, "dtype")),
    Mistake("the shape changed", "What does the optimizer expect?", lambda one: unlike(one, "shape")),
)
# fmt: on


def right_elsewhere(one: Gradient) -> str | None:
    """Return a sentence about the ranks on which all gradients are right, or None if there is none."""
    ranks = [r for i, r in enumerate(one.world.members) if not Gradient(one.seen, i, one.name).parts[1]]
    return f"Right on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}." if ranks else None


def right_but_for_digits(one: Gradient) -> str | None:
    every = [g for part in one.parts for g in part]
    found, expected = flat(g.received for g in every), flat(g.expected for g in every)
    near = torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
    return "It is right but for its last digits." if near else None


def left_out(one: Gradient) -> str | bool:
    """Return whether parameters are left out: their gradients are this rank's own, and the other gradients are right.

    Gradients that are too short for a mixture count as well if they are this rank's own.
    """
    right, wrong = one.parts
    if one.made:
        return right and one.nothing_of_others
    return all(g.near(g.received, mean(own[g.name] for own in one.done.facts["plain"])) for g in wrong)


def equal_everywhere(seen: StepOutcomes, name: str) -> bool:
    return all(torch.equal(seen.done[0].values[name], done.values[name]) for done in seen.done)


PARTLY = "right on some ranks only"
# fmt: off
VALUES = (
    Mistake(PARTLY, "How do the other ranks learn the mean?", right_elsewhere),
    Mistake("rounded on the way", "In which dtype do the gradients travel?", right_but_for_digits),
    replace(TIED, matches=lambda one: one.made and one.parts[0] and [g.name for g in one.parts[1]] == ["embed.weight"]),
    replace(ONE_RANK, matches=lambda one: equal_everywhere(one.seen, one.parts[1][0].name) and one.nothing_of_others),
    Mistake("some parameters are left out", "What is special about those that are wrong?", left_out),
    replace(AVERAGED, question="A post-accumulate hook is given p. What is p.grad?", symptom="",
            matches=lambda one: one.done.facts["parameters sent"] and one.called in (None, "", NOTHING.name)),
    Mistake("the mean does not reach .grad", "Into which tensor does the result go?",
            lambda one: one.seen.sent[0] and one.nothing_of_others),
    *(replace(row, matches=lambda one, row=row: one.made and row.matches(one.made)) for row in COEFFICIENTS),
    Mistake("", QUESTION, lambda one: True),
)
BITS = (
    Mistake("not the same bits on every rank",
            "Does every rank add up in the same order? Replicas that differ by a bit drift apart.",
            lambda seen: first(f"the gradient of {name!r} differs between ranks in its last bits"
                               for name in trained(seen) if not equal_everywhere(seen, name))),
)
# fmt: on

# ---- messages --------------------------------------------------------------------------------------------


class RingTraffic:
    """The bytes that all ranks sent in a step, beside those that a ring sends for the same gradients.

    exact: whether the wrapper is the course's, or made from it, and sends nothing but gradients and buffers.
    """

    def __init__(self, seen: StepOutcomes, exact: bool) -> None:
        before = seen.done[0].facts["before"]
        self.world, self.by_rank, self.sent = seen.world, seen.sent, sum(seen.sent.values())
        self.sizes = {name: before[name].nbytes for name in trained(seen)}
        self.gradients = sum(self.sizes.values())
        self.frozen = sum(x.nbytes for name, x in before.items() if name.startswith("frozen"))
        self.buffers = sum(x.nbytes for x in seen.world.model().buffers())
        self.least = (seen.world.n - 1) * (2 * self.gradients + exact * self.buffers)
        flags = 0 if exact else 0.05 * self.least + 8 * seen.world.n * len(self.sizes)  # one or two per parameter
        self.enough = self.least + flags

    @property
    def too_much(self) -> str | bool:
        text = f"the ranks sent {self.sent:,} bytes in one step; a ring sends {self.least:,}"
        return self.sent > self.enough and text

    @property
    def one_for_all(self) -> str | bool:
        """A sentence if one rank sent more than its share, apart from buffers, which rank 0 broadcasts; else False."""
        rank = max(self.by_rank, key=self.by_rank.get)
        slack = self.buffers + 16 * len(self.sizes)
        text = f"rank {rank} sent {self.by_rank[rank]:,} bytes in one step, of {self.sent:,} by all together"
        return not self.too_much and self.by_rank[rank] > self.enough / self.world.n + slack and text

    def more_by(self, size: int) -> str | bool:
        """Return a sentence if the excess is one all-reduce of `size` bytes; else False, also if dtypes are mixed."""
        extra = (self.sent - self.least) / max(2 * (self.world.n - 1), 1)
        return extra == size and not self.world.mixed and self.too_much

    @property
    def every_time(self) -> str | bool:
        k = self.world.micro_batches
        return k > 1 and self.sent > (k - 0.1) * max(self.least, 1) and self.too_much


# fmt: off
TRAFFIC = (
    Mistake("one rank does the work for all", "How long do the others wait for this rank?", lambda t: t.one_for_all),
    Mistake("synchronised at every micro-batch",
            "When do the other ranks need your gradients, if the optimizer steps once?", lambda t: t.every_time,
            symptom="the right gradients, but the bytes grow with the number of micro-batches"),
    Mistake("forward outside of no_sync()", "What does the wrapper's forward send, if the model has buffers?",
            lambda t: t.world.micro_batches > 1 and t.world.buffers and t.too_much),
    replace(TIED, matches=lambda t: t.more_by(t.sizes["embed.weight"]), symptom=""),
    Mistake("frozen parameters are sent", "Which parameters never have a gradient?", lambda t: t.more_by(t.frozen)),
    Mistake("buffers are sent", "Which of a model's tensors have a gradient?", lambda t: t.more_by(t.buffers)),
    Mistake("too many bytes", "What does each rank send to whom, and how often does the same number travel?",
            lambda t: t.too_much),
    Mistake("less than the least possible", "How else did the gradients get there?",
            lambda t: t.sent < t.least and f"the ranks sent {t.sent:,} bytes; {t.least:,} is the least possible"),
)
KEPT = Mistake("something is kept from every step",
               "Which of your variables still refers to what was there a step ago?",
               describe("kept", "the wrapper's lists have {} more elements than a step before"),
               symptom="memory that grows from step to step")
LEFT = (
    KEPT,
    Mistake("hooks are left behind", "How many hooks are there after a thousand steps?",
            describe("hooks", "there are {} more hooks than before the step"),
            symptom="right, but every step takes longer than the one before"),
)
NOT_IN_PLACE = Mistake("not in place", "Who else may hold the tensor that was .grad, and what stands there now?",
                       describe("replaced", "the gradient of {!r} is right, but in another tensor than before"))
# Each row is asked about a rank's bytes, × the gradients: (the peak of a step, those left by it, those that a step
# leaves beyond those of the step before).
HELD = (
    replace(KEPT, symptom="",
            matches=lambda held: held[1] > 0.3
                and f"holds {held[1]:.2f} × the gradients more after a step than before"),
    replace(KEPT, symptom="",
            matches=lambda held: held[2] > 0.3 and f"holds {held[2]:.2f} × the gradients more than a step ago"),
    # Two copies of the gradients at the same time are enough.
    Mistake("full copies are kept", "Whose gradients do you keep after you have added them up?",
            lambda held: held[0] > 2.5 and f"held {held[0]:.2f} × the gradients in buffers"),
)
# fmt: on

# ---- a play ----------------------------------------------------------------------------------------------


def each_gradient(seen: StepOutcomes) -> Iterator[tuple[str, Gradient]]:
    """Yield each parameter's gradient on each rank, with words for where it is."""
    for name, index in product(seen.done[0].facts["before"], range(seen.world.n)):
        yield f"on rank {seen.world.members[index]} ", Gradient(seen, index, name)


def wrong_gradients(seen: StepOutcomes) -> Iterator[tuple[str, Gradient]]:
    for where, one in each_gradient(seen):
        if one.wanted and not one.right:
            yield f"{where}the gradient of {one.name!r} at {one.first}\n{one.names}", one


def tables(*left: Mistake, exact: bool) -> tuple[tuple[Parts, tuple[Mistake, ...]], ...]:
    """Return the tables that judge a step; `left` are further rows about a rank after it.

    exact: whether the step may send nothing but gradients and buffers.
    """

    def traffic(seen: StepOutcomes) -> Iterator[tuple[str, RingTraffic]]:
        yield "", RingTraffic(seen, exact)

    return (
        (on_each_rank, STEP), (each_gradient, KIND), (wrong_gradients, VALUES),
        (as_a_whole, BITS), (traffic, TRAFFIC), (on_each_rank, (*LEFT, *left)),
    )  # fmt: skip


def line(passed: Passed) -> str:
    """Return the line of success, to be filled in at {}; its bytes are those of the last step on 4 ranks."""
    traffic = RingTraffic([seen for seen in passed.seen if seen.world.n == 4][-1], exact=False)
    sent, least = (f"{x / 4 / traffic.gradients:.2f} ×" for x in (traffic.sent, traffic.least))
    return f"you sent {sent} the gradients per rank{{}}; the least possible is {least}"


def bytes_held(script: Script, fn: Callable[..., Any], seed: int) -> None:
    """Raise Wrong if a rank holds too many bytes in a training step.

    In odd steps, gradients are added to those of the step before; even steps begin without any.  The least of several
    steps counts, since sometimes a backend's thread keeps a tensor a moment longer than it needs it.
    """
    world = wide(Draw(seed), 4, steps=6)
    gradients = sum(p.nbytes for p in world.model().parameters() if p.requires_grad)
    for rank, steps in enumerate(measure_held(script, (fn,), world, ("G", "comm", "temporary"))):
        sizes = [[size / gradients for size in step] for step in steps]
        most, left = min(max(step) - step[0] for step in sizes[1::2]), min(step[-1] - step[0] for step in sizes[1::2])
        refuse(HELD, (most, left, min(sizes[-2]) - min(sizes[-4])), f"{world}: rank {rank} ")
