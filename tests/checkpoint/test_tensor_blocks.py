"""Tests of labs.checkpoint.tensor_blocks against tensors that are really cut."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labs.checkpoint.tensor_blocks import as_slices, assign_pieces, common, of_range, require_whole, whole, within
from labs.dtensor.placement import Block

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_is_its_blocks_in_order(shape, data):
    n = prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    x = torch.arange(n).view(shape)
    found = of_range(shape, start, stop)
    assert torch.cat([x[block.slices].flatten() for block in found] or [x.new_empty(0)]).tolist() == [
        *range(start, stop)
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_range_as_its_docstring_has_it():
    assert list(map(as_slices, of_range((3, 4), 2, 9))) == ["[0:1, 2:4]", "[1:2, 0:4]", "[2:3, 0:1]"]


@given(SHAPES, st.data())
def test_what_two_blocks_have_in_common(shape, data):
    def block():
        ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Block(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    a, b, x = block(), block(), torch.arange(prod(shape)).view(shape)
    both = common(a, b)
    expected = sorted(set(x[a.slices].flatten().tolist()) & set(x[b.slices].flatten().tolist()))
    if both is None:
        assert expected == []
    else:
        for other in (a, b):
            assert x[other.slices][within(both, other)].flatten().tolist() == expected


def test_missing_and_doubled_blocks_are_reported():
    left, right = Block((0, 0), (2, 3)), Block((0, 3), (2, 1))
    require_whole("w", (2, 4), {left, right})
    require_whole("nothing", (0, 4), {whole((0, 4))})
    with pytest.raises(ValueError, match="2 of the 8 elements of 'w' are on no rank"):
        require_whole("w", (2, 4), {left})
    with pytest.raises(ValueError, match=r"'w' is cut in two ways: \[0:2, 3:4\] is in \[0:2, 0:4\] and in"):
        require_whole("w", (2, 4), {whole((2, 4)), right})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), st.data())
def test_blocks_are_whole_if_each_element_is_in_one(shape, data):
    def block():
        ends = [sorted(data.draw(st.tuples(st.integers(0, n + 1), st.integers(0, n + 1)))) for n in shape]
        return Block(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    found = {block() for _ in range(data.draw(st.integers(0, 3)))}
    times = torch.zeros([n + 1 for n in shape])
    for each in found:
        times[each.slices] += 1
    expected = torch.zeros_like(times)
    expected[whole(shape).slices] = 1
    if torch.equal(times, expected):
        require_whole("w", shape, found)
    else:
        with pytest.raises(ValueError, match=r"is cut in two ways|is no part of|are on no rank"):
            require_whole("w", shape, found)


def test_one_block_of_many_that_is_missing_is_reported():
    cut = {Block((i, 0, j), (1, 3, 2)) for i in range(10) for j in range(0, 20, 2)}
    require_whole("w", (10, 3, 20), cut)
    with pytest.raises(ValueError, match="6 of the 600 elements of 'w' are on no rank"):
        require_whole("w", (10, 3, 20), cut - {Block((7, 0, 4), (1, 3, 2))})


def test_replicas_are_written_once_by_the_ranks_with_least_to_write():
    mine, ours, small = ("a", whole((4,))), ("b", whole((3,))), ("c", whole((1,)))
    held = [{mine: 40, ours: 30, small: 10}, {ours: 30, small: 10}, {small: 10}]
    assert assign_pieces(held) == [[mine], [ours], [small]]


@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.none()), min_size=1, max_size=5))
def test_every_piece_is_written_once_by_one_that_has_it(held):
    held = [{(key, whole((ord(key),))): ord(key) for key in each} for each in held]
    writes = assign_pieces(held)
    assert sorted(piece[0] for each in writes for piece in each) == sorted({key for each in held for key, _ in each})
    assert all(piece in held[rank] for rank, each in enumerate(writes) for piece in each)
