"""Tests of labs.memory.offload and disk against the same training with its state in memory, bit by bit.

Crashes are real: a rank kills itself in the middle of a step, between any two accesses to the disk, and a new process
continues from the folder as if nothing had happened.  Memory is what the kernel reports for the process.
"""

import copy
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import RankError, run
from labs.memory import disk, mapped_files, offload
from labs.memory.disk import Disk
from labs.memory.mapped_files import mapped, to_file
from labs.memory.offload import Offloaded
from labs.memory.precision import Masters
from labs.model import GPT, PRESETS
from labs.zero import Zero
from tests.depth import deepen

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "adamw": ADAMW,
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5),
}
MiB = 2**20


def exactly_equal(mine, reference):
    torch.testing.assert_close(mine, reference, rtol=0, atol=0)


class Net(nn.Module):
    """A model with odd sizes, a scalar, and a branch that only some steps use."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.branch = nn.Linear(5, 7), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x, branch):
        h = torch.tanh(self.inner(x)) * self.scale
        return (self.branch(h) if branch else h).square().mean()


def train(model, optimizer, first=0, last=5):
    """Take steps first to last - 1, each determined by its number alone."""
    for step in range(first, last):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step)).to(model.scale.dtype)
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        model(x, branch=step % 3 != 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def offloaded(model, where, optimizer=ADAMW):
    return Offloaded(model.parameters(), optimizer, where)


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_optimizer_in_memory(name, tmp_path):
    model, reference = Net(), Net()
    mine = train(model, offloaded(model, tmp_path, OPTIMIZERS[name]))
    exactly_equal(mine, train(reference, OPTIMIZERS[name](reference.parameters())))


def test_in_bfloat16_equal_to_masters_in_memory(tmp_path):
    model, reference = Net(torch.bfloat16), Net(torch.bfloat16)
    mine = offloaded(model, tmp_path)
    theirs = Masters(reference.parameters(), ADAMW)
    exactly_equal(train(model, mine), train(reference, theirs))
    exactly_equal(mine.state_dict()["state"], theirs.state_dict()["state"])


def test_state_goes_from_one_to_the_other(tmp_path):
    """Move state between a folder, another folder and memory, in torch's format, with the master as a part of the
    state.
    """
    first, second, third = (Net(torch.bfloat16) for _ in range(3))
    here = offloaded(first, tmp_path / "here")
    train(first, here, last=3)
    there = offloaded(second, tmp_path / "there")
    there.load_state_dict(here.state_dict())
    exactly_equal(list(second.parameters()), list(first.parameters()))
    memory = Masters(third.parameters(), ADAMW)
    memory.load_state_dict(there.state_dict())
    expected = train(first, here, first=3)
    exactly_equal(train(second, there, first=3), expected)
    exactly_equal(train(third, memory, first=3), expected)


def tokens(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(256, (2, 1, 16), generator=generator)


def train_sharded(stage, optimizer, last=3):
    model = GPT(PRESETS["tiny"])
    zero = Zero(model, stage=stage, optimizer=optimizer)
    for step in range(getattr(zero.optimizer, "steps", 0), last):
        model(*tokens(step)).backward()
        zero.step()
    return zero.full_state_dict(), zero.optimizer.state_dict()["state"]


def test_under_every_stage_of_zero(tmp_path):
    def body():
        pairs = []
        for stage in (1, 2, 3):
            mine = train_sharded(stage, partial(Offloaded, optimizer=ADAMW, where=tmp_path / str(stage)))
            pairs.append((mine, train_sharded(stage, partial(Masters, optimizer=ADAMW))))
        return pairs

    for pairs in run(body, ranks=2):
        for mine, reference in pairs:
            exactly_equal(mine, reference)


# ---- a folder that holds a training ----------------------------------------------------------------------


def test_a_folder_is_resumed_where_it_was_left(tmp_path):
    model = Net()
    train(model, offloaded(model, tmp_path), last=3)
    model = Net()
    optimizer = offloaded(model, tmp_path)
    assert optimizer.steps == 3
    mine = train(model, optimizer, first=optimizer.steps)
    reference = Net()
    exactly_equal(mine, train(reference, ADAMW(reference.parameters())))


def events(at):
    """Call `at` from here on before every copy, flush, renaming and removal, and in the middle of a copy."""

    def with_event(original):
        def call(*args, **kwargs):
            at()
            return original(*args, **kwargs)

        return call

    def half(source, target):
        at()
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])
        at()
        Path(target).write_bytes(content)

    disk.shutil = type("shutil", (), {"copyfile": staticmethod(half)})
    disk.os = mapped_files.os = type(
        "os",
        (),
        vars(os) | {"fsync": staticmethod(with_event(os.fsync)), "replace": staticmethod(with_event(os.replace))},
    )
    Path.unlink = with_event(Path.unlink)


def killed_at(moment, where):
    """Resume the training in a folder, and die at the nth event of the fourth step, or return how many it has."""
    model = Net()
    optimizer = offloaded(model, where)
    train(model, optimizer, first=2, last=3)
    count = iter(range(1000))
    events(lambda: next(count) == moment and os.kill(os.getpid(), signal.SIGKILL))
    train(model, optimizer, first=3, last=4)
    return next(count)


@pytest.mark.parametrize("every", [3, *deepen(1)])
def test_killed_at_every_moment_of_a_step(every, tmp_path):
    reference, model = Net(), Net()
    expected = train(reference, ADAMW(reference.parameters()))
    train(model, offloaded(model, tmp_path / "begun"), last=2)
    shutil.copytree(tmp_path / "begun", tmp_path / "counted")
    (moments,) = run(killed_at, -1, tmp_path / "counted", ranks=1)
    assert moments == 5 * (2 + 1) + 4 + 5 + 1, "copies and flushes, the commit, and what it removes"
    found = []
    for moment in range(0, moments, every):
        where = tmp_path / str(moment)
        shutil.copytree(tmp_path / "begun", where)
        with pytest.raises(RankError, match="SIGKILL"):
            run(killed_at, moment, where, ranks=1)
        model = Net()
        optimizer = offloaded(model, where)
        found.append(optimizer.steps)
        exactly_equal(train(model, optimizer, first=optimizer.steps), expected)
    assert found == sorted(found) and set(found) == {3, 4}, "before the renaming the step is none, and then it is"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_folder_is_resumed_under_every_stage(stage, tmp_path):
    """Check the other ranks' shards, too: under stages 1 and 2 this rank computes with the whole."""

    def body(last, optimizer):
        return train_sharded(stage, optimizer, last)[0]

    run(body, 2, partial(Offloaded, optimizer=ADAMW, where=tmp_path), ranks=2)
    mine = run(body, 4, partial(Offloaded, optimizer=ADAMW, where=tmp_path), ranks=2)
    exactly_equal(mine, run(body, 4, ADAMW, ranks=2))


def sharded_and_killed(where, rank=None, before=""):
    """Train under stage 3, and let a rank die just before it calls a method of its Disk for the fourth time."""
    calls = {}

    def die(name, original):
        def call(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            if dist.get_rank() == rank and calls[name] == 4:
                time.sleep(0.5)  # the other rank comes as far as it can
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    if before:
        setattr(Disk, before, die(before, getattr(Disk, before)))
    return train_sharded(3, partial(Offloaded, optimizer=ADAMW, where=where), last=5)[0]


@pytest.mark.parametrize(("rank", "before"), [(1, "commit"), (0, "keep")])
def test_a_rank_killed_between_the_commits_of_two(rank, before, tmp_path):
    with pytest.raises(RankError, match=f"rank {rank} died of SIGKILL"):
        run(sharded_and_killed, tmp_path, rank, before, ranks=2)
    newest = [
        max(int(path.stem.partition("-")[2]) for path in (tmp_path / f"rank-{r}-of-2").glob("*.json")) for r in (0, 1)
    ]
    assert newest == ([3, 2] if before == "commit" else [2, 2])
    mine = run(sharded_and_killed, tmp_path, ranks=2)
    exactly_equal(mine[0], mine[1])
    exactly_equal(mine, run(lambda: train_sharded(3, ADAMW, last=5)[0], ranks=2))


def test_nothing_is_left_but_the_last_two_commits(tmp_path):
    threads, handles = threading.active_count(), len(os.listdir("/dev/fd"))
    model = Net()
    train(model, offloaded(model, tmp_path))
    folder = tmp_path / "rank-0-of-1"
    assert list(tmp_path.iterdir()) == [folder]
    names = {path.name for path in folder.iterdir()}
    expected = {"generation-4.json", "generation-5.json"}
    for record in sorted(expected):
        expected = expected | {name for name, *_ in json.loads((folder / record).read_text())["record"]["parameters"]}
    assert names == expected and len(names) == 2 + 5 + 3, "in step 4 the branch had no gradient"
    assert (threading.active_count(), len(os.listdir("/dev/fd"))) == (threads, handles)


def test_a_step_that_fails_is_no_step(tmp_path, monkeypatch):
    model, reference = Net(), Net()
    optimizer = offloaded(model, tmp_path)
    train(model, optimizer, last=2)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(disk, "flush", full_disk)
        train(model, optimizer, first=2)
    assert optimizer.steps == 2
    optimizer.zero_grad()
    model = Net()
    mine = train(model, offloaded(model, tmp_path), first=2)
    exactly_equal(mine, train(reference, ADAMW(reference.parameters())))


def test_after_a_step_that_failed_half_way_only_an_earlier_state_continues(tmp_path):
    """Let the optimizer fail at the second parameter, when the first one has already taken the step."""

    def failing(masters):
        if len(seen := [*masters]) and seen[0].shape == (7,):
            raise ArithmeticError("a gradient is too large")
        return ADAMW(seen)

    model, reference = Net(), Net()
    optimizer = offloaded(model, tmp_path)
    train(model, optimizer, last=2)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.optimizer = failing
    with pytest.raises(ArithmeticError):
        train(model, optimizer, first=2)
    optimizer.optimizer = ADAMW
    for go_on in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="a step failed half way, so that some parameters have taken it"):
            go_on()
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    mine = train(model, optimizer, first=2)
    exactly_equal(mine, train(reference, ADAMW(reference.parameters())))


def test_a_frozen_parameter_costs_nothing_and_unfreezing_it_is_refused(tmp_path):
    model, reference = Net(), Net()
    for net in (model, reference):
        net.inner.weight.requires_grad_(False)
    optimizer = offloaded(model, tmp_path)
    exactly_equal(train(model, optimizer), train(reference, ADAMW(reference.parameters())))
    assert len(optimizer.state_dict()["state"]) == 4
    model.inner.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(7, 5\) was unfrozen"):
        train(model, optimizer, last=1)


def full_disk(path):
    raise OSError(28, "No space left on device")


# ---- overlap and memory ----------------------------------------------------------------------------------


def test_one_parameter_is_updated_while_its_neighbours_travel(tmp_path, monkeypatch):
    """Check with an update that does not end before its neighbours have travelled; alone, it would wait in vain."""
    seen, changed = [], threading.Condition()

    def note(*what):
        with changed:
            seen.append(what)
            changed.notify_all()

    def noting(name):
        original = getattr(Disk, name)

        def call(self, i, *args):
            note(name, i)
            answer = original(self, i, *args)
            note(f"{name} over", i)
            return answer

        monkeypatch.setattr(Disk, name, call)

    def updated(self, i, fetched, original=Offloaded.updated):
        note("update")
        neighbours = {("fetch over", i + 1), ("store over", i - 1)} if 0 < i < 5 else set()
        with changed:
            assert changed.wait_for(lambda: neighbours <= set(seen), timeout=300)
        return original(self, i, fetched)

    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
    optimizer = offloaded(model, tmp_path)
    noting("fetch")
    noting("store")
    monkeypatch.setattr(Offloaded, "updated", updated)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for i in range(1, 4):
        assert seen.index(("store over", i - 1)) < seen.index(("fetch", i + 2)), "three parameters at a time"


LAYERS = 64  # 1 MiB each: the claim is many times what a process varies by chance


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(LAYERS)))

    def forward(self):
        return self.layers(torch.ones(1, 512)).sum()


def memory_of(optimizer):
    """Return the MiB of this process in a training, at rest and at the peak, beyond those when the model was there."""
    ctypes.CDLL(None).mallopt(-3, 2**17)  # large blocks go back to the system as soon as they are freed
    model, status = Wide(), Path("/proc/self/status")

    def held(what):
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(what)) / 1024

    def step(optimizer):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(ADAMW([next(model.parameters())]))  # loads and allocates what torch needs once
    model.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = held("VmRSS")
    optimizer = optimizer(model.parameters())
    for _ in range(3):
        step(optimizer)
    return held("VmRSS") - before, held("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc and Linux")
def test_a_process_has_the_state_of_three_parameters_in_memory_and_not_of_all(tmp_path):
    rest, most = run(memory_of, ADAMW, ranks=1)[0]
    rest_offloaded, most_offloaded = run(memory_of, partial(Offloaded, optimizer=ADAMW, where=tmp_path), ranks=1)[0]
    state, three = LAYERS * 2.0, 3 * 3.0  # MiB: two moments of all layers; moments and masters of 3
    assert rest >= 0.95 * state and most >= state
    assert rest_offloaded <= state / 10
    assert most - most_offloaded >= state - 2 * three


def test_a_tensor_in_a_file(tmp_path):
    model, reference = Net(torch.bfloat16), Net(torch.bfloat16)
    for i, p in enumerate(model.parameters()):
        p.data = to_file(p.data, tmp_path / str(i))
    mine = train(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    exactly_equal(mine, train(reference, torch.optim.SGD(reference.parameters(), lr=1e-2)))
    layout = [["", "bfloat16", [7, 5]]]
    exactly_equal(mapped(tmp_path / "1", layout, shared=False)[""], model.inner.weight.data)


def test_stage_3_with_its_shards_in_files_too(tmp_path):
    def body(where=None):
        model = GPT(PRESETS["tiny"])
        optimizer = partial(Offloaded, optimizer=ADAMW, where=where / "state") if where else ADAMW
        zero = Zero(model, stage=3, optimizer=optimizer)
        for i, shard in enumerate(zero.shards if where else ()):
            shard.data = to_file(shard.data, where / f"{i}-{dist.get_rank()}")
        for step in range(3):
            model(*tokens(step)).backward()
            zero.step()
        return zero.full_state_dict()

    exactly_equal(run(body, tmp_path, ranks=2), run(body, ranks=2))


# ---- host memory beside a GPU ----------------------------------------------------------------------------


def test_the_host_tier_keeps_what_it_is_given():
    """Check the host tier's logic without a GPU: parameters and tier share one memory here, which saves nothing."""
    model, reference = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizer = Offloaded.__new__(Offloaded)
    optimizer.params, optimizer.optimizer, optimizer.tier = list(model.parameters()), ADAMW, offload.Host()
    optimizer.frozen, optimizer.half_way = [], False
    optimizer.param_groups = [ADAMW([nn.Parameter(torch.empty(0))]).param_groups[0] | {"params": optimizer.params}]
    masters = {i: optimizer.tier.store(i, {"master": offload.master_of(p)}) for i, p in enumerate(optimizer.params)}
    optimizer.tier.commit(0, masters)
    exactly_equal(train(model, optimizer), train(reference, Masters(reference.parameters(), ADAMW)))
    assert optimizer.steps == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_beside_a_gpu(tier, tmp_path):
    """Compare with updates on the CPU, which rounds in its own way."""
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).bfloat16()
        reference = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).bfloat16()
        reference.load_state_dict(model.state_dict())
        before = torch.cuda.memory_allocated()
        optimizer = offloaded(model, "cpu" if tier == "cpu" else tmp_path)
        theirs = Masters(reference.parameters(), ADAMW)
        for _ in range(3):
            for net, each in ((model, optimizer), (reference, theirs)):
                net(torch.ones(1, 512, dtype=torch.bfloat16)).float().square().sum().backward()
                each.step()
                each.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=1e-4)
    masters_and_moments = 12 * 8 * 512 * 512
    assert torch.cuda.memory_allocated() - before < 1.1 * masters_and_moments, "ours is not on the GPU"
    if tier == "cpu":
        assert optimizer.tier.read(0)["master"].is_pinned()


# ---- mistakes --------------------------------------------------------------------------------------------


def test_parameters_on_the_cpu_have_no_use_for_where_cpu():
    with pytest.raises(ValueError, match="on the CPU already; the next tier is a disk: give a folder"):
        offloaded(Net(), "cpu")


def test_a_folder_of_another_training_is_reported(tmp_path):
    offloaded(Net(), tmp_path)
    with pytest.raises(ValueError, match=r"has 5 parameters, and 2 were given: it belongs to another model"):
        offloaded(nn.Linear(5, 7), tmp_path)
    wider = Net()
    wider.branch = nn.Linear(7, 9)
    with pytest.raises(
        ValueError, match=r"parameter 3, of shape \(9, 7\) in float32, is of shape \(7, 7\) in float32 there"
    ):
        offloaded(wider, tmp_path)
    with pytest.raises(ValueError, match=r"parameter 0, of shape \(\) in float64, is of shape \(\) in float32 there"):
        offloaded(Net(torch.float64), tmp_path)
    with pytest.raises(RankError, match=r"rank-0-of-1 was not left by 2 ranks: give another folder"):
        run(lambda: offloaded(Net(), tmp_path).steps, ranks=2)


def test_ranks_of_different_trainings_are_reported(tmp_path):
    def body(last):
        model = Net()
        train(model, offloaded(model, tmp_path), last=last[dist.get_rank()])

    run(body, (1, 3), ranks=2)
    with pytest.raises(RankError, match=r"is not of one training \(by rank, the last commits there are \[1, 3\]\)"):
        run(body, (0, 0), ranks=2)


def test_a_state_without_masters_is_reported(tmp_path):
    model = Net()
    optimizer = offloaded(model, tmp_path)
    plain = ADAMW(Net().parameters()).state_dict()
    with pytest.raises(ValueError, match="this state has 0 parameters, and 5 were given"):
        optimizer.load_state_dict(plain)
    with pytest.raises(
        ValueError, match=r"this state: the master of parameter 0, of shape \(\) in float32, is missing there"
    ):
        optimizer.load_state_dict(plain | {"state": {i: {} for i in range(5)}})


def test_state_that_is_no_tensor_is_reported(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["steps"] = 1

    model = Net()
    with pytest.raises(TypeError, match=r"state 'steps' is 1: files hold tensors"):
        train(model, offloaded(model, tmp_path, partial(Counting, lr=0.1)))
