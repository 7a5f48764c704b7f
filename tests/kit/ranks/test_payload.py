"""Tests of the way back from a rank: values, and with them errors and warnings."""

import time
import warnings

import numpy
import pytest
import torch

from labs.kit.launch import RankError, run
from labs.kit.ranks.torch_settings import apply, settings


def test_a_view_travels_without_its_storage():
    def views():
        x = torch.arange(2.0**20)
        return x[2:4], x[:6].view(2, 3).t(), x[:1].expand(3), {"a": [x[5]]}

    part, turned, expanded, nested = run(views, ranks=1)[0]
    assert part.tolist() == [2, 3] and turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert expanded.tolist() == [0, 0, 0] and nested["a"][0].item() == 5
    for tensor in (part, turned, expanded, nested["a"][0]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch 2.11 warns
def test_tensors_of_all_kinds_come_back_as_they_were():
    def make():
        torch.manual_seed(0)
        return [
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.rand(2, 3, requires_grad=True),
            torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.rand(3).bfloat16(),
            torch.rand(2, 2) > 0.5,
            torch.rand(2, dtype=torch.complex64),
            torch.rand(2, dtype=torch.complex64).conj(),
            torch.eye(3).to_sparse(),
            torch.nn.Parameter(torch.rand(2)),
        ]

    for back, here in zip(run(make, ranks=1)[0], make(), strict=True):
        assert type(back) is type(here) and back.dtype == here.dtype and back.requires_grad == here.requires_grad
        assert back.layout == here.layout and back.is_conj() == here.is_conj()
        if here.layout == torch.strided:
            assert back.stride() == here.stride()
        assert torch.equal(back.to_dense(), here.to_dense())
        if not here.requires_grad and here.layout == torch.strided:
            back.resize_(100)  # the tensor owns its memory


def test_large_values_do_not_pass_through_a_socket():
    """Check that this process reads the bytes from its own descriptors; through a socket a GiB took half a minute."""
    value = run(lambda: (torch.ones(1 << 24), bytearray(1 << 24), numpy.ones(1 << 20)), ranks=1)[0]
    assert value[0].sum() == 1 << 24 and len(value[1]) == 1 << 24 and value[2].flags.writeable
    began = time.process_time()
    run(lambda: torch.ones(1 << 26), ranks=1)
    mine = time.process_time() - began
    began = time.process_time()
    for _ in range(4):
        torch.ones(1 << 26)
    assert mine < 4 * (time.process_time() - began), "a few copies of 256 MiB"


def test_where_warnings_are_errors_the_ranks_own_error_is_reported():
    def job():
        warnings.warn("mind the gap", stacklevel=1)
        raise ValueError("the cause")

    with warnings.catch_warnings(), pytest.raises(RankError, match="the cause") as caught:
        warnings.simplefilter("error")
        run(job, ranks=2)
    assert caught.value.__notes__ == ["UserWarning: mind the gap"]


def test_both_ends_of_a_message_of_megabytes_are_shown():
    def job():
        warnings.warn(f"first{'x' * 20_000_000}last", stacklevel=1)
        raise ValueError(f"first{'y' * 20_000_000}last")

    failed = r"failed: ValueError: firsty+ … .* not shown … y+last\n"
    warned = "^firstx+ … 19,934,473 characters are not shown … x+last$"
    with pytest.warns(UserWarning, match=warned), pytest.raises(RankError, match=failed) as caught:
        run(job, ranks=2)
    assert len(str(caught.value)) < 200_000


def test_the_first_of_thousands_of_warnings_are_shown():
    def job():
        for step in range(1001):
            warnings.warn(f"{step}", stacklevel=1)

    with pytest.warns(UserWarning) as seen:
        run(job, ranks=1)
    texts = [str(warning.message) for warning in seen]
    assert texts == [*map(str, range(100)), "the ranks gave 901 warnings more, which are not shown"]


def test_where_warnings_are_errors_a_warning_is_one():
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="mind the gap"):
        warnings.simplefilter("error")
        run(lambda: warnings.warn("mind the gap", stacklevel=1), ranks=2)


def test_what_is_set_in_pytorch_is_set_on_the_ranks():
    """Check the settings that labs/kit/ranks/torch_settings.py lists."""
    before = settings()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            here = settings()
            there, dtype = run(lambda: (settings(), torch.ones(1).dtype), ranks=2)[1]
    finally:
        apply(before)
    assert there == here and dtype == torch.float64
    assert {name for name in here if here[name] != before[name]} >= {"dtype", "deterministic", "matmul", "gradients"}
    assert run(settings, ranks=1)[0] == before == settings()


def test_a_default_device_that_no_rank_has_is_reported():
    x = torch.ones(2)
    with torch.device("meta"), pytest.raises(ValueError, match=r"default device is 'meta' here, .* in the function"):
        run(lambda: x, ranks=1)
