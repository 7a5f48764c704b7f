"""Reference: calls and bytes counted by hand on models of two layers, pieces as torch.tensor_split cuts them, what our
own ring really sends, and the bytes that cross the loopback device of a network of its own."""

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
from labs.kit.launch import run
from labs.kit.record import PASSES, Recording, Span, TimePass, join, mark, span
from labs.kit.watch import tap
from labs.kit.watch.communication import Event

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def recording(fn, *args, ranks=2, record="communication"):
    return run(fn, *args, ranks=ranks, device="cpu", record=record).recording


def pieces(n, ranks):
    return [len(piece) for piece in torch.empty(n).tensor_split(ranks)]


# Every call -------------------------------------------------------------------------------------------------------


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
    """Output and input splits of an all_to_all in which every rank keeps n - 1 and gives n to each other."""
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


# Whoever issues it ------------------------------------------------------------------------------------------------


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
        (by_fsdp, {"all_gather": 4, "reduce_scatter": 2}, 6 * SHARD, "test_record.py:"),
        # The row layer's output in forward, the gradient of the column layer's input in backward: both 2 x 8.
        (by_tensor_parallel, {"all_reduce": 2}, 2 * 4 * 16, "test_record.py:"),
        # Four micro-batches go down, four gradients come up.
        (by_pipeline, {"send": 4, "recv": 4}, 4 * MICRO, "test_record.py:"),
    ],
)
def test_strategies_by_hand(strategy, counts, sent, issuer):
    seen = recording(strategy)
    for rank in (0, 1):
        assert seen.counts(rank, step=2) == Counter(counts)
        assert seen.sent(rank, step=2) == sent
        assert all(event.issuer.startswith(issuer) for event in seen.select(rank, step=2))


def test_messages_about_shapes_are_no_part_of_a_step():
    """PyTorch's pipelines send the sizes and the bytes of a few pickled objects, and a vote, as they begin."""
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
        assert {event.issuer.split(":")[0] for event in events if event.op != "barrier"} == {"test_record.py"}
        assert all(event.end >= event.start and event.waited > 0 for event in events if event.op == "all_reduce")


def test_the_tap_knows_every_operator_that_torch_has():
    """A collective that a new version brings must not pass unseen: it belongs in one of the two tables."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    collectives = {name.removeprefix("c10d::") for name in names if name.startswith("c10d::")}
    assert collectives - tap.OPERATORS.keys() - tap.NO_COMMUNICATION == set()
    assert not tap.OPERATORS.keys() & tap.NO_COMMUNICATION
    assert len(collectives & tap.OPERATORS.keys()) >= 20
    waits = {name.split("::")[1] for name in names if name.startswith("_c10d_functional::wait")}
    assert waits <= set(tap.WAITS)


def test_the_tap_knows_where_each_operator_has_its_tensors_and_its_group():
    for raw, (_, inputs, outputs, group) in tap.OPERATORS.items():
        if torch._C._dispatch_has_kernel(f"c10d::{raw}"):
            arguments = getattr(torch.ops.c10d, raw).default._schema.arguments
            assert "ProcessGroup" in str(arguments[group].type), raw
            assert all("Tensor" in str(arguments[n].type) for n in (inputs, outputs) if n is not None), raw
            assert raw not in tap.ROOT or "root" in arguments[tap.ROOT[raw]].name, raw


def functional(pairs):
    """Every functional collective of this torch, each in a step of its own; their names."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    ops = torch.ops._c10d_functional
    calls = {
        "all_gather_into_tensor": lambda x: ops.all_gather_into_tensor(x, 2, name),
        "all_gather_into_tensor_coalesced": lambda x: ops.all_gather_into_tensor_coalesced([x], 2, name),
        "all_gather_into_tensor_out": lambda x: ops.all_gather_into_tensor_out(x, 2, name, out=torch.empty(8)),
        "all_reduce": lambda x: ops.all_reduce(x, "sum", name),
        "all_reduce_": lambda x: ops.all_reduce_(x, "sum", name),
        "all_reduce_coalesced": lambda x: ops.all_reduce_coalesced([x], "sum", name),
        "all_reduce_coalesced_": lambda x: ops.all_reduce_coalesced_([x], "sum", name),
        "all_to_all_single": lambda x: ops.all_to_all_single(x, [2, 2], [2, 2], name),
        "broadcast": lambda x: ops.broadcast(x, 0, name),
        "broadcast_": lambda x: ops.broadcast_(x, 0, name),
        "reduce_scatter_tensor": lambda x: ops.reduce_scatter_tensor(x, "sum", 2, name),
        "reduce_scatter_tensor_coalesced": lambda x: ops.reduce_scatter_tensor_coalesced([x], "sum", 2, name),
        "reduce_scatter_tensor_out": lambda x: ops.reduce_scatter_tensor_out(x, "sum", 2, name, out=torch.empty(2)),
        "isend": lambda x: ops.isend(x, 1, 0, name) if rank == 0 else ops.irecv(x, 0, 0, name),
        "irecv": lambda x: ops.isend(x, 0, 0, name) if rank == 1 else ops.irecv(x, 1, 0, name),
        "batch_p2p_ops": lambda x: ops.batch_p2p_ops(["isend"] if rank else ["irecv"], [1 - rank], [0], [x], name),
    }
    there = [each for each in pairs if not each.startswith(("wait", "_wrap_tensor"))]  # these two send nothing
    for each in there:
        mark("step")
        waited = calls[each](torch.ones(4))
        for tensor in waited if isinstance(waited, list) else [waited]:
            ops.wait_tensor(tensor)
    return there


def test_whatever_is_functional_comes_by_the_tap():
    """torch.compile and DTensor issue these; each one ends in an operator of c10d."""
    prefix = "_c10d_functional::"
    names = sorted(
        {n.split(".")[0][len(prefix) :] for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)}
    )
    results = run(functional, names, ranks=2, device="cpu", record="communication", timeout=60.0)
    missed = [name for step, name in enumerate(results[0]) if len(results.recording.select(0, step)) != 1]
    assert not missed


def kept_by_the_tap():
    others, tap.listeners[:] = list(tap.listeners), []
    x = torch.ones(2**10)
    with PASSES["communication"]():
        work = dist.all_reduce(x, async_op=True)
        functional = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        kept = [call for _, call, _ in tap._outstanding.values()] + list(tap._by_storage.values())
        groups = [call.group for call in kept]
    work.wait()
    torch.ops._c10d_functional.wait_tensor(functional)
    left = len(tap._outstanding) + len(tap._by_storage)
    tap.listeners[:] = others
    return groups, left


def test_the_tap_keeps_no_group_and_after_the_pass_nothing():
    """A process group that lives until the interpreter's end aborts it there, now and then."""
    for groups, left in run(kept_by_the_tap, ranks=2, device="cpu"):
        assert len(groups) >= 2 and set(groups) == {None} and left == 0


def test_the_issuer_is_a_line_of_the_strategy():
    event = recording(by_ours).select(rank=1, step=0)[0]
    name, function = event.issuer.split(" ")
    assert name.startswith("ddp.py:") and function.isidentifier()


# Time -------------------------------------------------------------------------------------------------------------


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
    assert first.end - first.start > 0.2 and first.waited > 0.2  # it stood still for the late one
    other = seen.select(rank=1)[1]
    assert other.start > first.start + 0.2 and abs(other.end - first.end) < 0.15  # one clock
    assert hidden.end - hidden.start < 0.2 and hidden.waited < 0.15  # done behind the sleep: its own end, not wait's
    assert hidden.waits[0][0] - hidden.start > 0.2  # and it began to wait when that was over
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


# Marks, spans, joining --------------------------------------------------------------------------------------------


def tape(start, end, marks=(), spans=()):
    return {"start": start, "end": end, "marks": list(marks), "spans": list(spans), "watched": None}


def test_marks_cut_time_into_steps_and_phases():
    marks = [("step", 10), ("forward", 12), ("backward", 14), ("step", 20), ("forward", 21), ("end", 25)]
    seen = join("time", [tape(5, 30, marks, [("inner", 13, 14)]), tape(6, 40, [("step", 8)])])
    spans = {(s.rank, s.name, round(s.start * 1e9), round(s.end * 1e9)) for s in seen.spans}
    assert spans == {
        (0, "step", 5, 15),
        (0, "forward", 7, 9),
        (0, "inner", 8, 9),
        (0, "backward", 9, 15),
        (0, "step", 15, 20),
        (0, "forward", 16, 20),
        (1, "step", 3, 35),
    }
    assert seen.steps == 2 and repr(seen) == "Recording(time, 2 ranks, 2 steps, 7 spans)"


def test_marks_outside_of_a_pass_do_nothing():
    mark("step")
    with span("forward"):
        pass
    assert TimePass.active is None


def test_a_pass_ends_with_its_function_even_when_that_raises():
    for kind in PASSES:
        with pytest.raises(ZeroDivisionError), PASSES[kind]():
            mark("step")
            1 / 0  # noqa: B018
        assert TimePass.active is None


def marked(steps):
    for _ in range(steps):
        mark("step")
        with span("inside"):
            mark("forward")


def test_time_pass_brings_spans_of_all_ranks():
    seen = recording(marked, 2, record="time")
    assert Counter((s.rank, s.name) for s in seen.spans) == Counter(
        {(rank, name): 2 for rank in (0, 1) for name in ("step", "forward", "inside")}
    )
    assert seen.events == [] and seen.memory == []


def test_questions_that_a_recording_cannot_answer():
    seen = Recording("communication", 2, [], [Span(0, "step", 0.0, 1.0)])
    with pytest.raises(ValueError, match="rank 0 marked 1 steps"):
        seen.sent(0, step=1)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        seen.counts(2)
    with pytest.raises(ValueError, match='record="memory"'):
        seen.held()


def test_held_over_a_step_counts_what_was_there_as_it_began():
    steps = [Span(0, "step", 1.0, 2.0), Span(0, "step", 2.0, 3.0)]
    moments = [
        (0.5, {"P": 4, "A": 0}),
        (1.5, {"P": 4, "A": 9}),
        (1.6, {"P": 4, "A": 1}),
        (2.5, {"P": 3, "A": 1}),
    ]
    zeros = dict.fromkeys(("P", "G", "S", "A", "comm", "temporary"), 0)
    seen = Recording("memory", 1, spans=steps, memory=[[(t, zeros | held) for t, held in moments]])
    assert seen.held() == zeros | {"P": 4, "A": 9, "peak": 13}
    assert seen.held(step=1) == zeros | {"P": 4, "A": 1, "peak": 5}


def test_a_steady_step_holds_the_least_of_all_but_the_first():
    steps = [Span(0, "step", float(start), start + 1.0) for start in (1, 2, 3)]
    zeros = dict.fromkeys(("P", "G", "S", "A", "comm", "temporary"), 0)
    moments = [(1.5, {"G": 1}), (2.5, {"G": 7}), (3.1, {"G": 5})]
    seen = Recording("memory", 1, spans=steps, memory=[[(t, zeros | held) for t, held in moments]])
    assert [seen.held(step=step)["G"] for step in range(3)] == [1, 7, 7]
    assert seen.steady() == zeros | {"G": 7, "peak": 7}
    with pytest.raises(ValueError, match="this recording has 1 steps"):
        Recording("memory", 1, spans=steps[:1], memory=[[]]).steady()


def test_what_some_kinds_held_during_a_step():
    steps = [Span(0, "step", 1.0, 2.0), Span(0, "step", 2.0, 3.0)]
    zeros = dict.fromkeys(("P", "G", "S", "A", "comm", "temporary"), 0)
    moments = [(0.5, {"P": 4, "A": 1}), (1.5, {"P": 4, "A": 9}), (1.6, {"P": 4, "G": 2}), (2.0, {"G": 3})]
    seen = Recording("memory", 1, spans=steps, memory=[[(t, zeros | held) for t, held in moments]])
    assert seen.during(0, 0, ("G", "A")) == [(1.0, 1), (1.5, 9), (1.6, 2)]
    assert seen.during(0, 1) == [(2.0, 6), (2.0, 3)]
    assert seen.during(0, None, ("P",)) == [(0.0, 0), (0.5, 4), (1.5, 4), (1.6, 4), (2.0, 0)]
    with pytest.raises(ValueError, match="step 2: rank 0 marked 2 steps"):
        seen.during(0, 2)


class Walked(list):
    """A list that counts how often somebody walks over the whole of it."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_many_steps_are_looked_at_once():
    """Everything that is asked for step by step would else take a time that grows with their square."""
    zeros = dict.fromkeys(("P", "G", "S", "A", "comm", "temporary"), 0)
    steps = Walked(Span(0, "step", float(start), start + 1.0) for start in range(50))
    line = Walked((start + 0.5, zeros | {"G": 7}) for start in range(50))
    events = Walked(
        Event(0, "all_reduce", "float32", 4, 4, "g", (0, 1), None, step + 0.1, step + 0.2, (), 4, "x.py:1 f", step)
        for step in range(50)
    )
    memory = Recording("memory", 1, spans=steps, memory=[line])
    assert memory.steady()["G"] == 7 and steps.walks == 1 and line.walks == 0
    communication = Recording("communication", 1, events, steps)
    assert [communication.sent(0, step) for step in range(50)] == [4] * 50 and events.walks == 1


def test_it_draws_itself():
    event = Event(0, "all_reduce", "float32", 4, 4, "g", (0, 1), None, 0.1, 0.2, (), 4, "x.py:1 f", 0)
    seen = Recording("communication", 2, [event], [Span(0, "forward", 0.0, 0.1)])
    assert "data:image/png" in seen._repr_mimebundle_()["text/html"]


# On the wire ------------------------------------------------------------------------------------------------------

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
    """The command that runs another in a network of its own; skips where this machine does not allow it."""
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
