"""labs.pp without a process: lists, their check, their times.

References: the lists that PyTorch's schedules print; published closed forms and tables, each named where it is used;
and for times and for what can be run, a longest path and a topological order that are written here, by their own rules.
"""

import csv
import io
import random
import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed.pipelining.schedules as theirs
from torch.distributed.pipelining import PipelineStage

from labs import pp
from labs.pp import SCHEDULES, B, F, I, Schedule, W, WrongSchedule, alive, read, read_csv, simulate, validate
from labs.pp.checker import in_order

PYTORCHS = {
    "gpipe": (theirs.ScheduleGPipe, [1]),
    "1f1b": (theirs.Schedule1F1B, [1]),
    "interleaved": (theirs.ScheduleInterleaved1F1B, [2, 3, 4]),
    "zb1p": (theirs.ScheduleInterleavedZeroBubble, [1, 2, 3]),
    "zbv": (theirs.ScheduleZBVZeroBubble, [2]),
    "dualpipev": (theirs.ScheduleDualPipeV, [2]),
}


def pytorchs(name, ranks, microbatches, stages_per_rank):
    """PyTorch's schedule; its stages have no model, and are on no rank."""
    kind, _ = PYTORCHS[name]
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * stages_per_rank
    single = issubclass(kind, theirs.PipelineScheduleSingle)
    return kind(stage if single else [stage] * stages_per_rank, microbatches)


def printed(schedule):
    """As text, a row for each rank."""
    file = io.StringIO()
    csv.writer(file).writerows(schedule.pipeline_order[rank] for rank in sorted(schedule.pipeline_order))
    return file.getvalue().splitlines()


# ---- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_are_those_that_pytorch_prints(name):
    compared = 0
    for stages_per_rank in PYTORCHS[name][1]:
        for ranks in (1, 2, 3, 4):
            for microbatches in (1, 3, 4, 7, 8, 10):
                try:
                    text = printed(pytorchs(name, ranks, microbatches, stages_per_rank))
                except ValueError:
                    continue  # sizes that it refuses, or that its list is wrong for
                expected = read_csv(text)
                ours = list(SCHEDULES[name](ranks, microbatches, stages_per_rank))
                # PyTorch 2.13 runs 1F1B rightly on the last rank, but prints another list there.
                last = ranks - 1 if name == "1f1b" else ranks
                assert ours[:last] == expected[:last], (ranks, microbatches, stages_per_rank)
                compared += 1
    assert compared >= 9


def test_warm_up_is_clamped_where_there_are_few_micro_batches():
    assert SCHEDULES["1f1b"](4, 2)[0] == [F(0, 0), F(0, 1), B(0, 0), B(0, 1)]
    for name in SCHEDULES:
        for ranks in range(1, 6):
            for microbatches in range(1, 10):
                try:
                    SCHEDULES[name](ranks, microbatches)  # is checked as it is made
                except ValueError as refused:
                    assert not isinstance(refused, WrongSchedule)


def test_text_and_back():
    for x in (F(2, 0), B(0, 13), I(11, 1), W(3, 3)):
        assert read(repr(x)) == x and hash(read(repr(x))) == hash(x)
    assert repr([F(2, 0), I(2, 0)]) == "[2F0, 2I0]"
    assert F(1, 2) != B(1, 2) and {F(1, 2), F(1, 2)} == {F(1, 2)}
    for text in ("2G0", "F0", "2F", "", "2F0;3B1", "-1F0"):
        with pytest.raises(ValueError, match=re.escape(f"{text!r} is no instruction: write stage, F, B, I or W, and")):
            read(text)
    with pytest.raises(ValueError, match=r"-1F0: stages and micro-batches are counted from 0"):
        F(-1, 0)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["interleaved", "zb1p", "zbv", "dualpipev"])
def test_pytorchs_files_are_read(name, form, tmp_path: Path):
    schedule = pytorchs(name, 4, 8, 2)
    schedule._dump_csv(tmp_path / "schedule.csv", format=form)
    with (tmp_path / "schedule.csv").open(newline="") as file:
        assert read_csv(file) == list(SCHEDULES[name](4, 8, 2))


def test_a_cell_that_is_no_instruction_is_named():
    assert read_csv(["0F0,,0UNSHARD,0SEND_F0,(0F1;1B0)OVERLAP_F_B, 0REDUCE_GRAD"]) == [[F(0, 0), F(0, 1), B(1, 0)]]
    assert read_csv(["0F0,0WAIT_SEND_F0,0WAIT_REDUCE_GRAD"]) == [[F(0, 0)]]  # as PyTorch 2.15 writes
    with pytest.raises(ValueError, match="'0X0' is no instruction"):
        read_csv(["0F0,0X0"])


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("gpipe", (4, 8, 2), "stages_per_rank is 2: gpipe takes 1"),
        ("interleaved", (4, 8, 1), "stages_per_rank is 1: interleaved takes 2 or more"),
        (
            "interleaved",
            (4, 9, 2),
            "interleaved: 9 micro-batches do not make 2 equal rounds of 4 ranks or more: give 8 or 10",
        ),
        ("zb1p", (2, 7, 2), "zb1p: 7 micro-batches do not make 3 equal rounds of 2 ranks or more: give 6 or 9"),
        ("zbv", (4, 8, 3), "stages_per_rank is 3: zbv takes 2"),
        ("dualpipev", (4, 7, 2), "dualpipev on 4 ranks takes 8 micro-batches or more, not 7"),
        ("1f1b", (0, 8, 1), "ranks is 0: 1f1b takes 1 or more"),
        ("1f1b", (4, 0, 1), "microbatches is 0: 1f1b takes 1 or more"),
        ("gpipe", (2.0, 4), "ranks is 2.0: gpipe takes a whole number"),
        ("gpipe", (2, True), "microbatches is True: gpipe takes a whole number"),
    ],
)
def test_sizes_that_do_not_fit(name, sizes, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SCHEDULES[name](*sizes)


# ---- times -----------------------------------------------------------------------------------------------------------

P_AND_M = [(1, 1), (1, 5), (2, 4), (3, 6), (4, 4), (4, 8), (8, 16)]


@pytest.mark.parametrize(("p", "m"), P_AND_M)
def test_bubbles_are_the_published_ones(p, m):
    """(p - 1) / m and (p - 1) / (v m): Narayanan et al. 2021, arXiv 2104.04473, section 2.2, equations of t_pb / t_id.

    ZB-H1, (p - 1)(F + I - W): Qi et al. 2023, arXiv 2401.10241, table 2, and the README of DeepSeek's DualPipe, which
    writes it (PP - 1)(F + B - 2W).  It holds where W is not longer than F, nor than I.
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
    """ZB-V, no bubble: arXiv 2401.10241, section 6, where F = I = W, and a rank's time counts from its own beginning.

    DualPipeV, (PP / 2 - 1)(F&B + B - 3W) with PP / 2 ranks, where a pair F&B takes F + B and is one step: the README of
    DeepSeek's DualPipe.  Here a pair is two steps, and what the first one makes goes before the second.
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
    """1F1B: arXiv 2104.04473, section 2.2.1.  Interleaved, on the first rank L (1 + (p - 1) / (p v)) layers:
    Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3.  ZB-H1 and ZB-V, as 1F1B: arXiv 2401.10241, table 2 and
    section 6.  DualPipeV, PP + 1 where PP = 2 p: the README of DeepSeek's DualPipe.
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
    """Start and end of each instruction, by relaxation until nothing changes.

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


def random_lists(draw):
    """A schedule that can be run: all that there is to do, in any order that is possible."""
    ranks = draw.randint(1, 4)
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 5)
    rank_of = [draw.randrange(ranks) for _ in range(stages)]
    split = draw.choice([0, 0.5, 1])
    lists, ready = [[] for _ in range(ranks)], [F(0, m) for m in range(microbatches)]
    while ready:
        x = ready.pop(draw.randrange(len(ready)))
        lists[rank_of[x.stage]].append(x)
        s, m = x.stage, x.microbatch
        if isinstance(x, F):
            follows = [F(s + 1, m)] if s + 1 < stages else [(I if draw.random() < split else B)(s, m)]
        else:
            follows = [(I if draw.random() < split else B)(s - 1, m)] if s and not isinstance(x, W) else []
            follows += [W(s, m)] if isinstance(x, I) else []
        ready += follows
    return lists


def test_times_are_longest_paths_to_the_last_bit():
    draw = random.Random(0)
    for _ in range(1000):
        lists = random_lists(draw)
        stages = 1 + max(x.stage for order in lists for x in order)
        costs = {name: [draw.uniform(0, 3) for _ in range(stages)] for name in ("F", "B", "I", "W", "send")}
        of = simulate(lists, **costs)
        groups = [[(x,) for x in order] for order in lists]
        start, end = longest_path(
            groups,
            lambda x, costs=costs: costs[type(x).__name__][x.stage],
            lambda x, costs=costs: costs["send"][x.stage],
        )
        assert (of.start, of.end) == (start, end)
        assert of.time == max(end.values())


@pytest.mark.parametrize("costs", [{"F": [1, 2]}, {"B": -1}, {"send": [1, 2, 3, float("nan")]}])
def test_costs_that_cannot_be(costs):
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


# ---- what can be run -------------------------------------------------------------------------------------------------


def can_be_run(lists):
    """Whether a graph, with an edge to each instruction from all that must be before it, has a topological order."""
    stages = 1 + max(x.stage for order in lists for x in order)
    all_of_it = {x for order in lists for x in order}
    graph = {x: set() for x in all_of_it}
    for order in lists:
        for first, second in pairwise(order):
            graph[second].add(first)
    for x in all_of_it:
        s, m = x.stage, x.microbatch
        if isinstance(x, F) and s:
            graph[x].add(F(s - 1, m))
        if isinstance(x, W):
            graph[x].add(I(s, m))
        if isinstance(x, B | I):
            graph[x] |= {F(s, m)} | ({B(s + 1, m), I(s + 1, m)} & all_of_it if s + 1 < stages else set())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


def test_lists_are_refused_if_and_only_if_they_have_no_order():
    draw, refused = random.Random(1), 0
    for number in range(600):
        lists = random_lists(draw)
        validate(lists)
        assert can_be_run(lists) and sum(1 for _ in in_order(lists)) == sum(map(len, lists))
        for order in lists:
            if number % 3:  # two neighbours exchanged; or all of them in any order
                i = draw.randrange(len(order)) if order else 0
                order[i : i + 2] = reversed(order[i : i + 2])
            else:
                draw.shuffle(order)
        if can_be_run(lists):
            validate(lists)
            continue
        refused += 1
        with pytest.raises(WrongSchedule, match=r"^(rank . runs|ranks wait for each other)") as error:
            validate(lists)
        assert lists[error.value.rank][error.value.place] in lists[error.value.rank]
    assert 200 < refused < 500


def test_lists_without_an_instruction_or_with_one_twice_are_refused():
    draw = random.Random(2)
    for _ in range(200):
        lists = random_lists(draw)
        order = draw.choice([order for order in lists if order])
        taken = order.pop(draw.randrange(len(order)))
        if any(lists):
            lost_stage = all(x.stage < taken.stage for each in lists for x in each)
            lost_batch = all(x.microbatch < taken.microbatch for each in lists for x in each)
            if not (lost_stage or lost_batch):
                with pytest.raises(WrongSchedule):
                    validate(lists)
        order += [taken, taken]
        with pytest.raises(WrongSchedule, match="the same work"):
            validate(lists)


def changed(name, *changes, sizes=(2, 3)):
    """A schedule in which these (rank, from, to) have been moved, or, where there is no `to`, left out."""
    lists = [list(order) for order in SCHEDULES[name](*sizes)]
    for rank, place, *to in changes:
        x = lists[rank].pop(place)
        if to:
            lists[rank].insert(to[0], x)
    return lists


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        (
            [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 1), B(1, 0), F(1, 0), B(1, 1)]],
            "rank 1 runs 1B0 at its 2nd place, but 1F0, which it needs, stands at its 3rd",
        ),
        (changed("zb1p", (0, 6, 3)), "rank 0 runs 0W1 at its 4th place, but 0I1, which it needs, stands at its 7th"),
        (
            [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]],
            "ranks wait for each other: rank 0 comes to 0B0 at its 2nd place, which needs 1B0, rank 1's 3rd; "
            "rank 1 comes to 1F1 at its 2nd place, which needs 0F1, rank 0's 3rd",
        ),
        (changed("1f1b", (1, 2)), "1F1 is missing: each of 3 micro-batches goes forward through each of 2 stages"),
        (
            changed("1f1b", (1, 3)),
            "rank 1 runs 1F1 at its 3rd place, and no 1B1 follows it",
        ),
        (
            changed("zb1p", (0, -1)),
            "rank 0 runs 0I2 at its 8th place, and 0W2, the other half of the backward, is missing",
        ),
        (
            [[F(0, 0), B(0, 0), W(0, 0)]],
            "rank 0 runs 0B0 at its 2nd place, which is all of the backward: 0W0 is one too many",
        ),
        (
            [[F(0, 0), I(0, 0), W(0, 0), B(0, 0)]],
            "rank 0 runs 0B0 at its 4th place, and 0I0, the same work, at its 2nd",
        ),
        (
            [[F(0, 0), B(0, 0)], [F(0, 1), B(0, 1)]],
            "rank 1 runs 0F1 at its 1st place, but stage 0 is on rank 0",
        ),
        ([["0F0"]], "rank 0 runs '0F0' at its 1st place, which is no instruction: write it as F(stage, microbatch)"),
        ([[], []], "the schedule is empty: give each rank's list instructions, such as F(stage, microbatch)"),
        ([F(0, 0), B(0, 0)], "[0F0, 0B0] is no schedule: it is a list for each rank, such as [F(0, 0), B(0, 0)]"),
        (None, "None is no schedule: it is a list for each rank, such as [F(0, 0), B(0, 0)]"),
    ],
)
def test_why_a_list_cannot_be_run(lists, text):
    with pytest.raises(WrongSchedule, match=f"^{re.escape(text)}$"):
        validate(lists)
    with pytest.raises(WrongSchedule):
        simulate(lists)


def test_any_lists_become_a_schedule_or_are_refused():
    assert Schedule(changed("gpipe", (1, 3, 1))) == [
        [F(0, 0), F(0, 1), F(0, 2), B(0, 0), B(0, 1), B(0, 2)],
        [F(1, 0), B(1, 0), F(1, 1), F(1, 2), B(1, 1), B(1, 2)],
    ]
    with pytest.raises(WrongSchedule):
        Schedule(changed("gpipe", (1, 3, 0)))


def test_all_names_are_at_hand():
    assert pp.gpipe(2, 2) == pp.SCHEDULES["gpipe"](2, 2)
