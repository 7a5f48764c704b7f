"""Tests of labs.gspmd.annotated_layer against whole tensors in float64; bytes and tracing by hand."""

from functools import cache

import pytest
import torch

from labs.gspmd import execute, forward_and_backward, given, lower, propagate, trace
from labs.gspmd.annotated_layer import layout_of
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import Config, Layer, initialise

CONFIG = Config(vocab=16, dim=32, depth=1, heads=4, kv_heads=2, hidden=48, context=8)
TP, FSDP, BOTH, MANY = (("tp", 2),), (("dp", 4),), (("dp", 2), ("tp", 2)), (("tp", 4),)
BATCH, TIME, DIM = 8, 8, CONFIG.dim
TOKENS = BATCH * TIME
# q, o, gate, up and down, then k and v, which are half as large as q.
MATRICES = 2 * DIM * DIM + 3 * DIM * CONFIG.hidden + 2 * DIM * DIM // 2


def layer_and_inputs():
    layer = Layer(CONFIG)
    initialise(layer)
    weights = [p.detach() + torch.arange(p.numel()).view(p.shape) % 7 / 50 for p in layer.parameters()]
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, BATCH, TIME, DIM, generator=generator)
    return layer, [tensor.double() for tensor in (x, gradient, *weights)]


@cache
def program_of(mesh):
    """Return the program of a layer on a mesh, given as its axes and their sizes."""
    layer, tensors = layer_and_inputs()
    names, (axes, sizes) = [name for name, _ in layer.named_parameters()], zip(*mesh, strict=True)
    graph = trace(forward_and_backward(layer), *tensors)
    return lower(graph, propagate(graph, sizes, given(graph, names, axes)))


def on_meshes(meshes, programs):
    """Return the largest difference between this rank's results and the expected ones, on each mesh."""
    layer, tensors = layer_and_inputs()
    whole, differences = forward_and_backward(layer)(*tensors), []
    for axes, program in zip(meshes, programs, strict=True):
        mesh = Mesh(*reversed(tuple(zip(*axes, strict=True))))
        place = mesh.get_coordinate()

        def own(x, value, program=program, place=place):
            return x[program.layouts[value].block(place).slices].contiguous()

        blocks = list(map(own, tensors, program.graph.arguments))
        mark("step")
        results = execute(program, mesh, *blocks)
        mark("end")
        expected = map(own, whole, program.graph.results)
        differences.append(max((a - b).abs().max().item() for a, b in zip(results, expected, strict=True)))
    return differences


@pytest.fixture(scope="module")
def four_ranks():
    meshes = [FSDP, BOTH, MANY]
    return run(on_meshes, meshes, list(map(program_of, meshes)), ranks=4, device="cpu", record="communication")


def test_the_same_numbers_in_every_layout(four_ranks):
    two_ranks = run(on_meshes, [TP], [program_of(TP)], ranks=2, device="cpu")
    assert all(difference < 1e-12 for rank in (*four_ranks, *two_ranks) for difference in rank)


def test_what_is_sent_is_what_the_program_says(four_ranks):
    for step, mesh in enumerate([FSDP, BOTH, MANY]):
        assert four_ranks.recording.sent(rank=0, step=step) == program_of(mesh).sent


@pytest.mark.parametrize(
    ("mesh", "counts", "elements"),
    [
        # Megatron's two in forward and two in backward.
        (TP, {"all_reduce": 4}, 4 * 2 * TOKENS * DIM // 2),
        # Each of 7 matrices and 2 norms is gathered once, and its gradient is reduce-scattered.
        (FSDP, {"all_gather": 9, "reduce_scatter": 9}, 2 * 3 * (MATRICES + 2 * DIM) // 4),
        (
            BOTH,
            {"all_gather": 9, "reduce_scatter": 9, "all_reduce": 4},
            2 * (MATRICES // 2 + 2 * DIM) // 2 + 4 * 2 * TOKENS // 2 * DIM // 2,
        ),
    ],
)
def test_a_block_sends_what_a_strategy_does_that_was_written_for_it(mesh, counts, elements):
    assert program_of(mesh).counts == counts and program_of(mesh).sent == 8 * elements


def test_heads_that_cannot_be_split_are_gathered():
    """Check two heads of keys and values on four ranks: each rank computes a part, then they become whole."""
    program = program_of(MANY)
    assert program.counts["all_reduce"] == 4 and len(program.moves) > 4


def test_a_program_shows_where_it_moves_what():
    shown = repr(program_of(TP)).splitlines()
    assert shown[0].split() == ["operation", "letters", "result", "as", "moved"]
    assert [line.split()[0] for line in shown if line.endswith("all_reduce of (8, 8, 32), 16,384 bytes")] == ["add"] * 4


@pytest.mark.parametrize(
    ("name", "axes", "layout"),
    [
        ("layers.0.attention.q.weight", ("dp", "tp"), "(Shard(1), Shard(0))"),
        ("mlp.down.weight", ("dp", "tp"), "(Shard(0), Shard(1))"),
        ("head.weight", ("tp",), "(Shard(0),)"),
        ("layers.3.mlp_norm.weight", ("dp", "tp"), "(Shard(0), Replicate())"),
        ("norm.weight", ("tp",), "(Replicate(),)"),
    ],
)
def test_the_layout_of_a_weight(name, axes, layout):
    assert repr(layout_of(name, axes)) == layout


# ---- tracing ---------------------------------------------------------------------------------------------


def traced(fn, *shapes):
    return trace(fn, *map(torch.ones, shapes))


def written(graph):
    return [f"{operation.name} {operation.letters}" for operation in graph.operations]


def test_a_product_of_transposed_matrices_is_one_operation_on_them():
    graph = traced(lambda x, w: (x @ w.t(), w @ x.t(), x.t() @ x), (4, 3), (5, 3))
    assert written(graph) == ["mm ik,jk->ij", "mm ik,jk->ij", "mm ki,kj->ij"]
    x, w = graph.arguments
    assert [operation.inputs for operation in graph.operations] == [(x, w), (w, x), (x, x)]


def test_what_is_not_needed_and_what_is_no_change_is_left_out():
    graph = traced(lambda x: (x.detach().t().t() * 2, x.exp())[:1], (4, 3))
    assert written(graph) == ["mul ab->ab"]


def test_what_is_done_in_place_is_a_new_value():
    graph = traced(lambda x: ((x * 2).add_(1) * x,), (4,))
    assert written(graph) == ["mul a->a", "add a->a", "mul a,a->a"]
    first, second, third = graph.operations
    assert second.inputs == first.outputs and third.inputs == (*second.outputs, *graph.arguments)


def test_what_depends_on_no_argument_is_a_constant():
    graph = traced(lambda x: (x * torch.arange(4.0).cos(),), (4,))
    assert written(graph) == ["mul a,a->a"]
    assert torch.equal(*graph.constants.values(), torch.arange(4.0).cos())


def test_an_operation_without_a_rule_is_reported():
    with pytest.raises(NotImplementedError, match="cumsum has no rule: leave it out of the function"):
        traced(lambda x: (x.cumsum(0),), (4,))


def executed_with(shape):
    graph = traced(lambda x: (x * 2,), (4, 3))
    return execute(lower(graph, propagate(graph, (2,), {})), Mesh((2,), ("tp",)), torch.ones(shape))


def test_a_block_of_another_shape_is_reported():
    with pytest.raises(RankError, match=r"a block of shape \(2, 3\): of \(4, 3\) this rank holds \(4, 3\)"):
        run(executed_with, (2, 3), ranks=2, device="cpu")
