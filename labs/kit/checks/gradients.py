"""Are these the gradients of the whole batch?  What data parallelism must get right, on an awkward model.

    average_gradients    after one backward on every rank: each gradient becomes the mean over the ranks
    accumulation         several micro-batches, one synchronisation
    data_parallel        any wrapper, through several steps of training

What must come out is the mean of the plain gradients (awkward.py, means.py).  The bytes are a ring's: 2 (N - 1) / N of
the gradients per rank and step, however many micro-batches there are; and nobody holds copies of everybody's.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from labs.kit.checks.answer import Wrong, answered, job
from labs.kit.checks.awkward import Case, Step, accumulate_once, average_once, train
from labs.kit.checks.means import judge, right_kind, trained
from labs.kit.launch import Results
from labs.kit.record import Event, Recording

WIDE = 64  # dimensions of the model whose bytes held are measured
BUFFERS = 2.5  # × the gradients


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def average_gradients(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model)`, on every rank after its backward: every gradient becomes the mean over all ranks."""
    draw = Draw(seed)
    cases = {
        3: [draw.case(3), draw.case(3, spare=True)],
        2: [draw.case(2), draw.case(2, spare=True), draw.case(2, dtype=torch.float32)],
        4: [draw.case(4), draw.case(4, spare=True), draw.budget(4)],
    }
    for ranks in cases:
        results = job(average_once, fn, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    bytes_held(average_once, fn, draw.wide(4))
    return sent_line(cases[4], results.recording, "")


@answered
def accumulation(fn: Callable[..., Any], seed: int) -> str:
    """`fn(model, micro_batches)`: all backwards of a step and one synchronisation.

    `model` is one of labs.ddp's; `model(*micro_batch)` is the mean loss of a micro-batch, all of them equally large.
    Afterwards each gradient is that of the mean loss of all micro-batches of all ranks.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3, micro_batches=2), draw.case(3, micro_batches=4, overlapped=True)],
        2: [draw.case(2), draw.case(2, micro_batches=3), draw.case(2, micro_batches=3, overlapped=True)],
        4: [draw.case(4, micro_batches=3, dtype=torch.float32), draw.budget(4, micro_batches=4)],
    }
    for ranks in cases:
        results = job(accumulate_once, fn, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    one_graph_at_a_time(fn, draw)
    return sent_line(cases[4], results.recording, " and step, for 4 micro-batches")


@answered
def data_parallel(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model)` -> a module with `forward`, `no_sync()` and `sync()`; sync may be missing if backward waits.

    Trained for several steps, with and without accumulation; replicas that start unequal must be refused or made equal.
    """
    draw = Draw(seed)
    cases = {
        3: [draw.case(3, steps=3), draw.case(3, micro_batches=3, steps=2)],
        2: [draw.case(2, micro_batches=2, steps=3), draw.case(2, steps=2, dtype=torch.float32)],
        4: [
            draw.case(4, micro_batches=2, steps=2),
            draw.case(4, steps=2, dtype=torch.float32),
            draw.budget(4, steps=3),
        ],
    }
    for ranks in cases:
        results = job(train, wrap, cases[ranks], ranks=ranks)
        judge_all(cases[ranks], results)
    unequal_replicas(wrap, draw)
    unused_parameter(wrap, draw)
    bytes_held(train, wrap, draw.wide(4, steps=2))
    return sent_line(cases[4], results.recording, " and step")


class Draw:
    """Cases by chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def case(self, ranks: int, **options: Any) -> Case:
        sizes = tuple(self.random.choice(odd) for odd in ((9, 11, 13), (5, 7), (11, 13, 17)))
        return Case(self.random.randrange(2**40), ranks, sizes=sizes, **options)

    def budget(self, ranks: int, **options: Any) -> Case:
        """The case of the line of success: always the same sizes, so that the line is."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, **options)

    def wide(self, ranks: int, **options: Any) -> Case:
        """The case whose bytes held are measured: parameters outweigh everything else."""
        return Case(self.random.randrange(2**40), ranks, dtype=torch.float32, sizes=(WIDE, WIDE, WIDE), **options)


def judge_all(cases: list[Case], results: Results) -> None:
    recorded = itertools.count()
    for index, case in enumerate(cases):
        for number in range(case.steps):
            ranks, step = [results[rank][index][number] for rank in range(case.ranks)], next(recorded)
            events = [event for event in results.recording.events if event.step == step]
            try:
                judge(case, number, ranks, results.recording.sent(0, step))
            except Wrong as wrong:
                raise blame_luck(wrong, events) from None
            budget(case, results.recording, step, ranks)


def blame_luck(wrong: Wrong, events: list[Event]) -> Wrong:
    """Wrong values where somebody did not wait are wrong for that reason.  (What C++ waits for is not seen.)"""
    hasty = [event for event in events if not event.waited and event.op != "barrier" and "C++" not in event.issuer]
    if not hasty or wrong.answer.mistake == "not a wrapper":
        return wrong
    text = f"{wrong.answer.text}\nNobody waited for the {hasty[0].op} of {hasty[0].issuer} on rank {hasty[0].rank}."
    return Wrong(text, "When is the result of a call with async_op=True there?", "nobody waited")


# ---- bytes -----------------------------------------------------------------------------------------------


def budget(case: Case, recording: Recording, step: int, ranks: list[Step]) -> None:
    """What a step sent, against what a ring sends for these gradients."""
    sizes = {name: ranks[0].before[name].nbytes for name in trained(ranks)}
    least = 2 * (case.ranks - 1) * sum(sizes.values())  # of all ranks
    sent = sum(recording.sent(rank, step) for rank in range(case.ranks))
    slack = 0.05 * least + 8 * case.ranks * len(sizes)  # a flag or two for each parameter
    busiest = max(range(case.ranks), key=lambda rank: recording.sent(rank, step))
    most = recording.sent(busiest, step)
    if sent <= least + slack and most <= (least + slack) / case.ranks + 16 * len(sizes):
        return
    if sent <= least + slack:
        raise Wrong(
            f"{case}: rank {busiest} sent {most:,} bytes in one step, of {sent:,} by all ranks together",
            "How long do the others wait for this rank?",
            "one rank does the work for all",
        )
    times, text = sent / least, f"{case}: the ranks sent {sent:,} bytes in one step; a ring sends {least:,}"
    extra = (sent - least) / (2 * (case.ranks - 1))
    frozen = sum(v.nbytes for name, v in ranks[0].before.items() if name.startswith("frozen"))
    if case.micro_batches > 1 and abs(times - case.micro_batches) < 0.1:
        raise Wrong(
            text,
            "When do the other ranks need your gradients, if the optimizer steps once?",
            "synchronised at every micro-batch",
        )
    if abs(extra - sizes["embed.weight"]) <= 8 * len(sizes):
        raise Wrong(
            text, "How often does your loop meet a parameter that two modules share?", "a tied weight reduced twice"
        )
    if abs(extra - frozen) <= 8 * len(sizes):
        raise Wrong(text, "Which parameters will never have a gradient?", "frozen parameters are sent")
    if case.dtype is torch.float32 and abs(times - 2) < 0.05 and case.ranks != 4:
        raise Wrong(text, "In which dtype do they travel, and how often?", "sent twice")
    raise Wrong(text, "What does each rank send to whom, and how often does the same number travel?", "too many bytes")


def sent_line(cases: list[Case], recording: Recording, per: str) -> str:
    """The line of success, from the last step of the last case."""
    case, step = cases[-1], sum(case.steps for case in cases) - 1
    model = case.model()
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    sent = sum(recording.sent(rank, step) for rank in range(case.ranks)) / case.ranks / gradients
    least = 2 * (case.ranks - 1) / case.ranks
    return f"you sent {sent:.2f} × the gradients per rank{per}; the least possible is {least:.2f} ×"


# ---- bytes held, unequal replicas, parameters without use ------------------------------------------------


def bytes_held(body: Callable[..., Any], fn: Callable[..., Any], case: Case) -> None:
    """In buffers, two copies of the gradients at the same time are plenty."""
    recording = job(body, fn, [case], ranks=case.ranks, record="memory").recording
    gradients = sum(p.nbytes for p in case.model().parameters() if p.requires_grad)
    for rank in range(case.ranks):
        beside = in_buffers(recording, rank, case.steps - 1) / gradients
        if beside > BUFFERS:
            raise Wrong(
                f"{case}: rank {rank} held {beside:.2f} × the gradients in buffers",
                "Whose gradients do you keep after you have added them up?",
                "full copies are kept",
            )


def in_buffers(recording: Recording, rank: int, step: int) -> int:
    """The most bytes of gradients, communication and temporaries that a step added to what was there before."""
    sizes = [size for _, size in recording.during(rank, step, ("G", "comm", "temporary"))]
    return max(sizes) - sizes[0]


def one_graph_at_a_time(fn: Callable[..., Any], draw: Draw) -> None:
    """The activations held must not grow with the number of micro-batches."""
    cases = [draw.wide(2, micro_batches=k) for k in (1, 4)]
    recording = job(accumulate_once, fn, cases, ranks=2, record="memory").recording
    one, four = (recording.held(0, step)["A"] for step in (0, 1))
    if four > 1.5 * one:
        raise Wrong(
            f"activations held at the peak: {one:,} bytes with 1 micro-batch, {four:,} with 4",
            "What is freed by backward, and when do you call it?",
            "the graphs of all micro-batches are kept",
        )


def unequal_replicas(wrap: Callable[..., Any], draw: Draw) -> None:
    """Replicas from different seeds: an error is a right answer, and so are equal replicas."""
    case = draw.case(3, equal=False)
    ranks = outcome_or_refusal(wrap, case)
    for name, value in ranks[0].after.items() if ranks else ():
        for rank, step in enumerate(ranks):
            if not torch.equal(value, step.after[name]):
                raise Wrong(
                    f"{case}: each rank built its model from another seed; after wrap(model) and one step "
                    f"{name!r} still differs between rank 0 and rank {rank}, and nobody was told",
                    "Equal gradients keep equal replicas equal. Who makes sure that they start so?",
                    "a replica that started from another seed",
                )


def unused_parameter(wrap: Callable[..., Any], draw: Draw) -> None:
    """A parameter without use: an error is a right answer, and so is None; zeros are not, nor a hang."""
    case = draw.case(2, steps=2, spare=True)
    if ranks := outcome_or_refusal(wrap, case):
        right_kind(case, f"{case}, a parameter without use", ranks)


def outcome_or_refusal(wrap: Callable[..., Any], case: Case) -> list[Step]:
    """The last step of each rank; nothing where the wrapper raised an error."""
    try:
        results = job(train, wrap, [case], ranks=case.ranks)
    except Wrong as wrong:
        if wrong.raised:
            return []
        raise
    return [steps[0][-1] for steps in results]
