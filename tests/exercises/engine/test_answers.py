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


def one_of_each(answers):
    """Return the first right answer, and the first wrong one with each name."""
    return [*{(answer.right, answer.mistake): answer for answer in reversed(answers)}.values()]


@of_each
def test_a_right_one_is_accepted_and_wrong_ones_called_by_their_names(name):
    """Try the answers to an exercise in the same jobs."""
    answers = EXERCISES[name].answers
    assert {answer.right for answer in answers} == {True, False}
    assert misjudged(one_of_each(answers)) == ""


@pytest.mark.depth
@of_each
def test_those_built_otherwise_too(name):
    assert misjudged(EXERCISES[name].answers) == ""


@pytest.mark.soak
@of_each
def test_by_other_numbers(name):
    """Expect the same verdicts whatever a check draws when a learner calls it."""
    for seed in (random.SystemRandom().randrange(10**6) for _ in range(TIMES)):
        print(f"seed {seed}")
        assert misjudged((EXERCISES | archived())[name].answers, seed) == ""
