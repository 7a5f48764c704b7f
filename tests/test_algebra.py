"""labs.algebra and labs.rules: every way of every rule, done block by block in one process, against the whole.

Nothing is sent: for each way, each rank's blocks are cut out of whole inputs, the operation is done on each, and what
comes out must be that rank's block of the result, or the summands must add up to it.
"""

import pytest
import torch

from labs.algebra import Doing, ways
from labs.placement import Partial, Replicate, Shard, Spec
from labs.rules import RULES

aten = torch.ops.aten
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
TOKENS = torch.tensor([[0, 5, 2], [3, 3, 1]])


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


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
]


def blocks(x, placement, ranks):
    """What each rank holds of a whole tensor."""
    if placement == P:
        return [x * (rank + 1) / sum(range(1, ranks + 1)) for rank in range(ranks)]
    spec = Spec(tuple(x.shape), (ranks,), (placement,))
    return [x[spec.block((rank,)).slices] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize(("op", "args"), DONE, ids=lambda value: str(value) if callable(value) else "")
def test_every_way_gives_the_blocks_of_the_result(op, args, ranks):
    whole = op(*args)
    inputs = [x for x in args if isinstance(x, torch.Tensor)]
    specs = [Spec(tuple(x.shape), (ranks,), (R,)) for x in inputs]
    rule = RULES[op._schema.name.removeprefix("aten::")]
    letters = rule.letters
    if not isinstance(letters, str):
        shapes = iter(specs)
        letters = letters(tuple(whole.shape), *(next(shapes) if isinstance(x, torch.Tensor) else x for x in args))
    for way in ways(letters, rule.linear):
        if way.inputs[0] == P and inputs[0].dtype == torch.int64:
            continue
        given = [blocks(x, placement, ranks) for x, placement in zip(inputs, way.inputs, strict=True)]
        output = Spec(tuple(whole.shape), (ranks,), (way.output,))
        results = []
        for rank in range(ranks):
            mine = iter(block[rank] for block in given)
            mine = [next(mine) if isinstance(x, torch.Tensor) else x for x in args]
            if rule.local:
                lie = [spec.but([placement]) for spec, placement in zip(specs, way.inputs, strict=True)]
                results.append(rule.local(Doing(op, lie, output, (rank,)), *mine))
            else:
                results.append(op(*mine))
        if way.output == P:
            torch.testing.assert_close(
                sum(results), whole, rtol=1e-12, atol=1e-12, msg=lambda text, way=way: f"{way}: {text}"
            )
        for rank, result in enumerate(results if way.output != P else []):
            expected = whole[output.block((rank,)).slices]
            torch.testing.assert_close(
                result, expected, rtol=1e-12, atol=1e-12, msg=lambda text, way=way: f"{way}: {text}"
            )


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
