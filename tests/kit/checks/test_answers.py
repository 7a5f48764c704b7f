"""Each check accepts right answers, however they are built, and calls wrong ones by their names: tests/answers."""

import random

import pytest

from tests.answers import exercises, misjudged, short

EXERCISES = exercises()
TIMES = 2  # each run of the soak draws others
of_each = pytest.mark.parametrize("name", EXERCISES)


@pytest.fixture(autouse=True)
def needs(name):
    EXERCISES[name].needs()


@of_each
def test_right_answers_are_accepted(name):
    answers = [answer for answer in short(EXERCISES[name].answers) if answer.right]
    assert answers and misjudged(answers) == ""


@of_each
def test_wrong_answers_are_called_by_their_names(name):
    answers = [answer for answer in short(EXERCISES[name].answers) if not answer.right]
    assert answers and misjudged(answers) == ""


@pytest.mark.soak
@of_each
def test_by_other_numbers(name):
    """Whatever a check draws when a learner calls it, right is right and wrong is wrong."""
    for seed in (random.SystemRandom().randrange(10**6) for _ in range(TIMES)):
        print(f"seed {seed}")
        assert misjudged(EXERCISES[name].answers, seed) == ""
