"""The course's GPT as pure functions: arrays in, arrays out, and no state.

    weights = from_torch(model)                       {"layers.0.attention.q.weight": array, ...}, labs.model's names
    loss(weights, tokens_BT, targets_BT, config)      equals model(tokens_BT, targets_BT), up to rounding
    step(...)                                         a step of AdamW: new weights, new moments, the loss

The code follows labs.model line by line, and has the same letters for shapes; a linear layer's weight is [out, in], as
in PyTorch.  No line of this file mentions devices: the arrays get their layouts from outside (labs.xla.annotations).
The argument `keep` is a caller's only way to set the layout of the activations between layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from labs.model import IGNORED, Config, require_context

Weights = dict[str, Any]  # {name: array}, or a tree of arrays for each name
Keep = Callable[[Array], Array]


def from_torch(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the parameters as {name: array}; a shared weight has only its first name, as in `named_parameters`."""
    return {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}


def as_is(x: Array) -> Array:
    return x


def logits(weights: Mapping[str, Array], tokens_BT: Array, config: Config, keep: Keep = as_is) -> Array:
    """Return logits_BTV.  Raises ValueError for more tokens than the model's context."""
    require_context(config, tokens_BT.shape[1])
    x_BTD = keep(weights["embed.weight"][tokens_BT])
    for number in range(config.depth):
        x_BTD = keep(layer(part(weights, f"layers.{number}"), x_BTD, config))
    x_BTD = rms_norm(x_BTD, weights["norm.weight"], config.eps)
    return x_BTD @ weights.get("head.weight", weights["embed.weight"]).T


def loss(
    weights: Mapping[str, Array], tokens_BT: Array, targets_BT: Array, config: Config, keep: Keep = as_is
) -> Array:
    """Return the mean cross-entropy in nats per token (0-dim); nan if any target is ignored (-100).

    With ignored targets, each part of a batch would have to be weighted by its number of targets, and no part knows the
    number of targets in the whole batch.
    """
    logprobs_BTV = jax.nn.log_softmax(logits(weights, tokens_BT, config, keep))
    # Picking the target's number would gather what is cut along V; a sum with ones and zeros does not.
    losses_BT = -(logprobs_BTV * jax.nn.one_hot(targets_BT, config.vocab)).sum(-1)
    return jnp.where(targets_BT == IGNORED, jnp.nan, losses_BT).mean()


def layer(weights: Mapping[str, Array], x_BTD: Array, config: Config) -> Array:
    normed = rms_norm(x_BTD, weights["attention_norm.weight"], config.eps)
    x_BTD = x_BTD + attention(part(weights, "attention"), normed, config)
    return x_BTD + mlp(part(weights, "mlp"), rms_norm(x_BTD, weights["mlp_norm.weight"], config.eps))


def attention(weights: Mapping[str, Array], x_BTD: Array, config: Config) -> Array:
    """Return the output of causal attention, after its last projection.

    Heads of queries are grouped by the head of keys and values that they share: K groups of G heads.
    """
    time, size = x_BTD.shape[1], config.head_size
    q_BTHE, k_BTKE, v_BTKE = ((x_BTD @ weights[f"{p}.weight"].T).reshape(*x_BTD.shape[:2], -1, size) for p in "qkv")
    q_BTHE, k_BTKE = rotate(q_BTHE, config), rotate(k_BTKE, config)
    q_BTKGE = q_BTHE.reshape(*k_BTKE.shape[:3], -1, size)
    scores_BKGTS = jnp.einsum("btkge,bske->bkgts", q_BTKGE, k_BTKE) / size**0.5
    past = jnp.tril(jnp.ones((time, time), bool))
    probabilities = jax.nn.softmax(jnp.where(past, scores_BKGTS, -jnp.inf))
    y_BTKGE = jnp.einsum("bkgts,bske->btkge", probabilities, v_BTKE)
    return y_BTKGE.reshape(*x_BTD.shape[:2], -1) @ weights["o.weight"].T


def mlp(weights: Mapping[str, Array], x_BTD: Array) -> Array:
    gate, up = x_BTD @ weights["gate.weight"].T, x_BTD @ weights["up.weight"].T
    return (jax.nn.silu(gate) * up) @ weights["down.weight"].T


def rms_norm(x_BTD: Array, weight: Array, eps: float) -> Array:
    return x_BTD * jax.lax.rsqrt((x_BTD**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x_BTHE: Array, config: Config) -> Array:
    first, second = jnp.split(x_BTHE, 2, axis=-1)
    pairs = first.shape[-1]
    frequencies = torch.tensor(config.rope_base) ** (-torch.arange(pairs) / pairs)
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling(frequencies)
    angles_T1E = (torch.arange(x_BTHE.shape[1])[:, None] * frequencies).unsqueeze(1).numpy()
    cos, sin = np.cos(angles_T1E), np.sin(angles_T1E)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def part(weights: Mapping[str, Array], of: str) -> Weights:
    """Return the weights of a module, by their names within it."""
    return {name.removeprefix(f"{of}."): w for name, w in weights.items() if name.startswith(f"{of}.")}


# ---- training --------------------------------------------------------------------------------------------


def adamw(
    weight: Array, gradient: Array, moments: tuple[Array, Array], count: Array, *,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
    """Return one weight after step number `count` (from 1), and its moments, by torch.optim.AdamW's formula and names.

    Source: Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2.
    """
    first, second = (
        beta * moment + (1 - beta) * g for beta, moment, g in zip(betas, moments, (gradient, gradient**2), strict=True)
    )
    mean, square = (moment / (1 - beta**count) for beta, moment in zip(betas, (first, second), strict=True))
    weight = weight * (1 - lr * weight_decay) - lr * mean / (jnp.sqrt(square) + eps)
    return weight, (first, second)


def step(
    weights: Weights, moments: Weights, count: Array, tokens_BT: Array, targets_BT: Array,
    config: Config, settings: Mapping[str, Any], keep: Keep = as_is,
) -> tuple[Weights, Weights, Array]:  # fmt: skip
    """Take a training step; return the new weights and moments, both by name, and the loss before the step.

    settings: AdamW's settings, by the names that torch.optim.AdamW gives them
    """
    value, gradients = jax.value_and_grad(loss)(weights, tokens_BT, targets_BT, config, keep)
    stepped = {name: adamw(w, gradients[name], moments[name], count, **settings) for name, w in weights.items()}
    return {name: new for name, (new, _) in stepped.items()}, {name: m for name, (_, m) in stepped.items()}, value
