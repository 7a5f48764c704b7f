"""Each check draws its numbers anew when a learner calls it: whatever they are, right is right and wrong is wrong."""

import random

import pytest

from tests import (
    test_check_fsdp,
)
from tests.answers.together import together
from tests.wrong_answers.answers import ANSWERS, let_past

TIMES = 2  # each run of the soak draws others
RIGHT = [
    *((name, *functions) for name, _, functions in test_check_fsdp.RIGHT),
]
CHECKS = list(dict.fromkeys(answer.check for answer in ANSWERS))


def seeds() -> list[int]:
    drawn = [random.SystemRandom().randrange(10**6) for _ in range(TIMES)]
    print(f"seeds {drawn}")
    return drawn


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_by_other_numbers(name):
    for seed in seeds():
        assert let_past(name, seed=seed) == ""


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_by_other_numbers(name):
    for seed in seeds():
        for answer in together([(name, tuple(fns), False) for check, *fns in RIGHT if check == name], seed):
            assert answer.ok, answer
