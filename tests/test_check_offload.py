"""The checks of notebook 07b against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, that of `labs.memory.offload`, and answers that go another way about it.  Wrong:
tests/wrong_answers/offload.py.
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from labs.kit import check, exercises
from labs.kit.checks.pencil.step_seconds import slots
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.offload import offloaded_step, step_seconds

CHECKS = ["offloaded_step", "step_seconds"]

# ---- right answers ---------------------------------------------------------------------------------------


def two_threads(due, fetch, update, store):
    """One that fetches and one that stores."""
    with ThreadPoolExecutor(1) as fetching, ThreadPoolExecutor(1) as storing:
        coming, going = None, None
        for i, following in pairwise([*due, None]):
            values = coming.result() if coming else fetch(i)
            coming = fetching.submit(fetch, following) if following is not None else None
            new = update(i, values)
            if going:
                going.result()
            going = storing.submit(store, i, new)
            del values, new
        if going:
            going.result()


def updated_in_the_thread(due, fetch, update, store):
    """The caller fetches and stores."""
    with ThreadPoolExecutor(1) as thread:
        last, values = None, fetch(due[0]) if due else None
        for n, i in enumerate(due):
            updating = thread.submit(update, i, values)
            if last:
                store(*last)
            last, values = None, fetch(due[n + 1]) if n + 1 < len(due) else None
            last = i, updating.result()
            del updating
        if last:
            store(*last)


def by_a_queue(due, fetch, update, store):
    """A thread that brings one after the other, as the caller has room; the first error is the caller's."""
    room, here, errors, todo = threading.Semaphore(2), queue.Queue(), [], queue.Queue()

    def bring():
        for i in due:
            room.acquire()
            try:
                here.put(fetch(i))
            except Exception as error:
                here.put(error)
                return

    def take():
        while (each := todo.get()) is not None:
            try:
                store(*each)
            except Exception as error:
                errors.append(error)
            del each

    threads = [threading.Thread(target=bring), threading.Thread(target=take)]
    for thread in threads:
        thread.start()
    try:
        for i in due:
            values = here.get()
            if isinstance(values, Exception):
                raise values
            values = update(i, values)
            todo.put((i, values))
            del values
            room.release()
    finally:
        todo.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def by_events(fetch, update, store):
    """The clocks of the caller and of the thread."""
    caller, thread = 0.0, sum(fetch[:1])
    come = thread
    for n, seconds in enumerate(update):
        caller = max(caller, come)
        thread = come = max(thread, caller) + sum(fetch[n + 1 : n + 2])
        caller += seconds
        thread = max(thread, caller) + store[n]
    return thread


def by_recursion(fetch, update, store):
    def rest(n, going):
        if n == len(update):
            return going
        return max(update[n], going + sum(fetch[n + 1 : n + 2])) + rest(n + 1, store[n])

    return sum(fetch[:1]) + rest(0, 0)


RIGHT = {
    "offloaded_step": (offloaded_step, exercises.offloaded_step, two_threads, updated_in_the_thread, by_a_queue),
    "step_seconds": (step_seconds, exercises.step_seconds, slots, by_events, by_recursion),
}


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    for fn, answer in zip(RIGHT[name], together([(name, (fn,), False) for fn in RIGHT[name]]), strict=True):
        assert answer.ok is True, f"{fn.__name__}: {answer}"


def test_what_they_say():
    assert str(check.step_seconds(step_seconds)) == "✓ step_seconds: right on all 15 examples"
    assert str(check.offloaded_step(offloaded_step)).startswith(
        "✓ offloaded_step: each fetch, and each store, beside an update; the state of "
    )


# ---- wrong answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name and answer.listed for answer in ANSWERS) >= 12
    assert let_past(name) == ""


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_beyond_the_list(name):
    assert let_past(name, listed=False) == ""


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args):
        raise NotImplementedError("your turn")

    assert getattr(check, name)(stub).ok is None


def test_what_does_not_end_is_told_in_time():
    def waits_for_ever(due, fetch, update, store):
        threading.Event().wait(0.1 if not due else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labs.kit.checks.launching.TIMEOUT", 2.0)
        answer = check.offloaded_step(waits_for_ever)
    assert answer.mistake == "it does not come to an end"
