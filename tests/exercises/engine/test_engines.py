"""Tests of the checks' engines: which results are near enough, and which wrong value an answer equals."""

import pytest
import torch

from labs.exercises.collectives import _by_hand as by_hand
from labs.exercises.collectives.all_reduce import ALL_REDUCE
from labs.exercises.collectives.reduce_scatter import REDUCE_SCATTER
from labs.exercises.engine.answer import Mistake, Wrong, refuse
from labs.exercises.engine.common_mistakes import VALUES
from labs.exercises.engine.on_ranks import Exercise, Given, part_of
from labs.exercises.engine.scripts import Done, StepOutcomes, parts
from labs.exercises.engine.value import One, as_if
from labs.exercises.mesh_and_dtensor import partial_to_shard as scatter
from labs.exercises.start_here import mean_on_rank_0 as mean


def found_by(exercise: Exercise, world: Given, values: list[torch.Tensor]) -> One:
    """Return the value that was found on the first rank, if all ranks have these values."""
    expected_by_name = [{"": expected} for expected in exercise.expected.values(world)]
    seen = StepOutcomes(world, [Done(values={"": value}) for value in values], [])
    return part_of(exercise.expected, seen, 0, "", expected_by_name)


@pytest.mark.parametrize(
    "exercise, world, wrong",
    [
        (REDUCE_SCATTER, by_hand.InPlace(0, 2, shape=(1,)), 1e-9),
        (ALL_REDUCE, by_hand.InPlace(0, 2, shape=(1,)), 1e-9),
        (mean.EXERCISE, Given(0, 2, shape=(1,)), 1e-10),
        (scatter.EXERCISE, Given(0, 2, shape=(1,), args={"dim": 0}), 1e-10),
    ],
)
def test_where_a_sum_cancels_out_rounding_is_no_mistake(monkeypatch, exercise, world, wrong):
    """Add the numbers of two ranks, which nearly cancel each other out."""
    numbers = torch.tensor([[1.0], [-0.999999]], dtype=torch.float64)
    monkeypatch.setattr(Given, "tensor", lambda self, rank: numbers[rank])
    for by, right in ((1e-16, True), (-1e-16, True), (wrong, False)):
        values = [None if expected is None else expected + by for expected in exercise.expected.values(world)]
        assert found_by(exercise, world, values).right is right


def test_a_variant_that_is_right_as_well_is_not_the_mistake():
    world = by_hand.InPlace(0, 2, shape=(4,))
    one = found_by(ALL_REDUCE, world, [world.total, world.total])
    assert not as_if(lambda world: [world.total] * 2)(one)
    assert not as_if(lambda world: [world.total * 2] * 2)(one)


def test_several_variants_are_tried_one_after_the_other():
    world = by_hand.InPlace(0, 2, shape=(4,))
    one = found_by(ALL_REDUCE, world, [3 * world.total] * 2)
    assert as_if(lambda world: ([factor * world.total] * 2 for factor in (2, 3)))(one)


@pytest.mark.parametrize(
    "times, name",
    [
        ((0.5, 0.5, 0.5, 0.5), ""),
        ((0.25, 0.25, 0.25, 0.25), "averaged instead of summed"),
        ((4, 4, 4, 4), "summed instead of averaged"),
        ((1, 0, 0, 0), "one's own only"),
        ((1, 1, 0, 1), "a rank is left out"),
        ((2, 1, 1, 1), "counted twice"),
        ((0.5, 1, 1, 1), "some ranks count more than others"),
        ((0.5, 0.5, 1, 2), "some ranks count more than others"),
    ],
)
def test_what_a_wrong_sum_is_made_of(times, name):
    world = by_hand.InPlace(0, 4, shape=(24,))
    value = sum(c * x for c, x in zip(times, world.xs, strict=True))
    with pytest.raises(Wrong) as wrong:
        refuse(VALUES, found_by(ALL_REDUCE, world, [value] * 4), "", "What?")
    assert wrong.value.answer.mistake == (name or "divided by the wrong number")


def test_a_row_keeps_its_name_where_it_holds_everywhere():
    wrong = Wrong("…", "?", "far too slow").with_name("right only for small tensors")
    assert wrong.answer.mistake == "far too slow"
    assert Wrong("…", "?", "").with_name("right only here").answer.mistake == "right only here"


def test_an_exercise_asks_its_own_question():
    with pytest.raises(Wrong) as wrong:
        refuse([Mistake("too many bytes", "Who?", lambda seen: True)], None, "")
    assert wrong.value.with_questions({"too many bytes": "Which part?"}).answer.question == "Which part?"
    assert wrong.value.with_questions({}).answer.question == "Who?"


@pytest.mark.parametrize(
    "names, seeds",
    [
        (("", "a", "b", "a"), [[0], [1, 3], [2]]),
        (("a", "a"), [[0], [1]]),
        (("", "", "a"), [[0], [1], [2]]),
        (("a",) * 5, [[0, 1], [2, 3, 4]]),
    ],
)
def test_what_hangs_is_looked_for_by_name_and_then_in_halves(names, seeds):
    worlds = [by_hand.InPlace(seed, 2, only=name) for seed, name in enumerate(names)]
    assert [[world.seed for world in part] for part in parts(worlds)] == seeds
