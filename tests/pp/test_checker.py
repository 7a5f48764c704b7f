"""Tests of labs.pp.checker: it refuses lists exactly if they cannot be run, and says why."""

import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labs.pp import B, F, I, Schedule, W, WrongSchedule, simulate, validate
from labs.pp.checker import in_order
from tests.pp.common import DICE, LISTS, changed


def can_be_run(lists):
    """Return whether the graph of all "must come before" has a topological order."""
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
    refused = []

    @settings(max_examples=600)
    @given(LISTS, DICE, st.integers(0, 2))
    def holds(lists, draw, way):
        validate(lists)
        assert can_be_run(lists) and sum(1 for _ in in_order(lists)) == sum(map(len, lists))
        for order in lists:
            if way:  # two neighbours exchanged, or all instructions in any order
                i = draw.randrange(len(order)) if order else 0
                order[i : i + 2] = reversed(order[i : i + 2])
            else:
                draw.shuffle(order)
        refused.append(not can_be_run(lists))
        if not refused[-1]:
            validate(lists)
            return
        with pytest.raises(WrongSchedule, match=r"^(rank . runs|ranks wait for each other)") as error:
            validate(lists)
        assert lists[error.value.rank][error.value.place] in lists[error.value.rank]

    holds()
    assert 100 < sum(refused) < len(refused) - 100


@settings(max_examples=200)
@given(LISTS, DICE)
def test_lists_without_an_instruction_or_with_one_twice_are_refused(lists, draw):
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
