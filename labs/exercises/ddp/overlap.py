"""overlap: does communication begin while backward still runs?  Real jobs show what `labs.ddp.Overlapped` promises.

Numbers and bytes are judged as in `buckets`, with small buckets.  Then two models of equal layers are trained, and each
rank records in order: the backward of a layer, the start of a collective, a wait for one, and sync().

    a chain    a bucket is full when the last of its layers has its gradients: its all-reduce must begin then, and must
               not be waited for before backward is over
    a fork     gradients are ready in a different order on each rank: the all-reduces of buckets must begin in the same
               order everywhere, several at once if the first bucket was the last to be full
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.ddp import in_buckets
from labs.exercises.ddp._awkward_training import TrainingWorld, odd, train_wrapped
from labs.exercises.ddp._wrong_gradients import NOT_IN_PLACE, PARTLY, QUESTION, tables
from labs.exercises.ddp.buckets import ONE_EACH, own_group
from labs.exercises.engine.answer import Mistake, Wrong, answered, first, says
from labs.exercises.engine.by_script import Play, checked, wrong
from labs.exercises.engine.mixture import TIED
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.kit.watch import c10d_tap

LAYERS, DIM = 7, 5
LAYER_BYTES = 8 * DIM * DIM  # float64
SMALL = 500  # bytes of a bucket of odd models: no bucket is as large as the model
BY_LUCK = ("", TIED.name, PARTLY)  # names that a sum of different buckets may be given by chance


def worlds(draw: Draw) -> dict[int, list[TrainingWorld]]:
    case = partial(odd, draw)
    return {
        2: [case(2, micro_batches=3, steps=3)],
        3: [case(3, steps=2, evaluating=True), case(3, steps=2, mixed=True)],
        4: [case(4, dtype=BF16), draw.world(TrainingWorld, 4, dtype=F32, micro_batches=3, steps=2)],
    }


# ---- layers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layered(World):
    """A world in which equal layers are trained for two steps, and for a third one with a micro-batch in no_sync().

    fork: whether all layers read the same input, in the rank's own order; else they are a chain.
    """

    fork: bool = False
    steps: int = 3

    @property
    def bucket_bytes(self) -> int:
        """The size that puts two layers in each bucket, and the first layer alone; in a fork, one layer in each."""
        return LAYER_BYTES if self.fork else 2 * LAYER_BYTES

    def model(self, rank: int) -> Layers:
        turned = [*range(LAYERS - 1)]
        turned.insert(LAYERS - 1 - 3 * rank, LAYERS - 1)
        return Layers(self.generator(), turned if self.fork else [])

    def batch(self, rank: int) -> Tensor:
        x_BD = torch.randn(3, DIM, generator=self.generator(rank, 1), dtype=F64)
        return x_BD.requires_grad_()  # otherwise the first layer's own hook does not fire

    def plain(self, rank: int) -> tuple[Tensor, ...]:
        model = self.model(rank)
        return torch.autograd.grad(model(self.batch(rank)), list(model.parameters()))

    def mean(self) -> list[dict[str, Tensor]]:
        twice = 1 + (self.step == 2)
        plain = zip(*map(self.plain, self.members), strict=True)
        return [{f"the gradient of layer {i}": twice * sum(own) / self.n for i, own in enumerate(plain)}] * self.n

    def __str__(self) -> str:
        odd = ", whose gradients become ready in different orders"
        return f"{self.who}{odd}" if self.fork else f"a chain of {LAYERS} layers, {self.who}"


class Layers(nn.Module):
    def __init__(self, generator: torch.Generator, turned: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)).double()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2
        self.turned = turned

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.turned:
            return sum(torch.tanh(self.layers[i](x_BD)).square().mean() * (i + 1) for i in self.turned)
        for layer in self.layers:
            x_BD = torch.tanh(layer(x_BD))
        return x_BD.square().mean()


class InOrder(c10d_tap.Listener):
    """A record of the events on a rank while it is entered; collectives are numbered in the order of their starts."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.begun = 0

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        call.notes[self] = self.begun
        self.events.append(("begin", self.begun))
        self.begun += 1

    def waiting(self, call: c10d_tap.IssuedCall) -> None:
        if self in call.notes:
            self.events.append(("wait", call.notes[self]))


def in_order(world: Layered, wrap: Callable[..., Any]) -> Iterator[Look | None]:
    """Train the layers: yield before each step, and then a look with the gradients and the events."""
    model, x_BD = world.model(dist.get_rank()), world.batch(dist.get_rank())
    wrapped = wrap(model, bucket_bytes=world.bucket_bytes)
    for step in range(world.steps):
        wrapped.zero_grad()
        yield None
        if step == 2:
            with wrapped.no_sync():
                wrapped(x_BD).backward()
        places = [p.grad.data_ptr() for p in wrapped.parameters()] if step == 2 else []
        with InOrder() as order:
            for i, layer in enumerate(model.layers):
                layer.register_full_backward_pre_hook(lambda *_, i=i, at=order.events: at.append(("layer", i)))
            wrapped(x_BD).backward()
            order.events.append(("sync", 0))
            if hasattr(wrapped, "sync"):
                wrapped.sync()
        beside = sum(p.grad.data_ptr() != place for p, place in zip(wrapped.parameters(), places, strict=False))
        gradients = {f"the gradient of layer {i}": p.grad for i, p in enumerate(model.parameters())}
        yield Look(gradients, {"events": order.events, "beside": beside})


class Backward:
    """The events of a step on a rank.

    events: (what, number), in their order.
    full: for each bucket, the layer whose gradient fills it, when all buckets before it are full.
    """

    def __init__(self, events: list[list[Any]], bucket_bytes: int) -> None:
        self.events = [tuple(event) for event in events]
        over = self.events.index(("sync", 0))
        self.begun, self.after = (
            [number for what, number in part if what == "begin"] for part in (self.events[:over], self.events[over:])
        )
        self.order = [layer for what, layer in self.events[:over] if what == "layer"]
        sizes = map(len, in_buckets([torch.empty(DIM, DIM).double() for _ in range(LAYERS)], bucket_bytes))
        needed = ([self.order.index(i) for i in range(LAYERS - n, LAYERS)] for n in accumulate(sizes))
        self.full = [self.order[max(places)] for places in needed]

    def at(self, what: str, number: int) -> int:
        """Return the event's place in the order of a step's events, or the place after all events if it is missing."""
        return self.events.index((what, number)) if (what, number) in self.events else len(self.events)


def begins_late(backward: Backward) -> str | None:
    """Return a sentence about an all-reduce that begins more than one layer late, or None: hooks may fire late."""
    for number, layer in zip(backward.begun, backward.full, strict=False):
        later = backward.order[backward.order.index(layer) + 2 :]
        if later and backward.at("begin", number) > backward.at("layer", later[0]):
            late = f"its all-reduce began after the backward of layer {later[0]} had begun"
            return f"bucket {number} could begin after layer {layer}; {late}"
    return None


def begins_early(backward: Backward) -> str | None:
    """Return a sentence about an all-reduce that begins before its bucket is full, or None."""
    pairs = zip(backward.begun, backward.full, strict=False)
    early = (pair for pair in pairs if backward.at("begin", pair[0]) < backward.at("layer", pair[1]))
    return first(
        "all-reduce {} began before the backward of layer {}, which is in its bucket".format(*x) for x in early
    )


WORKS = "sync() goes through self.buckets and self.works side by side. How many does it find of each?"
ORDER = "buckets begin in different orders on different ranks"
# fmt: off
RAISED = (
    Mistake("a bucket's all-reduce never begins", WORKS, says(r"zip\(\) argument 2 is shorter")),
    Mistake("more works than buckets", WORKS, says(r"zip\(\) argument 2 is longer")),
)
FORK = (
    Mistake(ORDER, "Which bucket's all-reduce may begin when the second bucket is full and the first is not?",
            lambda one: True,
            symptom="right where all ranks run the same graph; otherwise gradients of other layers, or a hang"),
)
BESIDE = (
    Mistake("gradients are held outside their buckets",
            "Where do the gradients of the first micro-batches add up, and what lies there already?",
            lambda beside: beside and f"{beside} gradients were not in their buckets within no_sync()",
            symptom="right, but with micro-batches the gradients take twice the memory"),
)
IDLE = Mistake("a full bucket lies idle", "When do you check whether a bucket is full?", begins_late)
EARLY = (
    Mistake("a bucket begins before it is full", "Which gradients are in the bucket at that moment?", begins_early),
)
OVERLAP = (
    Mistake("nothing is sent during backward",
            "Who is called when the last gradient of a bucket is there, and what could it start?",
            lambda backward: not backward.begun and f"all {len(backward.after)} collectives began after backward",
            symptom="the bucketed timeline: backward, and then waiting"),
    replace(ONE_EACH,
            matches=lambda backward: ONE_EACH.matches((len(backward.begun + backward.after), len(backward.full)))),
    Mistake("waited for during backward", "Which call waits, and what could the rank compute meanwhile?",
            lambda backward: first(f"all-reduce {n} was waited for before sync() was called" for n in backward.begun
                                   if backward.at("wait", n) < backward.at("sync", 0)),
            symptom="all-reduces that begin early, and a step that is no shorter"),
    Mistake("some buckets begin after backward", "Which bucket is full when the last hook has fired, and who checks?",
            lambda backward: backward.after
            and f"{len(backward.after)} of {len(backward.full)} all-reduces began after backward"),
    IDLE,
)
# fmt: on


def second(seen: StepOutcomes) -> Iterator[tuple[str, Backward]]:
    """Yield each rank's Backward in the second step, and nothing in the other steps."""
    for rank, done in enumerate(seen.done if seen.world.step == 1 else ()):
        yield f"on rank {rank} ", Backward(done.facts["events"], seen.world.bucket_bytes)


def beside(seen: StepOutcomes) -> Iterator[tuple[str, int]]:
    """Yield for each rank the number of gradients that do not lie in the memory of their buckets."""
    for rank, done in enumerate(seen.done):
        yield f"on rank {rank} ", done.facts["beside"]


not_the_mean = wrong(lambda world: world.mean(), {F64: 1e-10})


def layered(*parts: Any, ranks: tuple[int, ...] = (2,), fork: bool = False) -> Play:
    def worlds(draw: Draw) -> dict[int, list[Layered]]:
        return {n: [draw.world(Layered, n, fork=fork)] for n in ranks}

    return Play(worlds, in_order, parts, QUESTION, raised=RAISED)


PLAY = Play(
    worlds, partial(train_wrapped, bucket_bytes=SMALL), tables(NOT_IN_PLACE, exact=True), QUESTION, raised=RAISED
)
CHAIN, TOO_EARLY = layered((second, OVERLAP), (beside, BESIDE)), layered((second, EARLY))
FORKS = layered((not_the_mean, FORK), (second, (IDLE,)), ranks=(2, 3), fork=True)


@answered
def overlap(wrap: Callable[..., Any], seed: int) -> str:
    """Check `wrap(model, bucket_bytes, **options)`: it returns a module like `labs.ddp.Overlapped`."""
    numbers_and_bytes(wrap, seed)
    chain = checked(CHAIN, (wrap,), seed).seen
    forks(wrap, seed)
    own_group(partial(wrap, bucket_bytes=SMALL), seed, SMALL)
    begun = len(Backward(chain[1].done[0].facts["events"], chain[1].world.bucket_bytes).begun)
    return f"{begun} of {begun} all-reduces begin during backward, and nobody waits there"


def numbers_and_bytes(wrap: Callable[..., Any], seed: int) -> None:
    """Raise Wrong for wrong gradients, or for wrong numbers of bytes.

    If buckets begin too early, or in different orders, the verdict names that and not the sums that follow from it.
    """
    try:
        checked(PLAY, (wrap,), seed)
    except Wrong as wrong:
        if wrong.answer.mistake in BY_LUCK and not (wrong.raised or wrong.untouched):
            chain = checked(TOO_EARLY, (wrap,), seed).seen
            if not any(part for seen in chain for part in not_the_mean(seen)):
                forks(wrap, seed)
        raise


def forks(wrap: Callable[..., Any], seed: int) -> None:
    """Raise Wrong if ranks start the all-reduces of buckets in different orders, or leave full buckets waiting."""
    try:
        checked(FORKS, (wrap,), seed)
    except Wrong as wrong:
        if wrong.raised or wrong.untouched or wrong.answer.mistake == IDLE.name:
            raise
        raise Wrong(wrong.answer.text, FORK[0].question, ORDER) from None
