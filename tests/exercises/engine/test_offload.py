"""A test of what the check of offloaded_step says of a step that hangs; its answers are in tests/exercises/offload."""

import threading

from labs.kit import check


def test_what_does_not_end_is_told_in_time(monkeypatch):
    def waits_for_ever(expected, fetch, update, store):
        threading.Event().wait(0.1 if not expected else None)

    monkeypatch.setattr("labs.exercises.engine.learner_job.SECONDS", 0.5)
    monkeypatch.setattr("labs.exercises.engine.learner_job.load", lambda: 0.0)
    answer = check.offloaded_step(waits_for_ever)
    assert answer.ok is None and answer.mistake == "not done in time"
