"""A GPT with dropout or without, and what a rank does with it in a check of recomputation.

The reference is the same model untouched, from the same random numbers: a step of each, in one case two.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labs.kit.checks import case as shared
from labs.kit.checks.answer import show
from labs.kit.checks.launching import noted
from labs.kit.record import mark
from labs.model import GPT, Config, Layer, initialise

RATE = 0.1
WITHOUT_GRAPH = "(a layer had just run again, under no_grad)"
# What torch's own counter leaves out.
ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case(shared.Case):
    """A GPT and what it is trained on. measured: in float32, for bytes and multiplications; the others in float64."""

    depth: int
    dropout: float = 0.0
    frozen: bool = False  # the embedding, so that the input of the first layer needs no gradient
    tied: bool = False
    waiting: int = 1  # forwards, before the first backward
    sequences: int = 2
    tokens: int = 6
    again: bool = False  # there is a second step, and a forward under no_grad
    measured: bool = False

    def model(self) -> GPT:
        config = Config(32, 64, self.depth, 4, 2, 160, context=64, tied=self.tied)
        model = GPT(config)
        for name in model.layers if self.dropout else ():
            model.layers[name] = Dropping(config, self.dropout)
        initialise(model, self.seed)
        model.embed.weight.requires_grad_(not self.frozen)
        return model if self.measured else model.double()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        size = (self.waiting, 2, self.sequences, self.tokens)
        return [(x, y) for x, y in torch.randint(32, size, generator=self.generator())]

    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.model().parameters())

    def __str__(self) -> str:
        words = [f"{self.depth} layer{'s' * (self.depth > 1)}"]
        words += ["a frozen embedding"] * self.frozen + ["a tied head"] * self.tied
        words += [f"{self.waiting} forwards before the first backward"] * (self.waiting > 1)
        words += ["dropout"] * bool(self.dropout)
        return ", ".join(words)


class Dropping(Layer):
    """A layer that draws random numbers."""

    def __init__(self, config: Config, rate: float) -> None:
        super().__init__(config)
        self.rate = rate

    def forward(self, x_BTD: Tensor) -> Tensor:
        drop = partial(nn.functional.dropout, p=self.rate, training=self.training)
        x_BTD = x_BTD + drop(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + drop(self.mlp(self.mlp_norm(x_BTD)))


@dataclass
class Step:
    """Losses, gradients by name, and the state of the random numbers afterwards; what it cost."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    random: Tensor
    multiplications: int
    elsewhere: int  # the most bytes that came in Python and numpy (where traced)


@dataclass
class Outcome:
    """Steps of the model as it was (plain), and as it is (found)."""

    names: tuple[list[str], list[str]]
    complaint: tuple[str, str, str] | None = None  # text, question, mistake
    returned: str = ""  # where it is another than the model itself
    plain: list[Step] = field(default_factory=list)
    found: list[Step] = field(default_factory=list)
    without_grad: tuple[Tensor, ...] = ()  # found, plain
    again: float = 0.0  # multiplications that a step has more than before, × the layers' forward
    elsewhere: int = 0  # the most bytes that came in Python and numpy (the model as it was makes few)
    runs: dict[str, float] = field(default_factory=dict)  # of each layer, by its name, per forward of the model


# ---- what it computes ------------------------------------------------------------------------------------


def numbers(fn: Function, cases: list[Case]) -> list[Outcome]:
    return [numbers_of(fn, case) for case in cases]


def numbers_of(fn: Function, case: Case) -> Outcome:
    plain, model = case.model(), case.model()
    runs: Counter[str] = Counter()
    for name, layer in model.layers.items():
        layer.mlp.register_forward_pre_hook(partial(ran, runs, name))
    returned = noted(case, fn, model)
    outcome = Outcome((names(plain), names(model)), complaint=changed(plain, model))
    outcome.returned = "" if returned is None or returned is model else show(returned)
    if outcome.complaint or outcome.names[0] != outcome.names[1]:
        return outcome
    runs.clear()
    try:
        outcome.plain, outcome.found = (
            [step(each, case, trace=case.measured and each is model) for _ in range(1 + case.again)]
            for each in (plain, model)
        )
    except Exception as error:
        if runs[WITHOUT_GRAPH]:
            error.add_note(WITHOUT_GRAPH)
        raise
    outcome.runs = {name: runs[name] / len(outcome.found) / case.waiting for name in plain.layers}
    compare_costs(outcome, plain, case)
    if case.again:
        with torch.no_grad():
            outcome.without_grad = tuple(losses(each, case)[0] for each in (model, plain))
    return outcome


def ran(runs: Counter[str], name: str, *_: Any) -> None:
    runs[name] += 1
    runs[WITHOUT_GRAPH] = not torch.is_grad_enabled()  # the last one


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the names that a saved checkpoint has."""
    state = model.state_dict(keep_vars=True)
    return {name: p for name, p in state.items() if isinstance(p, nn.Parameter)}


def names(model: nn.Module) -> list[str]:
    return list(parameters(model))


def changed(plain: nn.Module, model: nn.Module) -> tuple[str, str, str] | None:
    if idle := [name or "the model" for name, module in model.named_modules() if not module.training]:
        return f"{idle[0]} is in evaluation mode", "What does dropout do there?", "no longer in training mode"
    before, after = parameters(plain), parameters(model)
    for name in before.keys() & after.keys():
        if before[name].requires_grad != after[name].requires_grad:
            return f"requires_grad of {name!r} has changed", "Who decides what is trained?", "requires_grad has changed"
        if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name]):
            text = (
                f"the parameter {name!r} was {show(before[name])}, and is {show(after[name])}, with different numbers"
            )
            return text, "What, besides activations, may the function change?", "the parameters have changed"
    return None


def step(model: nn.Module, case: Case, trace: bool) -> Step:
    if trace:
        tracemalloc.start()
    with Multiplications() as count:
        found = losses(model, case)
        for loss in found:
            loss.backward()
    elsewhere = tracemalloc.get_traced_memory()[1]  # 0 where nothing is traced
    tracemalloc.stop()
    after = Step([loss.detach() for loss in found], {}, torch.get_rng_state(), count.total, elsewhere)
    for name, p in parameters(model).items():
        after.gradients[name] = p.grad
        if p.grad is not None:
            p.data.sub_(RATE * p.grad)
        p.grad = None
    return after


def losses(model: nn.Module, case: Case) -> list[Tensor]:
    torch.manual_seed(case.seed)
    return [model(x, y) for x, y in case.batches()]


# ---- what it costs ---------------------------------------------------------------------------------------


def compare_costs(outcome: Outcome, plain: nn.Module, case: Case) -> None:
    """Of the first step."""
    x = torch.zeros(case.sequences, case.tokens, plain.config.dim, dtype=plain.embed.weight.dtype)
    with Multiplications() as forward, torch.no_grad():
        for layer in plain.layers.values():
            layer(x)
    before, after = outcome.plain[0], outcome.found[0]
    outcome.again = (after.multiplications - before.multiplications) / forward.total / case.waiting
    outcome.elsewhere = after.elsewhere


class Multiplications(TorchDispatchMode):
    """Counts floating-point operations of matrix products, and of attention's forward."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        elif func.overloadpacket is ATTENTION_ON_CPU:
            query, key = args[:2]
            self.total += 4 * query.numel() * key.shape[-2]
        return output


def bytes_held(fn: Function, case: Case) -> None:
    """Step 0 is of the model as it was, step 1 as it is."""
    for apply in (lambda model: None, fn):
        model = case.model()
        apply(model)
        mark("step")
        mark("forward")
        (loss,) = losses(model, case)
        mark("backward")
        loss.backward()
        mark("end")
        del model, loss
