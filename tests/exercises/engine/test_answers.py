"""Tests of every check on tests/answers: it accepts right answers and calls wrong ones by their names."""

import random

import pytest

from tests.answers import archived, exercises, misjudged

EXERCISES = exercises()
TIMES = 2  # each run of the soak draws others
of_each = pytest.mark.parametrize("name", EXERCISES)


@pytest.fixture(autouse=True)
def needs(name):
    EXERCISES[name].needs()


def one_of_each():
    """Return {exercise: wrong answers}: the first with each name, and of a name that several exercises have, the first
    in all of them.
    """
    known, found = set(), {}
    for name, exercise in EXERCISES.items():
        wrong = {answer.mistake: answer for answer in reversed(exercise.answers) if not answer.right}
        found[name] = [answer for mistake, answer in wrong.items() if mistake not in known]
        known |= wrong.keys()
    return found


@of_each
def test_wrong_ones_are_called_by_their_names(name):
    """Try the answers to an exercise in the same jobs.  The solved notebook shows that a right one is accepted."""
    answers = one_of_each()[name]
    assert answers and misjudged(answers) == ""


@pytest.mark.depth
@of_each
def test_right_ones_are_accepted_and_wrong_ones_called_by_their_names(name):
    answers = EXERCISES[name].answers
    assert {answer.right for answer in answers} == {True, False}
    assert misjudged(answers) == ""


@pytest.mark.soak
@of_each
def test_by_other_numbers(name):
    """Expect the same verdicts whatever a check draws when a learner calls it."""
    for seed in (random.SystemRandom().randrange(10**6) for _ in range(TIMES)):
        print(f"seed {seed}")
        assert misjudged((EXERCISES | archived())[name].answers, seed) == ""
