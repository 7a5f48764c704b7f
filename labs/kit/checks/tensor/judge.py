"""Is a transformer split as it must be?

    conjugate      copy and reduce, forward and backward; both of them twice in a larger graph
    row_linear     summands of y from pieces of x, and the bias once
    split_loss     three numbers per token, all-reduced, whatever the vocabulary
    block_plan     one layer of the course's GPT: a table of styles, which a job obeys

On 1 to 8 ranks and in two groups at the same time, some calls twice: pieces that differ, and
empty ones, no dimension, no element, three dtypes, transposed, gradients that are expanded, under no_grad; on a wire
on which nothing is right by luck (wire.py); the first three once with the bytes held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, Wrong, answered, instead, refuse
from labs.kit.checks.case import close, isclose
from labs.kit.checks.job import blame_luck, job
from labs.kit.checks.tensor import mistakes
from labs.kit.checks.tensor.body import Called, hold, play
from labs.kit.checks.tensor.cases import WIDE, Border, Draw, Functions, Loss, Row, Split, X
from labs.kit.record import Event, Recording

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Held between forward and backward, when the result is gone, and at the most: × x, y, and this rank's logits.
ENOUGH = {Border: ("x", 0.1, 6.1), Row: ("y", 1.3, 7.1), Loss: ("its logits", 4.6, 9.1)}

# ---- the checks ------------------------------------------------------------------------------------------


@answered
def conjugate(copy: Callable[..., Any], reduce: Callable[..., Any], seed: int) -> str:
    """`copy(x, group=None)` and `reduce(x, group=None)` -> tensor: forward and backward; x stays as it is.

    copy: x as it is, and the sum of all ranks' gradients.  reduce: the sum of all ranks' x, and the gradient as it is.
    """
    recording = every_job((copy, reduce), Draw(seed).borders(), mistakes.BORDERS)
    of_copy, of_reduce = sent(recording, "the tensor", 64 * 96 * 4, 4), sent(recording, "", 64 * 96 * 4, 6)
    least = "the least possible is 1.50 × where something is due, and 0.00 × elsewhere"
    return f"copy sent {of_copy}, reduce {of_reduce}; {least}"


@answered
def row_linear(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, weight, bias, group=None) -> y`, whole on every rank: of this rank's inputs to all outputs.

    x [..., inputs], weight [outputs, inputs], whose sizes may differ between ranks; bias [outputs], the same, or None.
    """
    recording = every_job((fn,), Draw(seed).rows(), mistakes.ROWS)
    return f"you sent {sent(recording, 'y', 32 * 24 * 4, 2)}; the least possible is 1.50 × and 0.00 ×"


@answered
def split_loss(fn: Callable[..., Any], seed: int) -> str:
    """`fn(logits, targets, first, group=None) -> loss`: the mean cross-entropy (0-dim), the same on every rank.

    logits [tokens, columns]: this rank's, perhaps none, of the vocabulary from `first` on; targets [tokens]: the same.
    """
    recording = every_job((fn,), Draw(seed).losses(), mistakes.LOSSES)
    numbers = sum(event.bytes_in for event in recording.select(0, 2)) / (64 * 4)
    return f"you sent {numbers:.2f} numbers per token forward and none backward; 3 are enough for any vocabulary"


@answered
def block_plan(fn: Callable[..., Any], seed: int) -> str:
    """`fn(config, sequence_parallel) -> plan`: from "attention", "attention.q", ..., "mlp.down" to styles of labs.tp.

    Of one Layer of the course's GPT; x comes in and goes out whole, or as a shard of the sequence, dim 1.
    """
    try:
        recording = every_job((fn,), Draw(seed).blocks(), mistakes.LAYERS)
    except Wrong as wrong:
        if wrong.raised:
            refuse(mistakes.PLANS, wrong.answer.text, wrong.answer.text)
        raise
    return (
        f"a rank holds its part of every matrix, and sent {sent(recording, 'x', 8 * prod(X), 0)}; "
        "the least possible is 3.00 ×, as two all-reduces each way"
    )


def sent(recording: Recording, whole: str, size: int, step: int) -> str:
    """In a step forward and the one backward, × the bytes of `whole`."""
    forward, backward = (recording.sent(0, step + way) / size for way in range(2))
    return f"{forward:.2f} × {whole} forward and {backward:.2f} × backward".replace("  ", " ")


# ---- calls that are differentiated -----------------------------------------------------------------------


def every_job(functions: Functions, cases: Sequence[Any], numbers: Sequence[Mistake]) -> Recording:
    """Put them through all cases, one job for each number of ranks; the first one's recording."""
    counts = dict.fromkeys(case.ranks for case in cases)
    recordings = [play_all(functions, [c for c in cases if c.ranks == count], numbers) for count in counts]
    if wide := WIDE[type(cases[0])]:
        recording = job(hold, functions, wide, ranks=4, record="memory").recording
        for index, case in enumerate(wide):
            for rank in range(4):
                refuse(mistakes.HELD, Held(case, recording, rank, 6 * index), f"{case}: rank {rank} ")
    return recordings[0]


def play_all(functions: Functions, cases: Sequence[Split], numbers: Sequence[Mistake]) -> Recording:
    try:
        results = job(play, functions, cases, ranks=cases[0].ranks)
    except Wrong as wrong:
        at = next((at for at, case in enumerate(cases) if f"(with {case})" in wrong.answer.text), 0)
        if at:  # what is wrong in an earlier case tells more than what it raises in this one
            play_all(functions, cases[:at], numbers)
        raise wrong.also(cases[at].peculiar) from None
    for index, case in enumerate(cases):
        events = [[results.recording.select(rank, 2 * index + way) for rank in range(case.ranks)] for way in range(2)]
        try:
            judge(case, [of_rank[index] for of_rank in results], events, numbers)
        except Wrong as wrong:
            told = blame_luck(wrong, list(chain(*events[0], *events[1])))
            raise (told if told.answer.mistake else told.also(case.peculiar)) from None
    return results.recording


def judge(case: Split, called: list[Called], events: list[list[list[Event]]], numbers: Sequence[Mistake]) -> None:
    for rank, of_rank in enumerate(called):
        refuse(mistakes.RESULT, of_rank, f"{case}: on rank {rank} ")
    sent = [Sent(case, rank, way, events[way]) for way in range(2) for rank in range(case.ranks)]
    dues = {rank: due for group in case.groups for rank, due in zip(group, case.due(group), strict=True)}
    for name in dues[0] if case.graded else (case.result,):
        for rank in range(case.ranks):
            one = One(case, rank, name, called, dues[rank][name], sent[rank])
            if not one.right:
                refuse(mistakes.FORM, one, f"{case}: on rank {rank}, ")
                refuse(numbers, one, f"{case}: on rank {rank}, {one.first}\n")
    for rank, of_rank in enumerate(called):
        refuse(mistakes.AFTER, of_rank, f"{case}: on rank {rank} ")
    for one in sent:
        refuse(mistakes.SENT, one, f"{case}: ")


class One:
    """On one rank the result, or the gradient of what goes by `name`."""

    def __init__(self, case: Split, rank: int, name: str, called: list[Called], due: Tensor, forward: Sent) -> None:
        self.case, self.rank, self.name, self.called, self.forward = case, rank, name, called, forward
        self.is_result, self.members = name == case.result, case.members(rank)
        self.found, self.due, self.n = self.on(rank), due, len(self.members)

    def on(self, rank: int) -> Any:
        return self.called[rank].returned if self.is_result else self.called[rank].gradients.get(self.name)

    def brought(self, name: str) -> Tensor:
        return self.case.brings(self.rank)[name]

    @property
    def right(self) -> bool:
        """(Where nothing comes back there need be no gradient.)"""
        if self.found is None:
            return not self.due.any()
        found, dtype = self.found, self.case.dtype
        return isinstance(found, Tensor) and found.dtype == dtype and close(found, self.due, TOLERANCE[dtype])

    def same(self, value: Tensor | float, tolerance: float = 1e-5) -> bool:
        return bool(self.found.numel()) and close(self.found.double(), value, tolerance)

    def times(self, factor: float) -> bool:
        return factor != 1 and bool(self.due.any()) and self.same(factor * self.due)

    @cached_property
    def alone(self) -> bool:
        """Is it what this rank makes of it by itself?"""
        return self.n > 1 and self.same(self.case.due((self.rank,))[0][self.name])

    @property
    def what(self) -> str:
        return f"the {self.name}" if self.is_result else f"the gradient of {self.name!r}"

    @property
    def first(self) -> str:
        at = int((~isclose(self.found, self.due, TOLERANCE[self.case.dtype])).flatten().nonzero()[0])
        found = self.found.flatten()[at]
        return f"{self.what} at element {at} is {instead(found, self.due.flatten()[at].to(found.dtype))}"


class Sent:
    """What a rank sent on one way of a call; in numbers of the case's dtype, or of any for a loss."""

    def __init__(self, case: Split, rank: int, way: int, events: list[list[Event]]) -> None:
        self.case, self.events, self.due, members = case, events[rank], case.due_numbers()[way], case.members(rank)
        self.strangers = {other for event in self.events for other in event.ranks} - set(members)
        is_loss, ring = isinstance(case, Loss), 2 * (len(members) - 1) / len(members)  # × a tensor, in an all-reduce
        by_member = {member: sum(self.count(event, event.sent) for event in events[member]) for member in members}
        self.total, self.found = sum(by_member.values()), by_member[rank]
        # An all-reduce may be made of two collectives, or of a ring of messages.
        parts = {"all_reduce": 1, "barrier": 1, "send": 0.5 / max(1, len(members) - 1), "recv": 0}
        self.calls, self.due_calls = sum(parts.get(e.op, 0.5) for e in self.events), case.calls[way]
        self.enough = ring * self.due + 2 * len(members) * bool(self.due)  # and what odd pieces add
        self.least = (len(members) - 1) * (case.tokens * (way == 0) if is_loss else 2 * self.due)
        direction = ("forward", "backward")[way]
        told, enough = f"{self.found:,.0f} numbers {direction}", f"{self.enough:,.0f} by {self.due_calls} are enough"
        self.text = f"rank {rank} sent {told} by {len(self.events)} call{'s' * (len(self.events) != 1)}; {enough}"

    def count(self, event: Event, nbytes: int) -> float:
        dtype = event.dtype if isinstance(self.case, Loss) and event.dtype else self.case.dtype_name
        return nbytes / getattr(torch, dtype).itemsize


class Held:
    """On one rank, beyond what was there before the first call: in the second, and after each."""

    def __init__(self, case: Split, recording: Recording, rank: int, first: int) -> None:
        unit = 4 * (case.tokens * case.vocabulary // 4 if isinstance(case, Loss) else prod(case.shape))
        base = recording.during(rank, first)[0][1]
        steps = [[(size - base) / unit for _, size in recording.during(rank, first + step)] for step in range(6)]
        self.after, self.most = (steps[2][0], steps[5][0]), max(steps[3] + steps[4])
        self.between = steps[4][0] - steps[2][0]
        self.unit, self.kept, self.enough = ENOUGH[type(case)]

    def told(self, when: str, *sizes: float) -> str:
        return f"held {', and then '.join(f'{size:.2f}' for size in sizes)} × {self.unit} {when}"
