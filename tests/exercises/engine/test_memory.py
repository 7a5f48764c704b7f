"""Tests of what the checks of notebook 07 say; their answers are in tests/exercises/memory.

The bytes that a check measures are held to the table of labs/memory/recompute.py, which tests/memory/test_recompute.py
derives.
"""

import pytest
import torch

from labs.kit import check
from labs.memory import recompute
from tests.exercises.memory.checkpoint import ck_torch_forgetful


def test_a_stub_inside_of_a_hook_is_not_yet():
    def checkpoint(layer, x):
        def unpack(number):
            raise NotImplementedError("your turn")

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 0, unpack):
            return layer(x)

    assert check.checkpoint(checkpoint).ok is None


def test_both_budgets_and_the_measure_of_them():
    answer = check.place_checkpoints(lambda model: recompute.recompute(model.layers.values()), seed=1)
    assert str(answer).splitlines() == [
        "✗ place_checkpoints: too much is computed again",
        "  the step holds 0.20 × as much as before (0.07 × when backward begins); the budget is 0.40 ×",
        "  1.00 × the layers' forward is computed again; the budget is 0.50 ×",
        "  → Which operations are expensive to compute, and which only expensive to keep?",
        "  (for the same numbers again: seed=1)",
    ]


def test_what_is_kept_is_what_the_table_says():
    """Derive the 0.07 × that are held as backward begins.

    Each of 8 layers holds D numbers per token, instead of 9D + 2KE + H + 4F + 2; the head is the same.
    """
    D, KE, H, F, V = 64, 32, 4, 160, 32
    head = D + V + 2 * D + 1 + D  # input and logarithms, the last norm and its output, x
    kept, before = 8 * D + head, 8 * (9 * D + 2 * KE + H + 4 * F + 2) + head
    assert kept / before == pytest.approx(0.07, abs=0.01)


def test_a_result_that_is_thrown_away_is_spoken_of():
    answer = check.place_checkpoints(lambda model: torch.nn.Identity())
    assert answer.mistake == "nothing is recomputed"
    assert "returned a Identity; what counts is the model that it was given" in answer.text


def test_the_random_numbers_are_named_only_where_they_matter():
    """Expect the text to name the case with dropout: without dropout all is right."""
    answer = check.checkpoint(ck_torch_forgetful)
    assert answer.mistake == "the random numbers are not kept"
    assert ", dropout: " in answer.text and "gradients differ, first that of" in answer.text


def test_what_it_raises_is_told_with_its_line():
    answer = check.place_checkpoints(lambda model: recompute.recompute(model.layers))
    assert answer.text.startswith(
        "on one rank, rank 0 of 1 failed: TypeError: recompute() takes modules, not '0': for a ModuleDict"
    )
    assert "in recompute:   raise TypeError(" in answer.text
