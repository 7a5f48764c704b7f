"""Does communication begin while backward still works?  What `labs.ddp.Overlapped` promises, read off real jobs.

    overlap(wrap)    wrap(model, bucket_bytes, **options) -> a module as data_parallel has it, whose buckets `labs.ddp`
                     cuts, and whose options are those of `labs.ddp.Overlapped`

Numbers and bytes are those of data_parallel, in small buckets.  Then two models of equal layers, and what each rank
does, in its order: a layer's backward, a collective begun, one waited for, sync().

    a chain    a bucket is full when the last of its layers has its gradients: its all-reduce begins then, and is
               waited for when backward is over
    a fork     gradients are ready in a different order on each rank: buckets must begin in the same one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.ddp import in_buckets
from labs.kit.checks.answer import Mistake, Wrong, answered, refuse
from labs.kit.checks.case import close
from labs.kit.checks.gradients.buckets import ONE_EACH, own_group
from labs.kit.checks.gradients.cases import Draw
from labs.kit.checks.gradients.judge import every_job
from labs.kit.checks.gradients.mistakes import PARTLY
from labs.kit.checks.job import job
from labs.kit.checks.mixture import TIED
from labs.kit.launch import Results
from labs.kit.watch import tap

LAYERS, DIM = 7, 5
LAYER_BYTES = 8 * DIM * DIM  # float64
BUCKET_BYTES = 2 * LAYER_BYTES  # two layers in a bucket, and the first one by itself
BY_LUCK = ("", TIED.name, PARTLY)  # so a sum of different buckets may be called
SMALL = 500  # bytes of a bucket of data_parallel's models: none is as large as the model


@answered
def overlap(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model, bucket_bytes, **options)` -> a module as `labs.ddp.Overlapped` is one; so are the options."""
    draw = Draw(seed)
    with by_name():
        try:
            every_job("data_parallel", partial(wrap, bucket_bytes=SMALL), draw.overlap(), exact=True)
        except Wrong as wrong:
            if wrong.answer.mistake in BY_LUCK and not (wrong.raised or wrong.untouched):
                too_early_or_in_another_order(wrap, seed)
            raise
        chain = job(watched, wrap, [seed, 0], ranks=2, when="a chain of layers, 2 ranks")
    for rank, (_, steps, beside) in enumerate(chain):
        refuse(OVERLAP, Backward(steps[1]), f"a chain of {LAYERS} layers, 2 ranks: on rank {rank} ")
        refuse(BESIDE, beside, f"a chain of {LAYERS} layers, 2 ranks: on rank {rank} ")
    for ranks in (2, 3):
        fork_or_refuse(wrap, [seed, 1], ranks)
    own_group(partial(wrap, bucket_bytes=SMALL), draw, SMALL)
    begun = len(Backward(chain[0][1][1]).begun)
    return f"{begun} of {begun} all-reduces begin during backward, and nobody waits there"


@contextmanager
def by_name() -> Iterator[None]:
    """An error that sync() raises has the name of the mistake that led to it."""
    try:
        yield
    except Wrong as wrong:
        refuse(RAISED if wrong.raised else (), wrong.answer.text, wrong.answer.text)
        raise


def fork_or_refuse(wrap: Callable[..., Any], numbers: list[int], ranks: int) -> None:
    where = f"{ranks} ranks, whose gradients become ready in different orders"
    try:
        results = job(watched, wrap, numbers, ranks=ranks, when=where)
    except Wrong as wrong:
        if wrong.raised or wrong.untouched:
            raise
        raise Wrong(wrong.answer.text, ORDER.question, ORDER.name) from None
    for rank, layer in not_the_mean(results):
        refuse(FORK, layer, f"{where}: on rank {rank} ")


def too_early_or_in_another_order(wrap: Callable[..., Any], seed: int) -> None:
    """Raise Wrong where it is the moment that is wrong, or the order, and not the sums."""
    chain = job(watched, wrap, [seed, 0], ranks=2)
    refuse(EARLY, Backward(chain[0][1][1]), f"a chain of {LAYERS} layers, 2 ranks: on rank 0 ")
    if not not_the_mean(chain):
        fork_or_refuse(wrap, [seed, 1], ranks=2)


def not_the_mean(results: Results) -> list[tuple[int, int]]:
    """(rank, layer) of the gradients that are wrong when the second step is over."""
    plain = [gradients for gradients, *_ in results]
    return [
        (rank, layer)
        for rank, (_, steps, _) in enumerate(results)
        for layer, found in enumerate(steps[1].gradients)
        if not close(found, torch.stack([own[layer] for own in plain]).mean(0), 1e-10)
    ]


# ---- on a rank -------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What a rank did in one step, in its order, and the gradients that it had when sync() was over."""

    events: list[tuple[str, int]]
    gradients: list[Tensor]


class Layers(nn.Module):
    """Layers in a chain, or each of them on the same input, in an order of the rank's own."""

    def __init__(self, generator: torch.Generator, fork: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)).double()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2
        self.fork = fork

    def forward(self, x_BD: Tensor) -> Tensor:
        if not self.fork:
            for layer in self.layers:
                x_BD = torch.tanh(layer(x_BD))
            return x_BD.square().mean()
        turned = torch.arange(LAYERS).roll(2 * dist.get_rank()).tolist()
        return sum(torch.tanh(self.layers[i](x_BD)).square().mean() * (i + 1) for i in turned)


class InOrder(tap.Listener):
    """Notes what happens, while it is entered; collectives are numbered as they begin."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.begun = 0

    def __enter__(self) -> InOrder:
        tap.listeners.append(self)
        return self

    def __exit__(self, *failure: object) -> None:
        tap.listeners.remove(self)

    def issued(self, call: tap.Call) -> None:
        call.notes[self] = self.begun
        self.events.append(("begin", self.begun))
        self.begun += 1

    def waiting(self, call: tap.Call) -> None:
        if self in call.notes:
            self.events.append(("wait", call.notes[self]))


def watched(wrap: Callable[..., Any], numbers: list[int]) -> tuple[list[Tensor], list[Step], int]:
    """This rank's own gradients, two steps with the same batch, and what lies beside the buckets in a third."""
    seed, fork = numbers
    model = Layers(torch.Generator().manual_seed(seed), bool(fork))
    x_BD = torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed + 1 + dist.get_rank())).double()
    x_BD.requires_grad_()  # else the first layer's own hook does not fire
    plain = list(torch.autograd.grad(model(x_BD), list(model.parameters())))
    wrapped, steps = wrap(model, bucket_bytes=BUCKET_BYTES), []
    for _ in range(2):
        wrapped.zero_grad()
        with InOrder() as order:
            for i, layer in enumerate(model.layers):
                layer.register_full_backward_pre_hook(lambda *_, i=i, at=order.events: at.append(("layer", i)))
            wrapped(x_BD).backward()
            order.events.append(("sync", 0))
            if hasattr(wrapped, "sync"):
                wrapped.sync()
        steps.append(Step(order.events, [p.grad.detach().clone() for p in model.parameters()]))
    return plain, steps, beside_the_buckets(wrapped, x_BD)


def beside_the_buckets(wrapped: nn.Module, x_BD: Tensor) -> int:
    """How many gradients lie elsewhere within no_sync() than when sync() is over."""
    wrapped.zero_grad()
    with wrapped.no_sync():
        wrapped(x_BD).backward()
    within = [p.grad.data_ptr() for p in wrapped.parameters()]
    wrapped(x_BD).backward()
    if hasattr(wrapped, "sync"):
        wrapped.sync()
    return sum(p.grad.data_ptr() != place for p, place in zip(wrapped.parameters(), within, strict=True))


# ---- what is judged --------------------------------------------------------------------------------------


class Backward:
    """A step of the chain.  A bucket is named by the last of its layers to have a gradient."""

    def __init__(self, step: Step) -> None:
        self.events = step.events
        over = self.events.index(("sync", 0))
        self.begun = [number for what, number in self.events[:over] if what == "begin"]
        self.after = [number for what, number in self.events[over:] if what == "begin"]
        sizes = map(len, in_buckets([torch.empty(DIM, DIM).double() for _ in range(LAYERS)], BUCKET_BYTES))
        self.full = [LAYERS - layers for layers in accumulate(sizes)]

    def at(self, what: str, number: int) -> int:
        """Its place; after all others where there is none."""
        return self.events.index((what, number)) if (what, number) in self.events else len(self.events)


def begins_late(seen: Backward) -> str | None:
    """A layer more is forgiven: hooks need not fire at once."""
    for number, layer in zip(seen.begun, seen.full, strict=False):
        if layer >= 2 and seen.at("begin", number) > seen.at("layer", layer - 2):
            return (
                f"bucket {number} was full after layer {layer}; its all-reduce began after the backward of layer "
                f"{layer - 2} had begun"
            )
    return None


def begins_early(seen: Backward) -> str | None:
    for number, layer in zip(seen.begun, seen.full, strict=False):
        if seen.at("begin", number) < seen.at("layer", layer):
            return f"all-reduce {number} began before the backward of layer {layer}, which is in its bucket"
    return None


def waits_early(seen: Backward) -> str | None:
    for number in seen.begun:
        if seen.at("wait", number) < seen.at("sync", 0):
            return f"all-reduce {number} was waited for before sync() was called"
    return None


def raised(pattern: str) -> Callable[[str], bool]:
    return lambda text: bool(re.search(pattern, text))


WORKS = "sync() goes through self.buckets and self.works side by side. How many does it find of each?"
RAISED = (
    Mistake("a bucket's all-reduce never begins", WORKS, raised(r"zip\(\) argument 2 is shorter")),
    Mistake("more works than buckets", WORKS, raised(r"zip\(\) argument 2 is longer")),
)
FORK = (
    ORDER := Mistake(
        "buckets begin in different orders on different ranks",
        "Which bucket's all-reduce may begin when the second bucket is full and the first is not?",
        lambda layer: f"the gradient of layer {layer} is not the mean",
        shows="right where all ranks run the same graph; otherwise gradients of other layers, or a hang",
    ),
)
BESIDE = (
    Mistake(
        "gradients are held outside their buckets",
        "Where do the gradients of the first micro-batches add up, and what lies there already?",
        lambda beside: beside and f"{beside} gradients were not in their buckets within no_sync()",
        shows="right, but with micro-batches the gradients take twice the memory",
    ),
)
EARLY = (
    Mistake("a bucket begins before it is full", "Which gradients are in the bucket at that moment?", begins_early),
)
OVERLAP = (
    Mistake(
        "nothing is sent during backward",
        "Who is called when the last gradient of a bucket is there, and what could it start?",
        lambda seen: not seen.begun and f"all {len(seen.after)} collectives began after backward",
        shows="the bucketed timeline: backward, and then waiting",
    ),
    replace(ONE_EACH, fits=lambda seen: ONE_EACH.fits((len(seen.begun + seen.after), len(seen.full)))),
    Mistake(
        "waited for during backward",
        "Which call waits, and what could the rank compute meanwhile?",
        waits_early,
        shows="all-reduces that begin early, and a step that is no shorter",
    ),
    Mistake(
        "some buckets begin after backward",
        "Which bucket is full when the last hook has fired, and who checks?",
        lambda seen: seen.after and f"{len(seen.after)} of {len(seen.full)} all-reduces began after backward",
    ),
    Mistake("a full bucket lies idle", "When do you check whether a bucket is full?", begins_late),
)
