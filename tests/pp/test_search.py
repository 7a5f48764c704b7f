"""Tests of labs.pp.search.

References: all lists for a few ranks and micro-batches, one after the other, in which micro-batches are distinguished;
published schedules and their closed forms; and, for the results, the numbers of one process in a real job.
"""

import random
import re
from contextlib import suppress
from itertools import pairwise, product

import pytest
import torch

from labs.kit.launch import run
from labs.pp import SCHEDULES, B, F, I, W, WrongSchedule, alive, simulate
from labs.pp.search import search
from tests.pp.trainings import SMALL, expected, largest_difference, piped


def merged(queues):
    """Yield all ways to merge these queues, each of which stays in order."""
    queues = [queue for queue in queues if queue]
    if not queues:
        yield []
    for number, (first, *others) in enumerate(queues):
        for rest in merged([*queues[:number], others, *queues[number + 1 :]]):
            yield [first, *rest]


def all_lists(rank, microbatches, split, most, told_apart):
    """Yield all lists of one rank: each micro-batch in its own order, before or after any other; or each kind in its
    own.
    """
    kinds = (F, I, W) if split else (F, B)
    each = [[kind(rank, m) for kind in kinds] for m in range(microbatches)]
    orders = merged(each if told_apart else list(map(list, zip(*each, strict=True))))
    for order in orders:
        in_its_own_order = all(order.index(a) < order.index(b) for one in each for a, b in pairwise(one))
        if in_its_own_order and max(alive([order])[0]) <= most:
            yield order


def least_time(limits, costs, *case):
    times = []
    for lists in product(*(list(all_lists(rank, *case[:2], most, case[2])) for rank, most in enumerate(limits))):
        with suppress(WrongSchedule):
            times.append(simulate(lists, **costs).time)
    return min(times)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "split", "told_apart", "times"),
    [
        (1, 2, True, True, 4),
        (2, 2, False, True, 4),
        (2, 2, True, True, 3),
        (3, 2, False, True, 3),
        (2, 3, False, True, 1),
        (2, 3, True, False, 2),
        (3, 3, False, False, 4),
        (4, 2, True, False, 2),
    ],
)
def test_no_list_is_faster_than_the_one_found(ranks, microbatches, split, told_apart, times):
    draw = random.Random(ranks * microbatches)
    for _ in range(times):
        costs = {name: [draw.choice([0, 1, 1.5, 2, 4]) for _ in range(ranks)] for name in "FBIW"}
        costs["send"] = [draw.choice([0, 0.25, 1]) for _ in range(ranks)]
        limits = [draw.randint(1, microbatches) for _ in range(ranks)]
        best = search(ranks, microbatches, limits, split, **costs)
        assert best.proven and best.simulation.time == simulate(best.schedule, **costs).time
        assert best.at_least == pytest.approx(least_time(limits, costs, microbatches, split, told_apart), rel=1e-12)
        assert all(max(rank) <= most for rank, most in zip(alive(best.schedule), limits, strict=True))


# ---- known optima ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 2), (3, 6), (4, 6)])
def test_whole_backwards_leave_a_bubble_whatever_may_be_alive(p, m):
    """Check 1F1B's bubble, (p - 1) / m: its last rank has to wait for the first F, and all others for the last B."""
    for limits in ([min(m, p - rank) for rank in range(p)], m):
        best = search(p, m, limits)
        assert best.proven and best.simulation.bubble == pytest.approx((p - 1) / m)
        assert best.simulation.time == simulate(SCHEDULES["1f1b"](p, m)).time


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (6, 10)])
def test_zero_bubble(p, m):
    """Check ZB-H1 with its p activations alive, and ZB-H2 with its 2 p - 1.

    Under ZB-H2 ranks that have begun never wait, and the last one begins after p - 1 Fs.  Source: Qi et al. 2023,
    arXiv 2401.10241, section 2.
    """
    costs = {"F": 2, "B": 5, "I": 3, "W": 2}
    ideal = 7 * m
    h1, h2 = (search(p, m, most, split=True, **costs) for most in (p, 2 * p - 1))
    assert h1.proven and h1.simulation.time == simulate(SCHEDULES["zb1p"](p, m), **costs).time
    assert h1.simulation.time == ideal + (p - 1) * (2 + 3 - 2)
    assert h2.proven and h2.simulation.time == ideal + (p - 1) * 2
    for rank, order in enumerate(h2.schedule):
        assert h2.simulation.start[F(rank, 0)] == 2 * rank and order


def test_where_messages_take_time_published_schedules_can_be_beaten():
    """Check that one or two more Fs at the start than 1F1B's, one per later rank, avoid waits for messages."""
    of_1f1b = simulate(SCHEDULES["1f1b"](4, 6), send=0.5)
    same, more = (search(4, 6, most, send=0.5) for most in ([4, 3, 2, 1], [5, 4, 3, 1]))
    assert same.proven and same.simulation.time == of_1f1b.time == 33
    assert more.proven and more.simulation.time == 30


# ---- the search itself -----------------------------------------------------------------------------------

HARD = {"F": [1, 3, 5, 2], "I": [2, 3, 3, 3], "W": [2, 5, 3, 5], "send": 2}


def test_it_stops_and_says_so():
    stopped = search(4, 6, [6, 4, 3, 6], split=True, **HARD, beginnings=100)
    assert not stopped.proven and (stopped.simulation.time, stopped.at_least) == (85, 81)
    assert repr(stopped).splitlines()[-1] == (
        "the search stopped at 100 beginnings: there may be lists that take less time, down to 81; give it more "
        "`beginnings`, or fewer ranks or micro-batches"
    )
    best = search(4, 6, [6, 4, 3, 6], split=True, **HARD)
    assert best.proven and best.simulation.time == 83 and 100 < best.looked_at < 10_000
    assert repr(best).startswith("rank 0   0F0") and repr(best).endswith(f"(beginnings looked at: {best.looked_at})")
    assert len(search(4, 6, 6, split=True, **HARD, beginnings=0).schedule) == 4  # the search always finds some lists


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((4, 6, 0), "most_alive=0: give 1 or more, or a number for each of 4 ranks"),
        ((4, 6, [4, 3, 2]), "most_alive=[4, 3, 2]: give 1 or more, or a number for each of 4 ranks"),
        ((0, 6, 1), "ranks is 0: search takes 1 or more"),
        ((4, 0, 1), "microbatches is 0: search takes 1 or more"),
    ],
)
def test_sizes_that_do_not_fit(sizes, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        search(*sizes)


def found(reference, lists):
    assert largest_difference(piped(SMALL, torch.float32, lists), reference) == 0


def test_the_schedule_found_runs():
    case = SMALL, torch.float32, 6
    lists = search(4, 6, [4, 3, 3, 2], split=True, send=0.2).schedule
    assert lists not in [list(schedule(4, 6)) for name, schedule in SCHEDULES.items() if name in ("1f1b", "zb1p")]
    run(found, expected(case)[case], lists, ranks=4)
