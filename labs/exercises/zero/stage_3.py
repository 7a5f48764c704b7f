"""stage_3: the events of one step in their order, in which each layer is whole only while it computes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.by_script import Play, checked, on_each_rank, wrong
from labs.exercises.engine.on_ranks import F64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.exercises.engine.value import One
from labs.group import all_gather, reduce_scatter

DIM, BATCH, LEARNING_RATE = 6, 5, 0.1  # a layer has 36 elements, which 2 and 3 divide


@dataclass(frozen=True)
class Chain(World):
    """A world with layers y = tanh(x @ W), and a loss whose gradient is y, divided by the batch."""

    depth: int = 4

    def inputs(self, rank: int, step: int) -> Tensor:
        return torch.randn(BATCH, DIM, generator=self.generator(rank, step + 1), dtype=F64)

    def weights(self, steps: int) -> list[Tensor]:
        """Return the layers' weights after this number of steps, by plain autograd on the batches of all ranks."""
        weights = list(torch.randn(self.depth, DIM, DIM, generator=self.generator(), dtype=F64) / 2)
        for step in range(steps):
            x = torch.cat([self.inputs(rank, step) for rank in range(self.ranks)])
            for w in weights:
                x = torch.tanh(x @ w.requires_grad_())
            gradients = torch.autograd.grad(x.square().sum() / (2 * BATCH * self.ranks), weights)
            weights = [w.detach() - LEARNING_RATE * g for w, g in zip(weights, gradients, strict=True)]
        return weights

    def shards(self, steps: int, rank: int) -> dict[str, Tensor]:
        return {f"layer {n}": w.flatten().chunk(self.ranks)[rank] for n, w in enumerate(self.weights(steps))}

    def __str__(self) -> str:
        return f"{self.who}, {self.depth} layer{'s' * (self.depth > 1)}"


def worlds(draw: Draw) -> dict[int, list[Chain]]:
    depths = {2: (4, 1), 3: (5,)}
    return {n: [draw.world(Chain, n, steps=2, depth=depth) for depth in of_n] for n, of_n in depths.items()}


def loss(y: Tensor) -> Tensor:
    """Return the gradient with respect to y of the loss: half the sum of y's squares, divided by the rows."""
    return y / BATCH


class RecordingLayer:
    """A layer for the learner's function, which notes each event and keeps the tensors that later events need."""

    def __init__(self, number: int, shard: Tensor, events: list[tuple[str, int]]) -> None:
        self._number, self._shard, self._events = number, shard, events
        self._left: dict[str, Any] = {}  # {event: the tensors that the event has left for later ones}

    def _begin(self, what: str, *after: str) -> list[Any]:
        """Note the event `what`, and return the tensors that the events in `after` have left for it."""
        for event in after:
            if event not in self._left:
                raise RuntimeError(f"layer {self._number}: {what}() comes after {event}()")
        self._events.append((what, self._number))
        return [self._left[event] if event == "gather" else self._left.pop(event) for event in after]

    def gather(self) -> None:
        """Gather all parameters of the layer from the shards of all ranks."""
        if "gather" not in self._left:
            self._begin("gather")
            self._left["gather"] = whole = torch.empty(DIM * DIM, dtype=F64)
            all_gather(whole, self._shard)

    def drop(self) -> None:
        if "gather" in self._left:
            self._begin("drop")
            del self._left["gather"]

    def forward(self, x: Tensor) -> Tensor:
        (whole,) = self._begin("forward", "gather")
        y = torch.tanh(x @ whole.view(DIM, DIM))
        self._left["forward"] = x, y
        return y

    def backward(self, dy: Tensor) -> Tensor:
        whole, (x, y) = self._begin("backward", "gather", "forward")
        dz = dy * (1 - y * y)
        self._left["backward"] = (x.t() @ dz).flatten()
        return dz @ whole.view(DIM, DIM).t()

    def reduce(self) -> None:
        """Reduce the gradient to its owners, and keep this rank's shard of the mean."""
        (gradient,) = self._begin("reduce", "backward")
        self._left["reduce"] = reduce_scatter(gradient, None) / dist.get_world_size()

    def update(self) -> None:
        """Update this rank's shard, as the optimizer would."""
        (part,) = self._begin("update", "reduce")
        self._shard -= LEARNING_RATE * part

    def __repr__(self) -> str:
        return f"<layer {self._number}>"


def train(world: Chain, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play the steps: yield before each, and then a look with the shards and the events."""
    rank, events = dist.get_rank(), []
    layers = [RecordingLayer(n, shard.clone(), events) for n, shard in enumerate(world.shards(0, rank).values())]
    for step in range(world.steps):
        given, x = list(layers), world.inputs(rank, step)
        events.clear()
        yield None
        fn(given, x, loss)
        facts = {"events": list(events), "listed": given == layers}
        yield Look({f"layer {layer._number}": layer._shard for layer in layers}, facts)


class StageThreeStep:
    """A step on one rank, with its events: (what, number of the layer)."""

    def __init__(self, depth: int, events: list[tuple[str, int]], listed: bool) -> None:
        self.layers, self.events, self.listed = range(depth), events, listed

    def count(self, what: str, layer: int | None = None) -> int:
        return sum(event == what and layer in (None, number) for event, number in self.events)

    def between(self, begins: str, ends: str) -> Iterator[list[int]]:
        """Yield after each event the layers for which the event `begins` has come, and `ends` has not."""
        there: list[int] = []
        for what, number in self.events:
            if what == begins and number not in there:
                there.append(number)
            elif what == ends and number in there:
                there.remove(number)
            yield list(there)

    def together(self, begins: str, ends: str) -> list[int]:
        """Return the first layers, more than one, that are between the same two events at once; or []."""
        return next((layers for layers in self.between(begins, ends) if len(layers) > 1), [])

    def describe(self, matches: Callable[[int], Any], text: str) -> str | None:
        return describe([layer for layer in self.layers if matches(layer)], text)


def describe(layers: list[int], text: str) -> str | None:
    """Return a sentence made of the text and the names of these layers, or None if there are no layers."""
    named = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    return text.format(named) if layers else None


def each_step(seen: StepOutcomes) -> Iterator[tuple[str, StageThreeStep]]:
    for where, done in on_each_rank(seen):
        yield where, StageThreeStep(seen.world.depth, **done.facts)


def expected(world: Chain) -> list[dict[str, Tensor]]:
    return [world.shards(world.step + 1, rank) for rank in world.members]


def not_right(one: One) -> str | None:
    """Return a sentence about the layers whose shards are wrong on this rank."""
    pairs = [(one.done.values[name], value) for name, value in one.expected_by_name[one.index].items()]
    return describe([n for n, pair in enumerate(pairs) if not one.near(*pair)], "Not those of one process: {}.")


# fmt: off
TOGETHER = "{} were whole at the same time"
EVENTS = (
    *(Mistake(f"a layer without {what}()", "Which layers does the step pass through, and which events does each have?",
              lambda step, what=what: step.describe(lambda layer: not step.count(what, layer), f"{{}} had no {what}()"))
      for what in ("forward", "backward", "reduce", "update")),
    # PyTorch has this as reshard_after_forward=False.
    Mistake("layers stay whole from forward to backward", "Who needs a layer between its forward and its backward?",
            lambda step: step.count("gather") <= len(step.layers) and describe(step.together("gather", "drop"),
            TOGETHER),
            symptom="P is whole on every rank in the middle of the step: stage 2"),
    Mistake("more than one layer is whole", "When was the layer before this one needed for the last time?",
            lambda step: describe(step.together("gather", "drop"), TOGETHER)),
    Mistake("a layer stays whole after the step", "What does a rank hold at rest?",
            lambda step: describe([*step.between("gather", "drop")][-1], "still whole: {}")),
    Mistake("gradients wait for each other",
            "Who owns the other parts of a gradient, once its layer's backward is over?",
            lambda step: describe(step.together("backward", "reduce"), "{} had whole gradients"),
            symptom="G grows through backward, and is whole at its end: stage 1"),
    Mistake("forward runs twice", "What does forward() keep for backward(), and for how long?",
            lambda step: step.describe(lambda layer: step.count("forward", layer) > 1,
            "{} had more than one forward()")),
    Mistake("gathered too often", "In which two events is a layer needed?",
            lambda step: step.describe(lambda layer: step.count("gather", layer) > 2, "{} gathered more than twice")),
    Mistake("the list of layers has changed", "Whose list is it?",
            lambda step: not step.listed and "the list is not what it was; reversed(layers) leaves it alone"),
)
PLAY = Play(
    worlds,
    train,
    tables=(
        (each_step, EVENTS),
        (wrong(expected, {F64: 1e-10}), (Mistake("not one process's parameters", "", not_right),)),
    ),
    question="In which order does backward pass through the layers, and what does each hand to the next?",
)
# fmt: on


@answered
def stage_3(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(layers, x, loss)`: it runs one step of stage 3.

    layers: the layers in the order of forward.
    loss: `loss(y)` returns the gradient of the loss with respect to y.
    """
    ((_, last), *_) = each_step(checked(PLAY, (fn,), seed).seen[-1])
    return (
        f"{last.count('gather')} gathers and {last.count('reduce')} reduce-scatters for {len(last.layers)} layers, "
        "and never more than one layer whole; with one layer at a time 9 gathers are the least possible"
    )
