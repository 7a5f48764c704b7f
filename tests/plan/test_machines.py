"""Tests of clusters: a wrong one says so in a sentence with the value and a remedy."""

from dataclasses import replace

import pytest

from labs.plan import CLUSTERS, Cluster

H100 = CLUSTERS["H100, InfiniBand"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"card": 80}, "card is 80: it is in bytes, between 1e[+]09 and 1e[+]13; an H100 has 80e9"),
        ({"flops": None}, "flops is missing: it is in operations per second"),
        ({"between": 0}, "between is 0: it is in bytes per second out of a GPU"),
        ({"memory": float("nan")}, "memory is nan: it is in bytes per second"),
        ({"gpus": 12}, "12 GPUs are 1.50 nodes of 8: give a multiple of 8"),
        ({"gpus": 0}, "gpus is 0: a cluster has a whole number of them, and at least 1"),
        ({"gpus": None}, "gpus is missing: a cluster has a whole number of them"),
        ({"name": None}, "name is missing: give the cluster one"),
        ({"node": 8.0}, "node is 8.0: a cluster has a whole number of them"),
    ],
)
def test_an_absurd_field(fields, says):
    with pytest.raises(ValueError, match=says):
        replace(H100, **fields)


def test_a_field_that_is_left_out():
    with pytest.raises(ValueError, match="between is missing: it is in bytes per second out of a GPU, between"):
        Cluster("ours", 8, 8, 80e9, 3.35e12, 989e12, 450e9)


def test_a_ring_leaves_the_node_over_the_links_of_all_that_are_on_it():
    within, across = H100.link(8, 1), H100.link(16, 1)
    assert within.bandwidth == H100.inside and across.bandwidth == 8 * H100.between
    assert H100.link(4, 8).bandwidth == H100.between  # one rank on each node, as data parallelism beside TP 8
    assert H100.link(4, 2).bandwidth == H100.inside  # every second GPU of one node
    assert H100.link(16, 1, reached=0.5).bandwidth == 4 * H100.between


def test_latency_is_that_of_a_rings_average_hop():
    within, across, alone = (H100.link(*each).latency for each in ((8, 1), (16, 1), (2, 8)))
    assert within < across < alone and across == pytest.approx((7 * within + alone) / 8)
