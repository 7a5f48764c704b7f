"""Tests of the checker against a theorem: calls in one order, in which each rank issues its own, never hang.

The first call that is not done waits for no other one, so the order is sound under any rules.  Without one of its
parts, it is not.
"""

from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

from hypothesis import given, settings
from hypothesis import strategies as st

from labs.kit.nccl.calls import programs
from labs.kit.nccl.deadlock_replay import Replay, Rules
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.record import Recording
from labs.kit.watch.communication import Event

RANKS = 4
GROUPS = {"world": (0, 1, 2, 3), "again": (0, 1, 2, 3), "low": (0, 1), "even": (0, 2), "three": (1, 2, 3)}

COLLECTIVE = st.tuples(st.sampled_from(["all_reduce", "barrier"]), st.sampled_from(sorted(GROUPS)))
PAIR = st.tuples(st.integers(0, RANKS - 1), st.integers(1, RANKS - 1)).map(lambda a: (a[0], (a[0] + a[1]) % RANKS))
MESSAGE = st.tuples(st.just("message"), PAIR)
EXCHANGE = st.tuples(st.just("exchange"), st.lists(PAIR, min_size=1, max_size=5, unique=True))
ORDER = st.lists(COLLECTIVE | MESSAGE | EXCHANGE, min_size=1, max_size=10)


def part(rank, op, group, peer, now, is_waited_for, batch=None):
    size = 0 if op == "barrier" else 4
    waits = ((now, now + 0.5),) if is_waited_for else ()
    return Event(
        rank, op, "float32" if size else "", size, size, group, GROUPS[group], peer, now, now, waits, 0, "a.py:1 f",
        communicator=group, batch=batch,
    )  # fmt: skip


def events_of(order, waited):
    """Yield the recorded events of all ranks, which issue all their calls in this order. waited: whether they wait for
    each.
    """
    # otherwise a batch of a few ranks may be the first call of its group
    used = [("barrier", group) for group in GROUPS]
    for now, (what, who) in enumerate([*used, *order]):
        is_waited_for = now < len(used) or waited[now - len(used)]
        if what in ("message", "exchange"):
            batch = now if what == "exchange" else None
            for source, to in [who] if what == "message" else who:
                yield part(source, "send", "world", to, now, is_waited_for, batch)
                yield part(to, "recv", "world", source, now, is_waited_for, batch)
        else:
            for rank in GROUPS[who]:
                yield part(rank, what, who, None, now, is_waited_for)


JOB = st.tuples(ORDER, st.lists(st.booleans(), min_size=10, max_size=10)).map(lambda job: [*events_of(*job)])


def verdict_of(events):
    return would_hang(Recording("communication", RANKS, events))


@settings(max_examples=100)
@given(JOB)
def test_calls_in_one_order_are_sound(events):
    assert verdict_of(events).name == SOUND


@settings(max_examples=100)
@given(JOB, st.data())
def test_without_one_part_of_a_call_nothing_is_sound(events, data):
    missing = data.draw(st.sampled_from(range(len(events))))
    verdict = verdict_of(events[:missing] + events[missing + 1 :])
    assert verdict.name != SOUND and verdict.standstill is not None


@settings(max_examples=100)
@given(JOB, st.data())
def test_lenient_rules_pass_what_strict_rules_pass(events, data):
    """Check calls in any order."""
    times = data.draw(st.permutations([event.start for event in events]))
    moved = [replace(event, start=now, batch=None) for event, now in zip(events, times, strict=True)]
    moved = [replace(event, waits=((event.start, event.start + 0.5),) * len(event.waits)) for event in moved]
    moved.sort(key=attrgetter("start"))
    asked = programs(moved)
    for lazy in (False, True):
        stopped = [Replay(asked, range(RANKS), rules, lazy).stopped is not None for rules in Rules]
        assert all(kind <= strict for kind, strict in pairwise(stopped))
