"""Tests of labs.checkpoint.randomness: random numbers continue, and an invalid state changes nothing."""

import json
import random
import sys
from unittest import mock

import numpy.random
import pytest
import torch

from labs.checkpoint import random_state, set_random_state


def drawn():
    """Draw random numbers. random.gauss and numpy keep every second number for the next call."""
    python = [random.random(), random.gauss(0, 1)]
    return (
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
        python,
        numpy.random.rand(2).tolist(),
        numpy.random.randn(),
    )


def test_random_numbers_continue_as_they_would_have():
    for draws in range(3):  # each of them leaves half of a pair, or takes it
        state = json.loads(json.dumps(random_state()))
        expected = drawn()
        assert drawn() != expected
        set_random_state(state)
        assert drawn() == expected, draws


def test_numpy_is_imported_by_nobody_who_does_not_use_it():
    with mock.patch.dict(sys.modules):
        del sys.modules["numpy.random"]
        state = random_state()
        assert "numpy" not in state and "numpy.random" not in sys.modules
        set_random_state(state)
        assert "numpy.random" not in sys.modules


STATE = random_state()
OTHERS = [
    None,
    {},
    "a",
    {"cpu": STATE["cpu"]},
    STATE | {"cpu": 5},
    STATE | {"cpu": "AAAA"},
    STATE | {"cpu": STATE["cpu"][:-8]},
    STATE | {"cpu": "no base64"},
    STATE | {"python": [3, [1, 2], None]},
    STATE | {"python": [3, ["a"] * 625, None]},
    STATE | {"numpy": ["MT19937", [1], 2, 3, 4.0]},
    STATE | {"cuda": "AAAA"},
]


@pytest.mark.parametrize("state", OTHERS, ids=range(len(OTHERS)))
def test_an_invalid_state_is_refused_and_changes_nothing(state):
    before = random_state()
    with pytest.raises(
        ValueError, match=r"the state cannot be set here \(.*\): give one that random_state\(\) returned"
    ):
        set_random_state(state)
    assert random_state() == before
