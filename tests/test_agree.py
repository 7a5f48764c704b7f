"""Tests of labs.agree against numbers worked out by hand, and with ranks made to differ."""

import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import agree
from labs.agree import Order, Some, fingerprint, first_difference, on_all_ranks, require_equal_replicas, require_same
from labs.kit.launch import RankError, run


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


def test_a_different_imaginary_part_is_noticed():
    x = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.complex128)
    assert len({fingerprint(y) for y in (x, x.conj(), x.flip(0), x + 1e-12j)}) == 4


def test_different_signs_are_noticed_anywhere():
    x = torch.ones(6, dtype=torch.float64)
    flipped = [x.clone().index_fill(0, torch.tensor(places), -1) for places in ([0], [1], [0, 1], [1, 3], [0, 2, 4, 5])]
    assert len({fingerprint(y) for y in (x, *flipped)}) == 6


@pytest.mark.parametrize("at_once", [1, 2, 3, 2**17])
def test_elements_exchanged_within_a_block_or_between_blocks_are_noticed(at_once, monkeypatch):
    monkeypatch.setattr(agree, "AT_ONCE", at_once)
    x = torch.arange(20.0, dtype=torch.float64)
    orders = [
        [*range(20)],
        [1, 0, *range(2, 20)],
        [0, 1, 8, *range(3, 8), 2, *range(9, 20)],
        [*range(10, 20), *range(10)],
    ]
    found = [fingerprint(x[order]) for order in orders]
    assert len({*found}) == 4 and [fingerprint(x[order]) for order in orders] == found


def test_a_flipped_bit_is_noticed_at_each_place_of_each_number():
    x = torch.zeros(9, dtype=torch.int64)
    flipped = [
        x.index_fill(0, torch.tensor(place), -(2**63) if bit == 63 else 2**bit)
        for place in range(9)
        for bit in range(64)
    ]
    assert len({fingerprint(y) for y in (x, *flipped)}) == 1 + 9 * 64


def test_sums_are_those_of_plain_integers(monkeypatch):
    monkeypatch.setattr(agree, "AT_ONCE", 5)
    bits = torch.tensor([2**62, -1, 0, 3, -(2**63), 7, 2**40 + 1])
    times, high_times = agree.WEIGHTS[:, :5].tolist()
    whole = [
        [x * times[i] + (x >> 32) * high_times[i] for i, x in enumerate(block)]
        for block in (bits[:5].tolist(), bits[5:].tolist())
    ]
    assert [x % 2**64 for x in agree.sums_of(bits)] == [sum(block) % 2**64 for block in whole]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's with the CPU's")
def test_a_fingerprint_is_the_same_on_a_gpu():
    for x in (torch.randn(300_000), torch.randn(300_001), torch.arange(5, dtype=torch.uint8)):
        assert fingerprint(x) == fingerprint(x.cuda())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32])
def test_a_fingerprint_does_not_depend_on_where_a_tensor_lies(dtype):
    x = torch.arange(33).remainder(2).to(dtype)
    for size in (8, 9):
        assert fingerprint(x[1 : 1 + size]) == fingerprint(x[1 : 1 + size].clone())


def ones(length, *places, value=1.0, dtype=torch.float32):
    return torch.zeros(length, dtype=dtype).index_fill(0, torch.tensor(places), value)


EXCHANGED = [  # a regular mixture would take the two of a row as equal
    (ones(1024, 1), ones(1024, 513)),
    (ones(8, 1, value=2), ones(8, 5, value=2)),
    (ones(4, 0, value=2, dtype=torch.float64), ones(4, 2, value=2, dtype=torch.float64)),
    (ones(4096, 0, dtype=torch.float64), ones(4096, 2048, dtype=torch.float64)),
    (ones(2048, 3, dtype=torch.bfloat16), ones(2048, 1027, dtype=torch.bfloat16)),
    (ones(2, 0, value=-0.0), ones(2, 1, value=-0.0)),
    (torch.eye(512, dtype=torch.float64), torch.eye(512, dtype=torch.float64)[[4, 1, 2, 3, 0, *range(5, 512)]]),
    (ones(64, 11, 31), ones(64, 15, 27)),
    (ones(65, 10, 30), ones(65, 14, 26)),
    (ones(65, 10, 30, dtype=torch.int32), ones(65, 14, 26, dtype=torch.int32)),
    (ones(65, 10, 30, dtype=torch.uint8), ones(65, 14, 26, dtype=torch.uint8)),
]


@pytest.mark.parametrize(("x", "other"), EXCHANGED)
def test_exchanged_elements_are_noticed(x, other):
    assert sorted(x.flatten().tolist()) == sorted(other.flatten().tolist())
    assert fingerprint(x) != fingerprint(other) and fingerprint(x) == fingerprint(x.clone())


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.complex64])
def test_a_fingerprint_does_not_depend_on_strides(dtype):
    x = torch.arange(64).remainder(3).to(dtype).view(32, 2)
    for view in (x[:, 1], x.flatten()[::3], x.t(), x[1::2]):
        assert fingerprint(view) == fingerprint(view.contiguous())


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


def test_some_numbers_are_equal_but_for_rounding():
    x = torch.rand(1000, dtype=torch.float64)
    assert Some.of(x) == Some.of(x * (1 + 1e-12)) and Some.of(x) != Some.of(x * (1 + 1e-6))
    assert Some.of(x) != Some.of(x[:-1])
    assert Some.of(torch.tensor([math.nan])).spoiled and Some.of(torch.tensor([math.inf])) == Some.of(torch.ones(1))


class Unsent(Exception):
    def __reduce__(self):
        raise TypeError("not for others")


class MadeOtherwise(Exception):
    def __init__(self, code, where):
        super().__init__(f"{code} at {where}")


def errors():
    return [  # the errors that ranks raise, and the error that each rank gets
        ({1: KeyError("a")}, [KeyError("a")] * 3),
        ({2: OSError(28, "No space left", "file")}, [OSError(28, "No space left", "file")] * 3),
        ({0: TypeError("this"), 2: ValueError("that")}, [TypeError("this")] * 3),
        ({1: Unsent("it")}, [RuntimeError("rank 1: Unsent: it"), Unsent("it"), RuntimeError("rank 1: Unsent: it")]),
        ({0: MadeOtherwise(3, "x")}, [MadeOtherwise(3, "x"), *[RuntimeError("rank 0: MadeOtherwise: 3 at x")] * 2]),
        ({0: ValueError(threading.Lock())}, [ValueError, RuntimeError, RuntimeError]),
    ]


def test_what_one_rank_raises_all_of_them_raise():
    def body():
        met = []
        for raised, _ in errors():

            def do():
                if dist.get_rank() in raised:  # noqa: B023
                    raise raised[dist.get_rank()]  # noqa: B023
                return dist.get_rank()

            try:
                on_all_ranks(do)
            except Exception as error:
                met.append((type(error).__name__, str(error)))
        return met, on_all_ranks(dist.get_rank)

    for rank, (met, found) in enumerate(run(body, ranks=3)):
        assert found == [0, 1, 2]
        for (kind, words), (_, expect) in zip(met, errors(), strict=True):
            expected = expect[rank]
            if isinstance(expected, type):
                assert kind == expected.__name__
            else:
                assert (kind, words) == (type(expected).__name__, str(expected))


def test_every_rank_names_the_first_rank_that_differs():
    def body():
        with pytest.raises(KeyError, match="rank 0 has a, rank 2 has b"):
            value = "ab"[dist.get_rank() // 2]
            require_same(value, None, lambda *they: "rank {} has {}, rank {} has {}".format(*they), KeyError)
        require_same("a", None, str)

    run(body, ranks=4)
    assert first_difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b"
    assert first_difference({"a": 1}, {"a": 1, "c": None}) == "c"
