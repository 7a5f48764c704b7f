"""Tests of recordings: marks, spans and events, and the questions that a recording answers."""

from collections import Counter

import pytest

from labs.kit.record import PASSES, Recording, Span, TimePass, join, mark, span
from labs.kit.watch.communication import Event
from tests.kit.watch.common import recording


# ---- marks, spans, joining -------------------------------------------------------------------------------
def tape(start, end, marks=(), spans=()):
    return {"start": start, "end": end, "marks": list(marks), "spans": list(spans), "watched": None}


def test_marks_cut_time_into_steps_and_phases():
    marks = [("step", 10), ("forward", 12), ("backward", 14), ("step", 20), ("forward", 21), ("end", 25)]
    seen = join("time", [tape(5, 30, marks, [("inner", 13, 14)]), tape(6, 40, [("step", 8)])])
    spans = {(s.rank, s.name, round(s.start * 1e9), round(s.end * 1e9)) for s in seen.spans}
    assert spans == {
        (0, "step", 5, 15),
        (0, "forward", 7, 9),
        (0, "inner", 8, 9),
        (0, "backward", 9, 15),
        (0, "step", 15, 20),
        (0, "forward", 16, 20),
        (1, "step", 3, 35),
    }
    assert seen.steps == 2 and repr(seen) == "Recording(time, 2 ranks, 2 steps, 7 spans)"


def test_marks_outside_of_a_pass_do_nothing():
    mark("step")
    with span("forward"):
        pass
    assert TimePass.active is None


def test_a_pass_ends_with_its_function_even_when_that_raises():
    for kind in PASSES:
        with pytest.raises(ZeroDivisionError), PASSES[kind]():
            mark("step")
            1 / 0  # noqa: B018
        assert TimePass.active is None


def marked(steps):
    for _ in range(steps):
        mark("step")
        with span("inside"):
            mark("forward")


def test_time_pass_brings_spans_of_all_ranks():
    seen = recording(marked, 2, record="time")
    assert Counter((s.rank, s.name) for s in seen.spans) == Counter(
        {(rank, name): 2 for rank in (0, 1) for name in ("step", "forward", "inside")}
    )
    assert seen.events == [] and seen.memory == []


def test_questions_that_a_recording_cannot_answer():
    seen = Recording("communication", 2, [], [Span(0, "step", 0.0, 1.0)])
    with pytest.raises(ValueError, match="rank 0 marked 1 steps"):
        seen.sent(0, step=1)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        seen.counts(2)
    with pytest.raises(ValueError, match='record="memory"'):
        seen.held()


ZEROS = dict.fromkeys(("P", "G", "S", "A", "comm", "temporary"), 0)


def of_memory(steps, moments):
    return Recording("memory", 1, spans=steps, memory=[[(t, ZEROS | held) for t, held in moments]])


def test_held_over_a_step_counts_what_was_there_as_it_began():
    steps = [Span(0, "step", 1.0, 2.0), Span(0, "step", 2.0, 3.0)]
    moments = [
        (0.5, {"P": 4, "A": 0}),
        (1.5, {"P": 4, "A": 9}),
        (1.6, {"P": 4, "A": 1}),
        (2.5, {"P": 3, "A": 1}),
    ]
    seen = of_memory(steps, moments)
    assert seen.held() == ZEROS | {"P": 4, "A": 9, "peak": 13}
    assert seen.held(step=1) == ZEROS | {"P": 4, "A": 1, "peak": 5}


def test_a_steady_step_holds_the_least_of_all_but_the_first():
    steps = [Span(0, "step", float(start), start + 1.0) for start in (1, 2, 3)]
    moments = [(1.5, {"G": 1}), (2.5, {"G": 7}), (3.1, {"G": 5})]
    seen = of_memory(steps, moments)
    assert [seen.held(step=step)["G"] for step in range(3)] == [1, 7, 7]
    assert seen.steady() == ZEROS | {"G": 7, "peak": 7}
    with pytest.raises(ValueError, match="this recording has 1 steps"):
        Recording("memory", 1, spans=steps[:1], memory=[[]]).steady()


def test_what_some_kinds_held_during_a_step():
    steps = [Span(0, "step", 1.0, 2.0), Span(0, "step", 2.0, 3.0)]
    moments = [(0.5, {"P": 4, "A": 1}), (1.5, {"P": 4, "A": 9}), (1.6, {"P": 4, "G": 2}), (2.0, {"G": 3})]
    seen = of_memory(steps, moments)
    assert seen.during(0, 0, ("G", "A")) == [(1.0, 1), (1.5, 9), (1.6, 2)]
    assert seen.during(0, 1) == [(2.0, 6), (2.0, 3)]
    assert seen.during(0, None, ("P",)) == [(0.0, 0), (0.5, 4), (1.5, 4), (1.6, 4), (2.0, 0)]
    with pytest.raises(ValueError, match="step 2: rank 0 marked 2 steps"):
        seen.during(0, 2)


class Walked(list):
    """A list that counts how often it is walked from end to end."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_many_steps_are_looked_at_once():
    """Check that each list is walked once; otherwise, asking step by step would take a time quadratic in the steps."""
    steps = Walked(Span(0, "step", float(start), start + 1.0) for start in range(50))
    line = Walked((start + 0.5, ZEROS | {"G": 7}) for start in range(50))
    events = Walked(
        Event(0, "all_reduce", "float32", 4, 4, "g", (0, 1), None, step + 0.1, step + 0.2, (), 4, "x.py:1 f", step)
        for step in range(50)
    )
    memory = Recording("memory", 1, spans=steps, memory=[line])
    assert memory.steady()["G"] == 7 and steps.walks == 1 and line.walks == 0
    communication = Recording("communication", 1, events, steps)
    assert [communication.sent(0, step) for step in range(50)] == [4] * 50 and events.walks == 1


def test_it_draws_itself():
    event = Event(0, "all_reduce", "float32", 4, 4, "g", (0, 1), None, 0.1, 0.2, (), 4, "x.py:1 f", 0)
    seen = Recording("communication", 2, [event], [Span(0, "forward", 0.0, 0.1)])
    assert "data:image/png" in seen._repr_mimebundle_()["text/html"]
