"""Tests of labs.cost on collectives: cases by hand, published limits, and the messages of labs.collectives."""

import dataclasses
from fractions import Fraction

import pytest

from labs import cost
from labs.cost import Traffic
from labs.kit.launch import run
from tests.test_collectives import SIZES, traffic


def test_seven_elements_on_three_ranks_by_hand():
    # pieces of 3, 2 and 2: rank 0 keeps 3, rank 1 keeps 2, rank 2 keeps 2; then each passes on all but the next rank's
    assert [cost.reduce_scatter(7, 3, r) for r in range(3)] == [Traffic(4, 2), Traffic(5, 2), Traffic(5, 2)]
    assert [cost.all_gather(7, 3, r) for r in range(3)] == [Traffic(5, 2), Traffic(5, 2), Traffic(4, 2)]
    assert [cost.all_reduce(7, 3, r).elements for r in range(3)] == [9, 10, 9]


def test_trees_on_five_ranks_by_hand():
    # 0 sends to 1, 2 and 4, and 1 sends to 3
    assert [cost.broadcast(10, 5, r).elements for r in range(5)] == [30, 10, 0, 0, 0]
    assert [cost.broadcast(10, 5, r, src=3).elements for r in range(5)] == [0, 0, 0, 30, 10]
    assert [cost.reduce(10, 5, r, dst=3).elements for r in range(5)] == [10, 10, 10, 0, 10]
    # 4 folds into 0; 0 and 1, 2 and 3, then 0 and 2, 1 and 3; 0 sends to 4
    assert [cost.all_reduce_doubling(10, 5, r).elements for r in range(5)] == [30, 20, 20, 20, 10]
    assert [cost.barrier(ranks).messages for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_empty_messages_are_not_counted():
    assert [cost.all_reduce(1, 4, r) for r in range(4)] == [Traffic(1, 1), *[Traffic(2, 2)] * 2, Traffic(1, 1)]
    assert cost.all_reduce(0, 4) == cost.broadcast(0, 4) == Traffic(0, 0)


def test_limits_are_the_published_ones():
    # ring: all-gather = reduce-scatter = (N-1)/N S; all-reduce 2 (N-1)/N S, exact where N divides
    for ranks in (1, 2, 4, 8):
        n = 64 * ranks
        assert cost.reduce_scatter(n, ranks).elements == cost.all_gather(n, ranks).elements
        assert cost.all_reduce(n, ranks).elements == cost.all_reduce_limit(n, ranks)
    assert cost.all_reduce_limit(7, 3) == Fraction(28, 3)
    assert cost.all_reduce_limit(1000, 10**9) == pytest.approx(2000)  # ZeRO, section 7.1: 2 Ψ


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_collectives_send_what_was_predicted(ranks):
    results = run(lambda: {size: traffic(size) for size in SIZES}, ranks=ranks)
    root = ranks - 1
    for rank, by_size in enumerate(results):
        for n, counted in by_size.items():
            predicted = {
                "broadcast": cost.broadcast(n, ranks, rank, src=root),
                "reduce": cost.reduce(n, ranks, rank, dst=root),
                "reduce_scatter": cost.reduce_scatter(n, ranks, rank),
                "all_gather": cost.all_gather(n, ranks, rank),
                "all_reduce": cost.all_reduce(n, ranks, rank),
                "all_reduce_doubling": cost.all_reduce_doubling(n, ranks, rank),
                "all_to_all": cost.all_to_all(n, ranks, rank),
                "barrier": cost.barrier(ranks),
            }
            assert counted == {name: dataclasses.astuple(sent) for name, sent in predicted.items()}


def test_time_by_hand():
    link = {"latency": 1e-5, "bandwidth": 1e9}
    assert cost.ring_seconds(10**6, 4, **link) == pytest.approx(6e-5 + 1.5e-3)
    assert cost.tree_seconds(10**6, 4, **link) == pytest.approx(4 * (1e-5 + 1e-3))
    assert cost.doubling_seconds(10**6, 4, **link) == pytest.approx(2 * (1e-5 + 1e-3))
    assert cost.doubling_seconds(10**6, 5, **link) == pytest.approx(4 * (1e-5 + 1e-3))
    assert cost.ring_seconds(10**6, 1, **link) == cost.doubling_seconds(10**6, 1, **link) == 0
    assert cost.doubling_seconds(1000, 64, **link) < cost.ring_seconds(1000, 64, **link)
    assert cost.doubling_seconds(10**9, 64, **link) > cost.ring_seconds(10**9, 64, **link)
