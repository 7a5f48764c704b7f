"""Tests of the cuts of a sequence: every token has one rank, and ranks work alike."""

import re

import pytest
import torch

from labs.cp.pieces import Pieces, contiguous, products, striped, zigzag

CUTS = contiguous, zigzag, striped


@pytest.mark.parametrize("cut", CUTS)
def test_each_token_is_on_one_rank_once(cut):
    for ranks in range(1, 9):
        for tokens in range(2 * ranks, 2 * ranks + 20):
            pieces = cut(tokens, ranks)
            assert sorted(place for places in pieces for place in places) == [*range(tokens)]
            sizes = [*map(len, pieces)]
            assert max(sizes) - min(sizes) <= (2 if cut is zigzag else 1)
            Pieces(pieces)


def test_work_by_hand():
    found = {cut.__name__: products(cut(8, 2)) for cut in CUTS}
    assert found == {
        "contiguous": [[10, 0], [16, 10]],
        "zigzag": [[10, 8], [8, 10]],
        "striped": [[10, 6], [10, 10]],
    }


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_balance(ranks):
    """Compare the ranks' products in all, and in each step of a ring, whose slowest rank keeps the others waiting."""
    work = {cut.__name__: products(cut(48 * ranks, ranks)) for cut in CUTS}
    total = {name: [sum(row) for row in rows] for name, rows in work.items()}
    assert len({*total["zigzag"]}) == 1
    assert max(total["striped"]) < 1.05 * min(total["striped"])
    assert max(total["contiguous"]) > 1.9 * (ranks - 0.5) * min(total["contiguous"])
    even, ring = sum(total["zigzag"]) / ranks, {}
    for name, rows in work.items():
        ring[name] = sum(max(rows[rank][(rank - step) % ranks] for rank in range(ranks)) for step in range(ranks))
    assert ring["zigzag"] < 1.03 * even > ring["striped"] / 1.03 and ring["contiguous"] > 1.4 * even


@pytest.mark.parametrize("cut", CUTS)
def test_split_and_join_are_inverse(cut):
    pieces, x = Pieces(cut(11, 3), torch.arange(22).view(2, 11)), torch.arange(66).view(2, 11, 3)
    assert torch.equal(pieces.join(pieces.split(x, 1), 1), x)
    assert all(torch.equal(pieces[rank].documents, pieces.documents[:, [*pieces.places[rank]]]) for rank in range(3))


@pytest.mark.parametrize(
    "places, sentence",
    [
        (zigzag(5, 4), "a sequence of 5 tokens leaves one of 4 ranks without any"),
        ([[0, 2], [1, 1]], "the pieces do not make up a sequence"),
        ([[0, 1], [3]], "the pieces do not make up a sequence"),
        ([[1, 0], [2]], "a rank's places in ascending order"),
    ],
)
def test_refused(places, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Pieces(places)
