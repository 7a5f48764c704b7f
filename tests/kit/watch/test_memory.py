"""Tests of recorded memory against the CPU allocator's events (torch.profiler, profile_memory), and against sizes.

The sizes are those of the tensors that a model, its gradients and its optimizer hold.  Numbers are compared with the
same job without the watch.
"""

import contextlib
import gc
import json
import pickle
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy as copy_of

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parameter import UninitializedTensorMixin
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from labs.group import all_gather
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.watch import c10d_tap, storage_ledger
from labs.kit.watch import late_release as loans
from labs.kit.watch.memory import KINDS, StorageWatch, timeline
from labs.model import GPT, PRESETS

TINY = PRESETS["tiny"]
KIB = 2**10


def allocator(fn, folder):
    """Return fn's value, and the peak bytes and the last bytes that the allocator had given out for it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        value = fn()
    trace = folder / "trace.json"
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        total += event["args"]["Bytes"]
        most = max(most, total)
    return value, most, total


@contextlib.contextmanager
def no_collection():
    """Keep cycles alive: otherwise they would go whenever Python collects, sooner or later under a watch."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watch(fn, *args):
    """Return fn's value and the timeline."""
    with StorageWatch() as watched:
        value = fn(*args)
    return value, timeline(pickle.loads(pickle.dumps(watched.tape)))


def most(line, kind):
    return max(held[kind] for _, held in line)


def last(line):
    return {kind: size for kind, size in line[-1][1].items() if size}


def storage_bytes(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def state(optimizer):
    return [v for values in optimizer.state.values() for v in values.values()]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY.vocab, (2, 2, TINY.context), generator=generator)


def train(model=None, steps=3):
    model = model or GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        mark("step")
        x, y = batch(step)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return checkpoint(self.layer, *args, use_reentrant=False)


def checkpointed():
    model = GPT(TINY)
    for name, layer in list(model.layers.items()):
        model.layers[name] = Checkpointed(layer)
    return train(model)


# ---- against the allocator -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11 warns
@pytest.mark.parametrize("job", [train, checkpointed])
def test_every_byte_of_the_allocator(job, tmp_path):
    job()  # allocates what torch allocates once and keeps
    with no_collection():
        _, alone, _ = allocator(job, tmp_path)
    with no_collection():
        (_, line), true_peak, true_end = allocator(lambda: watch(job), tmp_path)
    totals = [sum(held.values()) for _, held in line]
    assert max(totals) == pytest.approx(true_peak, abs=0.02 * 2**20)
    assert true_peak == pytest.approx(alone, abs=0.02 * 2**20), "the watch changes what it measures"
    assert totals[-1] == pytest.approx(true_end, abs=KIB)


def test_parameters_gradients_and_state_to_the_byte():
    (model, optimizer), line = watch(train)
    parameters = list(model.parameters())
    size = storage_bytes(parameters)
    assert most(line, "P") == size
    assert most(line, "G") == size
    assert most(line, "S") == storage_bytes(state(optimizer)) == 2 * size + 4 * len(parameters)  # a counter each
    assert most(line, "comm") == 0
    assert last(line) == {"P": size, "S": 2 * size + 4 * len(parameters)}


def test_checkpointing_keeps_less_for_the_backward():
    plain, little = (most(watch(job)[1], "A") for job in (train, checkpointed))
    assert 0 < little < 0.75 * plain


# ---- kinds -----------------------------------------------------------------------------------------------


def chain():
    layers = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Sigmoid(), nn.Sigmoid())
    x = torch.randn(64, 32)
    layers(x).sum().backward()
    return layers


def test_activations_are_what_the_backward_needs():
    _, line = watch(chain)
    assert most(line, "A") == 3 * 4 * 64 * 32  # the input of the linear layer and the output of each sigmoid


def mixed_precision():
    model = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    model(torch.randn(4, 16, dtype=torch.bfloat16)).sum().backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    return model, optimizer


def test_masters_are_optimizer_state():
    _, line = watch(mixed_precision)
    n = 16 * 16
    assert (most(line, "P"), most(line, "G"), most(line, "S")) == (2 * n, (2 + 4) * n, 3 * 4 * n + 4)


def no_module():
    weight = torch.randn(16, requires_grad=True)
    weight.square().sum().backward()
    torch.optim.SGD([weight]).step()


def test_parameters_without_a_module_are_parameters_all_the_same():
    _, line = watch(no_module)
    assert (most(line, "P"), most(line, "G"), most(line, "S")) == (64, 64, 0)


def frozen_tied_and_cast():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    model.to(torch.float64)  # the same Parameter objects with other storages
    model(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    return model


def test_frozen_tied_and_cast_parameters():
    model, line = watch(frozen_tied_and_cast)
    assert last(line) == {"P": 2 * 8 * 64, "G": 8 * 64}
    assert storage_bytes(model.parameters()) == 2 * 8 * 64


def test_memory_that_operators_only_look_at_is_not_counted():
    corpus = torch.frombuffer(bytearray(2**20), dtype=torch.uint8)
    (part, copy), line = watch(lambda: (corpus[10:20], corpus[10:20].long()))
    assert last(line) == {"temporary": 80} and len(part) == len(copy)


def resized():
    x = torch.zeros(256)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(2048)
    return x


def test_storages_that_change_their_size():
    x, line = watch(resized)
    assert [held["temporary"] for _, held in line] == [1024, 0, 2048] and len(x) == 256


def test_sparse_gradients():
    def embed():
        model = nn.Embedding(100, 4, sparse=True)
        model(torch.tensor([1, 2])).sum().backward()
        return model

    model, line = watch(embed)
    gradient = model.weight.grad
    assert last(line)["G"] == storage_bytes([gradient._values()]) + storage_bytes([gradient._indices()])


def test_a_lazy_layer():
    def lazy():
        model = nn.Sequential(nn.LazyLinear(8, bias=False), nn.LazyBatchNorm1d())
        model(torch.ones(3, 4)).sum().backward()
        return model

    _, line = watch(lazy)
    assert (last(line)["P"], last(line)["G"]) == (4 * (8 * 4 + 8 + 8), 4 * (8 * 4 + 8 + 8))
    assert most(line, "comm") == 0


def test_fake_and_meta_tensors_hold_nothing():
    def fake():
        with FakeTensorMode():
            x = torch.ones(1000)
            y = nn.Linear(1000, 8)(x)
        return x, y, torch.ones(1000, device="meta") + 1

    assert sum(most(watch(fake)[1] or [(0, dict.fromkeys(KINDS, 0))], kind) for kind in KINDS) == 0


def test_threads_that_start_meanwhile_are_seen():
    def threads():
        layer = nn.Linear(32, 32, bias=False)

        def work(_):
            return layer(torch.ones(64, 32)).sigmoid()

        with ThreadPoolExecutor(2) as pool:
            return layer, list(pool.map(work, range(4)))

    _, line = watch(threads)
    assert last(line) == {"P": 4 * 32 * 32, "A": 4 * 2 * 4 * 64 * 32}  # four times the layer's input, and the output


def test_a_deep_copy_is_seen():
    x = torch.ones(256)
    copy, line = watch(lambda: copy_of(x))
    assert last(line) == {"temporary": 1024} and torch.equal(copy, x)


def test_flex_attention():
    def attend():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is not compiled
            return flex_attention(*torch.ones(3, 1, 2, 128, 16))

    answer, line = watch(attend)
    assert most(line, "temporary") >= 4 * 2 * 128 * 128, "the scores, which only operators within it see"
    assert torch.equal(answer, attend()) and last(line)["temporary"] == answer.nbytes


def test_torch_func_works_and_the_pass_says_what_it_cannot_measure():
    model, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, x).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.warns(UserWarning, match="torch.func allows no hooks on saved tensors; within it, activations"):
        gradient, line = watch(lambda: (chain(), torch.func.grad(loss)(parameters), chain())[1])
    torch.testing.assert_close(gradient["weight"], torch.func.grad(loss)(parameters)["weight"])
    assert most(line, "A") == 3 * 4 * 64 * 32, "before and after it, activations are known as ever"
    with StorageWatch(), pytest.warns(UserWarning, match="torch.func"):
        twice = torch.func.grad(lambda x: torch.func.grad(lambda x: x.pow(3).sum())(x).sum())(torch.ones(2))
    assert torch.equal(twice, 6 * torch.ones(2))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_is_compiled_runs_uncompiled_and_the_pass_says_so(fullgraph):
    calls = []

    def backend(module, _):
        calls.append(module)
        return module.forward

    fn = torch.compile(lambda x: x.sin() + 1, backend=backend, fullgraph=fullgraph)
    with pytest.warns(UserWarning, match="compiled functions run uncompiled") as warned:
        _, line = watch(lambda: (fn(torch.ones(256)), fn(torch.ones(256)))[0])
    assert len(warned) == 1 and calls == []
    assert most(line, "temporary") == 4 * 1024  # the first answer; argument, sine and answer of the second
    fn(torch.ones(256))
    assert len(calls) == 1, "afterwards it is compiled as ever"


# ---- nothing is changed ----------------------------------------------------------------------------------


def test_same_numbers_as_without():
    plain, _ = train()
    watched = watch(train)[0][0]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_nothing_is_kept_alive():
    gc.disable()  # only the collector would free a reference cycle
    try:
        _, line = watch(lambda: train() and None)
    finally:
        gc.enable()
    assert sum(last(line).values()) < KIB


def test_no_hook_stays_behind():
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    tables = [
        modules._global_parameter_registration_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]

    def replaced():
        kept = threading.Thread.start, torch.UntypedStorage.clone, UninitializedTensorMixin.materialize
        return *kept, saved_tensors_hooks.__enter__, torch.UntypedStorage.resize_, graph.disable_saved_tensors_hooks

    methods = replaced()
    model = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), StorageWatch():
        model(torch.ones(4)).sum().backward()
        1 / 0  # noqa: B018
    assert not any(tables) and not model.weight._post_accumulate_grad_hooks
    assert methods == replaced()
    assert len(timeline(StorageWatch().tape)) == 0


# ---- jobs ------------------------------------------------------------------------------------------------


def sizes(model, optimizer):
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    states = [v.to_local() if hasattr(v, "to_local") else v for v in state(optimizer)]
    return storage_bytes(local), storage_bytes(states)


def by_ddp():
    return sizes(*train(nn.parallel.DistributedDataParallel(GPT(TINY))))


def by_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = GPT(TINY)
    for layer in model.layers.values():
        fully_shard(layer)
    return sizes(*train(fully_shard(model)))


def by_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(TINY)
    plan = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, plan)
    return sizes(*train(model))


@pytest.mark.parametrize("strategy", [by_ddp, by_fsdp, by_tensor_parallel])
def test_strategies_to_the_byte(strategy):
    results = run(strategy, ranks=2, device="cpu", record="memory")
    for rank, (parameters, states) in enumerate(results):
        held = results.recording.steady(rank)
        assert (held["P"], held["G"], held["S"]) == (parameters, parameters, states)
        assert held["A"] > 0 and held["comm"] > 0
        assert max(held[kind] for kind in KINDS) < held["peak"] <= sum(held[kind] for kind in KINDS)


def ddp_and_the_allocator(folder):
    by_ddp()
    (_, line), true_peak, _ = allocator(lambda: watch(by_ddp), folder / str(dist.get_rank()))
    return max(sum(held.values()) for _, held in line), true_peak


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11 warns
def test_every_byte_of_the_allocator_in_a_job(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    for ours, true_peak in run(ddp_and_the_allocator, tmp_path, ranks=2, device="cpu"):
        assert ours == pytest.approx(true_peak, abs=0.02 * 2**20)


def test_what_fsdp_gathers_is_communication():
    results = run(by_fsdp, ranks=2, device="cpu", record="memory")
    first, third = (results.recording.held(step=step) for step in (1, 2))
    assert first == third  # nothing grows
    whole = storage_bytes(GPT(TINY).parameters())
    assert first["P"] < 0.6 * whole and first["comm"] > 0.25 * whole


def test_what_ddp_keeps_beside_is_its_buckets():
    results = run(by_ddp, ranks=2, device="cpu", record="memory")
    for rank, (parameters, _) in enumerate(results):
        assert results.recording.steady(rank)["comm"] == pytest.approx(parameters, abs=KIB)


class KeepsLonger(c10d_tap.Listener):
    """A backend's thread that runs 20 ms late, and holds its tensors until then."""

    def lent(self, call, args):
        call.notes[self] = args
        return args

    def waited(self, call):
        kept = [call.notes.pop(self)]
        threading.Timer(0.02, kept.clear).start()


def overtaken(frame, event, argument):
    if frame.f_code.co_filename == storage_ledger.__file__:
        time.sleep(0.001)


def gather_in_a_row(late):
    if late:
        # added after the recorder's own listener, so that it holds what that one gave to the backend
        c10d_tap.listeners.append(KeepsLonger())
        threading.settrace(overtaken)
    mark("step")
    for _ in range(5):
        gathered = torch.empty(2 * 1000)
        all_gather(gathered, torch.ones(1000))
        del gathered
    mark("step")


def test_what_is_held_does_not_depend_on_when_a_thread_runs():
    for late in (True, False):
        recording = run(gather_in_a_row, late, ranks=2, device="cpu", record="memory").recording
        for rank in (0, 1):
            assert [recording.held(rank, step)["comm"] for step in (0, 1)] == [4 * 3000, 0]


class KeepsForEver(c10d_tap.Listener):
    """A backend that keeps its tensors."""

    def __init__(self):
        self.kept = []

    def lent(self, call, args):
        self.kept.append(args)
        return args


def gather_with_one_that_keeps():
    loans.PATIENCE = 1.0
    c10d_tap.listeners.append(KeepsForEver())
    begun = time.monotonic()
    for _ in range(60):
        all_gather(torch.empty(2 * 1000), torch.ones(1000))
    return time.monotonic() - begun


def test_a_backend_that_keeps_is_waited_for_once():
    for seconds in run(gather_with_one_that_keeps, ranks=2, device="cpu", record="memory"):
        assert 1 < seconds < 59  # one wait, not 60


def keep_handles():
    loans.PATIENCE = 600.0
    x, works = torch.ones(1000), []
    for _ in range(5):
        works.append(dist.all_reduce(x, async_op=True))
        works[-1].wait()
        x = x + 1


def test_a_program_may_keep_its_handles():
    """Check a program that keeps its own handles: waiting for the backend to release them would never end."""
    run(keep_handles, ranks=2, device="cpu", record="memory")


def sums_of_all_kinds():
    rank = dist.get_rank()
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
    tensors = [sparse, torch.ones(3, dtype=torch.complex64), torch.ones(()), torch.empty(0)]
    for x in tensors:
        dist.all_reduce(x)
    with torch.inference_mode():
        tensors.append(torch.ones(3))
        dist.all_reduce(tensors[-1])
    return [x.to_dense().tolist() for x in tensors]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_the_backend_gets_is_what_the_program_has():
    watched, plain = (list(run(sums_of_all_kinds, ranks=2, device="cpu", record=it)) for it in ("memory", None))
    assert watched == plain
    assert watched[0][:3] == [[1.0, 1.0, 0.0, 0.0], [2 + 0j] * 3, 2.0]


def sum_and_let_go():
    summed, gone = functional.wait_tensor(functional.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)), []
    reference = weakref.ref(summed.untyped_storage(), gone.append)
    del summed
    for _ in range(100):
        if not gone:
            time.sleep(0.01)  # gives the backend's thread time
    return gone == [reference]


def test_a_recorder_keeps_nothing_alive():
    assert all(run(sum_and_let_go, ranks=2, device="cpu", record="memory"))
