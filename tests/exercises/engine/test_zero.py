"""Tests of what the checks of notebook 04 say beside a mistake's name; their answers are in tests/exercises/zero."""

from labs.exercises.engine.answer import Wrong
from labs.exercises.zero._pieces import hinted
from labs.kit import check


def test_a_parameter_where_plain_tensors_are_wanted():
    """Write to a Parameter such as the shard: full.data may have been written already."""
    said = hinted(Wrong("RuntimeError: … is being modified inplace with grad mode enabled."))
    assert said.answer.mistake == "autograd sees the change" and "still a Parameter" in said.answer.question


def test_a_stub_inside_of_step_is_not_yet():
    def fn(full, make):
        def step():
            raise NotImplementedError("your turn")

        return step

    assert check.partition_optimizer(fn).ok is None
