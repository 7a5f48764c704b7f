"""Tests of labs.dtensor.placement against torch.chunk, and torch's own arithmetic of blocks, on every mesh position."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.placement import Block, Spec, normalised, piece, whole_shape

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@given(size=st.integers(0, 20), pieces=st.integers(1, 9))
def test_a_dim_is_cut_as_torch_chunk_cuts_it(size, pieces):
    chunks = torch.arange(size).chunk(pieces) if size else ()
    for number in range(pieces):
        start, length = piece(size, pieces, number)
        expected = chunks[number].tolist() if number < len(chunks) else []
        assert list(range(start, start + length)) == expected


AXES = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([R, S0, S1])), min_size=1, max_size=3)


@settings(max_examples=300)
@given(shape=st.tuples(st.integers(0, 8), st.integers(0, 8)), axes=AXES)
def test_blocks_are_chunks_of_chunks_and_tile_the_tensor(shape, axes):
    mesh, placements = zip(*axes, strict=True)
    full, spec = torch.arange(prod(shape)).view(shape), Spec(shape, mesh, placements)
    seen = []
    for coordinate in product(*map(range, mesh)):
        expected = full
        for placement, ranks, place in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                chunks = expected.chunk(ranks, placement.dim) if expected.shape[placement.dim] else ()
                empty = expected.narrow(placement.dim, 0, 0)
                expected = chunks[place] if place < len(chunks) else empty
        block = spec.block(coordinate)
        assert torch.equal(full[block.slices], expected) and block.shape == tuple(expected.shape)
        seen += expected.flatten().tolist()
    copies = prod(n for n, placement in axes if placement == R)
    assert sorted(seen) == sorted(full.flatten().tolist() * copies)
    assert prod(mesh) == copies * spec.pieces(0) * spec.pieces(1)


def test_what_placements_say():
    assert [S1.is_shard(), S1.is_shard(1), S1.is_shard(0), R.is_shard(), P.is_partial(), R.is_replicate()] == [
        True, True, False, False, True, True,
    ]  # fmt: skip
    assert repr((S1, R, P)) == "(Shard(1), Replicate(), Partial())" and Shard(1) == S1 != S0
    assert whole_shape((2, 3), (2, 4), (S0, S1)) == (4, 12) and whole_shape((2,), (2, 4), (S0, S0)) == (16,)
    assert Spec((8, 2), (2, 2), (S0, P)).block((1, 0)) == Block((4, 0), (4, 2))


def test_impossible_placements_are_refused():
    assert normalised([Shard(-1), P], 3, 2) == (Shard(2), P) and normalised(None, 0, 2) == (R, R)
    for placements, ndim, error, sentence in [
        ([Shard(2)], 2, IndexError, r"Shard\(2\): a tensor has the dims 0 to 1"),
        ([Shard(-3)], 2, IndexError, r"Shard\(-3\): a tensor has the dims 0 to 1"),
        ([S0], 0, IndexError, r"Shard\(0\): a tensor of 0 dims cannot be cut"),
        ([R, R], 2, ValueError, "2 placements .*: a mesh of 1 axes needs 1"),
        (S0, 2, TypeError, r"give one for each axis of the mesh, as in \[Shard\(0\)\]"),
        (["S0"], 2, TypeError, "'S0' is no placement"),
        ([Shard], 2, TypeError, "is no placement"),
    ]:
        with pytest.raises(error, match=sentence):
            normalised(placements, ndim, 1)
    for dim in (1.5, True, None, "0"):
        with pytest.raises(TypeError, match=r"give the number of a dim, as in Shard\(0\)"):
            Shard(dim)
    for asked in ((5, 2, 2), (5, 2, -1), (-1, 2, 0)):
        with pytest.raises(ValueError, match=f"piece {asked[2]} of 2 of a dim of size {asked[0]}: give a size of 0"):
            piece(*asked)
