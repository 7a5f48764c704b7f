"""Tests of the pictures of context parallelism: their numbers are those of `labs.cp` (snapshots: test_gallery)."""

import re

import pytest
import torch

from labs.cp import Pieces, contiguous, products, striped, zigzag
from labs.kit import draw
from labs.kit.drawing.ring_steps import visible
from labs.kit.drawing.work_per_rank import by_step
from tests.kit.pictures import require_legible


@pytest.mark.parametrize("cut", [contiguous, zigzag, striped])
@pytest.mark.parametrize(("tokens", "ranks"), [(16, 4), (300, 2), (11, 3), (32, 8), (5, 1)])
def test_a_ring_has_the_products_that_the_cut_leaves(cut, tokens, ranks):
    places = cut(tokens, ranks)
    expected = [[products(places)[rank][(rank - step) % ranks] for rank in range(ranks)] for step in range(ranks)]
    drawing = draw.ring_steps(Pieces(places))
    told = [int(number) for number in re.findall(r"(\d+) of \d+ products", drawing.alt)]
    assert told == [count for row in expected for count in row]
    require_legible(drawing)
    assert by_step(places) == [list(rank) for rank in zip(*expected, strict=True)]


def test_what_is_filled_is_what_a_query_may_see():
    documents = torch.tensor([[0] * 5 + [1] * 7])
    pieces = Pieces(zigzag(12, 2), documents)
    for rank, source in ((0, 0), (0, 1), (1, 0)):
        pairs = [[(q, k) for k in pieces.places[source]] for q in pieces.places[rank]]
        expected = [[k <= q and (k < 5) == (q < 5) for q, k in row] for row in pairs]
        assert visible(pieces, rank, source).tolist() == expected


def test_bars_and_their_mean_are_told():
    drawing = draw.work_per_rank({"contiguous": contiguous(8, 2), "zigzag": zigzag(8, 2)})
    assert "contiguous: rank 0 10, rank 1 26, mean 18. zigzag: rank 0 18, rank 1 18, mean 18." in drawing.alt
    require_legible(draw.work_per_rank({cut.__name__: cut(600, 4) for cut in (contiguous, zigzag, striped)}))
    assert "busiest: 1.44 × the mean" in drawing.svg
