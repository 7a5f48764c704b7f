"""Tests of labs.kit's link: its arithmetic, done by hand here, against the clock.

Nothing may be faster than the wire.  Only the long tests limit how much slower the fastest of a few tries may be: 15 %.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from labs.group import all_gather, reduce_scatter_single
from labs.kit import draw
from labs.kit.launch import Link, RankError, run
from labs.kit.ranks import torchrun
from labs.kit.record import mark

LINK = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)
WIRE = 200e6 / 8  # bytes/s
N = 200_000  # float32 numbers: 32 ms
MS = 1e-3


def timed(call):
    """Return begin and end (s) of each of three tries."""
    tries = []
    for _ in range(3):
        dist.barrier()
        began = time.monotonic()
        call()
        tries.append((began, time.monotonic()))
    return tries


def quickest(by_rank):
    """Return the seconds from the first rank's begin to the last one's end, of the fastest try or step."""
    tries = zip(*by_rank, strict=True)
    return min(max(end for _, end in each) - min(begin for begin, _ in each) for each in tries)


# ---- arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "group", "across", "trips"),
    [
        ("all_reduce", (0, 1, 2, 3), 1.5, 4),
        ("reduce_scatter", (0, 1, 2, 3), 0.75, 2),
        ("all_gather", (0, 1, 2, 3), 3, 2),
        ("all_gather", (0, 2, 1, 3), 6, 3),  # a ring that leaves the node twice
        ("all_to_all", (0, 1, 2, 3), 1, 1),
        ("broadcast", (0, 1, 2, 3), 2, 1),
        ("scatter", (0, 1, 2, 3), 0.5, 1),
        ("gather", (0, 1, 2, 3), 2, 1),
        ("reduce", (1, 2), 1, 1),
        ("barrier", (0, 1, 2, 3), 0, 4),
        ("all_reduce", (0, 2), 1, 2),
        ("send", (1, 2), 1, 1),
        ("all_reduce", (0, 1), 0, 0),
        ("send", (3, 2), 0, 0),
    ],
)
def test_seconds_by_hand(op, group, across, trips):
    assert LINK.seconds(op, 1e6, ranks=4, group=group) == pytest.approx(across * 1e6 / WIRE + trips * 1e-3)


def test_root_and_group_default_to_rank_0_and_the_whole_job():
    assert LINK.seconds("broadcast", 1e6, 4) == LINK.seconds("broadcast", 1e6, 4, range(4), root=0)
    assert LINK.seconds("gather", 1e6, 4, (0, 1, 2), root=2) == pytest.approx(2e6 / WIRE + 1e-3)
    assert Link(4, 200e6).seconds("all_reduce", 1e6, 8) == pytest.approx(1.75e6 / WIRE)  # every wire carries as much


@pytest.mark.parametrize("text", ["200 Mbit/s", "200Mbit/s", "0.2 Gbit/s", "200000 kbit/s", "200000000 bit/s"])
def test_bandwidth_in_words(text):
    assert Link(2, text) == Link(2, 200e6) == Link(2, 200_000_000)


# ---- against the clock -----------------------------------------------------------------------------------


def every_kind():
    small, whole, rank = torch.ones(N), torch.ones(4 * N), dist.get_rank()
    pair, world = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))][rank % 2], dist.group.WORLD
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])

    def message():
        if rank in (1, 2):
            dist.send(small, 2) if rank == 1 else dist.recv(small, 1)

    def exchange():
        posts = [dist.P2POp(dist.isend, small, (rank + 2) % 4), dist.P2POp(dist.irecv, whole[:N], (rank + 2) % 4)]
        for work in dist.batch_isend_irecv(posts):
            work.wait()

    def overlapped():
        work = dist.all_reduce(whole, async_op=True)
        time.sleep(LINK.seconds("all_reduce", 16 * N, 4))
        work.wait()

    def two_at_once():
        for work in [dist.all_reduce(torch.ones(N), async_op=True) for _ in range(2)]:
            work.wait()

    def given_up():
        work = dist.all_reduce(whole, async_op=True)
        with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.01 s"):
            work.wait(timedelta(milliseconds=10))
        assert not work.is_completed()
        assert work.wait(timedelta(seconds=30)) and work.is_completed()

    def by_future():
        future = dist.all_reduce(torch.ones(4 * N), async_op=True).get_future()
        assert future.then(lambda done: done.value()[0].sum().item()).wait() == 16 * N

    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, small),
        "reduce_scatter": lambda: reduce_scatter_single(small, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(small, 0),
        "send": message,
        "exchange": exchange,
        "overlapped": overlapped,
        "two at once": two_at_once,
        "two groups": lambda: dist.all_reduce(whole, group=pair),
        "given up": given_up,
        "future": by_future,
        "functional all_reduce": lambda: functional.wait_tensor(functional.all_reduce(whole, "sum", world)),
        "functional reduce_scatter": lambda: functional.wait_tensor(scatter_sum(whole, world)),
        "dtensor": sharded.full_tensor,
    }
    return {name: timed(call) for name, call in calls.items()}


def scatter_sum(tensor, group):
    return getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)(tensor, "sum", 0, group)


# Delays of the link can only be later than the arithmetic says; how much later depends on the machine.
WITHIN = pytest.mark.parametrize("within", [math.inf, pytest.param(1.15, marks=pytest.mark.soak)])


@pytest.mark.alone
@WITHIN
def test_times_are_those_of_the_arithmetic(within):
    nbytes = 4 * N
    expected = {op: LINK.seconds(op, 4 * nbytes, 4) for op in ("all_reduce", "reduce_scatter", "all_to_all")}
    expected |= {op: LINK.seconds(op, nbytes, 4) for op in ("all_gather", "broadcast")}
    expected |= {
        "send": LINK.seconds("send", nbytes, 4, (1, 2)),
        "exchange": 2 * nbytes / WIRE + 1e-3,  # each node's wire carries two messages out, and two in at the same time
        "overlapped": expected["all_reduce"],
        "two at once": 2 * 1.5 * nbytes / WIRE + 4e-3,
        "two groups": 2 * 4 * nbytes / WIRE + 2e-3,
        "given up": expected["all_reduce"],
        "future": expected["all_reduce"],
        "functional all_reduce": expected["all_reduce"],
        "functional reduce_scatter": expected["reduce_scatter"],
        "dtensor": expected["all_gather"],
    }
    by_rank = run(every_kind, ranks=4, link=LINK)
    for name, seconds in expected.items():
        took = quickest(times[name] for times in by_rank)
        assert seconds < took < within * seconds + 5 * MS, name


def inside():
    """Return the seconds of an all-reduce inside a node, which would take 0.64 s across."""
    pair = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))][dist.get_rank() // 2]
    return timed(lambda: dist.all_reduce(torch.ones(10 * N), group=pair))


@pytest.mark.alone
def test_inside_a_node_nothing_is_slow():
    assert quickest(run(inside, ranks=4, link=LINK)) < 0.6


# ---- native strategies -----------------------------------------------------------------------------------


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(2)])  # 1 MB each


def trained(model):
    for _ in range(4):
        mark("step")
        model(torch.ones(1, 500)).sum().backward()
    mark("end")


def ddp():
    trained(DistributedDataParallel(layers()))


def fsdp(*shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    trained(fully_shard(model, mesh=mesh))


@pytest.mark.alone
@WITHIN
@pytest.mark.parametrize(("strategy", "shape", "across"), [(ddp, (), 3), (fsdp, (4,), 4.5), (fsdp, (2, 2), 2)])
def test_native_strategies_feel_the_wire(strategy, shape, across, within):
    """Check the MB out of each node in a step: 1.5 N, 3 x 0.75 N and N, for a model of N = 2 MB.

    In DDP, PyTorch's C++ waits.
    """
    free, seen = (run(strategy, *shape, ranks=4, link=link, record="communication") for link in (None, LINK))
    seen = seen.recording
    for node in ((0, 1), (2, 3)):
        assert sum(seen.across(rank, 2) for rank in node) == pytest.approx(across * 1e6)
    wire = across * 1e6 / WIRE
    latency = sum(LINK.seconds(event.op, 0, 4, event.ranks) for event in seen.select(0, 2))
    assert wire < quickest(steps(seen)) < within * (wire + latency + quickest(steps(free.recording))) + 20 * MS


def steps(seen):
    return [[(span.start, span.end) for span in seen.step_spans(rank)] for rank in range(4)]


# ---- recordings ------------------------------------------------------------------------------------------


def on_a_mesh(swapped):
    """Send much along one axis of a mesh and little along the other; the order of the axes decides which crosses
    nodes.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("much", "little") if swapped else ("little", "much"))
    mark("step")
    dist.all_reduce(torch.ones(1000), group=mesh.get_group("much"))
    dist.all_reduce(torch.ones(10), group=mesh.get_group("little"))


def test_the_order_of_axes_decides_what_crosses():
    fast = Link(2, "100 Gbit/s")
    for swapped, across in ((False, 40), (True, 4000)):
        seen = run(on_a_mesh, swapped, ranks=4, link=fast, record="communication").recording
        assert [seen.across(rank, step=0) for rank in range(4)] == [across] * 4
        assert [seen.sent(rank, step=0) for rank in range(4)] == [4040] * 4
        table = draw.traffic(seen, step=0)
        assert table.header == ("op", "calls", "bytes sent", "inside nodes", "across nodes")
        assert table.rows == (("all_reduce", "8", "16,160", f"{4 * (4040 - across):,}", f"{4 * across:,}"),)


def everything():
    rank, one, whole = dist.get_rank(), torch.ones(3), torch.ones(12)
    parts = list(whole.chunk(4))
    uneven = [1 + (rank + other) % 4 for other in range(4)]
    for call in [
        lambda: dist.all_reduce(torch.ones(10)),
        lambda: all_gather(whole, one),
        lambda: reduce_scatter_single(one, whole),
        lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        lambda: dist.all_to_all_single(torch.empty(10), torch.ones(10), uneven, uneven),
        lambda: dist.broadcast(one, 1),
        lambda: dist.scatter(one, parts if rank == 1 else None, 1),
        lambda: dist.reduce(one, 1),
        lambda: dist.gather(one, parts if rank == 1 else None, 1),
        lambda: dist.send(one, 2) if rank == 1 else dist.recv(one, 1) if rank == 2 else None,
        lambda: dist.recv(one) if rank == 2 else dist.send(one, 2) if rank == 1 else None,
    ]:
        mark("step")
        call()


def test_bytes_by_destination():
    seen = run(everything, ranks=4, link=Link(2, "100 Gbit/s"), record="communication").recording
    to = [{event.step: event.to for event in seen.select(rank)} for rank in range(4)]
    everyone = {0: 12, 2: 12, 3: 12}
    assert [to[1][step] for step in range(11)] == [
        {2: 4 * (20 - 3 - 2)},  # pieces of 3, 3, 2, 2
        {2: 36},
        {2: 36},
        everyone,
        {0: 8, 2: 16, 3: 4},
        everyone,
        everyone,
        {},
        {},
        {2: 12},
        {2: 12},
    ]
    assert to[0][7] == to[0][8] == {1: 12} and to[0][5] == to[0][6] == to[2][9] == to[2][10] == {}
    assert all(event.sent == sum(event.to.values()) for event in seen.events)
    assert [seen.across(1, step) for step in range(11)] == [60, 36, 36, 24, 20, 24, 24, 0, 0, 12, 12]


def test_without_a_link_nothing_crosses_and_an_error_says_so():
    seen = run(dist.barrier, ranks=2, record="communication").recording
    with pytest.raises(ValueError, match=r"run\(\.\.\., link=Link\(\.\.\.\)\)"):
        seen.across()
    assert draw.traffic(seen).header == ("op", "calls", "bytes sent")


# ---- failures and ends -----------------------------------------------------------------------------------


def left_behind():
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del work, tensor
    end = time.monotonic() + 60  # a thread of the backend may hold it a moment longer
    while time.monotonic() < end and (gone() is not None or timers()):
        time.sleep(0.01)
    left = timers()
    dist.all_reduce(torch.ones(60 * N), async_op=True)  # takes 57 s, for which nobody waits
    return gone() is None, left


def timers():
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_nothing_is_left_behind():
    slow = Link(2, "10 Mbit/s")
    run(dist.get_rank, ranks=4, link=slow)
    before, began = len(os.listdir("/dev/fd")), time.monotonic()
    assert run(left_behind, ranks=4, link=slow) == [(True, [])] * 4
    assert len(os.listdir("/dev/fd")) == before and time.monotonic() - began < 50


def test_a_collective_that_fails_late_raises_where_it_is_waited_for():
    def job():
        if dist.get_rank() == 3:
            time.sleep(0.2)
            os._exit(3)
        with pytest.raises(RuntimeError, match=r"Connection closed|closed by peer|Connection reset"):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(4), async_op=True).wait()
            else:  # the other ranks wait in C++
                functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))
        time.sleep(5)

    with pytest.raises(RankError, match=r"rank 3 ended with exit code 3"):
        run(job, ranks=4, link=LINK)


def test_ranks_that_wait_for_each_other_are_reported_as_without_a_link():
    def job():
        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 2)

    with pytest.raises(RankError, match="wait for each other") as error:
        run(job, ranks=2, link=LINK)
    assert error.value.kind == "deadlock"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bandwidth": 0}, r"bandwidth=0\): give more than 0 bit/s"),
        ({"bandwidth": "0 Mbit/s"}, "'0 Mbit/s'"),
        ({"bandwidth": -1e6}, "more than 0 bit/s"),
        ({"bandwidth": float("nan")}, "more than 0 bit/s"),
        ({"bandwidth": "25 MB/s"}, 'text such as "200 Mbit/s"'),
        ({"bandwidth": None}, "more than 0 bit/s"),
        ({"bandwidth": True}, "more than 0 bit/s"),
        ({"latency": -1e-3}, r"latency=-0\.001\): give a number of seconds, 0 or more"),
        ({"latency": "1 ms"}, "number of seconds"),
        ({"latency": float("inf")}, "number of seconds"),
        ({"nodes": 1}, r"nodes=1\).*for a single node, leave link out"),
        ({"nodes": 0}, "2 to 64"),
        ({"nodes": 2.0}, "2 to 64"),
        ({"nodes": 65}, "2 to 64"),
    ],
)
def test_an_impossible_link_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Link(**{"nodes": 2, "bandwidth": 1e6, "latency": 0.0} | arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"ranks": 3, "link": LINK}, ValueError, "2 nodes for ranks=3"),
        ({"link": Link(3, 1e6)}, ValueError, "3 nodes for ranks=4"),
        ({"ranks": 1, "link": LINK}, ValueError, "2 nodes for ranks=1"),
        ({"link": "200 Mbit/s"}, TypeError, r"'200 Mbit/s' is not a Link: Link\(nodes=2"),
        ({"link": LINK, "device": "cuda"}, ValueError, "only gloo can be slowed"),
    ],
)
def test_a_job_that_does_not_fit_the_link_is_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        run(dist.get_rank, **arguments)


def test_a_real_cluster_has_wires_of_its_own(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", *torchrun.GIVEN):
        monkeypatch.setenv(name, "4")
    with pytest.raises(ValueError, match="under torchrun links are real"):
        run(dist.get_rank, link=LINK)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_sum", 1, 4), "op='all_sum': give one of all_gather, all_reduce"),
        (("send", 1, 4, (0, 4)), "rank 4: a job with ranks=4 has ranks 0 to 3"),
        (("send", 1, 5), "2 nodes for ranks=5"),
    ],
)
def test_an_impossible_transfer_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        LINK.seconds(*arguments)


# ---- a real wire -----------------------------------------------------------------------------------------

# Two networks and a shaped cable between them, all of which end with this shell.
TWO_HOSTS = """
    ip link set lo up
    unshare --net sleep 100 & far=$!
    trap 'kill $far' EXIT
    until [ "$(readlink /proc/$far/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
    there="nsenter --net=/proc/$far/ns/net"
    set -e
    ip link add near type veth peer name far
    ip link set far netns $far
    ip addr add 10.77.0.1/24 dev near
    $there ip addr add 10.77.0.2/24 dev far
    ip link set near up
    $there ip link set lo up
    $there ip link set far up
    tc qdisc add dev near root tbf rate 50mbit burst 32kb latency 100ms
    $there tc qdisc add dev far root tbf rate 50mbit burst 32kb latency 100ms
    "$@" 0 & "$@" 1 & $there "$@" 2 & $there "$@" 3 & wait $!
"""
ON_A_HOST = """
    import json, os, sys, time
    import torch, torch.distributed as dist

    rank = int(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "near" if rank < 2 else "far"
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 4), rank=rank, world_size=4)
    torch.set_num_threads(1)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    part, whole = torch.ones(100_000), torch.ones(400_000)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "send": lambda: dist.send(whole, 2) if rank == 1 else dist.recv(whole, 1) if rank == 2 else None,
    }
    took = {}
    for name, call in calls.items():
        took[name] = []
        for _ in range(5):
            dist.barrier()
            began = time.monotonic()
            call()
            dist.barrier()
            took[name].append(time.monotonic() - began)
    if rank == 3:
        print(json.dumps({name: min(times) for name, times in took.items()}))
"""


@pytest.mark.alone
@WITHIN
def test_a_real_shaped_wire_agrees_with_the_arithmetic(tmp_path, within):
    """Check 50 Mbit/s of the kernel's token bucket, between two network namespaces, with negligible latency.

    all_to_all is left out: gloo's took 0.33 s there, a third longer than the arithmetic says.
    """
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(ON_A_HOST))
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", TWO_HOSTS, "sh"]
    job = [sys.executable, str(script), str(tmp_path / "store")]
    shape = [*command[:-2], "tc qdisc add dev lo root tbf rate 1mbit burst 9kb latency 9ms"]
    if (
        not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc")))
        or subprocess.run(shape, capture_output=True).returncode
    ):
        pytest.skip("a real slow wire needs Linux with ip, tc and the right to make and shape a network of its own")
    answer = subprocess.run([*command, *job], capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
    took = json.loads(answer.stdout)
    link = Link(2, "50 Mbit/s")
    nbytes = {"all_reduce": 1_600_000, "all_gather": 400_000, "send": 1_600_000}
    expected = {op: link.seconds(op, size, 4, (1, 2) if op == "send" else None) for op, size in nbytes.items()}
    for op, seconds in expected.items():
        assert 0.85 * seconds < took[op] < within * seconds, op
