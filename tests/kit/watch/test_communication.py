"""Tests of recorded communication: calls and bytes counted by hand, a real ring, and bytes on the wire.

The models have two layers; pieces are as torch.tensor_split cuts them.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.collectives import all_reduce
from labs.ddp import Overlapped
from labs.kit.record import mark
from tests.kit.watch.common import recording

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pieces(n, ranks):
    return [len(piece) for piece in torch.empty(n).tensor_split(ranks)]


# ---- every call ------------------------------------------------------------------------------------------
def each_collective(n):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, all_ = torch.ones(n), torch.ones(ranks * n)
    parts = list(all_.chunk(ranks))
    for call in [
        lambda: dist.all_reduce(one, async_op=True).wait(),
        lambda: all_gather_single(torch.empty(ranks * n), one),
        lambda: dist.all_gather([torch.empty(n) for _ in parts], one),
        lambda: reduce_scatter_single(torch.empty(n), all_),
        lambda: dist.reduce_scatter(torch.empty(n), parts),
        lambda: dist.all_to_all_single(torch.empty(ranks * n), all_),
        lambda: dist.all_to_all_single(torch.empty(len(all_) - 1), all_[1:], *uneven(rank, ranks, n)),
        lambda: dist.broadcast(one, 1),
        lambda: dist.reduce(one, 1),
        lambda: dist.scatter(torch.empty(n), parts if rank == 1 else None, 1),
        lambda: dist.gather(one, [torch.empty(n) for _ in parts] if rank == 1 else None, 1),
        lambda: dist.barrier(),
    ]:
        mark("step")
        call()


def uneven(rank, ranks, n):
    """Return output and input splits of an all_to_all in which every rank keeps n - 1 and gives n to each other."""
    splits = [n - (r == rank) for r in range(ranks)]
    return splits, splits


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_collective_has_its_op_and_bytes(ranks):
    n = 7
    seen = recording(each_collective, n, ranks=ranks)
    for rank in range(ranks):
        cut = pieces(n, ranks)
        ring, others, root = 2 * n - cut[rank] - cut[(rank + 1) % ranks], (ranks - 1) * n, rank == 1
        expected = [
            ("all_reduce", n, n, ring),
            ("all_gather", n, ranks * n, others),
            ("all_gather", n, ranks * n, others),
            ("reduce_scatter", ranks * n, n, others),
            ("reduce_scatter", ranks * n, n, others),
            ("all_to_all", ranks * n, ranks * n, others),
            ("all_to_all", ranks * n - 1, ranks * n - 1, others),
            ("broadcast", n, n, others if root else 0),
            ("reduce", n, n, 0 if root else n),
            ("scatter", ranks * n if root else 0, n, others if root else 0),
            ("gather", n, ranks * n if root else 0, 0 if root else n),
            ("barrier", 0, 0, 0),
        ]
        events = [event for event in seen.events if event.rank == rank]
        assert [(e.op, e.bytes_in / 4, e.bytes_out / 4, e.sent / 4) for e in events] == expected
        assert [event.step for event in events] == list(range(len(expected)))
        assert {(e.group, e.ranks, e.peer) for e in events} == {("default_pg", tuple(range(ranks)), None)}
        assert {event.dtype for event in events} == {"float32", ""}


def coalesced():
    ranks = dist.get_world_size()
    x, y = torch.ones(5), torch.ones(4, dtype=torch.float64)
    mark("step")
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(3))
    mark("step")
    for done in torch.ops._c10d_functional.all_gather_into_tensor_coalesced([x, y], ranks, dist.group.WORLD.group_name):
        torch.ops._c10d_functional.wait_tensor(done)


def test_coalesced_calls_count_every_tensor():
    seen = recording(coalesced)
    first, second = ([e for e in seen.events if e.rank == 0 and e.step == step] for step in (0, 1))
    assert {e.op for e in first} == {"all_reduce"} and sum(e.sent for e in first) == 4 * (10 - 5 + 6 - 3)
    assert {e.op for e in second} == {"all_gather"} and sum(e.sent for e in second) == 5 * 4 + 4 * 8


def our_ring(n):
    mark("step")
    dist.all_reduce(torch.ones(n))
    mark("step")
    all_reduce(torch.ones(n))


@pytest.mark.parametrize(("n", "ranks"), [(10, 3), (2, 3), (9, 4)])
def test_logical_bytes_are_what_a_ring_sends(n, ranks):
    seen = recording(our_ring, n, ranks=ranks)
    for rank in range(ranks):
        assert seen.sent(rank, step=0) == seen.sent(rank, step=1)
        assert set(seen.counts(rank, step=1)) == {"send", "recv"}


def subgroup_messages():
    rank = dist.get_rank()
    group = dist.new_group([1, 2], group_desc="pair")
    mark("step")
    if rank == 1:
        dist.send(torch.ones(3, dtype=torch.float64), 2, group=group)
    if rank == 2:
        dist.recv(torch.empty(3, dtype=torch.float64), 1, group=group)
    mark("step")
    ops = [
        dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % 3),
        dist.P2POp(dist.irecv, torch.empty(2), (rank - 1) % 3),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_messages_name_their_peer_by_its_rank_in_the_job():
    seen = recording(subgroup_messages, ranks=3)
    (send,), (recv,) = ([e for e in seen.events if e.step == 0 and e.rank == rank] for rank in (1, 2))
    assert (send.op, send.peer, send.ranks, send.sent, send.dtype) == ("send", 2, (1, 2), 24, "float64")
    assert send.group == recv.group == "pair"
    assert (recv.op, recv.peer, recv.ranks, recv.sent, recv.bytes_out) == ("recv", 1, (1, 2), 0, 24)
    around = {(e.rank, e.op, e.peer) for e in seen.events if e.step == 1}
    assert around == {(r, op, peer % 3) for r in range(3) for op, peer in (("send", r + 1), ("recv", r - 1))}


# ---- callers of all kinds --------------------------------------------------------------------------------
def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # 2 x (64 + 8) parameters


def train(model, x, sync=lambda: None):
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        mark("step")
        model(x).sum().backward()
        sync()
        optimizer.step()
        optimizer.zero_grad()


def by_ddp():
    train(nn.parallel.DistributedDataParallel(two_layers()), torch.ones(2, 8))


def by_ours():
    model = Overlapped(two_layers())
    train(model, torch.ones(2, 8), model.sync)


def by_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = two_layers()
    for layer in model:
        fully_shard(layer)
    train(fully_shard(model), torch.ones(2, 8))


def by_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(two_layers(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    train(model, torch.ones(2, 8, requires_grad=True))


def by_pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(two_layers()[rank], rank, ranks, torch.device("cpu"), group=dist.group.WORLD)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).sum())
    for _ in range(3):
        mark("step")
        if rank == 0:
            schedule.step(torch.ones(8, 8))
        else:
            schedule.step(target=torch.zeros(8, 8))


WHOLE = 4 * 144  # bytes of all gradients; on 2 ranks an all-reduce sends as many
SHARD = 4 * 72 // 2  # bytes of half a layer
MICRO = 4 * 2 * 8  # bytes of a micro-batch's activations


@pytest.mark.parametrize(
    ("strategy", "counts", "sent", "issuer"),
    [
        (by_ddp, {"all_reduce": 1}, WHOLE, "torch (C++)"),
        (by_ours, {"all_reduce": 1}, WHOLE, "ddp.py:"),
        # Each layer is gathered for forward and again for backward, and its gradient scattered once.
        (by_fsdp, {"all_gather": 4, "reduce_scatter": 2}, 6 * SHARD, "test_communication.py:"),
        # The row layer's output in forward, the gradient of the column layer's input in backward: both 2 x 8.
        (by_tensor_parallel, {"all_reduce": 2}, 2 * 4 * 16, "test_communication.py:"),
        # Four micro-batches go down, four gradients come up.
        (by_pipeline, {"send": 4, "recv": 4}, 4 * MICRO, "test_communication.py:"),
    ],
)
def test_strategies_by_hand(strategy, counts, sent, issuer):
    seen = recording(strategy)
    for rank in (0, 1):
        assert seen.counts(rank, step=2) == Counter(counts)
        assert seen.sent(rank, step=2) == sent
        assert all(event.issuer.startswith(issuer) for event in seen.select(rank, step=2))


def test_messages_about_shapes_are_no_part_of_a_step():
    """Check PyTorch's pipelines, which begin by sending the sizes and bytes of a few pickled objects, and a vote."""
    seen = recording(by_pipeline)
    for rank in (0, 1):
        events = [event for event in seen.events if event.rank == rank]
        told = [event for event in events if event.meta]
        assert {event.op for event in told} <= {"send", "recv", "all_reduce"} and 2 <= len(told) <= 8
        assert all(event.step is None and event.bytes_in + event.bytes_out < 2000 for event in told)
        assert {event.step for event in events if not event.meta} == {0, 1, 2}
        assert [seen.sent(rank, step) for step in range(3)] == [4 * MICRO] * 3
        assert [seen.counts(rank, step) for step in range(3)] == [Counter({"send": 4, "recv": 4})] * 3


def test_objects_that_the_program_sends_are_traffic_of_its_own():
    def body():
        mark("step")
        objects = [dist.get_rank()]
        dist.broadcast_object_list(objects, 0)

    seen = recording(body)
    assert len(seen.select(rank=0, step=0)) == 2 and not any(event.meta for event in seen.events)


def in_threads():
    mark("step")
    groups = [dist.new_group([0, 1], group_desc=f"group {number}") for number in range(3)]
    mark("step")

    def issue(number):
        for _ in range(5):
            dist.all_reduce(torch.ones(number + 1), group=groups[number])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(issue, range(3)))
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    thread.join()


def test_collectives_in_threads():
    seen = recording(in_threads)
    for rank in (0, 1):
        events = seen.select(rank, step=1)
        got = Counter((event.op, event.group, event.bytes_in) for event in events)
        assert got == {("all_reduce", f"group {n}", 4 * (n + 1)): 5 for n in range(3)} | {
            ("barrier", "default_pg", 0): 1
        }
        assert {event.issuer.split(":")[0] for event in events if event.op != "barrier"} == {"test_communication.py"}
        assert all(event.end >= event.start and event.waited > 0 for event in events if event.op == "all_reduce")


def test_the_issuer_is_a_line_of_the_strategy():
    event = recording(by_ours).select(rank=1, step=0)[0]
    name, function = event.issuer.split(" ")
    assert name.startswith("ddp.py:") and function.isidentifier()


# ---- time ------------------------------------------------------------------------------------------------
def late():
    dist.barrier()
    mark("step")
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.all_reduce(torch.ones(4))
    mark("step")
    work = dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(0.3)
    work.wait()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        dist.send(torch.ones(1), 0)
    else:
        dist.recv(torch.ones(1), 1)


def test_clock_waits_and_ends():
    seen = recording(late)
    assert seen.events == sorted(seen.events, key=lambda event: event.start)
    assert all(0 <= event.start <= event.end for event in seen.events)
    _, first, hidden, message = seen.select(rank=0)
    assert first.end - first.start > 0.2 and first.waited > 0.2  # rank 0 waited for the late rank
    other = seen.select(rank=1)[1]
    assert other.start > first.start + 0.2 and abs(other.end - first.end) < 0.15  # both use one clock
    # hidden behind the sleep: this is its own end, not wait's
    assert hidden.end - hidden.start < 0.2 and hidden.waited < 0.15
    assert hidden.waits[0][0] - hidden.start > 0.2  # the wait began when the sleep was over
    assert message.op == "recv" and message.waited > 0.15


def unwaited_and_failing_works():
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
    del works
    dist.barrier()
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2))


def test_a_work_that_nobody_waits_for_or_that_fails_does_no_harm():
    seen = recording(unwaited_and_failing_works)
    assert seen.counts()["all_reduce"] == 3 and all(event.end >= event.start for event in seen.events)


# ---- bytes on the wire -----------------------------------------------------------------------------------
WIRE = """
    import json
    import torch, torch.distributed as dist
    from labs.kit.launch import run
    from labs.kit.record import mark

    REPEATS = 4

    def on_loopback():
        with open("/proc/net/dev") as devices:
            return next(int(line.split()[9]) for line in devices if line.split()[0] == "lo:")

    def crossed(call):
        dist.barrier()
        before = on_loopback()
        dist.barrier()
        call()
        dist.barrier()
        return on_loopback() - before

    def measure():
        ranks, wire = dist.get_world_size(), {}
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        one, whole = torch.ones(2**18), torch.ones(ranks * 2**18)
        calls = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: gather(whole, one),
            "reduce_scatter": lambda: scatter(one, whole),
            "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "scatter": lambda: dist.scatter(one, list(whole.chunk(ranks)) if dist.get_rank() == 0 else None),
        }
        for op, call in calls.items():
            call()  # the first call also connects
            mark("step")
            # A busy machine now and then makes TCP send something twice: the least of a few is what gloo sends.
            wire[op] = min(crossed(call) for _ in range(REPEATS))
            mark("end")
        return wire

    if __name__ == "__main__":
        ratio = {}
        for ranks in (2, 4):
            results = run(measure, ranks=ranks, device="cpu", record="communication")
            seen = results.recording
            for step, (op, wire) in enumerate(results[0].items()):
                ratio[f"{op} {ranks}"] = REPEATS * wire / sum(seen.sent(rank, step) for rank in range(ranks))
        print(json.dumps(ratio))
"""


def own_network():
    """Return the command that runs another in a network of its own; skip where this machine does not allow it."""
    if not (sys.platform == "linux" and shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("counting bytes on the wire needs Linux with unshare and ip")
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("counting bytes on the wire needs the right to make a network namespace")
    return command


def test_logical_bytes_are_those_on_the_wire(tmp_path):
    script = tmp_path / "wire.py"
    script.write_text(textwrap.dedent(WIRE))
    root = str(Path(__file__).resolve().parents[2])
    answer = subprocess.run(
        [*own_network(), sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert answer.returncode == 0, answer.stderr
    ratio = json.loads(answer.stdout.splitlines()[-1])
    ops = "all_reduce", "all_gather", "all_to_all", "broadcast", "scatter"
    expected = {f"{op} {ranks}": 1 for op in ops for ranks in (2, 4)}
    # gloo has no reduce-scatter of its own: it does an all-reduce, twice the bytes, and keeps one piece.
    expected |= {f"reduce_scatter {ranks}": 2 for ranks in (2, 4)}
    assert ratio == pytest.approx(expected, rel=0.03)
