"""Tests of labs.group against torch's own reduce-scatter."""

import pytest
import torch
import torch.distributed as dist

from labs.group import all_gather, divisor_before, reduce_scatter
from labs.kit.launch import run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_reduce_scatter_and_an_all_gather_are_a_sum(ranks):
    def body():
        mine = torch.arange(2.0 * ranks) * 10 ** dist.get_rank()
        part = reduce_scatter(mine, None)
        whole = torch.empty(2 * ranks)
        all_gather(whole, part)
        return part.tolist(), whole.tolist()

    results = run(body, ranks=ranks, record="communication")
    total = [n * sum(10.0**rank for rank in range(ranks)) for n in range(2 * ranks)]
    for rank, (part, whole) in enumerate(results):
        assert part == total[2 * rank : 2 * rank + 2] and whole == total
        assert results.recording.sent(rank) == 2 * 4 * 2 * (ranks - 1)  # twice (N-1)/N of 2N float32


def test_float16_is_divided_before_the_sum_as_pytorchs_fsdp_does_it():
    assert [divisor_before(torch.float16, n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 2, 2, 2, 4, 4, 4]
    assert {divisor_before(dtype, 8) for dtype in (torch.bfloat16, torch.float32, torch.float64)} == {1}
