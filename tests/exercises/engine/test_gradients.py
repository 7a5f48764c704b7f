"""Tests of what the checks of notebooks 00, 02 and 03 say and forgive; their answers are in tests/exercises."""

import re

import torch
import torch.distributed as dist
from torch import nn

from labs.collectives import exchange, group_rank, place, powers_of_two
from labs.exercises.ddp._wrong_gradients import Gradient
from labs.exercises.engine.scripts import Done, StepOutcomes, World
from labs.kit import check
from tests.answers.together import together
from tests.exercises.ddp.average_gradients import one_vector
from tests.exercises.start_here.mean_on_rank_0 import by_all_reduce


def test_the_words_of_a_first_exercise():
    def summed(x):
        if dist.get_rank() > 0:
            return dist.send(x, dst=0)
        total, theirs = x.clone(), torch.empty_like(x)
        for other in range(1, dist.get_world_size()):
            dist.recv(theirs, src=other)
            total += theirs
        return total

    name = "mean_on_rank_0"
    summed_up, built_in = together([(name, (summed,), False), (name, (by_all_reduce,), False)])
    assert "rank 0 element 0 is" in summed_up.text and "rank 3's 4 times" in summed_up.text
    assert "dist's own all_reduce" in built_in.text


def test_a_buffer_of_another_dtype(capfd):
    """Expect the dtype to be named, without what gloo says when it aborts."""

    def fn(x):
        if dist.get_rank() > 0:
            return dist.send(x, dst=0)
        total, theirs = x.clone(), torch.zeros(x.shape)
        for other in range(1, dist.get_world_size()):
            dist.recv(theirs, src=other)
            total += theirs
        return total / dist.get_world_size()

    answer = check.mean_on_rank_0(fn)
    assert answer.mistake == "not the same dtype on every rank"
    assert "do not agree on the dtype of a message: rank 0 called recv float32[" in answer.text
    assert "gloo" not in capfd.readouterr().out + str(answer)


def test_a_tree_that_tells_ranks_that_do_not_exist():
    """Expect a question about these ranks, and the learner's line before the one of `exchange`."""

    def fn(x, src=0, group=None):
        rank, ranks = place(group)
        me = (rank - group_rank(src, group)) % ranks
        for distance in powers_of_two(below=ranks):
            if me < distance:
                exchange(group, send=(x, rank + distance))
            elif me < 2 * distance:
                exchange(group, receive=(x, rank - distance))

    answer = check.broadcast(fn)
    assert answer.mistake == "right only when the number of ranks is a power of two"
    assert answer.question.endswith("Is there a rank with that number?")
    within = r"  \(in collectives\.py line \d+: for work in"
    assert re.search(r"test_gradients\.py line \d+: exchange\(.*" + within, answer.text)


def test_one_vector_of_the_larger_dtype_is_no_weight_reduced_twice():
    """Use numbers with which one vector takes as many bytes more as reducing a weight twice."""
    assert check.average_gradients(one_vector, seed=539503).mistake == "too many bytes"


def test_where_gradients_cancel_out_rounding_is_no_mistake():
    """Average gradients whose mean is small, while their rounding is as large as ever."""

    def average(found):
        facts = ({"plain": [{"scale": torch.tensor(own)}], "before": {"scale": found}} for own in (1.0, -0.9998))
        done = [Done(values={"scale": found}, facts=each) for each in facts]
        return Gradient(StepOutcomes(World(0, 2), done, []), 0, "scale")

    assert average(torch.tensor(1e-4 + 1e-8)).right and not average(torch.tensor(2e-4)).right


def test_a_module_that_is_no_wrapper():
    answer = check.buckets(lambda model: nn.Linear(1, 1))
    assert answer.mistake == "not a wrapper" and "no_sync" in answer.text
