"""Tests of labs.cost on bubbles against the schedules of `labs.pp`, simulated and counted."""

import pytest

from labs import cost, pp

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb1p", 1), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("name", "v"), CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_alive_are_those_of_the_lists(name, v, ranks):
    m = 4 * ranks
    alive = pp.alive(pp.SCHEDULES[name](ranks, m, v))
    assert [cost.stages_alive(name, ranks, rank, m, v) for rank in range(ranks)] == [max(each) for each in alive]


@pytest.mark.parametrize(("name", "v"), CASES)
def test_seconds_are_those_of_the_simulation(name, v):
    """Check with F, I and W of 1 / v seconds per stage, so that a micro-batch takes 3 seconds on each rank."""
    ranks, m = 4, 16
    simulated = pp.simulate(pp.SCHEDULES[name](ranks, m, v), F=1 / v, I=1 / v, W=1 / v, B=2 / v)
    assert cost.pipeline_seconds(name, [3.0] * ranks, m, v) == pytest.approx(simulated.time)


def test_the_busiest_rank_sets_the_pace():
    # 1 + 2 + 1 for the first micro-batch, and 2 for each of the 4 others
    assert cost.pipeline_seconds("1f1b", [1.0, 2.0, 1.0], 5) == 4 + 4 * 2


def test_few_micro_batches_keep_no_more_than_there_are():
    assert cost.stages_alive("1f1b", 8, 0, 2) == 2 and cost.stages_alive("interleaved", 4, 0, 1, 2) == 2


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match="schedule is '2f2b': it must be one of 'gpipe', '1f1b'"):
        cost.stages_alive("2f2b", 2, 0, 2)
