"""The training of an awkward model, in DDP's exercises: the model, its batches, and the step that the exercises share.

The expected gradients come from a copy of the model that nobody has wrapped: before each step, each rank computes on
it the gradient of each of its micro-batches.  The step itself, with the exercise's function, is watched.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine.answer import show
from labs.exercises.engine.on_ranks import F32, Draw
from labs.exercises.engine.scripts import Look, World
from labs.kit.watch import c10d_tap

LEARNING_RATE = 0.1
WIDE = 64  # dimensions of the model whose bytes held are measured
SHORT, LONG = 5, 6  # tokens of a sequence
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks", "_forward_pre_hooks")
Gradients = dict[str, Tensor | None]
MicroBatch = tuple[Tensor, Tensor]


# ---- the model and its batches ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingWorld(World):
    """A world in which one awkward model is trained; in a refusable one, a parameter's gradient is not contiguous."""

    micro_batches: int = 1
    sizes: tuple[int, int, int] = (11, 7, 13)  # vocabulary, dim, hidden
    spare: bool = False  # one trainable parameter is never used
    late: bool = False  # the spare parameter is used from the second step on
    mixed: bool = False  # some of the model's parameters have another dtype
    evaluating: bool = False
    buffers: bool = False
    repeated: bool = False  # the last micro-batch is the first one again
    overlapped: bool = False
    frozen_late: bool = False  # a parameter is frozen once it has its gradient

    def model(self) -> Awkward:
        return Awkward(self, self.generator(0))

    def batch(self, rank: int, step: int) -> list[MicroBatch]:
        """Return a rank's micro-batches of 2 sequences, as (inputs, targets).  Only rank 0 never reads token 0."""
        shape = self.micro_batches, 2, (LONG if self.late and step else SHORT) + 1
        tokens = torch.randint(1, self.sizes[0], shape, generator=self.generator(rank, step + 1))
        if rank:
            tokens[..., 0] = 0
        batch = [(x[:, :-1], x[:, 1:]) for x in tokens]
        return [batch[-1], *batch[1:]] if self.repeated else batch

    def __str__(self) -> str:
        times = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        odd = ", a gradient that is not contiguous" * self.refusable + ", and parameters of float32" * self.mixed
        odd += ", in evaluation mode" * self.evaluating + ", the first micro-batch also the last" * self.repeated
        odd += ", and a buffer" * self.buffers + ", and a parameter that is used from step 1 on" * self.late
        odd += ", and a parameter that is frozen when it has its gradient" * self.frozen_late
        return f"{self.within}{times}, {self.dtype_name}{odd}{', an unused parameter' * (self.spare and not self.late)}"


def odd(draw: Draw, ranks: int = 0, **options: Any) -> TrainingWorld:
    """Return a world with a model of odd sizes, on 5 to 8 ranks if no number is given."""
    ranks = ranks or draw.random.choice((5, 6, 7, 8))
    sizes = tuple(draw.random.choice(odd) for odd in ((9, 11, 13), (5, 7), (11, 13, 17)))
    return draw.world(TrainingWorld, ranks, sizes=sizes, **options)


def wide(draw: Draw, ranks: int, **options: Any) -> TrainingWorld:
    """Return a world whose parameters are much larger than everything else, and whose bytes held are measured."""
    return draw.world(TrainingWorld, ranks, dtype=F32, sizes=(WIDE, WIDE, WIDE), held=True, **options)


class Awkward(nn.Module):
    """A model with awkward parameters: tied, frozen, without dimensions, without elements and, on request, unused.

    The gradient of `rare` is zero on rank 0 and nowhere else; if dtypes are mixed, it has a bucket of its own.
    In evaluation mode the model computes something else, as it would with dropout.

    `model(tokens_BT, targets_BT)` returns the mean cross-entropy loss, like the course's GPT.
    """

    def __init__(self, world: TrainingWorld, generator: torch.Generator) -> None:
        super().__init__()
        vocabulary, dim, hidden = world.sizes
        self.embed = nn.Embedding(vocabulary, dim)
        self.hidden = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(hidden, hidden)
        self.square = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, dim))
        self.rare = nn.Parameter(torch.ones(dim))
        if world.spare:
            self.spare = nn.Linear(dim, dim)
        if world.buffers:
            self.register_buffer("running", torch.zeros(64))
        if world.refusable:
            self.square.weight = nn.Parameter(self.square.weight.detach().t())
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(world.dtype)
        for p in (self.out.weight, self.rare) if world.mixed else ():
            p.data = p.data.float()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
        self.train(not world.evaluating)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.nothing.sum(0)
        x = x + self.rare.to(x.dtype) * (tokens_BT == 0)[..., None]
        if tokens_BT.shape[1] == LONG:
            x = x + self.spare(x)
        hidden = torch.tanh(self.frozen(self.square(torch.tanh(self.hidden(x)))))
        if not self.training:
            hidden = hidden / 2  # stands for dropout, which differs in evaluation mode, too
        x = x + self.scale * nn.functional.linear(hidden, self.out.weight.to(x.dtype), self.out.bias)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets_BT.flatten())

    def gradients(self) -> Gradients:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def plain(self, other: Awkward, batch: list[MicroBatch]) -> Iterator[Gradients]:
        """Yield the gradients of each micro-batch alone, after copying the trained model's parameters."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        for micro_batch in batch:
            self.zero_grad()
            self(*micro_batch).backward()
            yield self.gradients()


# ---- on a rank -------------------------------------------------------------------------------------------


class Cargo(c10d_tap.Listener):
    """A counter of the collectives whose inputs lie in the parameters' own memory."""

    def __init__(self, model: nn.Module) -> None:
        self.places, self.count = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}, 0

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        self.count += any(x.untyped_storage().data_ptr() in self.places for x in call.inputs)


def train(
    world: TrainingWorld,
    model: Awkward,
    wrapped: Any,
    step: Callable[[Any, list[MicroBatch]], dict[str, Any]],
    prepare: Callable[[list[MicroBatch]], None] | None = None,
) -> Iterator[Look | None]:
    """Train `wrapped`, a wrapper of `model`: yield before each step, and then a look with the gradients as values.

    step: `step(wrapped, batch)` computes the gradients, watched, and returns facts.
    prepare: `prepare(batch)` is called before each step, and is not watched.
    """
    kept, optimizer = 0, torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    untouched = None if world.held else world.model()
    wrapped.train(not world.evaluating)
    for number in range(world.steps):
        batch = world.batch(dist.get_rank(), number)
        before = {"plain": list(untouched.plain(model, batch)), "before": model.values()} if untouched else {}
        hooks = count_hooks(model)
        optimizer.zero_grad(set_to_none=number % 2 == 0 or prepare is not None)
        if prepare:
            prepare(batch)
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
        yield None
        with Cargo(model) as cargo:
            facts = step(wrapped, batch)
        if world.held:
            yield Look()
        else:
            facts |= before | {
                "after": model.values(),
                "thawed": [n for n, p in model.named_parameters() if p.requires_grad == n.startswith("frozen")],
                "idle": not world.evaluating and not all(module.training for module in model.modules()),
                "hooks": count_hooks(model) - hooks if number else 0,
                "kept": count_kept(wrapped) - kept if number > 1 else 0,
                "parameters sent": cargo.count,
                "replaced": [n for n, p in model.named_parameters() if n in places and moved(p.grad, places[n])],
            }
            yield Look(model.gradients(), facts)
        kept = count_kept(wrapped)
        optimizer.step()


def moved(gradient: Tensor | None, place: int) -> bool:
    """Return whether a gradient lies at another place in memory than before the step."""
    return gradient is not None and gradient.data_ptr() != place


def count_hooks(model: nn.Module) -> int:
    return sum(len(getattr(x, name, None) or ()) for x in (*model.parameters(), *model.modules()) for name in HOOKS)


def count_kept(wrapped: nn.Module) -> int:
    """Return the number of elements in lists, dicts, sets and deques that the wrapper, or a module in it, has."""
    attributes = (value for module in wrapped.modules() for value in vars(module).values())
    return sum(len(value) for value in attributes if isinstance(value, (list, dict, set, deque)))


# ---- a wrapper -------------------------------------------------------------------------------------------


def train_wrapped(world: TrainingWorld, wrap: Callable[..., Any], **options: Any) -> Iterator[Look | None]:
    """Wrap a model once, and train it: each step has the backwards of all micro-batches, and sync()."""
    model = world.model()
    wrapped = wrap(model, **options)
    if lacks := lacking(wrapped, model):
        for _ in range(world.steps):
            yield None
            yield Look({}, {"lacks": lacks})
    else:
        yield from train(world, model, wrapped, all_backwards)


def all_backwards(wrapped: nn.Module, batch: list[MicroBatch]) -> dict[str, Any]:
    for i, micro_batch in enumerate(batch):
        with contextlib.nullcontext() if i == len(batch) - 1 else wrapped.no_sync():
            (wrapped(*micro_batch) / len(batch)).backward()
            if hasattr(wrapped, "sync"):
                wrapped.sync()  # a wrapper may send nothing within no_sync()
    return {}


def lacking(wrapped: Any, model: nn.Module) -> str:
    """Return a sentence about what the wrapper lacks, or ""."""
    if not isinstance(wrapped, nn.Module):
        return f"wrap(model) returned {show(wrapped)}, and not an nn.Module"
    if not hasattr(wrapped, "no_sync"):
        return f"{type(wrapped).__name__} has no no_sync()"
    known = set(wrapped.parameters())
    missing = [name for name, p in model.named_parameters() if p not in known]
    name = type(wrapped).__name__
    return f"{name}.parameters() lacks {missing[0]!r}: is the model one of its attributes?" if missing else ""
