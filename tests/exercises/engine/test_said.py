"""Tests of what all checks say of jobs that fail, of values that are no functions, and of predictions."""

import contextlib
import math
import re
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labs import collectives, ddp
from labs.exercises.engine import learner_job
from labs.exercises.engine.learner_job import failed
from labs.kit import check
from labs.kit.launch import RankError
from tests.answers import exercises
from tests.answers.together import together
from tests.depth import deepen


def known():
    """Yield each exercise's name and the functions of a right answer, unless its extra is not installed."""
    for name, each in exercises().items():
        with contextlib.suppress(pytest.skip.Exception):
            each.needs()
            yield name, each.answers[0].functions


some_exercises = pytest.mark.parametrize("every", [3, *deepen(1)], ids=["some", "all"])

# ---- not yet ---------------------------------------------------------------------------------------------


def stub(*args, **kwargs):
    raise NotImplementedError("your turn")


def said_of(answers):
    """Return (exercise, what its check says) for pairs of an exercise and functions."""
    return list(zip((name for name, _ in answers), together([(*one, False) for one in answers]), strict=True))


@some_exercises
def test_an_untouched_stub_is_not_yet(every):
    """Try a stub; each notebook as shipped does so with every exercise."""
    for name, answer in said_of([(name, (stub,) * len(fns)) for name, fns in [*known()][::every]]):
        assert answer.ok is None and not answer
        assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


def test_half_of_an_answer_is_not_yet():
    pairs = [(name, fns) for name, fns in known() if len(fns) > 1]
    halves = [(name, (*fns[:i], stub, *fns[i + 1 :])) for name, fns in pairs for i in range(len(fns))]
    assert len(halves) > 8
    for name, answer in said_of(halves):
        assert answer.ok is None, (name, answer)


def test_a_stub_inside_of_a_wrapper_is_not_yet():
    class Stub(ddp.DataParallel):
        def average(self):
            raise NotImplementedError("your turn")

    assert check.buckets(Stub).ok is None


def test_another_not_implemented_error_is_a_mistake():
    def fn(x, group=None):
        raise NotImplementedError("could not run 'aten::add'")

    assert check.all_gather(fn).ok is False


# ---- what goes wrong ---------------------------------------------------------------------------------------


@some_exercises
def test_what_it_raises_is_told_with_its_line(every):
    """Expect the error, the line and the input."""

    def fn(*args, **options):
        return args[99]

    for name, answer in said_of([(name, (fn,) * len(fns)) for name, fns in [*known()][::every]]):
        assert answer.ok is False and "IndexError" in answer.text and "return args[99]" in answer.text, (name, answer)
        assert "float64" in answer.text or name != "reduce_scatter"


@pytest.mark.parametrize(
    "kind, said, question",
    [
        ("raised", "rank 0 of 2 failed: NameError: name 'math' is not defined", "This name is not known"),
        ("raised", "rank 0 of 2 failed: TypeError: 'tuple' object does not support item assignment", "What type does"),
        ("raised", "rank 0 of 2 failed: AttributeError: 'tuple' object has no attribute 'add_'", "What type does"),
        ("raised", "rank 0 of 2 failed: TypeError: fn() got an unexpected keyword argument 'group'", "Which arguments"),
        ("raised", "rank 0 of 2 failed: ValueError: TypeError: no", "What does this line assume"),
        ("mismatch", "rank 0 called all_reduce float32[4], rank 1 called all_reduce float64[4]", "The elements are"),
        ("mismatch", "rank 0 called all_reduce float32[4], rank 1 called all_reduce float64[5]", "How large"),
        ("mismatch", "rank 0 called all_gather float64[23], rank 1 called all_gather float64[7]", "How large"),
        ("mismatch", "rank 0 called broadcast int64[2] from 0, rank 1 called broadcast int64[2] from 1", "Which ranks"),
        ("mismatch", "rank 0 called all_gather float64[23], rank 1 called all_reduce float64[23]", "Which ranks take"),
        ("mismatch", "rank 0 called all_gather float64[23], rank 1 called barrier", "Which ranks take this line"),
        (
            "returned",
            "rank 3 returned without joining collective number 31 of all ranks, all_reduce",
            "Which ranks come",
        ),
        ("returned", "rank 1 returned without joining the send from rank 0", "How often does each rank send"),
    ],
)
def test_what_a_failed_job_is_asked(kind, said, question):
    assert failed(RankError(kind, (0,), said, []), "on 2 ranks").answer.question.startswith(question)


def test_a_hang_is_told_with_its_line():
    def fn(x, group=None):
        if dist.get_rank(group) != 1:
            dist.recv(x, group=group, group_src=1)

    answer = check.all_reduce(fn)
    assert answer.mistake == "one side of a message or a collective is missing"
    assert "rank 1 returned" in answer.text and "dist.recv(x, group=group, group_src=1)" in answer.text


def test_a_busy_machine_accuses_nobody(monkeypatch):
    """Expect no verdict on ranks that wait, since no clock on the wall knows why; the load and the cores are named."""
    monkeypatch.setattr(learner_job, "SECONDS", 0.3)
    monkeypatch.setattr(learner_job, "load", lambda: 0.0)
    answer = check.my_shard(lambda *given: time.sleep(60))
    first, *rest = str(answer).splitlines()
    assert answer.ok is None
    assert re.fullmatch(
        r"not yet: my_shard \(not done in time; this machine has a load of 0\.0, and \d+ cores\)", first
    )
    assert "the job was not done after 1.8 s" in rest[0] and rest[-1].startswith("  → Is the machine busy")
    monkeypatch.setattr(learner_job, "load", lambda: 14.0 * learner_job.cores())
    assert learner_job.patience(10) == 14 * 60


def test_a_loop_without_an_end_is_known_by_the_processors_clock(monkeypatch):
    """Expect the loop to be found whatever it catches, and where any error would be right."""

    def fn(*given):
        while True:
            try:
                math.sqrt(2)
            except Exception:  # this answer catches all that it can, and the check must still end it
                continue

    monkeypatch.setattr(learner_job, "SECONDS", 1.0)
    answers = [each(fn) for each in (check.my_shard, check.reduce_scatter)]
    for answer in answers:
        assert answer.mistake == "it does not come to an end" and answer.question.startswith("Which loop has no end")
        assert "NoEnd: its processor has computed for much longer" in answer.text and "in fn:" in answer.text


def test_one_that_ends_the_process():
    def fn(model):
        sys.exit(3)

    assert "exit(3)" in check.average_gradients(fn).text


@pytest.mark.skipif(sys.platform != "linux", reason="no other system keeps to the limit")
def test_far_too_much_memory_is_refused_with_its_line():
    """Allocate memory without writing to it: without the limit nobody else would lack it."""

    def fn(elements, ranks, rank, gigabytes):
        torch.empty(gigabytes << 30, dtype=torch.uint8)
        return 0, 0

    answers = [check.my_shard(partial(fn, gigabytes=size)) for size in (1, 3)]
    assert [answer.mistake == "far too much memory" for answer in answers] == [False, True]
    assert "can't allocate memory" in answers[1].text and "torch.empty(gigabytes << 30" in answers[1].text


@pytest.mark.parametrize("given", [None, 3, torch.ones(2)], ids=["None", "3", "a tensor"])
def test_something_that_is_no_function(given):
    answer = check.broadcast(given)
    assert answer.ok is False and "not a function" in answer.text


def test_one_that_cannot_be_sent_to_the_ranks():
    lock = threading.Lock()
    answer = check.all_gather(lambda x, group=None: lock.acquire())
    assert answer.ok is False and "variable 'lock'" in answer.text


def test_returned_of_a_wrong_type():
    def fn(x, group=None):
        collectives.reduce_scatter(x, group=group)
        return x.tolist()

    assert "returned a list" in check.reduce_scatter(fn).text


def test_a_changed_dtype():
    answer = check.reduce_scatter(lambda x, group=None: collectives.reduce_scatter(x, group=group).float())
    assert answer.mistake == "the dtype changed"


def test_the_same_seed_gives_the_same_answer():
    def fn(x, group=None):
        x += 1

    first, again, other = (check.all_reduce(fn, seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.text != other.text


# ---- predictions -------------------------------------------------------------------------------------------


def test_a_prediction():
    assert check.predict("How many?", None, answer=4).ok is None
    assert check.predict("How many?", 4, answer=4).ok
    assert check.predict("How many?", 4.1, answer=4).ok
    wrong = check.predict("How many?", 5, answer=4, unit="B", reason="Two for each of two.")
    assert str(wrong) == "✗ predict: How many? 4 B. You said 5 B. Two for each of two."
    assert str(check.predict("How many?", 4, answer=4, unit="B")) == "✓ predict: How many? 4 B."
    assert "4" not in str(check.predict("How many?", None, answer=4))
    assert check.predict("How many?", "four", answer=4).ok is False
    assert check.predict("How many?", 0, answer=0, tolerance=0).ok


def test_the_page_shows_the_same_words():
    answer = check.predict("Is 1 < 2 & 3?", 1, answer=2)
    page = answer._repr_html_()
    assert "Is 1 &lt; 2 &amp; 3?" in page and "You said 1." in page
