"""A GPT that is trained twice, untouched and changed by a function: what differs, and what does the change cost?

Both models begin with the same parameters, and each step with the same random numbers.  The bytes held are all bytes
but those of parameters and gradients, at every moment of a step.  Recomputation is counted in operations of matrix
products and attention, as a multiple of the layers' forward.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labs.exercises.engine.answer import show
from labs.exercises.engine.scripts import World
from labs.kit.watch.memory import StorageWatch, timeline
from labs.model import GPT, Config, Layer, initialise

RATE = 0.1
# torch's own counter of operations leaves this operator out.
ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
WITHOUT_GRAPH = "(a layer had just run again, under no_grad)"


@dataclass(frozen=True)
class Model(World):
    """A GPT, the data on which it is trained, and its limits.

    frozen: whether the embedding is frozen, so that the input of the first layer needs no gradient.
    waiting: the number of forwards before the first backward.
    again: whether there are a second step and a forward under no_grad.
    measured: whether the bytes held are measured, too.
    around: whether the function is given each layer with its input, and not the model.
    most: the limit of the bytes held, as a multiple of those that the untouched model holds.
    dear: the limit of recomputation, as a multiple of the layers' forward.
    runs: the least number of times that each layer must run in a step, per forward of the model.
    """

    depth: int = 1
    dropout: bool = False
    frozen: bool = False
    tied: bool = False
    waiting: int = 1
    sequences: int = 2
    tokens: int = 6
    again: bool = False
    measured: bool = False
    around: bool = False
    most: float = 1.0
    dear: float = 1.0
    runs: int = 0

    def model(self) -> GPT:
        config = Config(32, 64, self.depth, 4, 2, 160, context=64, tied=self.tied)
        model = GPT(config)
        for name in model.layers if self.dropout else ():
            model.layers[name] = Dropping(config)
        initialise(model, self.seed)
        model.embed.weight.requires_grad_(not self.frozen)
        return model.to(self.dtype)

    def losses(self, model: nn.Module) -> list[Tensor]:
        size = (self.waiting, 2, self.sequences, self.tokens)
        torch.manual_seed(self.seed)
        return [model(x, y) for x, y in torch.randint(32, size, generator=self.generator())]

    def __str__(self) -> str:
        words = [f"{self.depth} layer{'s' * (self.depth > 1)}"]
        words += ["a frozen embedding"] * self.frozen + ["a tied head"] * self.tied
        words += [f"{self.waiting} forwards before the first backward"] * (self.waiting > 1)
        return ", ".join([*words, *["dropout"] * self.dropout])


class Dropping(Layer):
    """A layer that draws random numbers."""

    rate = 0.3

    def forward(self, x_BTD: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x_BTD), self.rate, self.training)


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have in a saved checkpoint."""
    return {name: p for name, p in model.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}


class Twice:
    """The untouched model (plain), the changed one (received), and the same step of both (expected, now)."""

    def __init__(self, world: Model, fn: Callable[..., Any]) -> None:
        self.world, self.plain, self.received = world, world.model(), world.model()
        self.ran: Counter[str] = Counter()
        for name, layer in self.received.layers.items():
            layer.mlp.register_forward_pre_hook(partial(self.runs_now, name))
        self.returned = self.apply(fn)
        self.ran.clear()

    def apply(self, fn: Callable[..., Any]) -> str:
        """Apply the function; return a description of what it returned, or "" if that is None or the model."""
        if self.world.around:
            for layer in self.received.layers.values():
                layer.forward = partial(fn, layer.forward)
            return ""
        returned = fn(self.received)
        return "" if returned is None or returned is self.received else show(returned)

    def runs_now(self, name: str, *_: Any) -> None:
        self.ran[name] += 1
        self.without_graph = not torch.is_grad_enabled()

    def steps(self) -> Iterator[tuple[str, Twice]]:
        """Yield (the step in words, this object) after each step; the costs are those of the first one."""
        for number, step in enumerate(expected(self.world)):
            self.expected, self.under_no_grad = step, number == 2
            with torch.set_grad_enabled(not self.under_no_grad):
                try:
                    self.now = TrainedStep(self.world, self.received)
                except Exception as error:
                    if self.ran and self.without_graph:
                        error.add_note(WITHOUT_GRAPH)
                    raise
            if number == 0:
                self.costs = self.compared()
            yield ("", "in the second step, ", "under no_grad, ")[number], self

    def compared(self) -> dict[str, Any]:
        """Return what the learner's change to the model costs, in runs of layers, recomputation and bytes.

        runs: the number of times that each layer ran, per forward of the model.
        again: the recomputation, as a multiple of the layers' forward.
        The entries of `bytes` are in the dictionary, too.
        """
        x = torch.zeros(self.world.sequences, self.world.tokens, self.plain.config.dim, dtype=self.world.dtype)
        with Multiplications() as forward, torch.no_grad():
            for layer in self.plain.layers.values():
                layer(x)
        more = self.now.multiplications - self.expected.multiplications
        runs = {name: self.ran[name] / self.world.waiting for name in self.plain.layers}
        return {"runs": runs, "again": more / forward.total / self.world.waiting} | self.bytes()

    def bytes(self) -> dict[str, Any]:
        """Return the bytes held, or nothing where they are not measured.

        held, left: at the peak, and when backward begins, as a multiple of the untouched model's peak.
        late: whether the peak is in backward.
        come: the share of all gradients that exists at the moment of the peak.
        elsewhere: the bytes that Python and NumPy hold beyond those of the untouched model's step.
        before: the untouched model's peak.
        returned: a description of what the function returned.
        """
        if not self.world.measured:
            return {}
        held, before = self.now.held, max(self.expected.held)
        at = held.index(max(held))
        return {
            "held": held[at] / before,
            "left": held[self.now.middle] / before,
            "late": at > self.now.middle,
            "come": self.now.come[at] / max(self.now.come),
            "elsewhere": self.now.elsewhere - self.expected.elsewhere,
            "before": before,
            "returned": self.returned,
        }


class TrainedStep:
    """A step's losses, its gradients by name, the random state after it, and its costs.

    held: at each moment, the bytes besides parameters and gradients; empty if they are not measured.
    come: at each moment, the bytes of the gradients; empty if they are not measured.
    middle: the moment when backward begins.
    elsewhere: the peak of the bytes that Python and NumPy allocated.
    multiplications: the operations of matrix products and attention.
    """

    def __init__(self, world: Model, model: nn.Module) -> None:
        if world.measured:
            tracemalloc.start()
        with StorageWatch() if world.measured else nullcontext() as watch, Multiplications() as count:
            losses = world.losses(model)
            self.middle = len(watch.changes) - 1 if watch else 0
            for loss in losses if torch.is_grad_enabled() else ():
                loss.backward()
            line = [held for _, held in timeline(watch.tape)] if watch else []
        self.elsewhere, self.multiplications = tracemalloc.get_traced_memory()[1], count.total
        tracemalloc.stop()
        size = sum(p.nbytes for p in model.parameters())
        self.held = [sum(held.values()) - min(held["P"], size) - held["G"] for held in line]
        self.come = [held["G"] for held in line]
        self.losses, self.random = [loss.detach() for loss in losses], torch.get_rng_state()
        self.gradients = {name: p.grad for name, p in parameters(model).items()}
        for p in model.parameters():
            if p.grad is not None:
                p.data.sub_(RATE * p.grad)
            p.grad = None


@cache
def expected(world: Model) -> list[TrainedStep]:
    """Return the untouched model's steps, which are the same for every function that is tried in a job."""
    plain, steps = world.model(), []
    for under_no_grad in (False, False, True) if world.again else (False,):
        with torch.set_grad_enabled(not under_no_grad):
            steps.append(TrainedStep(world, plain))
    return steps


class Multiplications(TorchDispatchMode):
    """A count (total) of the floating-point operations of matrix products and of attention's forward."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: no need to guard each operator against it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        elif func.overloadpacket is ATTENTION_ON_CPU:
            query, key = args[:2]
            self.total += 4 * query.numel() * key.shape[-2]
        return output
