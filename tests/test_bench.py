"""Tests of the bench's pipelines: the order of a sleeping one, with `make soak` its idle time, and shared cores.

References: the lists themselves, and their simulation.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.pipeline import Sleeps, bubbles
from bench.plan import on_cores, undisturbed
from labs.kit.launch import run
from labs.pp import SCHEDULES, B, Pipeline, one_f_one_b, simulate
from labs.pp.checker import stages_of


def slept():
    """Return for each schedule the stages of a rank in the order in which they slept; a stage sleeps for its number."""
    found = []
    for schedule in SCHEDULES.values():
        lists = schedule(dist.get_world_size(), 4)
        pipeline = Pipeline([Sleeps(s) for s in range(stages_of(lists))], lists, lambda y, target: (y - target).sum())
        with mock.patch("bench.pipeline.time", **{"sleep.return_value": None}) as clock:
            pipeline.forward_backward(torch.ones(4, 1, requires_grad=True), torch.zeros(4, 1))
        found.append([call.args[0] for call in clock.sleep.call_args_list])
    return found


def test_ranks_work_in_the_order_of_their_lists():
    for rank, all_orders in enumerate(run(slept, ranks=2)):
        for schedule, order in zip(SCHEDULES.values(), all_orders, strict=True):
            # B sleeps as I and as W.
            assert order == [x.stage for x in schedule(2, 4)[rank] for _ in range(1 + isinstance(x, B))]


def test_ranks_that_share_cores():
    of = simulate(one_f_one_b(4, 4), F=1, B=2, send=0.5)
    assert on_cores(of, 4) == of.time and on_cores(of, 1) >= sum(of.busy) == 48
    assert sum(of.busy) / 2 < on_cores(of, 2) < sum(of.busy)


def test_what_ranks_that_share_cores_would_take_alone():
    assert undisturbed([2, 2], 1) == [1, 1]
    assert undisturbed([3, 1], 1) == [2.5, 0.5] and undisturbed([3, 1], 2) == [3, 1]


@pytest.mark.soak
@pytest.mark.alone
def test_the_measured_bubble_is_the_simulated_one():
    """Check within 5 %."""
    for figure in bubbles(list(SCHEDULES), 2):
        assert figure.met and figure.value > 0.95, figure
