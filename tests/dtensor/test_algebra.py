"""Tests of labs.dtensor.algebra and rules: every way of every rule, block by block in one process, against the whole.

Nothing is sent.  For each way, each rank's blocks are cut out of whole inputs, and the operation runs on each.  Each
output must be that rank's block of the result, or the summands must add up to the result.
"""

from functools import partial

import pytest
import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.algebra import Doing, ways
from labs.dtensor.placement import Spec
from labs.dtensor.rules import RULES
from labs.mesh import Mesh

aten = torch.ops.aten
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
TOKENS = torch.tensor([[0, 5, 2], [3, 3, 1]])


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


X = numbers(5, 2, 3)
STATISTICS = aten.native_layer_norm(X.flip(0), [3], None, None, 1e-5)[1:]
DONE = [  # operation, arguments
    (aten.mm.default, (numbers(5, 3), numbers(3, 4))),
    (aten.bmm.default, (numbers(2, 5, 3), numbers(2, 3, 4))),
    (aten.mv.default, (numbers(5, 3), numbers(3))),
    (aten.dot.default, (numbers(5), numbers(5))),
    (aten.sum.default, (numbers(5, 3),)),
    (aten.sum.dim_IntList, (numbers(5, 3), [1], True)),
    (aten.sum.dim_IntList, (numbers(5, 3, 2), [-1, 0])),
    (aten.mean.default, (numbers(5, 3),)),
    (aten.mean.dim, (numbers(5, 3), [0])),
    (aten.embedding.default, (numbers(7, 4), TOKENS)),
    (aten.embedding_dense_backward.default, (numbers(2, 3, 4), TOKENS, 7, -1, False)),
    (aten.embedding_dense_backward.default, (numbers(2, 3, 4), TOKENS, 7, 5, True)),
    (aten.t.default, (numbers(5, 3),)),
    (aten.t.default, (numbers(5),)),
    (aten.transpose.int, (numbers(5, 3, 2), 0, -1)),
    (aten.permute.default, (numbers(5, 3, 2), [2, 0, 1])),
    (aten.unsqueeze.default, (numbers(5, 3), 1)),
    (aten.squeeze.dim, (numbers(5, 1, 3), 1)),
    (aten.view.default, (numbers(5, 1, 3), [5, 3, 1])),
    (aten.expand.default, (numbers(5, 1), [2, 5, 3])),
    (aten._softmax.default, (numbers(5, 3), 1, False)),
    (aten._softmax_backward_data.default, (numbers(5, 3), numbers(3, 5).t(), 0, torch.float64)),
    (aten.add.Tensor, (numbers(5, 3), numbers(3))),
    (aten.lerp.Scalar, (numbers(5, 3), numbers(3, 5).t(), 0.3)),
    (aten.mul.Tensor, (numbers(5, 3), numbers(5, 1))),
    (aten.div.Tensor, (numbers(5, 3), numbers(3, 5).t())),
    (aten.neg.default, (numbers(5, 3),)),
    (aten.threshold_backward.default, (numbers(5, 3), numbers(3, 5).t(), 0)),
    (aten.silu_backward.default, (numbers(5, 3), numbers(3, 5).t())),
    (aten.exp.default, (numbers(5, 3),)),
    (aten.addcmul.default, (numbers(5, 3), numbers(5, 3), numbers(3))),
    (aten.cat.default, ([numbers(5, 3), numbers(4, 5).t(), numbers(5, 0)], -1)),
    (aten.cat.default, ([numbers(5, 3), numbers(0)],)),
    (aten.split.Tensor, (numbers(5, 3), 2, -1)),
    (aten.split_with_sizes.default, (numbers(5, 3), [1, 0, 4])),
    (aten.slice.Tensor, (numbers(5, 3), 0, 1, -1, 2)),
    (aten.slice.Tensor, (numbers(5, 3), 1, 0, 3)),
    (aten.slice_backward.default, (numbers(2, 3), [5, 3], 0, 1, 4, 2)),
    (aten.slice_backward.default, (numbers(5, 3), [5, 3], 0, 0, 9, 1)),
    (aten.native_layer_norm.default, (X, [3], numbers(3), numbers(3), 1e-5)),
    (aten.native_layer_norm.default, (X, [2, 3], None, None, 1e-5)),
    (aten.native_layer_norm_backward.default, (X, X.flip(0), [3], *STATISTICS, numbers(3), numbers(3), [True] * 3)),
    (aten.native_layer_norm_backward.default, (X, X, [3], *STATISTICS, numbers(3), None, [False, True, False])),
    (aten._fused_rms_norm.default, (X, [3], numbers(3), 1e-5)),
    (aten._fused_rms_norm_backward.default, (X, X.flip(0), [3], STATISTICS[1], numbers(3), [True, True])),
]
KERNELS = {op: decomposition_table[op] for op in (aten._fused_rms_norm_backward.default,)}  # CPUs have no kernel for it


def blocks(x, placement, ranks):
    """Return what each rank holds of a whole tensor. Blocks are dense, and not parts of a larger tensor."""
    if placement == P:
        return [x * (rank + 1) / sum(range(1, ranks + 1)) for rank in range(ranks)]
    spec = Spec(tuple(x.shape), (ranks,), (placement,))
    return [x[spec.block((rank,)).slices].clone() for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize(("op", "args"), DONE, ids=lambda value: str(value) if callable(value) else "")
def test_every_way_gives_the_blocks_of_the_result(op, args, ranks):
    leaves, tree = tree_flatten(args)
    places = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    inputs, specs = [leaves[place] for place in places], list(leaves)
    for place in places:
        specs[place] = Spec(tuple(leaves[place].shape), (ranks,), (R,))
    kernel = KERNELS.get(op, op)
    result = kernel(*args)
    wholes = tensors_of(result)
    shapes = [tuple(whole.shape) for whole in wholes]
    rule = RULES[op._schema.name.removeprefix("aten::")]
    letters = rule.letters
    if not isinstance(letters, str):
        letters = letters(shapes[0] if isinstance(result, torch.Tensor) else shapes, *tree_unflatten(specs, tree))
    for way in ways(letters, rule.linear):
        if way.inputs[0] == P and inputs[0].dtype == torch.int64:
            continue
        given = [blocks(x, placement, ranks) for x, placement in zip(inputs, way.inputs, strict=True)]
        lie = [specs[place].but([placement]) for place, placement in zip(places, way.inputs, strict=True)]
        outputs = [Spec(shape, (ranks,), (p,)) for shape, p in zip(shapes, way.outputs, strict=True)]
        results = []
        for rank in range(ranks):
            mine = list(leaves)
            for place, block in zip(places, given, strict=True):
                mine[place] = block[rank]
            doing = Doing(op, lie, outputs, Mesh((ranks,), ("tp",), rank=rank))
            do = partial(rule.local, doing) if rule.local else kernel
            results.append(tensors_of(do(*tree_unflatten(mine, tree))))
        for number, (whole, output) in enumerate(zip(wholes, outputs, strict=True)):
            of_ranks = [result[number] for result in results]
            expected = [whole[output.block((rank,)).slices] for rank in range(ranks)]
            if output.placements == (P,):
                of_ranks, expected = [sum(of_ranks)], [whole]
            torch.testing.assert_close(
                of_ranks, expected, rtol=1e-12, atol=1e-12, msg=lambda text, way=way: f"{way}: {text}"
            )


def tensors_of(result):
    return [x for x in tree_leaves(result) if x is not None]


def test_an_output_without_the_dim_that_others_are_sharded_along_is_a_summand():
    assert [str(way) for way in ways("ab,b->ab,b", "first")] == [
        "Replicate(), Replicate() → Replicate(), Replicate()",
        "Shard(0), Replicate() → Shard(0), Partial()",
        "Shard(1), Shard(0) → Shard(1), Shard(0)",
        "Partial(), Replicate() → Partial(), Partial()",
    ]


def test_the_ways_of_a_matrix_product():
    assert [str(way) for way in ways("ik,kj->ij", "each")] == [
        "Replicate(), Replicate() → Replicate()",
        "Shard(0), Replicate() → Shard(0)",
        "Shard(1), Shard(0) → Partial()",
        "Replicate(), Shard(1) → Shard(1)",
        "Partial(), Replicate() → Partial()",
        "Replicate(), Partial() → Partial()",
    ]


def test_the_table_prints_every_rule():
    lines = repr(RULES).splitlines()
    assert lines[1].split() == ["ik,kj->ij", "each", "mm"] and max(map(len, lines)) <= 120
    assert set(RULES) <= {word for line in lines for word in line.replace(",", " ").split()}


@pytest.mark.parametrize(
    ("before", "after", "letters"),
    [
        ((4, 3, 2), (12, 2), "A.c->Ac"),
        ((12, 2), (4, 3, 2), "Ab->A.b"),
        ((4, 1, 2), (4, 2), "a.b->ab"),
        ((4, 2), (1, 4, 2), "ab->.ab"),
        ((5, 3), (15,), "A.->A"),
        ((2, 3), (3, 2), "A.->A."),
        ((0, 3), (0,), "..->."),
        ((), (1,), "->."),
    ],
)
def test_what_a_view_keeps(before, after, letters):
    x = Spec(before, (1,), (R,))
    said = RULES["view"].letters(after, x, list(after))
    assert said.translate(str.maketrans("bB", "cC")) == letters.translate(str.maketrans("bB", "cC"))


def test_a_view_keeps_a_cut_into_equal_pieces_only():
    for size, kept in ((4, "A"), (3, ".")):
        assert RULES["view"].letters((size * 5,), Spec((size, 5), (2,), (S0,)), [size * 5]) == f"{kept}.->{kept}"
