"""Are these the gradients of the whole batch?  What data parallelism must get right, on an awkward model.

    average_gradients    after one backward on every rank: each gradient becomes the mean over the ranks
    accumulation         several micro-batches, one synchronisation
    data_parallel        any wrapper, through several steps of training

Measured on 1, 2, 3, 4 and one of 5 to 8 ranks: tied, frozen and unused parameters, some without dimensions or
elements, several dtypes, also mixed, steps in a row, replicas that start unequal; once with the bytes held.  What must
come out is the mean of the plain gradients (body.py).  The bytes are a ring's: 2 (N - 1) / N of the gradients per rank
and step, however many micro-batches there are; and nobody holds copies of everybody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Wrong, answered, instead, refuse
from labs.kit.checks.case import close, isclose, largest_of
from labs.kit.checks.gradients.body import Seen, train, train_unseen
from labs.kit.checks.gradients.cases import Case, Draw, Gradients
from labs.kit.checks.gradients.mistakes import BITS, GRAPHS, HELD, KIND, LEFT, REPLICAS, STEP, TRAFFIC, VALUES, WRAPPED
from labs.kit.checks.job import blame_luck, job
from labs.kit.checks.mixture import Made, mixture
from labs.kit.launch import Results
from labs.kit.record import Recording

STEPS_HELD = 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def average_gradients(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model)`, on every rank after its backward: every gradient becomes the mean over all ranks."""
    draw = Draw(seed)
    line = every_job("average_gradients", fn, draw.average_gradients())
    bytes_held("average_gradients", fn, draw)
    return line.format("")


@answered
def accumulation(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model, micro_batches)`: all backwards of a step and one synchronisation.

    `model` is one of labs.ddp's; `model(*micro_batch)` is the mean loss of a micro-batch, all of them equally large.
    Afterwards each gradient is that of the mean loss of all micro-batches of all ranks.
    """
    draw = Draw(seed)
    line = every_job("accumulation", fn, draw.accumulation(), exact=True)
    one_graph_at_a_time(fn, draw)
    return line.format(" and step, for 4 micro-batches")


@answered
def data_parallel(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model)` -> a module with `forward`, `no_sync()` and `sync()`; sync may be missing if backward waits.

    Trained for several steps, with and without accumulation; replicas that start unequal must be refused or made equal.
    """
    draw = Draw(seed)
    line = every_job("data_parallel", wrap, draw.data_parallel())
    unequal_replicas(wrap, draw)
    unused_parameter(wrap, draw)
    bytes_held("data_parallel", wrap, draw)
    return line.format(" and step")


def every_job(name: str, fn: Callable[..., Any], cases: dict[int, list[Case]], exact: bool = False) -> str:
    """The line of success, from the last step of 4 ranks' last case."""
    for ranks in cases:
        results = job(train, name, fn, cases[ranks], ranks=ranks)
        traffic = judge_all(cases[ranks], results, exact=exact)
        if ranks == 4:
            gradients = sum(p.nbytes for p in traffic.case.model().parameters() if p.requires_grad)
            sent, least = (f"{x / ranks / gradients:.2f} ×" for x in (traffic.sent, traffic.least))
    return f"you sent {sent} the gradients per rank{{}}; the least possible is {least}"


# ---- what is judged --------------------------------------------------------------------------------------


def judge_all(cases: list[Case], results: Results, exact: bool) -> Traffic:
    """Raise Wrong for the first step that is not right; the last one's traffic."""
    recorded = itertools.count()
    for index, case in enumerate(cases):
        for number in range(case.steps):
            ranks, step = [results[rank][index][number] for rank in range(case.ranks)], next(recorded)
            if all(seen.refused for seen in ranks):
                continue
            try:
                judge(case, ranks, results.recording.sent(0, step), f"{case}{f', step {number}' * (case.steps > 1)}: ")
            except Wrong as wrong:
                events = [event for event in results.recording.events if event.step == step]
                raise blame_luck(wrong, events) from None
            traffic = Traffic(case, ranks, results.recording, step, exact)
            refuse(TRAFFIC, traffic, f"{case}: ")
            for rank, outcome in enumerate(ranks):
                refuse(LEFT, outcome, f"{case}: on rank {rank} ")
    return traffic


def judge(case: Case, ranks: list[Seen], sent: int, when: str) -> None:
    for rank, outcome in enumerate(ranks):
        refuse(STEP, outcome, f"{when}on rank {rank} ")
    refuse(WRAPPED, ranks, when)
    right_kind(ranks, when)
    for name, rank in product(trained(ranks), range(case.ranks)):
        seen = OfParameter(ranks, rank, name, sent)
        if not seen.right():
            refuse(VALUES, seen, f"{when}on rank {rank} the gradient of {name!r} {seen.first_wrong()}\n{seen.share()}")
    for name in trained(ranks):
        refuse(BITS, OfParameter(ranks, 0, name), when)


def right_kind(ranks: list[Seen], when: str) -> None:
    for rank, name in product(range(len(ranks)), ranks[0].before):
        refuse(KIND, OfParameter(ranks, rank, name), f"{when}on rank {rank} ")


def trained(ranks: list[Seen]) -> list[str]:
    return [name for name, gradient in ranks[0].plain[0].items() if gradient is not None]


class OfParameter:
    """One parameter's gradient on one rank; what a wrong one is made of is asked of all that are wrong on this rank."""

    def __init__(self, ranks: list[Seen], rank: int, name: str, sent: int = 0) -> None:
        self.ranks, self.rank, self.name, self.sent = ranks, rank, name, sent  # sent: bytes in the step, by rank 0
        self.outcome, self.found = ranks[rank], ranks[rank].found[name]
        self.value, self.due = ranks[rank].before[name], ranks[rank].plain[0][name] is not None

    def mean(self, name: str = "", ranks: list[Seen] | None = None) -> Tensor:
        return self.plain(name, ranks).mean(0)

    def plain(self, name: str = "", ranks: list[Seen] | None = None) -> Tensor:
        """What is to be averaged: of each rank and micro-batch."""
        return torch.stack([own[name or self.name].double() for step in ranks or self.ranks for own in step.plain])

    def right(self, name: str = "", rank: int | None = None, ranks: list[Seen] | None = None) -> bool:
        found = self.ranks[self.rank if rank is None else rank].found[name or self.name]
        plain = self.plain(name, ranks)
        return close(found, plain.mean(0), TOLERANCE[found.dtype], largest_of([plain]))

    def first_wrong(self) -> str:
        wrong = ~isclose(self.found, self.mean(), max(1e-4, TOLERANCE[self.found.dtype]))
        at = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.any() else (0,) * self.found.ndim
        element = f"[{', '.join(map(str, at))}]" if at else "its only element"
        return f"at {element} is {instead(self.found[at], self.mean()[at])}"

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """Of the parameters on this rank that have elements, those that are right and those that are not."""
        names = [name for name in trained(self.ranks) if self.outcome.found[name].numel()]
        return [name for name in names if self.right(name)], [name for name in names if not self.right(name)]

    def share(self) -> str:
        right, wrong = (", ".join(map(repr, names)) for names in self.names)
        return f"Right: {right}; wrong: {wrong}. " if right else ""

    def flat(self, gradients: Gradients, names: list[str]) -> Tensor:
        return torch.cat([gradients[name].double().flatten() for name in names])

    @cached_property
    def made(self) -> Made | None:
        """None where it cannot be told."""
        sources = [self.flat(micro_batch, self.names[1]) for step in self.ranks for micro_batch in step.plain]
        times = mixture(self.flat(self.outcome.found, self.names[1]), sources)
        return None if times is None else Made((times * len(sources)).view(len(self.ranks), -1), self.rank)


# ---- bytes -----------------------------------------------------------------------------------------------


class Traffic:
    """What a step sent, against what a ring sends for these gradients: of all ranks.

    `exact`: the wrapper is the course's, or made from it, and sends nothing else but a model's buffers.
    """

    def __init__(self, case: Case, ranks: list[Seen], recording: Recording, step: int, exact: bool) -> None:
        self.case = case
        self.sizes = {name: ranks[0].before[name].nbytes for name in trained(ranks)}
        self.frozen = sum(v.nbytes for name, v in ranks[0].before.items() if name.startswith("frozen"))
        self.buffers = sum(x.nbytes for x in case.model().buffers())
        self.by_rank = [recording.sent(rank, step) for rank in range(case.ranks)]
        self.sent, self.least = sum(self.by_rank), 2 * (case.ranks - 1) * sum(self.sizes.values())
        if exact:
            self.least += (case.ranks - 1) * self.buffers
        flags = 0 if exact else 0.05 * self.least + 8 * case.ranks * len(self.sizes)  # one or two for each parameter
        self.enough = self.least + flags
        self.times = self.sent / max(self.least, 1)


# ---- bytes held, unequal replicas, unused parameters ------------------------------------------------


class Held:
    """What a rank held in gradients, communication and temporaries, in units of the gradients.

    peak, left: in an odd step, whose gradients are added to those of the one before, beyond what was there before it;
    the least, since now and then a thread of the backend keeps a tensor a moment longer than the step needs it.
    grown: in the last even step beyond the one before, the least; both begin without a gradient.
    """

    def __init__(self, recording: Recording, rank: int, gradients: int) -> None:
        sizes = [
            [size / gradients for _, size in recording.during(rank, step, ("G", "comm", "temporary"))]
            for step in range(STEPS_HELD)
        ]
        odd = sizes[1::2]
        self.peak = min(max(step) - step[0] for step in odd)
        self.left = min(step[-1] - step[0] for step in odd)
        self.grown = min(sizes[-2]) - min(sizes[-4])


def bytes_held(name: str, fn: Callable[..., Any], draw: Draw) -> None:
    case = draw.wide(4, steps=STEPS_HELD)
    recording = job(train_unseen, name, fn, case, ranks=4, record="memory").recording
    gradients = sum(p.nbytes for p in case.model().parameters() if p.requires_grad)
    for rank in range(case.ranks):
        refuse(HELD, Held(recording, rank, gradients), f"{case}: rank {rank} ")


def one_graph_at_a_time(fn: Callable[..., Any], draw: Draw) -> None:
    """The activations held must not grow with the number of micro-batches."""
    cases = [draw.wide(2, micro_batches=k) for k in (1, 4)]
    recording = job(train, "accumulation", fn, cases, ranks=2, record="memory").recording
    one, four = (recording.held(0, step)["A"] for step in (0, 1))
    refuse(GRAPHS, (one, four), "activations held at the peak: ")


def unequal_replicas(wrap: Callable[..., Any], draw: Draw) -> None:
    """Replicas from different seeds: an error is a right answer, and so are equal replicas."""
    case = draw.case(3, equal=False)
    ranks = outcome_or_refusal(wrap, case)
    if ranks:
        refuse(WRAPPED, ranks, f"{case}: ")
        refuse(
            REPLICAS, ranks, f"{case}: each rank built its model from a different seed; after wrap(model) and one step "
        )


def unused_parameter(wrap: Callable[..., Any], draw: Draw) -> None:
    """An unused parameter: an error is a right answer, and so is None; zeros are not, nor is a hang."""
    case = draw.case(2, steps=2, spare=True)
    if ranks := outcome_or_refusal(wrap, case):
        right_kind(ranks, f"{case}, an unused parameter: ")


def outcome_or_refusal(wrap: Callable[..., Any], case: Case) -> list[Seen]:
    """The last step of each rank; nothing where the wrapper raised an error."""
    try:
        results = job(train, "data_parallel", wrap, [case], ranks=case.ranks)
    except Wrong as wrong:
        if wrong.raised:
            return []
        raise
    return [steps[0][-1] for steps in results]
