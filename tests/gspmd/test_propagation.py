"""Tests of labs.gspmd.propagation: layouts worked out by hand, of programs of a few lines."""

import pytest
import torch
from torch.nn.functional import silu

from labs.dtensor import Partial, Replicate, Shard
from labs.gspmd import propagate, trace
from labs.gspmd.propagation import cut, meet, pass_on

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def product(x, w):
    return (x @ w,)


def of_ones(fn, *shapes):
    return trace(fn, *map(torch.ones, shapes))


def along(graph, given, ranks=4):
    """Return the placements on one axis, by value. given: [placements of arguments], [placements of results]"""
    values = (*graph.arguments, *graph.results)
    layouts = propagate(graph, (ranks,), {v: [p] for v, p in zip(values, [p for ps in given for p in ps], strict=True)})
    return {value: spec.placements[0] for value, spec in layouts.items()}


@pytest.mark.parametrize(
    ("dims", "known", "letter", "after"),
    [
        (["ik", "kj", "ij"], [S0, None, None], "i", [S0, None, S0]),
        (["ik", "kj", "ij"], [None, S1, None], "j", [None, S1, S1]),
        (["ik", "kj", "ij"], [None, None, S1], "j", [None, S1, S1]),
        (["ik", "kj", "ij"], [S1, None, None], "k", [S1, S0, None]),
        (["ki", "jk", "ij"], [S0, None, None], "k", [S0, S1, None]),
        (["ik", "kj", "ij"], [S0, S1, None], "i", [S0, S1, S0]),
        (["ik", "kj", "ij"], [S0, None, R], "i", [S0, None, R]),
        (["abc", "c", "abc"], [S0, None, None], "a", [S0, None, S0]),
    ],
)
def test_a_cut_goes_along_its_letter_to_what_is_not_known_yet(dims, known, letter, after):
    assert letter in cut(dims, known)
    assert pass_on(dims, known, letter) == after


def test_no_letter_is_cut_where_a_dim_stays_whole():
    assert cut(["a.", "a."], [S1, R]) == [] and cut(["ik", "kj", "ij"], [R, P, None]) == []


@pytest.mark.parametrize(("tokens", "letter"), [(8, "j"), (128, "i")])
def test_where_two_letters_meet_the_larger_tensor_stays(tokens, letter):
    """Check x of [tokens, 16], cut along i, with w of [16, 32], cut along j."""
    [operation] = of_ones(product, (tokens, 16), (16, 32)).operations
    assert meet(operation, [S0, S1, None], ["i", "j"]) == letter
    assert meet(operation, [S0, S1, None], ["j", "i"]) == letter


def test_the_first_of_equal_tensors_stays():
    [operation] = of_ones(product, (16, 16), (16, 16)).operations
    assert [meet(operation, [S0, S1, None], letters) for letters in (["i", "j"], ["j", "i"])] == ["i", "j"]


def mlp(x, up, down):
    return (silu(x @ up.t()) @ down.t(),)


def test_columns_then_rows_follow_from_one_of_the_weights():
    graph = of_ones(mlp, (8, 4), (16, 4), (4, 16))
    layouts = along(graph, ([R, S0, None], [R]))
    assert layouts[graph.arguments[2]] == S1
    hidden = [value for operation in graph.operations for value in operation.outputs if value.shape == (8, 16)]
    assert len(hidden) == 2 and all(layouts[value] == S1 for value in hidden)


def test_a_layout_of_the_result_reaches_an_argument():
    graph = of_ones(mlp, (8, 4), (16, 4), (4, 16))
    layouts = along(graph, ([None, None, None], [S0]))
    assert [layouts[value] for value in graph.arguments] == [S0, R, R]


def test_values_without_an_annotation_are_whole():
    graph = of_ones(mlp, (8, 4), (16, 4), (4, 16))
    assert set(along(graph, ([None] * 3, [None])).values()) == {R}


def two_products(x, a, b):
    y = x @ a + x @ b
    return (y * y,)


def test_summands_stay_so_as_long_as_they_are_only_added_up():
    graph = of_ones(two_products, (8, 16), (16, 4), (16, 4))
    layouts = along(graph, ([S1, None, None], [R]))
    named = {operation.name: layouts[operation.outputs[0]] for operation in graph.operations}
    assert named == {"mm": P, "add": R, "mul": R}


def test_a_result_is_no_summand():
    graph = of_ones(lambda x, w: (x @ w, x @ w + x @ w), (8, 16), (16, 4))
    assert [along(graph, ([S1, None], [None, None]))[value] for value in graph.results] == [R, R]


def test_what_one_axis_has_cut_a_second_may_not_cut_evenly():
    graph = of_ones(lambda x: (x.view(2, 2, 6) * 2,), (4, 6))
    layouts = propagate(graph, (2, 2), {graph.arguments[0]: (S0, S0)})
    assert layouts[graph.results[0]].placements == (S0, R)


def test_a_letter_is_not_followed_where_it_cannot_be_cut_evenly():
    graph = of_ones(lambda x: (x.view(2, 3, 4) * 2,), (6, 4))
    assert along(graph, ([S0], [None]), ranks=2)[graph.results[0]] == S0
    assert along(graph, ([S0], [None]), ranks=3)[graph.results[0]] == R


def test_axes_are_propagated_one_by_one():
    graph = of_ones(product, (8, 8), (8, 8))
    x, w = graph.arguments
    layouts = propagate(graph, (2, 4), {x: (S0, None), w: (None, S1)})
    assert layouts[graph.results[0]].placements == (S0, S1)
    assert layouts[x].placements == (S0, R) and layouts[w].placements == (R, S1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([S0], r"\[Shard\(0\)\] cuts dim 0 of \(6, 4\) into 4 pieces, which cannot be equal"),
        ([S1, R], r"2 placements \[Shard\(1\), Replicate\(\)\]: a mesh of 1 axes needs 1"),
    ],
)
def test_a_layout_that_cannot_be_given_is_reported(given, message):
    graph = of_ones(product, (6, 4), (4, 8))
    with pytest.raises(ValueError, match=message):
        propagate(graph, (4,), {graph.arguments[0]: given})
