"""Communication that follows from given layouts: by XLA, by labs.dtensor and by labs.gspmd.

by_xla(fn, sizes, arguments, results)       the collectives that XLA adds to a function of arrays
layers_by_xla(config, names, cases)         the collectives that XLA adds to a layer, forward and backward
zero_3_by_hand(config, weights, batch)      the collectives of ZeRO 3 in shard_map
products(cases)                             the bytes that a rank sends for x @ w, by each of the three
largest_error(program, fn, tensors, sizes)  the difference between a program on real ranks and one process

XLA compiles in a process of its own, in which JAX has a virtual device for each place of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs import gspmd
from labs.dtensor import DTensor
from labs.dtensor.placement import Placement, Spec
from labs.kit.extras.jax_devices import on_devices
from labs.kit.ranks.run import run
from labs.kit.record import mark
from labs.kit.training.training_step import ADAMW
from labs.mesh import Mesh
from labs.model import Config

Layout = Sequence[Placement]
Arguments = Sequence[tuple[Sequence[int], Layout]]  # (shape, layout) of each
Product = tuple[Sequence[Sequence[int]], Sequence[Placement]]  # shapes of x and w; placements of x, w and the result
RANKS = 4


def by_xla(fn: Callable[..., Any], sizes: Mapping[str, int], arguments: Arguments, results: Sequence[Layout]) -> list:
    """Return the collectives that XLA adds to `fn`; its arguments: see labs.xla.added_collectives."""
    return on_devices(compile_all, fn, [(sizes, arguments, results)], devices=prod(sizes.values()))[0]


def compile_all(fn: Callable[..., Any], cases: Sequence[tuple]) -> list[list]:
    from labs.xla.added_collectives import communication

    return [communication(fn, *case) for case in cases]


def layers_by_xla(
    config: Config, names: Sequence[str], cases: Sequence[tuple[Mapping[str, int], Arguments, Sequence[Layout]]]
) -> list[list]:
    """Return the collectives that XLA adds to a layer's forward and backward, for each (sizes, arguments, results).

    names: the names of the layer's weights.
    """
    return on_devices(compile_layers, config, names, cases, devices=prod(cases[0][0].values()))


def compile_layers(config: Config, names: Sequence[str], cases: Sequence[tuple]) -> list[list]:
    from labs.xla.added_collectives import forward_and_backward

    return compile_all(forward_and_backward(config, names), cases)


def zero_3_by_hand(config: Config, weights: Mapping[str, Any], batch: Sequence[Any], devices: int = 8) -> list:
    """Return the collectives of a step of ZeRO 3 that is written with shard_map (labs/xla/shard_map.py)."""
    return on_devices(compile_zero_3, config, weights, *batch, devices=devices)


def compile_zero_3(config: Config, weights: Mapping[str, Any], tokens: Any, targets: Any) -> list:
    from labs.xla.shard_map import zero_3_collectives

    return zero_3_collectives(config, ADAMW, weights, tokens, targets)


def products(cases: Mapping[str, Product]) -> dict[str, dict[str, tuple[int, str]]]:
    """Return what the first of 4 ranks sends for each product x @ w.

    Returns {product: {"XLA", "labs.dtensor", "labs.gspmd": (bytes, names of the collectives)}}.
    """
    arguments = [list(zip(shapes, [[x], [w]], strict=True)) for shapes, (x, w, _) in cases.values()]
    tasks = [({"tp": RANKS}, each, [[p[2]]]) for each, (_, p) in zip(arguments, cases.values(), strict=True)]
    compiled = on_devices(compile_all, multiply, tasks, devices=RANKS)
    recording = run(multiply_dtensors, cases, ranks=RANKS, device="cpu", record="communication").recording
    found = {}
    for step, (name, case) in enumerate(cases.items()):
        events = [event for event in recording.select(0, step) if event.sent]
        program = program_of(*case)
        found[name] = {
            "XLA": (sum(each.sent for each in compiled[step]), listed(each.kind for each in compiled[step])),
            "labs.dtensor": (sum(each.sent for each in events), listed(map(called, events))),
            "labs.gspmd": (program.sent, listed(program.counts)),
        }
    return found


def multiply(x: Any, w: Any) -> tuple[Any]:
    return (x @ w,)


def multiply_dtensors(cases: Mapping[str, Product]) -> None:
    mesh = Mesh((RANKS,), ("tp",))
    for shapes, (*factors, wanted) in cases.values():
        specs = [Spec(shape, (RANKS,), (p,)) for shape, p in zip(shapes, factors, strict=True)]
        blocks = [torch.ones(spec.block((mesh.rank,)).shape) for spec in specs]
        x, w = (DTensor.from_local(block, mesh, [p]) for block, p in zip(blocks, factors, strict=True))
        mark("step")
        (x @ w).redistribute(placements=[wanted])
        mark("end")


def program_of(shapes: Sequence[Sequence[int]], placements: Sequence[Placement]) -> gspmd.Program:
    graph = gspmd.trace(multiply, *map(torch.ones, shapes))
    given = {v: [p] for v, p in zip((*graph.arguments, *graph.results), placements, strict=True)}
    return gspmd.lower(graph, gspmd.propagate(graph, (RANKS,), given))


def called(event: Any) -> str:
    return "reduce-scatter" if event.issuer.endswith("start_reduce_scatter") else event.op


def listed(names: Any) -> str:
    return " + ".join(name.replace("_", "-") for name in names) or "nothing"


def largest_error(
    program: gspmd.Program, fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> float:
    """Run a program on the blocks of real ranks; return its largest difference from `fn(*tensors)` in one process."""
    return max(run(error_of_rank, program, fn, tensors, sizes, ranks=prod(sizes.values()), device="cpu"))


def error_of_rank(
    program: gspmd.Program, fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> float:
    mesh, graph = Mesh(tuple(sizes.values()), tuple(sizes)), program.graph

    def blocks(values: Sequence[gspmd.tracing.Value], wholes: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(values, wholes, strict=True)
        return [whole[program.layouts[v].block(mesh.get_coordinate()).slices] for v, whole in pairs]

    results = gspmd.execute(program, mesh, *blocks(graph.arguments, tensors))
    expected = blocks(graph.results, fn(*tensors))
    return max((a - b).abs().max().item() for a, b in zip(results, expected, strict=True))
