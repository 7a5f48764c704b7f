"""The challenge of 13: annotate two layers on 2 × 2 × 2 devices so that XLA's program sends the fewest bytes.

A layout names, for each of two dims, the axes that shard it: ("ab", "c").  Each array has two layouts: one in which it
is kept, with a different eighth on each device, and one in which it enters a product.  The compiled program is read
(labs.xla.hlo), and it runs: its gradients must equal one process's.

The bound, for a layer of T × D by D × H on N devices:  Let one device do V = TDH/N of the multiplications with X
numbers of x and W numbers of w, and add them to Y sums; then X W Y ≥ V² (Loomis and Whitney, 1949).  The same holds for
both products of the backward, with the gradients of y, x and w in place of these arrays; numbers that the device had
for one product can be used in another.  The sum of the six counts is smallest if three of them are twice the others:
9 V^(2/3) / 64^(1/9).  The device keeps 1/N of each array, and everything else is sent to it or by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.extras import jax_devices

AXES, CUTS, ITEM = "abc", 2, 4  # devices along each axis; bytes of a float32
DEVICES = CUTS ** len(AXES)
WIDTH, LAYERS = 128, 2
TOKENS = 64, 128, 256
Layout = tuple[str, str]
Layouts = Sequence[tuple[Layout, Layout]]  # for each array, the layout in which it is kept and the one in a product


def bound(tokens: int) -> float:
    """Return the least bytes that a device sends."""
    products, kept = tokens * WIDTH**2 / DEVICES, (2 * tokens * WIDTH + WIDTH**2) / DEVICES
    return LAYERS * ITEM * (9 * products ** (2 / 3) / 64 ** (1 / 9) - 2 * kept)


def on_a_rank(fn: Function) -> list[tuple[Layouts, Layouts]]:
    found = []
    for tokens in TOKENS:
        chosen = fn(tokens, WIDTH)
        require_layouts(chosen)
        found.append(chosen)
    return found


def require_layouts(chosen: Any) -> None:
    if not isinstance(chosen, tuple | list) or [*map(len, chosen)] != [LAYERS, LAYERS + 1]:
        raise ValueError(f"it returned {show(chosen)}: {LAYERS} pairs of layouts are needed, and {LAYERS + 1}")
    for layouts in chosen:
        for kept, used in layouts:
            require_layout(kept, by_all=True)
            require_layout(used, by_all=False)


def require_layout(layout: Any, by_all: bool) -> None:
    if not isinstance(layout, tuple) or len(layout) != 2 or not all(isinstance(axes, str) for axes in layout):
        raise ValueError(f"{show(layout)} is no layout: give the axes that cut each of two dims, as in ('ab', 'c')")
    letters = sorted("".join(layout))
    if not {*letters} <= {*AXES} or len({*letters}) < len(letters):
        raise ValueError(f"{layout}: an axis is one of {', '.join(AXES)}, and cuts one dim, once")
    if by_all and letters != [*AXES]:
        raise ValueError(f"{layout}: a device would keep more than 1/{DEVICES} of the array: each axis must cut it")


def compiled(cases: Sequence[Any], chosen: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """Compile and run each case in a process in which JAX has virtual devices.

    Returns for each case the bytes that a device sends, and the gradients of the weights and of x.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from labs.xla import annotations, hlo

    mesh = annotations.mesh_of(dict.fromkeys(AXES, CUTS))

    def placed(layout: Layout) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in layout)))

    def one(case: Any, weights: Layouts, activations: Layouts) -> tuple[int, list[Any]]:
        def loss(ws: list[Any], x: Any) -> Any:
            for w, (_, used_w), (_, used), (then, _) in zip(ws, weights, activations, activations[1:], strict=False):
                x, w = (jax.lax.with_sharding_constraint(a, placed(to)) for a, to in ((x, used), (w, used_w)))
                x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), placed(then))
            return (jax.lax.with_sharding_constraint(x, placed(activations[-1][1])) ** 2).sum()

        kept = [placed(layout) for layout, _ in weights], placed(activations[0][0])
        program = jax.jit(jax.grad(loss, (0, 1)), in_shardings=kept, out_shardings=kept).lower(*case).compile()
        gradients = jax.tree.leaves(program(*jax.device_put(case, kept)))
        return sum(each.sent for each in hlo.collectives(program.as_text())), [*map(np.array, gradients)]

    return [one(case, *layouts) for case, layouts in zip(cases, chosen, strict=True)]


def measured(tokens: int, weights: Layouts, activations: Layouts) -> int:
    """Return the bytes that a device sends in one case, read from the compiled program.

    Raises ValueError for layouts that are not allowed.
    """
    require_layouts((weights, activations))
    *ws, x = (w.numpy() for w in tensors(tokens, chance()))
    return jax_devices.on_devices(compiled, [(ws, x)], [(weights, activations)], devices=DEVICES)[0][0]


def tensors(tokens: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(size, WIDTH, generator=generator) / WIDTH**0.5 for size in (*[WIDTH] * LAYERS, tokens)]


def judge(fn: Function) -> Judged:
    generator, scores = chance(), {}
    cases = [tensors(tokens, generator) for tokens in TOKENS]
    (chosen,) = job(on_a_rank, fn, ranks=1, record=None)
    if reason := jax_devices.jax_missing():
        raise Wrong(reason)
    given = [([w.numpy() for w in ws], x.numpy()) for *ws, x in cases]
    compiled_cases = jax_devices.on_devices(compiled, given, chosen)
    for tokens, case, (sent, gradients) in zip(TOKENS, cases, compiled_cases, strict=True):
        for found, expected in zip(gradients, alone(*case), strict=True):
            if not torch.allclose(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4):
                raise Wrong(f"{tokens} tokens: the gradients are not one process's")
        scores[f"{tokens} tokens"] = 100 * bound(tokens) / max(sent, 1)
    return Judged.of(scores)


def alone(*case: Tensor) -> Sequence[Tensor]:
    *weights, x = leaves = [each.clone().requires_grad_() for each in case]
    for w in weights:
        x = (x @ w).tanh()
    return torch.autograd.grad((x**2).sum(), leaves)


fewest_bytes = Challenge(
    "fewest_bytes",
    "13",
    "Annotate two layers so that XLA sends the fewest bytes",
    "Two layers on 2 × 2 × 2 devices, with few tokens and with many. Say how each array is kept, an eighth of it on "
    "each device, and how it enters a product; XLA adds the collectives, which are read from what it has compiled.",
    judge,
    floor=26.2,
    course=46.6,
    possible=55.0,
    cases=TOKENS,
    bound=bound,
    measured=measured,
)
