"""Tests of labs.pp.simulation: published closed forms and tables, each cited where it is used, and longest paths."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labs.pp import SCHEDULES, B, F, I, W, alive, read, simulate
from tests.pp.common import LISTS, pytorchs

P_AND_M = [(1, 1), (1, 5), (2, 4), (3, 6), (4, 4), (4, 8), (8, 16)]


@pytest.mark.parametrize(("p", "m"), P_AND_M)
def test_bubbles_are_the_published_ones(p, m):
    """Check (p - 1) / m and (p - 1) / (v m).

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2, equations of t_pb / t_id.  ZB-H1, (p - 1)(F + I -
    W): Qi et al. 2023, arXiv 2401.10241, table 2, and the README of DeepSeek's DualPipe, which writes it (PP - 1)(F +
    B - 2W).  It holds if W is not longer than F, nor than I.
    """
    for forward, half, weights in [(1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 1, 1), (5, 4, 3)]:
        costs = {"F": forward, "B": half + weights, "I": half, "W": weights}
        for name in ("gpipe", "1f1b"):
            assert simulate(SCHEDULES[name](p, m), **costs).bubble == pytest.approx((p - 1) / m, abs=1e-12)
        for v in (2, 3):
            of = simulate(SCHEDULES["interleaved"](p, m, v), **costs)
            assert of.bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)
        zero = simulate(SCHEDULES["zb1p"](p, m), **costs)
        assert zero.time - zero.ideal == (p - 1) * (forward + half - weights)
        assert zero.ideal == m * (forward + half + weights)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in P_AND_M if m >= 2 * p])
def test_the_schedules_in_a_v(p, m):
    """Check ZB-V, which has no bubble, and DualPipeV.

    ZB-V: arXiv 2401.10241, section 6, with F = I = W, where a rank's time counts from its own beginning.  DualPipeV,
    (PP / 2 - 1)(F&B + B - 3W) with PP / 2 ranks, where a pair F&B takes F + B and is one step: the README of DeepSeek's
    DualPipe.  Here a pair is two steps, and the output of the first one is sent before the second.
    """
    zbv = simulate(SCHEDULES["zbv"](p, m), F=1, I=1, W=1)
    for order, busy in zip(zbv.lists, zbv.busy, strict=True):
        assert zbv.end[order[-1]] - zbv.start[order[0]] == busy == 6 * m
    assert zbv.bubble == pytest.approx((p - 1) / (6 * m))
    dual = simulate(SCHEDULES["dualpipev"](p, m), F=1, B=2, I=1, W=1)
    assert dual.bubble == pytest.approx((p - 1) / (6 * m))
    order = pytorchs("dualpipev", p, m, 2).pipeline_order
    pairs = [[tuple(map(read, map(str, x.sub_actions or (x,)))) for x in order[rank]] for rank in range(p)]
    _, end = longest_path(pairs, lambda x: {F: 1, B: 2, I: 1, W: 1}[type(x)], lambda x: 0)
    assert max(end.values()) - 6 * m == (p - 1) * (3 + 2 - 3)


@pytest.mark.parametrize(("p", "m"), P_AND_M)
def test_activations_alive_are_the_published_ones(p, m):
    """Check the peaks of 1F1B, interleaved, ZB-H1, ZB-V and DualPipeV.

    1F1B: arXiv 2104.04473, section 2.2.1.  Interleaved, on the first rank L (1 + (p - 1) / (p v)) layers: Korthikanti
    et al. 2022, arXiv 2205.05198, section 4.2.3.  ZB-H1 and ZB-V, as 1F1B: arXiv 2401.10241, table 2 and section 6.
    DualPipeV, PP + 1 where PP = 2 p: the README of DeepSeek's DualPipe.
    """

    def most(name, v=1):
        return [max(rank) for rank in alive(SCHEDULES[name](p, m, v))]

    assert most("gpipe") == [m] * p
    assert most("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert most("zb1p") == [min(m, p)] * p
    assert most("zbv", 2) == [min(2 * m, 2 * p)] * p or m < 2 * p - 1
    if m >= 2 * p:
        assert most("dualpipev", 2) == [2 * p + 1] * p
        for v in (2, 3):
            assert most("interleaved", v) == [(v + 1) * p - 2 * rank - 1 for rank in range(p)]
            assert most("interleaved", v)[0] == pytest.approx(p * v * (1 + (p - 1) / (p * v)))


def test_activations_over_time():
    of = simulate(SCHEDULES["1f1b"](2, 3))
    assert of.alive[1] == [(1, 1), (4, 0), (4, 1), (7, 0), (7, 1), (10, 0)]
    assert alive(of.lists)[0] == [1, 2, 1, 2, 1, 0]


def longest_path(groups, cost, send):
    """Return start and end of each instruction, by relaxation until nothing changes.

    groups: for each rank, tuples of instructions that begin together and end together.
    """
    rank_of = {(x.stage): rank for rank, order in enumerate(groups) for group in order for x in group}
    last = max(rank_of)
    made_by = {}
    for order in groups:
        for group in order:
            for x in group:
                made_by[x.stage, "FB"[not isinstance(x, F)] if not isinstance(x, W) else "W", x.microbatch] = x

    def before(x):
        s, m = x.stage, x.microbatch
        keys = {
            F: [(s - 1, "F", m)] if s else [],
            W: [(s, "B", m)],
        }.get(type(x), [(s, "F", m)] + [(s + 1, "B", m)] * (s < last))
        return [made_by[key] for key in keys]

    end = {x: 0.0 for order in groups for group in order for x in group}
    start = dict(end)
    changed = True
    while changed:
        changed = False
        for rank, order in enumerate(groups):
            for i, group in enumerate(order):
                begins = 0.0 if i == 0 else end[order[i - 1][0]]
                for x in group:
                    for need in before(x):
                        travels = send(need) if rank_of[need.stage] != rank else 0
                        begins = max(begins, end[need] + travels)
                ends = begins + sum(map(cost, group))
                changed |= ends != end[group[0]]
                start |= dict.fromkeys(group, begins)
                end |= dict.fromkeys(group, ends)
    return start, end


@settings(max_examples=500)
@given(LISTS, st.lists(st.lists(st.floats(0, 3), min_size=6, max_size=6), min_size=5, max_size=5))
def test_times_are_longest_paths_to_the_last_bit(lists, numbers):
    stages = 1 + max(x.stage for order in lists for x in order)
    costs = {name: row[:stages] for name, row in zip(("F", "B", "I", "W", "send"), numbers, strict=True)}
    assume(any(costs["F"]))  # a schedule that takes no time at all is refused
    of = simulate(lists, **costs)
    groups = [[(x,) for x in order] for order in lists]
    start, end = longest_path(groups, lambda x: costs[type(x).__name__][x.stage], lambda x: costs["send"][x.stage])
    assert (of.start, of.end) == (start, end)
    assert of.time == max(end.values())


@pytest.mark.parametrize("costs", [{"F": [1, 2]}, {"B": -1}, {"send": [1, 2, 3, float("nan")]}])
def test_impossible_costs_are_refused(costs):
    with pytest.raises(ValueError, match="give a time of at least 0, or one for each of the 4 stages"):
        simulate(SCHEDULES["1f1b"](4, 8), **costs)


def test_a_schedule_prints_as_it_would_run():
    assert repr(SCHEDULES["1f1b"](2, 2)).splitlines() == [
        "rank 0   0F0 0F1  ·   ·  0B0────  ·  0B1────",
        "rank 1    ·  1F0 1B0──── 1F1 1B1────",
        "time 9, ideal 6, bubble 50.0%; activations alive at most: 2 1",
    ]
    assert "0F10 " in repr(SCHEDULES["gpipe"](1, 11))
    assert repr(simulate(SCHEDULES["gpipe"](1, 1), F=0.25, B=0.5)).startswith("rank 0   0F0 0B0────\ntime 0.75")
