"""What FSDP adds to stage 3: parameters that travel together, ahead of time, and over two axes.

    unshard_and_reshard    a group of parameters is there, bit for bit, by one collective; and then its memory is freed
    prefetch               while a layer computes, the next one's gather is under way, and no third one is held
    hsdp_gradient          this rank's piece of the mean over all ranks, by the least bytes

Measured on 2, 3 and 4 ranks, and on grids up to 2 × 3: uneven and empty shards, three dtypes, several calls in a row,
a layer that is used twice; on a wire on which nothing is right by luck (wire.py), and once with the bytes held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Wrong, answered, instead, refuse
from labs.kit.checks.case import close, isclose
from labs.kit.checks.fsdp import mistakes
from labs.kit.checks.fsdp.body import Averaged, Visit, Way, average, come_and_go, walk
from labs.kit.checks.fsdp.cases import Draw, Grid, Group, places
from labs.kit.checks.job import blame_luck, job
from labs.kit.checks.mixture import Made, mixture
from labs.kit.record import Event, Recording

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
BYTES = ("P", "G", "S", "A", "comm", "temporary")
PLACE = "At which place of the list is this layer now, and which layer comes after that place?"
ENOUGH = 2.75  # × the group, or the gradient: two of it, and some pieces; a third one makes 3


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def unshard_and_reshard(unshard: Callable[..., Any], reshard: Callable[..., Any], seed: int) -> str:
    """`unshard(shards, fulls)` fills the storage of each full from everybody's shards; `reshard(fulls)` empties it.

    shards: this rank's rows of each parameter, perhaps of another dtype, perhaps none; fulls: [rows, ...], empty.
    """
    draw = Draw(seed)
    for ranks, cases in draw.groups().items():
        results = job(come_and_go, unshard, reshard, cases, ranks=ranks)
        for index, (first, case) in enumerate(places(cases)):
            for step in range(case.steps):
                visits = [results[rank][index][step] for rank in range(ranks)]
                played(partial(judge_visits, case, step, visits), results.recording, first + step)
                for rank in range(ranks):
                    sent = Sent(rank, results.recording.select(rank, first + step), case.dtype)
                    sent.of_group(case)
                    refuse(mistakes.SENT, sent, f"{case}: on rank {rank} ")
    case = draw.wide()
    recording = job(come_and_go, unshard, reshard, [case], ranks=4, record="memory").recording
    held = judge_held(mistakes.HELD, recording, case, case.nbytes)
    calls = "1 collective" if sent.calls else f"{sent.messages} messages"
    return (
        f"you sent {sent.bytes / cases[-1].nbytes:.2f} × the group in {calls}; the least possible is 0.75 × in 1. You "
        f"held {held.most:.2f} × it meanwhile, where the table and the full tensors make 2.00 ×, and {held.rest:.2f} "
        "× afterwards"
    )


@answered
def prefetch(fn: Callable[..., Any], seed: int) -> str:
    """`fn(layers, compute)` calls compute(layer) for each, in this order, when it is there; none is held at the end.

    A layer has gather(), which starts its all-gather and returns at once, arrive(), which waits, and drop().
    The list is the caller's, and stays as it is.
    """
    for ranks, cases in Draw(seed).walks().items():
        results = job(walk, fn, cases, ranks=ranks)
        for index, (first, case) in enumerate(places(cases)):
            for call, order in enumerate((case.order, case.order[::-1])):
                for rank in range(ranks):
                    events = results.recording.select(rank, first + call)
                    steps = Steps(results[rank][index][call], order, len(events))
                    try:
                        refuse(mistakes.WALK, steps, f"{case}: on rank {rank} ")
                    except Wrong as wrong:
                        raise (Wrong(wrong.answer.text, PLACE, case.only) if case.only else wrong) from None
                    refuse(mistakes.AFTERMATH, steps.way, f"{case}: on rank {rank} ")
    return (
        f"each layer but the first was under way while the one before it computed, and you held {steps.most} layers "
        "at most; without prefetch 1, with it 2 is the least possible"
    )


@answered
def hsdp_gradient(fn: Callable[..., Any], seed: int) -> str:
    """`fn(gradient, mesh) -> piece`: this rank's piece of the mean of all ranks' gradients, [n] -> [n / shards].

    mesh: a labs.mesh.Mesh with the axes "replicate" and "shard"; the size of the latter divides n.
    `gradient` stays as it is.
    """
    draw = Draw(seed)
    for ranks, cases in draw.grids().items():
        results = job(average, fn, cases, ranks=ranks)
        for index, (first, case) in enumerate(places(cases)):
            for call in range(2):
                seen = [results[rank][index][call] for rank in range(ranks)]
                played(partial(judge_pieces, case, seen, call), results.recording, first + call)
                sent = judge_sent(case, results.recording, first + call)
                for rank in range(ranks):
                    refuse(mistakes.WHOLE, seen[rank], f"{case}: on rank {rank} ")
    case = draw.wide_grid()
    recording = job(average, fn, [case], ranks=4, record="memory").recording
    judge_held(mistakes.KEPT, recording, case, case.n * case.dtype.itemsize)
    whole = cases[-1].n * cases[-1].dtype.itemsize
    return (
        f"on 2 × 2 ranks you sent {sent.bytes / whole:.2f} × the gradient, of that {sent.crossing / whole:.2f} × "
        "between replicas; the least possible is 1.00 × and 0.50 ×"
    )


# ---- what is judged --------------------------------------------------------------------------------------


def played(judge: Callable[[], None], recording: Recording, step: int) -> None:
    try:
        judge()
    except Wrong as wrong:
        raise blame_luck(wrong, [event for event in recording.events if event.step == step]) from None


def judge_visits(case: Group, step: int, visits: list[Visit]) -> None:
    for rank, visit in enumerate(visits):
        for number, found in enumerate(visit.gathered):
            refuse(mistakes.GATHERED, found, f"{case}: on rank {rank}, after unshard, parameter {number}: ")
        for number in range(len(case.shapes)):
            p = Parameter(case, step, rank, number, visit.after[number])
            if not torch.equal(p.found, p.due):
                refuse(mistakes.VALUES, p, f"{case}, step {step}: on rank {rank}, in parameter {number}, {p.first}\n")
        for number, found in enumerate(visit.dropped):
            refuse(mistakes.DROPPED, found, f"{case}: on rank {rank}, after reshard, parameter {number}: ")
        refuse(mistakes.STEP, visit, f"{case}: on rank {rank} ")


class Parameter:
    """One that was gathered on a rank."""

    def __init__(self, case: Group, step: int, rank: int, number: int, found: Tensor) -> None:
        self.case, self.step, self.number, self.found = case, step, number, found
        self.wholes = case.wholes(step)
        self.due = self.wholes[number].to(case.dtype)
        self.mine = case.shards(step, rank)[number].to(case.dtype)

    @property
    def first(self) -> str:
        at = tuple(int(i) for i in (self.found != self.due).nonzero()[0])
        return f"element {list(at)} is {instead(self.found[at], self.due[at])}"


class Sent:
    """What one rank sent in one step."""

    def __init__(self, rank: int, events: list[Event], dtype: torch.dtype) -> None:
        self.rank, self.events = rank, [event for event in events if event.op != "barrier"]
        self.barriers = len(events) - len(self.events)
        self.bytes = sum(event.sent for event in self.events)
        self.messages = sum(event.op in ("send", "recv") for event in self.events)
        self.calls = len(self.events) - self.messages
        self.from_one = any(event.op == "broadcast" for event in self.events)
        self.all_reduced = sum(event.sent for event in self.events if event.op == "all_reduce")
        wide = {event.dtype for event in self.events if event.sent > 64 and itemsize(event) > dtype.itemsize}
        self.wider = " and ".join(sorted(wide))

    def expect(self, least: float, enough: float) -> None:
        self.least, self.enough = least, some_more(enough)
        self.text = f"it sent {self.bytes:,} bytes; {enough:,.0f} are enough"

    def of_group(self, case: Group) -> None:
        self.parameters, self.enough_calls = len(case.shapes), 2 * (case.ranks - 1) if self.messages else 1
        own = sum(shard.numel() for shard in case.shards(0, self.rank))
        self.expect(own * case.dtype.itemsize, (case.ranks - 1) * case.row)  # once at the least: others may hand it on

    def of_grid(self, case: Grid) -> None:
        """`crossing`: bytes to ranks of other replicas, by any op."""
        (replicas, self.shards), whole = case.shape, case.n * case.dtype.itemsize
        to = [pair for event in self.events for pair in event.to.items()]
        self.crossing = sum(size for rank, size in to if rank // self.shards != self.rank // self.shards)
        self.least_crossing = 2 * (replicas - 1) / replicas * whole / self.shards
        enough = (self.shards - 1) / self.shards * whole + self.least_crossing
        self.expect(0.9 * enough - 64, enough)

    @property
    def crosses(self) -> bool:
        return self.crossing > some_more(self.least_crossing)


def some_more(size: float) -> float:
    """What padding may add."""
    return 1.02 * size + 64


def itemsize(event: Event) -> int:
    return getattr(torch, event.dtype or "bool").itemsize


class Steps:
    """One walk on one rank."""

    def __init__(self, way: Way, order: tuple[int, ...], collectives: int) -> None:
        self.way, self.order, self.notes, self.collectives = way, order, way.notes, collectives

    @property
    def gathers(self) -> int:
        return sum(what == "gather" for what, _ in self.notes)

    @property
    def most(self) -> int:
        """Layers that were there or on their way at one moment."""
        held = most = 0
        for what, _ in self.notes:
            held += {"gather": 1, "drop": -1}.get(what, 0)
            most = max(most, held)
        return most

    def before_the_end_of(self, place: int, what: str, number: int) -> bool:
        """Whether the last such note before the layer's own turn came before the one in `place` had ended."""
        ends = [i for i, (kind, _) in enumerate(self.notes) if kind == "end"]
        begins = [i for i, (kind, _) in enumerate(self.notes) if kind == "begin"]
        found = [i for i, note in enumerate(self.notes[: begins[place + 1]]) if note == (what, number)]
        return bool(found) and found[-1] < ends[place]

    @cached_property
    def late(self) -> list[int]:
        """Places after which the next layer was not under way."""
        pairs = enumerate(pairwise(self.order))
        return [place for place, (_, after) in pairs if not self.before_the_end_of(place, "gather", after)]

    @cached_property
    def early(self) -> list[int]:
        """Places before whose end the next layer was waited for."""
        pairs = enumerate(pairwise(self.order))
        return [place for place, (_, after) in pairs if self.before_the_end_of(place, "arrive", after)]


def judge_pieces(case: Grid, seen: list[Averaged], call: int) -> None:
    where = f"{case}, call {call}: "
    pieces = [Piece(case, rank, seen) for rank in range(case.ranks)]
    for piece in pieces:
        refuse(mistakes.PIECE, piece, f"{where}on rank {piece.rank} ")
    for piece in pieces:
        if not close(piece.found, piece.due, piece.tolerance):
            refuse(mistakes.MEAN, piece, f"{where}on rank {piece.rank} {piece.first}\n")
    for line in case.places.T.tolist():
        refuse(mistakes.ALIKE, [pieces[rank].found for rank in line], where)


def judge_sent(case: Grid, recording: Recording, step: int) -> Sent:
    """The rank first that sent most to other replicas: a ring over all ranks crosses at a few places only."""
    ranks = [Sent(rank, recording.select(rank, step), case.dtype) for rank in range(case.ranks)]
    for sent in ranks:
        sent.of_grid(case)
    ranks.sort(key=lambda sent: sent.crossing, reverse=True)
    for sent in ranks:
        refuse(mistakes.AVERAGED, sent, f"{case}: on rank {sent.rank} ")
    return ranks[0]


class Piece:
    """What one rank returned."""

    def __init__(self, case: Grid, rank: int, ranks: list[Averaged]) -> None:
        self.case, self.rank, self.seen, self.found = case, rank, ranks[rank], ranks[rank].returned
        self.gradients = [seen.given.double() for seen in ranks]
        self.mean = torch.stack(self.gradients).mean(0)
        self.place = rank % case.shape[1]
        self.due = self.mean.chunk(case.shape[1])[self.place]
        self.needed = f"a piece has {len(self.due)} elements"
        self.tolerance = TOLERANCE[case.dtype]

    def size_of(self, parts: int) -> bool:
        return parts != self.case.shape[1] and self.found.numel() * parts == self.case.n

    def line(self, axis: int) -> list[int]:
        """The ranks along an axis, this one among them."""
        row, column = divmod(self.rank, self.case.shape[1])
        return (self.case.places[row] if axis else self.case.places[:, column]).tolist()

    @cached_property
    def made(self) -> Made | None:
        """Of which ranks' gradients, 1 where it is right; None where it cannot be told."""
        sources = [gradient.chunk(self.case.shape[1])[self.place] for gradient in self.gradients]
        found = mixture(self.found, sources)
        return None if found is None else Made((found * self.case.ranks).view(-1, 1), self.rank)

    @property
    def first(self) -> str:
        wrong = ~isclose(self.found, self.due, self.tolerance)
        at = int(wrong.nonzero()[0])
        return f"element {at} is {instead(self.found[at], self.due[at])}"


# ---- bytes held ------------------------------------------------------------------------------------------


class Held:
    """On one rank, beyond what was there before the first step, in units of `whole`: the least of steps 1 and on."""

    def __init__(self, recording: Recording, rank: int, whole: int) -> None:
        base = recording.during(rank, 0, BYTES)[0][1]
        steps = [
            [(size - base) / whole for _, size in recording.during(rank, step, BYTES)]
            for step in range(1, recording.steps)
        ]
        self.most, self.rest = min(map(max, steps)), min(step[-1] for step in steps[-2:])
        self.too_much = self.most > 1.05 * ENOUGH and f"at its most; {ENOUGH:.2f} × is enough"


def judge_held(rows: Any, recording: Recording, case: Any, whole: int) -> Held:
    """The rank that holds most."""
    ranks = [Held(recording, rank, whole) for rank in range(case.ranks)]
    for rank, held in enumerate(ranks):
        refuse(rows, held, f"{case}: rank {rank} ")
    return max(ranks, key=lambda held: held.most)
