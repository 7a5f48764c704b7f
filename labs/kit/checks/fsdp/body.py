"""What each rank does in a check of FSDP, and notes.

come_and_go   unshard, look, spoil what was gathered, reshard, look: in each step the shards hold other numbers
walk          the layers there, and back; each notes when its gather began, it was there, computed, was dropped
average       two gradients in a row, on one mesh
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.group import all_gather
from labs.kit.checks.answer import show
from labs.kit.checks.case import SETTLED, Outcome
from labs.kit.checks.fsdp.cases import Grid, Group, Walk
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.wire import Late
from labs.kit.record import mark
from labs.mesh import Mesh

COMPUTE = 0.001  # s that a layer pretends to compute


@dataclass
class Found:
    """One parameter after a call: is it what it was?"""

    given: str  # in a few words, before the call
    now: str
    same: bool  # the same memory
    nbytes: int  # of its storage
    due: int


@dataclass
class Visit(Outcome):
    """A step of one group; `after`: what was gathered, by parameter."""

    gathered: list[Found] = field(default_factory=list)
    dropped: list[Found] = field(default_factory=list)
    shards_changed: bool = False


def wire_of(case: Any) -> AbstractContextManager:
    """Slow, but where bytes held are measured: it keeps what it looks at."""
    return nullcontext() if case.held else Late(dist.get_rank(), case.seed)


# ---- unshard and reshard ---------------------------------------------------------------------------------


def come_and_go(unshard: Callable[..., Any], reshard: Callable[..., Any], cases: list[Group]) -> list[list[Visit]]:
    return [come_and_go_one(unshard, reshard, case) for case in cases]


def come_and_go_one(unshard: Callable[..., Any], reshard: Callable[..., Any], case: Group) -> list[Visit]:
    fulls = [torch.empty(shape, dtype=case.dtype) for shape in case.shapes]
    views = [full.view(full.shape) for full in fulls]  # what the layer computes with, whatever becomes of fulls
    for view in views:
        view.untyped_storage().resize_(0)
    visits = []
    for step in range(case.steps):
        shards, visit = case.shards(step, dist.get_rank()), Visit()
        before = [] if case.held else [shard.clone() for shard in shards]
        given = list(map(show, fulls))
        with wire_of(case), Aftermath() as aftermath:
            mark("step")
            noted(case, unshard, shards, fulls)
            visit.gathered = look(fulls, views, given, whole=True)
            keep(case, views, visit)
            noted(case, reshard, fulls)
            visit.dropped = look(fulls, views, given, whole=False)
            if case.held:
                time.sleep(SETTLED)
            mark("end")
        aftermath.tell(visit)
        visit.shards_changed = any(not unchanged(*pair) for pair in zip(before, shards, strict=False))
        visits.append(visit)
    return visits


def unchanged(before: Tensor, now: Tensor) -> bool:
    """Its memory is looked at first: reading what is not there ends the process."""
    return now.untyped_storage().nbytes() >= before.nbytes and torch.equal(before, now)


def keep(case: Group, views: list[Tensor], visit: Visit) -> None:
    """A copy of what was gathered; then spoil it, or the same memory might come back with the right numbers in it."""
    for view in views:
        if view.untyped_storage().nbytes() >= view.nbytes:
            visit.after.append(None if case.held else view.clone())
            if not case.held:
                view.fill_(float("nan"))


def look(fulls: list[Tensor], views: list[Tensor], given: list[str], whole: bool) -> list[Found]:
    found = []
    for full, view, before in zip(fulls, views, given, strict=True):
        storage = full.untyped_storage()
        same = storage._cdata == view.untyped_storage()._cdata
        found.append(Found(before, show(full), same, storage.nbytes(), view.nbytes if whole else 0))
    return found


# ---- prefetch --------------------------------------------------------------------------------------------


@dataclass
class Way(Outcome):
    """One walk: (what, place or number of the layer), in the order in which it happened."""

    notes: list[tuple[str, int]] = field(default_factory=list)
    wrong: int | None = None  # the first place where a layer computed without its numbers
    held: int = 0  # layers, at the end
    listed: bool = True  # the list of layers is as it was


class Layer:
    """What the learner's function is given: gather() starts and returns at once, arrive() waits, drop() frees."""

    def __init__(self, case: Walk, number: int, notes: list[tuple[str, int]]) -> None:
        self._case, self._number, self._notes = case, number, notes
        self._whole, self._work, self._there = None, None, False

    def _call(self, call: int) -> None:
        rank = dist.get_rank()
        self._mine = self._case.piece(call, self._number, rank)
        self._due = torch.cat([self._case.piece(call, self._number, other) for other in range(self._case.ranks)])

    def gather(self) -> None:
        if self._work is None and not self._there:
            self._notes.append(("gather", self._number))
            self._whole = torch.empty_like(self._due)
            self._work = all_gather(self._whole, self._mine, async_op=True)

    def arrive(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._notes.append(("arrive", self._number))
            self._work, self._there = None, True

    def drop(self) -> None:
        self.arrive()
        if self._there:
            self._notes.append(("drop", self._number))
            self._whole, self._there = None, False

    def _computes(self) -> bool:
        """Whether it has its numbers."""
        return self._there and torch.equal(self._whole, self._due)

    def __repr__(self) -> str:
        return f"<layer {self._number}>"


def walk(fn: Callable[..., Any], cases: list[Walk]) -> list[list[Way]]:
    return [walk_one(fn, case) for case in cases]


def walk_one(fn: Callable[..., Any], case: Walk) -> list[Way]:
    ways, notes = [], []
    layers = [Layer(case, number, notes) for number in range(len(case.sizes))]
    for call, order in enumerate((case.order, case.order[::-1])):
        way = Way()
        notes.clear()
        for layer in layers:
            layer._call(call)

        def compute(layer: Layer, way: Way = way) -> None:
            notes.append(("begin", layer._number))
            if way.wrong is None and not layer._computes():
                way.wrong = sum(what == "begin" for what, _ in notes) - 1
            time.sleep(COMPUTE)
            notes.append(("end", layer._number))

        with Late(dist.get_rank(), case.seed), Aftermath() as aftermath:
            mark("step")
            given = [layers[number] for number in order]
            noted(case, fn, given, compute)
            mark("end")
        aftermath.tell(way)
        way.notes, way.listed = list(notes), given == [layers[number] for number in order]
        way.held = sum(layer._there or layer._work is not None for layer in layers)
        for layer in layers:
            layer.drop()
        ways.append(way)
    return ways


# ---- the gradient of HSDP --------------------------------------------------------------------------------


@cache
def mesh_of(shape: tuple[int, int]) -> Mesh:
    return Mesh(shape, ("replicate", "shard"))


@dataclass
class Averaged(Outcome):
    """`returned` is the piece; `given`: the gradient, as it was."""

    kind: str = ""  # what was returned, in a few words
    storage: int = 0  # bytes of the memory behind it
    given: Tensor | None = None
    changed: bool = False  # the gradient
    overwritten: bool = False  # the piece, in the next call


def average(fn: Callable[..., Any], cases: list[Grid]) -> list[list[Averaged]]:
    return [average_one(fn, case) for case in cases]


def average_one(fn: Callable[..., Any], case: Grid) -> list[Averaged]:
    mesh, found, last = mesh_of(case.shape), [], None
    for call in range(4 if case.held else 2):
        gradient, seen = case.gradient(call, dist.get_rank()), Averaged()
        seen.given = None if case.held else gradient.clone()
        with wire_of(case), Aftermath() as aftermath:
            mark("step")
            piece = noted(case, fn, gradient, mesh)
            seen.changed = not case.held and not unchanged(seen.given, gradient)
            del gradient
            if case.held:
                time.sleep(SETTLED)
            mark("end")
        aftermath.tell(seen)
        seen.kind = show(piece)
        if isinstance(piece, Tensor):
            seen.returned, seen.storage = piece.detach().clone(), piece.untyped_storage().nbytes()
        if last is not None:
            found[-1].overwritten = not unchanged(found[-1].returned, last)
        last = piece if isinstance(piece, Tensor) and not case.held else None
        del piece
        found.append(seen)
    return found
