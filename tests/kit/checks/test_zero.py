"""The checks of notebook 04: what is told beside a mistake's name. Right and wrong answers: tests/answers."""

import torch.distributed as dist

from labs.kit import check
from labs.kit.checks.answer import Wrong
from labs.kit.checks.zero.pieces import hinted
from tests.answers.gather_and_drop import drop, gather


def test_a_parameter_where_plain_tensors_are_wanted():
    """The shard, say: full.data may have been written already."""
    said = hinted(Wrong("RuntimeError: … is being modified inplace with grad mode enabled."))
    assert said.answer.mistake == "autograd sees the change" and "still a Parameter" in said.answer.question


def test_a_stub_inside_of_step_is_not_yet():
    def fn(full, make):
        def step():
            raise NotImplementedError("your turn")

        return step

    assert check.partition_optimizer(fn).ok is None


def test_half_of_gather_and_drop_is_not_yet():
    def stub(full):
        raise NotImplementedError("your turn")

    assert check.gather_and_drop(gather, stub).ok is None


def test_what_it_raises_is_told_with_its_line():
    def fn(full, shard):
        shard.grad += full.grad.chunk(dist.get_world_size())[dist.get_rank()]

    answer = check.gradient_ready(fn)
    assert answer.ok is False
    assert "TypeError" in answer.text and "shard.grad += full.grad.chunk" in answer.text


def test_a_hang_is_told_with_its_line():
    def fn(full, shard):
        if dist.get_rank() > 0:
            gather(full, shard)

    answer = check.gather_and_drop(fn, drop)
    assert answer.mistake in ("one side of a message or a collective is missing", "the ranks make different calls")
    assert "all_gather(full.data, shard.data.to(full.dtype))" in answer.text
