"""Is a transformer split as it must be?

    conjugate      copy and reduce, forward and backward; both of them twice in a larger graph
    row_linear     summands of y from pieces of x, and the bias once
    split_loss     three numbers a token, whatever the vocabulary
    deal_heads     whole heads to each rank, and who shares keys and values
    block_plan     one layer of the course's GPT: a table of styles, which a job obeys

On 1 to 8 ranks (heads on 16, on paper) and in two groups at the same time: pieces that differ, and empty ones, no
dimension, no element, three dtypes, under no_grad, gradients that are expanded or transposed; on a wire on which
nothing is right by luck (wire.py); the first three once with the bytes held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, Wrong, answered, instead, refuse
from labs.kit.checks.case import close, isclose
from labs.kit.checks.job import blame_luck, job
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.tensor import mistakes
from labs.kit.checks.tensor.body import Called, deal, hold, obey, play
from labs.kit.checks.tensor.cases import WIDE, Border, Deal, Draw, Functions, Loss, Row, Split, X
from labs.kit.record import Event, Recording

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Held between forward and backward, and at the most: × x, y, and this rank's logits.
ENOUGH = {Border: ("x", 1.1, 4.1), Row: ("y", 2.3, 5.1), Loss: ("its logits", 4.6, 9.1)}

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

    x [..., inputs], weight [outputs, inputs], whose sizes may differ between ranks; bias [outputs], alike, or None.
    """
    recording = every_job((fn,), Draw(seed).rows(), mistakes.ROWS)
    return f"you sent {sent(recording, 'y', 32 * 24 * 4, 2)}; the least possible is 1.50 × and 0.00 ×"


@answered
def split_loss(fn: Callable[..., Any], seed: int) -> str:
    """`fn(logits, targets, first, group=None) -> loss`: the mean cross-entropy (0-dim), the same on every rank.

    logits [tokens, columns]: this rank's, perhaps none, of the vocabulary from `first` on; targets [tokens], alike.
    """
    recording = every_job((fn,), Draw(seed).losses(), mistakes.LOSSES)
    numbers = recording.sent(0, 2) / (1.5 * 64 * 4)
    return f"you all-reduced {numbers:.2f} numbers a token forward and none backward; 3 are enough for any vocabulary"


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


@answered
def deal_heads(fn: Callable[..., Any], seed: int) -> str:
    """`fn(heads, kv_heads, ranks, rank) -> (queries, keys, sharers)`: three lists of whole numbers.

    This rank's query heads; the heads of keys and values that these read; the ranks, in order and with this one, among
    whom the gradient of the latter must be added up.  Where there are enough, no two ranks have the same.
    """
    deals, shared = Draw(seed).deals(), Deal(8, 2, 4)
    results = job(deal, fn, deals, ranks=2)
    for index, case in enumerate(deals):
        refuse(mistakes.DEALS, Dealing(case, *(outcome.returned[index] for outcome in results)), f"{case}: ")
    for rank, outcome in enumerate(results):
        refuse(AFTERMATH, outcome, f"on rank {rank} ")
    if results.recording.events:
        raise Wrong(f"it calls {results.recording.events[0].op}", "What do the four numbers not tell you?", "it sends")
    for rank, found in enumerate(job(obey, fn, shared, seed, ranks=4)):
        if not all(close(*pair, 1e-12) for pair in zip(found[:3], found[3:], strict=True)):
            raise Wrong(f"{shared}: attention on rank {rank} is not one process's", mistakes.SHARE)
    return f"{len(deals)} deals without a message; a job that obeys, of {shared}, has one process's attention"


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
        try:
            judge(case, [of_rank[index] for of_rank in results], results.recording, 2 * index, numbers)
        except Wrong as wrong:
            events = [e for e in results.recording.events if e.step in (2 * index, 2 * index + 1)]
            told = blame_luck(wrong, events)
            raise (told if told.answer.mistake else told.also(case.peculiar)) from None
    return results.recording


def judge(case: Split, called: list[Called], recording: Recording, step: int, numbers: Sequence[Mistake]) -> None:
    ranks = range(case.ranks)
    for rank in ranks:
        refuse(mistakes.RESULT, called[rank], f"{case}: on rank {rank} ")
    events = [[recording.select(rank, step + way) for rank in ranks] for way in range(2)]
    sent = [Sent(case, rank, way, events[way]) for way in range(2) for rank in ranks]
    dues = [case.due(rank) for rank in ranks]
    for name in dues[0] if case.graded else (case.result,):
        for rank in ranks:
            one = One(case, rank, name, called, dues[rank][name], sent[rank])
            if not one.right:
                refuse(mistakes.FORM, one, f"{case}: on rank {rank}, ")
                refuse(numbers, one, f"{case}: on rank {rank}, {one.first}\n")
    for rank in ranks:
        refuse(mistakes.AFTER, called[rank], f"{case}: on rank {rank} ")
    for one in sent:
        refuse(mistakes.SENT, one, f"{case}: ")


class One:
    """On one rank the result, or the gradient of what goes by `name`."""

    def __init__(self, case: Split, rank: int, name: str, called: list[Called], due: Tensor, forward: Sent) -> None:
        self.case, self.rank, self.name, self.called, self.forward = case, rank, name, called, forward
        self.found, self.due, self.n = self.on(rank), due, len(case.members(rank))

    def on(self, rank: int) -> Any:
        called = self.called[rank]
        return called.returned if self.name == self.case.result else called.gradients.get(self.name)

    @property
    def right(self) -> bool:
        """(Of what is empty there need be no gradient.)"""
        if self.found is None:
            return not self.due.numel()
        found, dtype = self.found, self.case.dtype
        return isinstance(found, Tensor) and found.dtype == dtype and close(found, self.due, TOLERANCE[dtype])

    def same(self, value: Tensor | float, tolerance: float = 1e-5) -> bool:
        return bool(self.found.numel()) and close(self.found.double(), value, tolerance)

    def times(self, factor: float) -> bool:
        return bool(self.due.any()) and self.same(factor * self.due)

    @cached_property
    def alone(self) -> Tensor:
        """What this rank makes of it by itself."""
        return self.case.due(self.rank, (self.rank,))[self.name]

    @property
    def what(self) -> str:
        return f"the {self.name}" if self.name == self.case.result else f"the gradient of {self.name!r}"

    @property
    def first(self) -> str:
        at = int((~isclose(self.found, self.due, TOLERANCE[self.case.dtype])).flatten().nonzero()[0])
        found = self.found.flatten()[at]
        return f"{self.what} at element {at} is {instead(found, self.due.flatten()[at].to(found.dtype))}"


class Sent:
    """What a rank sent on one way of a call; in numbers of the case's dtype, or of any for a loss."""

    def __init__(self, case: Split, rank: int, way: int, events: list[list[Event]]) -> None:
        self.case, self.events, self.members = case, events[rank], case.members(rank)
        self.due = case.due_numbers()[way]
        n, by_member = len(self.members), [sum(map(self.count, events[member])) for member in self.members]
        self.total, self.found = sum(by_member), by_member[self.members.index(rank)]
        self.enough = 2 * (n - 1) / n * self.due + 2 * n * bool(self.due)  # an all-reduce, and what odd pieces add
        self.least = (n - 1) * (case.tokens * (way == 0) if isinstance(case, Loss) else 2 * self.due)
        direction = ("forward", "backward")[way]
        self.text = f"rank {rank} sent {self.found:,.0f} numbers {direction}; {self.enough:,.0f} are enough"

    def count(self, event: Event) -> float:
        dtype = event.dtype if isinstance(self.case, Loss) and event.dtype else self.case.dtype_name
        return event.sent / getattr(torch, dtype).itemsize


class Held:
    """On one rank, beyond what was there before the first call: in the second, and after each."""

    def __init__(self, case: Split, recording: Recording, rank: int, first: int) -> None:
        unit = case.brings(rank)["logits"].nbytes if isinstance(case, Loss) else 4 * case.shape_of_result(rank).numel()
        base = recording.during(rank, first)[0][1]
        steps = [[(size - base) / unit for _, size in recording.during(rank, first + step)] for step in range(6)]
        self.after, self.between, self.most = (steps[2][0], steps[5][0]), steps[4][0], max(steps[3] + steps[4])
        self.unit, self.kept, self.enough = ENOUGH[type(case)]

    def told(self, when: str, *sizes: float) -> str:
        return f"held {', and then '.join(f'{size:.2f}' for size in sizes)} × {self.unit} {when}"


# ---- heads -----------------------------------------------------------------------------------------------


class Dealing:
    """What two ranks were told of a deal: for each of its ranks three lists, or something else in a few words."""

    def __init__(self, case: Deal, told: list[Any], another_time: list[Any]) -> None:
        self.case, self.told, self.alike = case, told, told == another_time
        self.lists = [each for each in told if not isinstance(each, str)]
        self.queries, self.keys, self.sharers = zip(*self.lists, strict=True) if self.lists else ((), (), ())
        self.together = case.heads // case.kv_heads

    def first(self, fits: Callable[[int], str | bool]) -> str | None:
        """Of the first rank that it fits."""
        return next((f"rank {rank} {told}" for rank in range(self.case.ranks) if (told := fits(rank))), None)

    def owners(self, kind: Sequence[list[int]], head: int) -> list[int]:
        """A rank that has it twice is named twice."""
        return [rank for rank, heads in enumerate(kind) for each in heads if each == head]

    def read(self, rank: int) -> list[int]:
        """The heads of keys and values that this rank's queries read."""
        return sorted({query // self.together for query in self.queries[rank]})

    def with_its_keys(self, rank: int) -> list[int]:
        return [other for other, keys in enumerate(self.keys) if sorted(keys) == sorted(self.keys[rank])]
