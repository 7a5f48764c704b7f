"""labs.group against torch's own reduce-scatter, numbers worked out by hand, and ranks made to differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.agree import Order, fingerprint, require_equal_replicas
from labs.group import all_gather, reduce_scatter
from labs.kit.launch import RankError, run


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


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_kind_of_tensor_has_a_fingerprint(dtype, shape):
    x = torch.ones(shape).to(dtype)
    assert fingerprint(x) == fingerprint(x.clone())
    if x.numel():
        assert fingerprint(x) != fingerprint(torch.zeros_like(x))
    assert fingerprint(x) != fingerprint(torch.ones(shape, dtype=torch.float16))


def test_an_imaginary_part_that_differs_is_seen():
    x = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.complex128)
    assert len({fingerprint(y) for y in (x, x.conj(), x.flip(0), x + 1e-12j)}) == 4


def test_signs_that_differ_are_seen_wherever_they_are():
    x = torch.ones(6, dtype=torch.float64)
    flipped = [x.clone().index_fill(0, torch.tensor(places), -1) for places in ([0], [1], [0, 1], [1, 3], [0, 2, 4, 5])]
    assert len({fingerprint(y) for y in (x, *flipped)}) == 6


def test_replicas_that_differ_in_one_bit_are_named():
    def body():
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        require_equal_replicas(model)
        if dist.get_rank() == 2:
            model.bias.data[1] = 2**-149
        require_equal_replicas(model)

    with pytest.raises(RankError, match=r"parameter 'bias' is .* on rank 0, but .* on rank 2"):
        run(body, ranks=3)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (["a", "b", "c"], None),
        (["a", "c", "b"], "where rank 0 b, rank 1 c"),
        (["a", "b"], "where rank 0 c, rank 1 ended"),
        (["a", "b", "c", "d"], "where rank 0 ended, rank 1 d"),
    ],
)
def test_an_order_is_compared_in_8_bytes(others, sentence):
    def body():
        order = Order(None)
        for what in others if dist.get_rank() else ["a", "b", "c"]:
            order.add(what)
        try:
            order.compare(torch.device("cpu"))
        except RuntimeError as error:
            return str(error)
        order.compare(torch.device("cpu"))  # nothing was done since, and nothing is sent

    results = run(body, ranks=2, record="communication")
    if sentence is None:
        assert list(results) == [None, None]
        assert [results.recording.sent(rank) for rank in range(2)] == [8, 8]
    else:
        assert all(sentence in words for words in results)


def test_an_order_that_nobody_compares_stays_short():
    def body():
        order = Order(None)
        for _ in range(25_000):
            order.add("gathers")
        if dist.get_rank():
            order.done[0] += "?"
        length = len(order.done)
        try:
            order.compare(torch.device("cpu"))
        except RuntimeError:
            return length

    assert all(length <= 10_000 for length in run(body, ranks=2))
