"""Tests of labs.gspmd against XLA itself, for products in all layouts and for a layer, and against labs.dtensor.

labs.gspmd never sends more than either; what labs.dtensor sends is recorded.
"""

from itertools import product

import pytest
import torch

from labs.dtensor import DTensor, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.gspmd import forward_and_backward, given, lower, propagate, trace
from labs.kit.extras.jax_devices import on_devices
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import Config, Layer
from tests.extras import need_jax

RANKS, SHAPES = 4, ((32, 64), (64, 128))
LAYOUTS = list(product((Replicate(), Shard(0), Shard(1)), repeat=3))  # layouts of x, of w, and the wanted one of x @ w
CONFIG = Config(vocab=16, dim=32, depth=1, heads=8, kv_heads=4, hidden=48, context=8)
BATCH = 16


def multiply(x, w):
    return (x @ w,)


def by_xla():
    from labs.xla.added_collectives import communication

    return [
        communication(multiply, {"tp": RANKS}, list(zip(SHAPES, [[x], [w]], strict=True)), [[y]]) for x, w, y in LAYOUTS
    ]


def by_dtensor():
    mesh = Mesh((RANKS,), ("tp",))
    for *factors, wanted in LAYOUTS:
        specs = [Spec(shape, (RANKS,), (placement,)) for shape, placement in zip(SHAPES, factors, strict=True)]
        x, w = (DTensor.from_local(torch.ones(s.block((mesh.rank,)).shape), mesh, s.placements) for s in specs)
        mark("step")
        (x @ w).redistribute(placements=[wanted])
        mark("end")


def by_propagation(layouts):
    graph = trace(multiply, *map(torch.ones, SHAPES))
    values = (*graph.arguments, *graph.results)
    return lower(graph, propagate(graph, (RANKS,), {v: [p] for v, p in zip(values, layouts, strict=True)}))


def test_a_product_in_27_layouts():
    need_jax()
    recording = run(by_dtensor, ranks=RANKS, device="cpu", record="communication").recording
    for step, (layouts, found) in enumerate(zip(LAYOUTS, on_devices(by_xla, devices=RANKS), strict=True)):
        xla, eager, ours = sum(one.sent for one in found), recording.sent(0, step), by_propagation(layouts).sent
        assert ours <= min(xla, eager), layouts
        assert (ours == 0) == (xla == 0) == (eager == 0), layouts
        assert all(one.kind != "reduce-scatter" for one in found), "XLA has learned it on CPUs: say so in the texts"


def layer_by_xla(names, sizes, arguments, results):
    import jax

    from labs.xla.added_collectives import communication
    from labs.xla.gpt_in_jax import layer

    def fn(x, gradient, *weights):
        y, back = jax.vjp(lambda x, *w: layer(dict(zip(names, w, strict=True)), x, CONFIG), x, *weights)
        return y, *back(gradient)

    return communication(fn, sizes, arguments, results)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_a_layer_forward_and_backward(sizes):
    need_jax()
    layer = Layer(CONFIG)
    names, shape = [name for name, _ in layer.named_parameters()], (BATCH, CONFIG.context, CONFIG.dim)
    graph = trace(forward_and_backward(layer), torch.ones(shape), torch.ones(shape), *layer.parameters())
    layouts = given(graph, names, tuple(sizes))
    program = lower(graph, propagate(graph, tuple(sizes.values()), layouts))
    arguments, results = [(v.shape, layouts[v]) for v in graph.arguments], [layouts[v] for v in graph.results]
    found = on_devices(layer_by_xla, names, sizes, arguments, results, devices=RANKS)
    assert program.sent < sum(one.sent for one in found)
    gathered = sum(one.sent for one in found if one.kind == "all-gather")
    assert gathered >= sum(move.sent for move in program.moves if move.collectives == ["all_gather"])
