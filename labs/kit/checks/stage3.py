"""The events of stage 3, in order: each layer whole only while it computes.

    stage_3(fn)    fn(layers, x, loss): one training step of a chain of layers, sharded over the ranks

A layer has what stage 3 knows of: gather(), forward(x), backward(dy), reduce(), drop(), update().  They do what their
names say, with real all-gathers and reduce-scatters, on 2 and 3 ranks; each event is noted.  Two steps in a row must
leave every shard as one process leaves it, with one whole layer and one whole gradient at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.group import all_gather, reduce_scatter
from labs.kit.checks.answer import Mistake, answered, refuse
from labs.kit.checks.case import Case, Outcome, close
from labs.kit.checks.launching import job, noted
from labs.kit.checks.left import AFTERMATH, Aftermath
from labs.kit.record import mark

DIM, BATCH, LEARNING_RATE, STEPS = 6, 5, 0.1, 2  # 36 elements per layer: 2 ranks divide them, and 3


@answered
def stage_3(fn: Callable[..., Any], seed: int) -> str:
    """`fn(layers, x, loss)`: one step of stage 3; layers: in the order of forward; loss(y) is the gradient of y."""
    for ranks, depth in ((2, 4), (3, 5), (2, 1)):
        case = Chain(seed, ranks, depth=depth)
        results = job(train, fn, case, ranks=ranks)
        for step in range(STEPS):
            for rank in range(ranks):
                seen = results[rank][step]
                refuse(EVENTS, seen, f"{case}: on rank {rank} in step {step} ")
                refuse(AFTERMATH, seen, f"{case}: on rank {rank} ")
            if ranks == 3:
                gathers, reduces = (seen.count(what) for what in ("gather", "reduce"))
    return (
        f"{gathers} gathers and {reduces} reduce-scatters for 5 layers, "
        "and never more than one layer whole; with one layer at a time 9 gathers are the least possible"
    )


# ---- on a rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain(Case):
    """y = tanh(x @ W) for each layer, and a loss whose gradient is y itself, over the batch."""

    depth: int = 4

    def weights(self) -> list[Tensor]:
        return list(torch.randn(self.depth, DIM, DIM, generator=self.generator(), dtype=self.dtype) / 2)

    def inputs(self, rank: int, step: int) -> Tensor:
        return torch.randn(BATCH, DIM, generator=self.generator(rank, step + 1), dtype=self.dtype)

    def __str__(self) -> str:
        return f"{self.who}, {self.depth} layer{'s' * (self.depth > 1)}"


def loss(y: Tensor) -> Tensor:
    """The gradient, with respect to y, of half the squares of y, per row."""
    return y / BATCH


@dataclass
class Seen(Outcome):
    """A step on a rank: its events in their order, (what, number of the layer); which layers end with wrong shards."""

    events: list[tuple[str, int]] = field(default_factory=list)
    depth: int = 0
    wrong: list[int] = field(default_factory=list)
    listed: bool = True  # the list of layers is as it was

    def count(self, what: str, layer: int | None = None) -> int:
        return sum(event == what and layer in (None, number) for event, number in self.events)

    def together(self, begins: str, ends: str) -> list[int]:
        """The first layers of which more than one is between these two events."""
        there: list[int] = []
        for what, number in self.events:
            if what == begins and number not in there:
                there.append(number)
            if what == ends and number in there:
                there.remove(number)
            if len(there) > 1:
                return there
        return []

    def unended(self, begins: str, ends: str) -> list[int]:
        """Layers that are between them when the step is over."""
        last = {number: what for what, number in self.events if what in (begins, ends)}
        return [number for number, what in last.items() if what == begins]


class Layer:
    """What the learner's function is given."""

    def __init__(self, number: int, shard: Tensor, events: list[tuple[str, int]]) -> None:
        self._number, self._shard, self._events = number, shard, events
        self._whole: Tensor | None = None
        self._kept: tuple[Tensor, Tensor] | None = None
        self._gradient: Tensor | None = None
        self._part: Tensor | None = None

    def _note(self, what: str) -> None:
        self._events.append((what, self._number))

    def _needs(self, thing: Any, what: str, first: str) -> Any:
        if thing is None:
            raise RuntimeError(f"layer {self._number}: {what} comes after {first}")
        return thing

    def gather(self) -> None:
        """All of its parameters, from everybody's shard."""
        if self._whole is None:
            self._note("gather")
            self._whole = torch.empty(DIM * DIM, dtype=self._shard.dtype)
            all_gather(self._whole, self._shard)

    def drop(self) -> None:
        if self._whole is not None:
            self._note("drop")
            self._whole = None

    def forward(self, x: Tensor) -> Tensor:
        whole = self._needs(self._whole, "forward()", "gather()")
        self._note("forward")
        y = torch.tanh(x @ whole.view(DIM, DIM))
        self._kept = x, y
        return y

    def backward(self, dy: Tensor) -> Tensor:
        whole = self._needs(self._whole, "backward()", "gather()")
        x, y = self._needs(self._kept, "backward()", "forward()")
        self._note("backward")
        dz = dy * (1 - y * y)
        self._gradient, self._kept = (x.t() @ dz).flatten(), None
        return dz @ whole.view(DIM, DIM).t()

    def reduce(self) -> None:
        """Its gradient goes to the owners; this rank's shard of the mean stays."""
        gradient = self._needs(self._gradient, "reduce()", "backward()")
        self._note("reduce")
        self._part, self._gradient = reduce_scatter(gradient, None) / dist.get_world_size(), None

    def update(self) -> None:
        """The optimizer's step, on this rank's shard."""
        part = self._needs(self._part, "update()", "reduce()")
        self._note("update")
        self._shard -= LEARNING_RATE * part
        self._part = None

    def __repr__(self) -> str:
        return f"<layer {self._number}>"


def train(fn: Callable[..., Any], case: Chain) -> list[Seen]:
    rank, events = dist.get_rank(), []
    layers = [Layer(i, w.flatten().chunk(case.ranks)[rank].clone(), events) for i, w in enumerate(case.weights())]
    seen = []
    for step, due in enumerate(one_process(case)):
        given, after = list(layers), Seen(depth=case.depth)
        with Aftermath() as aftermath:
            mark("step")
            noted(case, fn, given, case.inputs(rank, step), loss)
            mark("end")
        aftermath.tell(after)
        after.events, after.listed = list(events), given == layers
        own = [w.flatten().chunk(case.ranks)[rank] for w in due]
        after.wrong = [layer._number for layer in layers if not close(layer._shard, own[layer._number], 1e-10)]
        events.clear()
        seen.append(after)
    return seen


def one_process(case: Chain) -> list[list[Tensor]]:
    """The weights after each step, by plain autograd on the batches of all ranks."""
    weights, after = [w.requires_grad_() for w in case.weights()], []
    for step in range(STEPS):
        x = torch.cat([case.inputs(rank, step) for rank in range(case.ranks)])
        for w in weights:
            x = torch.tanh(x @ w)
        gradients = torch.autograd.grad(x.square().sum() / (2 * BATCH * case.ranks), weights)
        weights = [(w.detach() - LEARNING_RATE * g).requires_grad_() for w, g in zip(weights, gradients, strict=True)]
        after.append([w.detach() for w in weights])
    return after


# ---- what is judged --------------------------------------------------------------------------------------


def named(layers: list[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def two_at_a_time(seen: Seen) -> str | None:
    layers = seen.together("gather", "drop")
    return f"{named(layers)} were whole at the same time" if layers else None


def kept_for_backward(seen: Seen) -> str | None:
    """All layers stay from forward to backward: what PyTorch calls reshard_after_forward=False."""
    return two_at_a_time(seen) if seen.depth > 1 and seen.count("gather") <= seen.depth else None


def too_often(seen: Seen) -> str | None:
    layers = [layer for layer in range(seen.depth) if seen.count("gather", layer) > 2]
    return f"{named(layers)} gathered {seen.count('gather', layers[0])} times" if layers else None


def twice(seen: Seen) -> str | None:
    layers = [layer for layer in range(seen.depth) if seen.count("forward", layer) > 1]
    return f"{named(layers)} had more than one forward()" if layers else None


def missing(what: str) -> Callable[[Seen], str | None]:
    def fits(seen: Seen) -> str | None:
        layers = [layer for layer in range(seen.depth) if not seen.count(what, layer)]
        return f"{named(layers)} had no {what}()" if layers else None

    return fits


# fmt: off
EVENTS = (
    *(
        Mistake(f"a layer without {what}()",
                "Which layers does the step pass through, and which events does each have?",
                missing(what))
        for what in ("forward", "backward", "reduce", "update")
    ),
    Mistake("layers stay whole from forward to backward", "Who needs a layer between its forward and its backward?",
            kept_for_backward,
            shows="P is whole on every rank in the middle of the step: stage 2"),
    Mistake("more than one layer is whole", "When was the layer before this one needed for the last time?",
            two_at_a_time),
    Mistake("a layer stays whole after the step", "What does a rank hold at rest?",
            lambda seen: (layers := seen.unended("gather", "drop")) and f"still whole: {named(layers)}"),
    Mistake("gradients wait for each other",
            "Who owns the other parts of a gradient, once its layer's backward is over?",
            lambda seen: (layers := seen.together("backward", "reduce")) and f"{named(layers)} had whole gradients",
            shows="G grows through backward, and is whole at its end: stage 1"),
    Mistake("forward runs twice", "What does forward() keep for backward(), and for how long?", twice),
    Mistake("gathered too often", "In which two events is a layer needed?", too_often),
    Mistake("the list of layers has changed", "Whose list is it?",
            lambda seen: not seen.listed and "the list is not what it was; reversed(layers) leaves it alone"),
    Mistake("not one process's parameters",
            "In which order does backward pass through the layers, and what does each hand to the next?",
            lambda seen: bool(seen.wrong) and f"the parameters of {named(seen.wrong)} are not those of one process"),
)
# fmt: on
