"""Tests of the errors of failing jobs: they name the cause, not the ranks that wait for it.

Each case plants one fault in a known rank, and the error must name that rank, the call and the learner's line.  Times
are the launcher's promises (a failure reported in 1 s, a certain hang in 2 s), counted from the fault.
"""

import ctypes
import os
import queue
import random
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labs.kit.launch import RankError, run
from labs.kit.ranks.flight_recorder import RING, Reader


def test_a_new_group_that_a_member_skips():
    def job():
        if dist.get_rank() != 1:
            dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3))

    with pytest.raises(RankError, match=r"rank 1 did not call new_group \[0, 1\], in which rank 0 waits") as caught:
        run(job, ranks=3)
    assert caught.value.kind == "deadlock" and caught.value.ranks == (1,)
    assert "dist.new_group([0, 1])" in caught.value.where[0].site
    assert caught.value.where[2].op == "all_reduce"


def test_a_new_group_without_which_a_member_returns():
    def job():
        if dist.get_rank() != 1:
            dist.new_group([0, 1])

    with pytest.raises(RankError, match=r"rank 1 returned without joining new_group number 1") as caught:
        run(job, ranks=3)
    assert caught.value.kind == "returned" and caught.value.ranks == (1,)
    assert caught.value.where[0].state == "waits in"


def test_a_new_group_that_its_members_alone_call():
    """Check PyTorch's rule that all ranks call new_group; with gloo the call goes through."""

    def job():
        if dist.get_rank() < 2:
            dist.barrier(group=dist.new_group([0, 1]))

    message = (
        r"rank 2 returned without joining new_group number 1, new_group \[0, 1\].*: all ranks have to, or its members"
    )
    with pytest.raises(RankError, match=message) as caught:
        run(job, ranks=3)
    assert caught.value.kind == "returned" and caught.value.ranks == (2,)


def test_a_message_to_a_rank_that_does_not_exist():
    """Check that the rank is named; the backend ends the process, or waits."""

    def job():
        if dist.get_rank() == 0:
            for other in range(1, dist.get_world_size() + 1):
                dist.recv(torch.zeros(3), src=other)
        else:
            dist.send(torch.zeros(3), dst=0)

    with pytest.raises(
        RankError, match=r"rank 0 called recv float32\[3\] from 2: the last rank of the group is 1"
    ) as caught:
        run(job, ranks=2)
    assert caught.value.kind == "nobody" and caught.value.ranks == (0,)
    assert "dist.recv(torch.zeros(3), src=other)" in caught.value.where[0].site


def test_what_gloo_says_of_its_end_is_in_the_error_where_nothing_better_is_known(capfd):
    def job():
        log = b"[E1126 06:12:00.1 99 third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer\n"
        os.write(2, log + b"before\nterminate called after throwing an instance of 'gloo::IoException'\n")
        os.write(2, b"  what():  [enforce fail at pair.cc:1] no\n")
        os.abort()

    with pytest.raises(RankError, match="died of SIGABRT") as caught:
        run(job, ranks=1)
    message = (
        "Connection closed by peer\nterminate called after throwing an instance of 'gloo::IoException'\n  what():  ["
    )
    assert message in str(caught.value)
    assert capfd.readouterr().out == "[rank 0] before\n"


def test_groups_made_in_another_order():
    def job():
        first, second = ([1, 2], [0, 1]) if dist.get_rank() == 2 else ([0, 1], [1, 2])
        dist.new_group(first)
        dist.new_group(second)
        dist.barrier()

    message = r"agree on new_group number 1: ranks 0 and 1 called new_group \[0, 1\], rank 2 called new_group \[1, 2\]"
    with pytest.raises(RankError, match=message) as caught:
        run(job, ranks=3)
    assert caught.value.kind == "mismatch" and caught.value.ranks == (2,)


def test_all_ways_to_make_groups_that_agree():
    def job():
        dist.new_group([2, 0])
        dist.new_group([0, 2] if dist.get_rank() % 2 else [2, 0])
        dist.new_subgroups(2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = torch.ones(1)
        dist.all_reduce(x, group=mesh["b"].get_group())
        if dist.get_rank() in (1, 3):  # last: in PyTorch 2.15 a mesh made after it hangs
            mine = dist.new_group([1, 3], use_local_synchronization=True)
            dist.barrier(group=mine)
        return x.item()

    assert run(job, ranks=4) == [2] * 4


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter_tensor", "all_reduce_coalesced"])
def test_a_reduction_that_differs(op):
    """Check an operation that gloo itself completes, with a number that is neither."""

    def job():
        how = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
        x = torch.ones(4)
        if op == "reduce":
            dist.reduce(x, 0, op=how)
        elif op == "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(torch.ones(2), x, op=how)
        elif op == "all_reduce_coalesced":
            dist.all_reduce_coalesced([x], op=how)
        else:
            dist.all_reduce(x, op=how)

    with pytest.raises(RankError, match=r"rank 1 called \w+ float32\[4\].* \(max\)") as caught:
        run(job, ranks=2)
    assert caught.value.kind == "mismatch"


def in_layout(layout, *shape):
    """Return zeros of `shape` that lie in memory with gaps, on top of each other, or in another order."""
    if layout == "gaps":
        return torch.zeros(*shape, 2)[..., 0]
    if layout == "expanded":
        return torch.zeros(shape[0], *[1] * (len(shape) - 1)).expand(shape)
    return torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))


IN_PLACE = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
}
OUT_OF_PLACE = {
    "reduce_scatter": lambda out, x: dist.reduce_scatter(out, [x, x]),
    "scatter": lambda out, x: dist.scatter(out, None if dist.get_rank() else [x, x], 0),
    "all_to_all": dist.all_to_all_single,
}


def test_where_gloo_would_take_a_tensor_for_a_contiguous_one_it_is_refused():
    """Check that only those are refused: tensors that gloo copies, or uses in the same layout on all ranks, stay
    right.
    """

    def job():
        message, whole = "which gloo takes for a contiguous one", torch.arange(8.0).view(4, 2)
        for layout in ("gaps", "expanded"):
            for call in IN_PLACE.values():
                with pytest.raises(ValueError, match=message):
                    call(in_layout(layout, 4, 2))
        for name, call in OUT_OF_PLACE.items():
            for layout in ("gaps", "expanded", "turned")[: 2 if name == "scatter" else 3]:  # only its root has both
                with pytest.raises(ValueError, match=message):
                    call(in_layout(layout, 4, 2), whole)
        sums = []
        for x in (whole.clone(), in_layout("turned", 4, 2).copy_(whole)):
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            sums.append(torch.equal(x, 2 * whole))
        mine = torch.zeros(4, 1)
        dist.reduce_scatter(mine, [*whole.chunk(2, dim=1)])  # has gaps, which gloo closes
        sums.append(torch.equal(mine, 2 * whole[:, dist.get_rank()].view(4, 1)))
        parts = [in_layout("gaps", 4, 2) for _ in range(2)]
        dist.all_gather(parts, in_layout("turned", 4, 2).copy_(whole))
        sums.append(all(torch.equal(part, whole) for part in parts))
        dist.all_reduce(torch.eye(2).to_sparse())
        return sums

    assert run(job, ranks=2) == [[True] * 4] * 2


def of_two_orders():
    dist.all_reduce(torch.ones(3, 4).t() if dist.get_rank() else torch.ones(4, 3))


def of_two_dtypes():
    x = torch.ones(4, dtype=torch.int32 if dist.get_rank() else torch.float32)
    dist.recv(x, 0) if dist.get_rank() else dist.send(x, 1)


def of_two_sizes():
    n = 4 if dist.get_rank() else 8
    dist.all_to_all_single(torch.ones(n), torch.ones(n))


def of_pieces_that_do_not_fit():
    dist.all_to_all_single(torch.ones(5, 2), torch.ones(5, 2), [2, 3], [2, 3])


def scattered_in_two_sizes():
    dist.scatter(torch.ones(4 + dist.get_rank()), None if dist.get_rank() else [torch.ones(4)] * 2, 0)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (of_two_orders, r"rank 1 called all_reduce float32\[4, 3\] of strides \(1, 4\)"),
        (of_two_dtypes, r"the dtype of a message: rank 0 called send float32\[4\] to 1, rank 1 called recv int32\[4\]"),
        (of_two_sizes, "; rank 0 sends 4 elements to rank 1, which takes 2"),
        (of_pieces_that_do_not_fit, "; rank 0 sends 6 elements to rank 1, which takes 4"),
        (scattered_in_two_sizes, r"rank 1 called scatter float32\[5\] from 0"),
    ],
)
def test_a_message_received_as_something_else_is_reported(job, message):
    """Check two cases that gloo completes, with nonsense, and two over which it ends the process."""
    with pytest.raises(RankError, match=message) as caught:
        run(job, ranks=2)
    assert caught.value.kind == "mismatch"
    assert all("test_diagnosis.py line" in where.site for where in caught.value.where)


def test_splits_for_too_few_ranks_are_the_callers_error():
    def job():
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [4], [4])

    with pytest.raises(RankError, match="Number of tensor splits not equal to group size"):
        run(job, ranks=2)


def test_pieces_of_all_sizes_that_fit():
    def job():
        rank, sizes = dist.get_rank(), [[2, 0, 1], [3, 4, 0], [1, 1, 2]]
        taken = [sizes[source][rank] for source in range(3)]
        x, y = torch.full((sum(sizes[rank]), 2), float(rank)), torch.zeros(sum(taken), 2)
        dist.all_to_all_single(y, x, taken, sizes[rank])
        dist.all_to_all([torch.zeros(2) for _ in range(3)], [torch.zeros(2) for _ in range(3)])
        dist.all_to_all_single(x[:1].repeat(3, 1), x[:1].repeat(3, 1), input_split_sizes=[1, 1, 1])
        return y[:, 0].tolist()

    assert run(job, ranks=3) == [[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 2], [0, 2, 2]]


@pytest.mark.parametrize("daemon", [False, True])
def test_a_collective_in_a_thread_is_named(daemon):
    def job():
        if dist.get_rank() == 0:
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)), daemon=daemon)
            thread.start()
            thread.join()
        time.sleep(60)

    with pytest.raises(RankError, match=r"rank 1 is still at work") as caught:
        run(job, ranks=2, timeout=2)
    waits = caught.value.where[0]
    assert str(waits).startswith("rank 0 waits, in a thread, in all_reduce float32[2]   test_diagnosis.py")
    assert caught.value.ranks == (1,)


def test_a_daemon_thread_may_wait_while_the_rank_continues():
    """Let both ranks stand still for a while, one in a thread; the main thread then sends what the other waits for."""

    def job():
        rank, x = dist.get_rank(), torch.zeros(1)
        answers, questions = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(x, 1), kwargs={"group": answers}, daemon=True)
            thread.start()
            time.sleep(1.5)
            dist.send(torch.ones(1), 1, group=questions)
            thread.join()
        else:
            dist.recv(x, 0, group=questions)
            dist.send(x + 1, 0, group=answers)
        return x.item()

    assert run(job, ranks=2) == [2, 1]


STUCK = {
    "queue": lambda: queue.Queue().get(),
    "subprocess": lambda: subprocess.run(["sleep", "60"], check=True),
    "event": lambda: threading.Event().wait(),
}


@pytest.mark.parametrize("inside", STUCK)
def test_the_line_is_the_learners_and_not_the_standard_librarys(inside):
    with pytest.raises(RankError) as caught:
        run(STUCK[inside], ranks=1, timeout=1)
    assert f'"{inside}": lambda' in caught.value.where[0].site


OPS = {
    "all_reduce": lambda x, g: dist.all_reduce(x, group=g),
    "broadcast": lambda x, g: dist.broadcast(x, first_of(g), group=g),
    "reduce": lambda x, g: dist.reduce(x, first_of(g), group=g),
    "all_gather": lambda x, g: dist.all_gather(
        [torch.empty_like(x) for _ in range(dist.get_world_size(g))], x, group=g
    ),
    "reduce_scatter": lambda x, g: dist.reduce_scatter(x.clone(), [x] * dist.get_world_size(g), group=g),
    "all_to_all": lambda x, g: dist.all_to_all_single(torch.empty_like(x), x, group=g),
    "gather": lambda x, g: dist.gather(
        x, [x.clone() for _ in range(dist.get_world_size(g))] if leads(g) else None, first_of(g), group=g
    ),
    "barrier": lambda x, g: dist.barrier(group=g),
}


def first_of(group):
    return dist.get_process_group_ranks(group)[0] if group else 0


def leads(group):
    return dist.get_rank() == first_of(group)


# ---- twenty hangs and crashes --------------------------------------------------------------------


def go_wrong(op, members, culprit, fault):
    """Run three all_reduces on all ranks, then `op` on the group of `members`, in which `culprit` commits `fault`."""
    group = dist.new_group(members)
    other = dist.new_group([culprit, (culprit + 1) % 4] if fault == "other group" else [0, 1])
    x = torch.ones(12)
    for _ in range(3):
        dist.all_reduce(x)
    if dist.get_rank() not in members:
        return None
    if dist.get_rank() == culprit:
        if fault == "returns":
            return None
        if fault == "other shape":
            x = torch.ones(24)
        if fault == "other op":
            op = "all_gather" if op == "all_reduce" else "all_reduce"
        if fault == "other group":
            group = other
        if fault == "raises":
            raise KeyError("planted")
        if fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "SIGSEGV":
            ctypes.string_at(0)
        if fault == "exit code 5":
            os._exit(5)
        if fault == "loop":
            while True:
                time.sleep(0.01)  # planted loop
    OPS[op](x, group)
    return None


KIND = {"returns": "returned", "raises": "raised", "loop": "timeout", "other group": "deadlock"}
KIND |= {"other shape": "mismatch", "other op": "mismatch"}
KIND |= {"SIGKILL": "died", "SIGSEGV": "died", "exit code 5": "died"}


def twenty_cases():
    dice = random.Random(20)
    faults = ["returns"] * 4 + ["other shape"] * 4 + ["other op"] * 4 + ["other group"] * 2
    faults += ["raises", "raises", "SIGKILL", "SIGSEGV", "exit code 5", "loop"]
    for fault in faults:
        ops = ["all_reduce", "broadcast", "reduce", "all_gather"] if fault == "other shape" else list(OPS)
        members = (0, 1, 2, 3) if fault == "other group" else tuple(sorted(dice.sample(range(4), dice.choice([3, 4]))))
        yield dice.choice(ops), members, dice.choice(members), fault


@pytest.mark.parametrize(("op", "members", "culprit", "fault"), list(twenty_cases()))
def test_a_fault_is_reported_with_rank_op_and_line(op, members, culprit, fault):
    """Check what the ranks did, not the clock: only the loop waits for the timeout.

    `make bench` measures the seconds.
    """
    with pytest.raises(RankError) as caught:
        run(go_wrong, op, list(members), culprit, fault, timeout=10 if fault == "loop" else 300)
    error = caught.value
    assert error.kind == KIND[fault]
    assert culprit in error.ranks
    if fault != "other group":
        assert error.ranks == (culprit,)
    where = {w.rank: w for w in error.where}
    assert sorted(where) == [0, 1, 2, 3]
    if fault == "raises":
        assert "KeyError: 'planted'" in str(error) and 'raise KeyError("planted")' in str(error)
    elif fault == "loop":
        assert "# planted loop" in where[culprit].site
    elif error.kind == "died":
        assert fault in str(error)
    if error.kind in ("mismatch", "returned", "deadlock", "timeout"):
        for rank in set(members) - {culprit}:
            assert where[rank].op == op, str(error)
            assert f'"{op}": lambda' in where[rank].site, str(error)


def test_a_mismatch_that_gloo_completes_silently_is_caught():
    """Check an all_reduce of int32[2] with float32[2], which gloo ends without an error, with nonsense as its
    result.
    """

    def job():
        x = torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32)
        dist.all_reduce(x)
        return x

    with pytest.raises(RankError, match=r"rank 0 called all_reduce float32\[2\], rank 1 called all_reduce int32\[2\]"):
        run(job, ranks=2)


def test_a_ring_of_blocking_sends_is_reported():
    def ring():
        rank, x = dist.get_rank(), torch.ones(1 << 20)
        dist.send(x, (rank + 1) % 3)
        dist.recv(x, (rank - 1) % 3)

    with pytest.raises(RankError, match="wait for each other: rank 0 in send") as caught:
        run(ring, ranks=3)
    assert caught.value.kind == "deadlock" and caught.value.ranks == (0, 1, 2)


def test_a_message_that_nobody_sends_is_reported():
    def job():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(4), 1)

    with pytest.raises(RankError, match=r"rank 1 returned and will never answer recv float32\[4\] from 1"):
        run(job, ranks=2)


def test_a_rank_quicker_than_its_reader_is_no_failure(monkeypatch):
    """Delay the reader: records are lost if a rank issues more of them than the ring holds between two looks."""

    def job(calls):
        x = torch.ones(0)
        for _ in range(calls):
            dist.all_reduce(x, async_op=True)
        dist.barrier()
        return calls

    new = Reader.new
    monkeypatch.setattr(Reader, "new", lambda reader: new(reader) if reader.header()[0] > RING + 99 else [])
    assert run(job, RING + 4000, ranks=2) == [RING + 4000] * 2


def test_the_first_cause_is_named_and_not_its_consequences():
    """Let rank 2 fail first; the others fail because it is gone, and come earlier in the order of ranks."""

    def job():
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 2:
            os._exit(7)
        dist.all_reduce(x)

    with pytest.raises(RankError, match="rank 2 ended with exit code 7") as caught:
        run(job)
    assert "ranks 0, 1 and 3 then had to stop" in str(caught.value)


def test_the_same_failure_on_all_ranks_is_reported_once():
    def job():
        raise ValueError("no batch")

    with pytest.raises(RankError, match="ranks 0, 1 and 2 of 3 failed: ValueError: no batch") as caught:
        run(job, ranks=3)
    assert str(caught.value).count("Traceback") == 1


def test_a_failure_still_shows_what_was_printed_before_it(capsys):
    def job():
        print("without a newline", end="")
        raise ValueError("x")

    with pytest.raises(RankError):
        run(job, ranks=2)
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == [f"[rank {r}] without a newline" for r in range(2)]
