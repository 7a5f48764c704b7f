"""Tests of budgets in real jobs: what fits trains as before; what does not ends in one sentence, anywhere.

StorageWatch's peak of the same job, which knows nothing of budgets, says how much fits.
"""

import functools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import RankError, run
from labs.kit.watch.budget import budget
from labs.memory.offload import Offloaded
from labs.memory.recompute import recompute
from labs.model import GPT, PRESETS
from labs.zero import Zero

MiB = 2**20
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def tokens():
    return torch.randint(256, (2, 8, 128), generator=torch.Generator().manual_seed(0))


def train(size=None, recomputed=False, steps=2):
    """Return the losses of a small GPT; everything but the model and its optimizer is allocated within the budget."""
    model = GPT(PRESETS["small"])
    if recomputed:
        recompute(model.layers.values())
    optimizer, losses = ADAMW(model.parameters()), []
    with budget(size or 2**40):
        for _ in range(steps):
            loss = model(*tokens())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@functools.cache
def without_budget():
    return run(train, ranks=1)


@functools.cache
def peak(recomputed=False):
    """Return the peak bytes of all tensors together, beyond the parameters."""
    ((_, *later), *_) = run(train, recomputed=recomputed, ranks=1, record="memory").recording.memory
    parameters = sum(p.nbytes for p in GPT(PRESETS["small"]).parameters())
    return max(sum(held.values()) for _, held in later) - parameters


# ---- jobs within the budget ------------------------------------------------------------------------------


def test_what_fits_trains_as_before_and_what_does_not_says_so():
    most = peak()
    assert run(train, most, ranks=1) == without_budget()
    with pytest.raises(RankError, match="rank 0 of 1 failed: MemoryError: this process exceeded its budget"):
        run(train, most - 2 * MiB, ranks=1)


def test_recomputation_makes_a_job_fit():
    size = 32 * MiB
    assert peak(recomputed=True) < size - 4 * MiB < peak()
    with pytest.raises(RankError, match=r"exceeded its budget of 32.00 MiB .* at model.py line \d+: "):
        run(train, size, ranks=1)
    assert run(train, size, recomputed=True, ranks=1) == without_budget()


def wide(size, where=None):
    """Train 16 MiB of parameters: 32 of state and 16 of gradients come with the first step."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    with budget(size):
        optimizer = Offloaded(model.parameters(), ADAMW, where) if where else ADAMW(model.parameters())
        for _ in range(2):
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_files_that_are_mapped_do_not_count(tmp_path):
    """Keep the state in files: the first step makes one parameter's state at a time."""
    with pytest.raises(RankError, match=r"exceeded its budget of 36\.00 MiB"):
        run(wide, 36 * MiB, ranks=1)
    run(wide, 36 * MiB, tmp_path, ranks=1)


def test_memory_that_was_freed_can_be_used_again():
    def body():
        with budget(24 * MiB):
            for _ in range(20):
                x = torch.ones(4 * MiB)
                del x
            x = torch.ones(MiB)
            x.untyped_storage().resize_(0)
            torch.ones(5 * MiB)
        return "done"

    assert run(body, ranks=1) == ["done"]


# ---- jobs beyond the budget ------------------------------------------------------------------------------


def message(body, *args, ranks=1):
    with pytest.raises(RankError) as failed:
        run(body, *args, ranks=ranks)
    return str(failed.value)


def test_one_sentence_tells_budget_request_and_line():
    def body():
        kept = []
        with budget(10 * MiB):
            for _ in range(9):
                kept.append(torch.zeros(MiB // 2))

    text = message(body)
    assert text.startswith(
        "rank 0 of 1 failed: MemoryError: this process exceeded its budget of 10.00 MiB of tensors: "
        "it held 10.00 MiB and asked for 2.00 MiB more at test_budget.py line "
    )
    assert text.count("kept.append(torch.zeros(MiB // 2))") == 3, "in the sentence, which ends the traceback, and there"


def test_a_storage_that_grows_counts():
    def body():
        with budget(6 * MiB):
            torch.ones(1).untyped_storage().resize_(64 * MiB)

    assert re.search(r"it held 4 B and asked for 64.00 MiB more at test_budget.py line \d+: ", message(body))


def test_in_backward():
    def body():
        x = torch.ones(MiB, requires_grad=True)
        y = (x * 2).exp().sin()
        with budget(6 * MiB):
            y.sum().backward()

    assert re.search(r"more at test_budget.py line \d+: y.sum\(\).backward\(\)", message(body))


def test_one_rank_of_several_while_the_others_wait_for_it():
    def body():
        x = torch.ones(MiB)
        with budget((64, 2)[dist.get_rank()] * MiB):
            for _ in range(3):
                dist.all_reduce(x.clone())

    text = message(body, ranks=2)
    assert text.startswith("rank 1 of 2 failed: MemoryError: this process exceeded its budget of 2.00 MiB")
    assert "rank 0 then had to stop." in text


def sharded(size, stage):
    model = GPT(PRESETS["tiny"])
    with budget(size):
        zero = Zero(model, stage=stage, optimizer=ADAMW)
        for _ in range(2):
            model(*torch.randint(256, (2, 4, 64))).backward()
            zero.step()
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_exceeding_the_budget_is_reported_wherever_it_happens_and_never_a_silent_crash(stage):
    """Try one budget after the other until it fits: it ends in autograd, in collectives, in the optimizer, in
    Python.
    """
    fits = []
    for size in (1, 2, 3, 5, 8, 32):
        try:
            fits.append(run(sharded, size * MiB, stage, ranks=2) == [True, True])
        except RankError as error:
            assert error.kind == "raised", error
            assert f"MemoryError: this process exceeded its budget of {size}.00 MiB" in str(error)
            fits.append(False)
    assert fits == sorted(fits) and {True, False} == set(fits), fits


def test_other_errors_are_left_alone():
    with pytest.raises(ValueError, match="something else"), budget(MiB):
        raise ValueError("something else")
    with pytest.raises(RuntimeError, match="no memory of it"), budget(MiB):
        raise RuntimeError("no memory of it")


def test_a_budget_of_nothing():
    with pytest.raises(ValueError, match="a budget of 0 bytes holds no tensor: give at least 1 byte"), budget(0):
        pass


# ---- afterwards ------------------------------------------------------------------------------------------


def test_the_limit_ends_with_the_block_and_the_next_job_knows_nothing_of_it():
    def body():
        with pytest.raises(MemoryError), budget(4 * MiB):
            torch.ones(16 * MiB)
        torch.ones(16 * MiB)
        return True

    assert run(body, ranks=1) == [True]
    assert run(lambda: len(torch.ones(16 * MiB)), ranks=2) == [16 * MiB] * 2
