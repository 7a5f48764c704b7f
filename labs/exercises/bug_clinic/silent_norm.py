"""silent_norm: hooks on parameters that an engine replaces, so that a norm's gradient is never added up."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn
from labs.mesh import Mesh
from labs.tp.conjugate import gather

SIZE, LENGTH = 12, 8
Engine = Callable[[nn.Module], None]


def faulty(model: nn.Module, engine: Engine, add_up: Callable[[nn.Parameter], None]) -> None:
    for p in model.norm.parameters():
        p.register_post_accumulate_grad_hook(add_up)
    engine(model)


def right(model: nn.Module, engine: Engine, add_up: Callable[[nn.Parameter], None]) -> None:
    engine(model)
    for p in model.norm.parameters():
        p.register_post_accumulate_grad_hook(add_up)


def engine(model: nn.Module) -> None:
    """Replace all parameters by float64 copies, as an engine with master weights does."""
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(p.detach().double()))


def add_up(p: nn.Parameter) -> None:
    dist.all_reduce(p.grad)


def model_of(seed: int) -> nn.Module:
    """Return a layer norm, which every rank holds, and a linear layer, of which each rank takes a part."""
    model = nn.Module()
    model.norm, model.linear = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE, bias=False)
    model.linear.weight.data = drawn((SIZE, SIZE), seed).float()
    return model


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    model, rank = model_of(seed), dist.get_rank()
    model.linear.weight.data = model.linear.weight.data.chunk(RANKS)[rank].clone()
    fn(model, engine, add_up)
    x = drawn((LENGTH, SIZE), seed, 1).chunk(RANKS)[rank]
    found = []
    for _ in range(2):  # steps
        model.zero_grad()
        whole = gather(model.norm(x), Mesh((RANKS,), ("tp",)), 0)
        model.linear(whole).tanh().square().sum().backward()
        found.append(model.norm.weight.grad)
    return named(*found, model.norm.bias.grad, model.linear.weight.grad)


def named(*gradients: Tensor) -> dict[str, Tensor]:
    return dict(zip(("gradient", "gradient of the second step", "bias", "linear"), gradients, strict=True))


def gradients(seed: int, *pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the norm and of the linear layer, of which the norm's is due to these pieces alone."""
    engine(model := model_of(seed))
    normed = [model.norm(x) for x in drawn((LENGTH, SIZE), seed, 1).chunk(RANKS)]
    whole = torch.cat([x if piece in pieces else x.detach() for piece, x in enumerate(normed)])
    model.linear(whole).tanh().square().sum().backward()
    return model.norm.weight.grad, model.norm.bias.grad, model.linear.weight.grad


def parts(seed: int, rank: int) -> list[list[Tensor]]:
    return [[RANKS * gradients(seed, piece)[0]] for piece in range(RANKS)]


def alone(seed: int) -> list[dict[str, Tensor]]:
    norm, bias, linear = gradients(seed, *range(RANKS))
    return [named(norm, norm, bias, part) for part in linear.chunk(RANKS)]


# fmt: off
silent_norm = clinic(
    "b", faulty, right, job, alone, number=9, parts=parts, tells={"numbers", "gradients", "sent", "dry"},
    asks="`fn(model, engine, add_up)`, which calls the engine, and has `add_up` called for each norm's gradient; "
         "engine: `engine(model)` replaces the model's parameters; add_up: `add_up(p)` adds up p.grad over the "
         "ranks, whose sequences are pieces of one",
    threads=("NVIDIA/Megatron-LM/issues/1446 closed 2025-03-04", "EleutherAI/gpt-neox/pull/1259 merged 2024-08-13"),
    mistake="hooks on parameters that are gone",
    question="Which parameter does backward reach, and on which one is the hook?",
)
# fmt: on
silent_norm.engine = engine
