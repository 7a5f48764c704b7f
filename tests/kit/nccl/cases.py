"""Published hangs and silent errors as small jobs of up to four ranks, each with its thread, and with its remedy.

Cases that gloo lets pass run on gloo, all of them in one job of four ranks.  The others run on PyTorch's fake backend,
rank after rank in one process: there no call does anything, or waits for others, and the recording is the order of
issue.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import P2POp, irecv, isend
from torch.distributed._functional_collectives import all_reduce as all_reduced
from torch.testing._internal.distributed.fake_pg import FakeStore

from labs.kit.nccl.would_hang import HANGS, MAY_HANG, SOUND, WRONG
from labs.kit.record import OrderPass, join, mark

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Case:
    """A case: its job and verdict. told: a part of what the checker says."""

    thread: str
    job: Callable
    verdict: str
    told: str
    backend: str

    @property
    def name(self) -> str:
        return self.job.__name__


CASES: list[Case] = []


def case(thread: str, verdict: str, told: str = "", backend: str = "gloo"):
    """Return a decorator of a job: (rank, g), with g.world and g.again, two groups of all ranks."""

    def noted(job):
        CASES.append(Case(thread, job, verdict, told, backend))
        return job

    return noted


def run_all(cases):
    """Run each case as a step, on every rank of a job of 4."""
    groups = SimpleNamespace(world=dist.new_group(), again=dist.new_group())
    for each in cases:
        mark("step")
        each.job(dist.get_rank(), groups)
    mark("end")


def pretended(cases):
    """Return the same recording, of ranks that are only pretended, one after the other."""
    tapes = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            with OrderPass() as watched:
                run_all(cases)
        finally:
            dist.destroy_process_group()
        tapes.append(watched.tape)
    return join("communication", tapes)


def x(n=4):
    return torch.zeros(n)


def wait(*works):
    for work in works:
        work.wait()


def batch(*messages):
    wait(*dist.batch_isend_irecv([P2POp(op, tensor, group=g, group_peer=peer) for op, tensor, peer, g in messages]))


def send(to, g, n=4, **options):
    dist.send(x(n), group=g, group_dst=to, **options)


def recv(source, g, n=4, **options):
    dist.recv(x(n), group=g, group_src=source, **options)


def send_later(to, g, n=4, **options):
    return isend(x(n), group=g, group_dst=to, **options)


def recv_later(source, g, n=4, **options):
    return irecv(x(n), group=g, group_src=source, **options)


def all_reduce(g, n=4, **options):
    return dist.all_reduce(x(n), group=g, **options)


def used(g, *pairs):
    """Use the communicators of the group, and of these pairs, so that they exist."""
    dist.barrier(g.world)
    for a, b in pairs:
        if dist.get_rank() == a:
            send(b, g.world)
        if dist.get_rank() == b:
            recv(a, g.world)


# ---- messages outside of a batch -------------------------------------------------------------------------


@case("NVIDIA/nccl#479", MAY_HANG, "where a send waits for its receive", "fake")
def both_send_first(rank, g):
    if rank < 2:
        send(1 - rank, g.world)
        recv(1 - rank, g.world)


@case("NVIDIA/nccl#479, mended", SOUND)
def one_sends_first(rank, g):
    if rank == 0:
        send(1, g.world)
        recv(1, g.world)
    if rank == 1:
        recv(0, g.world)
        send(0, g.world)


@case("NVIDIA/nccl#479, mended by a batch", SOUND)
def both_in_a_batch(rank, g):
    used(g)
    if rank < 2:
        batch((isend, x(), 1 - rank, g.world), (irecv, x(), 1 - rank, g.world))


@case("pytorch#129341: whether it hangs depends on the size", MAY_HANG, "unless it fits into NCCL's buffers")
def both_send_much_first(rank, g):
    if rank < 2:
        work = send_later(1 - rank, g.world, 100_000)
        recv(1 - rank, g.world, 100_000)
        work.wait()


@case("pytorch#109401", HANGS, "recv of 16 bytes from 1")
def both_receive_first(rank, g):
    if rank < 2:
        work = recv_later(1 - rank, g.world)
        wait(send_later(1 - rank, g.world), work)


@case("pytorch#109401, mended", SOUND)
def in_one_order_of_the_pair(rank, g):
    if rank == 0:
        wait(recv_later(1, g.world), send_later(1, g.world))
    if rank == 1:
        wait(send_later(0, g.world), recv_later(0, g.world))


@case("pytorch#172668", MAY_HANG, "send of 16 bytes to 1")
def around_a_ring(rank, g):
    work = send_later((rank + 1) % 4, g.world)
    recv((rank - 1) % 4, g.world)
    work.wait()


@case("pytorch#172668, mended", SOUND)
def around_a_ring_in_a_batch(rank, g):
    batch((isend, x(), (rank + 1) % 4, g.world), (irecv, x(), (rank - 1) % 4, g.world))


@case("Megatron-LM#5100", MAY_HANG, "send")
def shapes_in_a_fixed_order(rank, g):
    works = []
    if rank > 0:
        works += send_later(rank - 1, g.world), recv_later(rank - 1, g.world)
    if rank < 3:
        works += send_later(rank + 1, g.world), recv_later(rank + 1, g.world)
    wait(*works)


@case("Megatron-LM#5100, mended", SOUND)
def shapes_odd_and_even(rank, g):
    neighbours = [peer for peer in ((rank + 1, rank - 1) if rank % 2 == 0 else (rank - 1, rank + 1)) if 0 <= peer < 4]
    for peer in neighbours:
        first, second = (send, recv) if rank % 2 == 0 else (recv, send)
        first(peer, g.world)
        second(peer, g.world)


@case("pytorch#94819", WRONG, "NCCL has no tags")
def told_apart_by_tags(rank, g):
    if rank == 0:
        wait(send_later(1, g.world, tag=1), send_later(1, g.world, tag=2))
    if rank == 1:
        wait(recv_later(0, g.world, tag=2), recv_later(0, g.world, tag=1))


@case("pytorch#94819, mended", SOUND)
def in_the_order_of_their_tags(rank, g):
    for tag in (1, 2):
        if rank == 0:
            send(1, g.world, tag=tag)
        if rank == 1:
            recv(0, g.world, tag=tag)


# ---- batches ---------------------------------------------------------------------------------------------


@case("pytorch#120683", HANGS, "and that never happens", "fake")
def a_receive_that_nobody_sends(rank, g):
    used(g)
    if rank == 0:
        batch((irecv, x(), 1, g.world))


@case("NVIDIA/nccl#2130", HANGS, "recv of 16 bytes from 1", "fake")
def one_receive_too_many(rank, g):
    used(g)
    if rank == 0:
        batch((isend, x(), 1, g.world), (irecv, x(), 1, g.world), (irecv, x(), 1, g.world))
    if rank == 1:
        batch((irecv, x(), 0, g.world), (isend, x(), 0, g.world))


@case("pytorch#73960", MAY_HANG, "communicators are made at first use")
def a_batch_of_two_is_the_first_call(rank, g):
    if rank < 2:
        batch((isend, x(), 1 - rank, g.world), (irecv, x(), 1 - rank, g.world))


@case("pytorch#174288", MAY_HANG, "a batch of 300 messages")
def a_long_batch(rank, g):
    used(g)
    if rank < 2:
        op = isend if rank == 0 else irecv
        batch(*[(op, x(1), 1 - rank, g.world) for _ in range(300)])


@case("pytorch PR #117682", MAY_HANG, "end together")
def five_sends_for_four_receives_and_one(rank, g):
    used(g)
    if rank == 0:
        batch(*[(isend, x(), 1, g.world)] * 5)
    if rank == 1:
        batch(*[(irecv, x(), 0, g.world) for _ in range(4)])
        batch((irecv, x(), 0, g.world))


@case("pytorch PR #117682, mended", SOUND)
def five_sends_for_five_receives(rank, g):
    used(g)
    for number in (4, 1):
        if rank == 0:
            batch(*[(isend, x(), 1, g.world)] * number)
        if rank == 1:
            batch(*[(irecv, x(), 0, g.world) for _ in range(number)])


@case("PiPPy#969", MAY_HANG, "end together")
def a_skip_connection(rank, g):
    used(g)
    if rank == 0:
        batch((isend, x(), 1, g.world), (isend, x(), 2, g.world))
    if rank == 1:
        batch((irecv, x(), 0, g.world))
        batch((isend, x(), 2, g.world))
    if rank == 2:
        batch((irecv, x(), 0, g.world), (irecv, x(), 1, g.world))


@case("PiPPy#969, mended", SOUND)
def a_skip_connection_by_itself(rank, g):
    used(g)
    for source, to in ((0, 1), (0, 2), (1, 2)):
        if rank == source:
            batch((isend, x(), to, g.world))
        if rank == to:
            batch((irecv, x(), source, g.world))


@case("pytorch PR #127332", MAY_HANG, "where a send waits for its receive")
def stages_cross(rank, g):
    used(g)
    if rank < 2:
        works = [dist.batch_isend_irecv([P2POp(op, x(), group=g.world, group_peer=1 - rank)]) for op in (isend, irecv)]
        wait(*works[0], *works[1])


@case("Megatron-LM#1450", WRONG, "types or sizes differ")
def next_and_previous_are_one_rank(rank, g):
    used(g)
    if rank < 2:
        to = [P2POp(isend, x(n), group=g.world, group_peer=1 - rank, tag=n) for n in (4, 8)]
        back = [P2POp(irecv, x(n), group=g.world, group_peer=1 - rank, tag=n) for n in (8, 4)]
        wait(*dist.batch_isend_irecv(to + back))


@case("pytorch#129140", MAY_HANG, "communicators are made at first use")
def a_batch_meets_a_single_receive(rank, g):
    used(g)
    if rank == 0:
        batch((isend, x(), 1, g.world))
    if rank == 1:
        recv(0, g.world)


# ---- communicators ---------------------------------------------------------------------------------------


@case("Megatron-LM PR #5240", MAY_HANG, "the first use of its communicator")
def pairs_made_in_another_order(rank, g):
    if rank == 0:
        wait(send_later(1, g.world), send_later(2, g.world))
    if rank == 1:
        wait(send_later(2, g.world), recv_later(0, g.world))
    if rank == 2:
        wait(recv_later(0, g.world), recv_later(1, g.world))


@case("pytorch PR #154132", MAY_HANG, "one communicator for all of its calls")
def pairs_that_were_independent(rank, g):
    used(g, (0, 1), (1, 2), (0, 2))
    if rank == 0:
        wait(recv_later(1, g.world), send_later(2, g.world))
    if rank == 2:
        recv(0, g.world)
        send(1, g.world)
    if rank == 1:
        recv(2, g.world)
        send(0, g.world)


@case("pytorch#108378", MAY_HANG, "the first use of its communicator")
def the_first_isend_waits_for_its_peer(rank, g):
    work = send_later(1, g.world) if rank == 0 else None
    dist.barrier(g.world)
    if rank == 1:
        recv(0, g.world)
    if work:
        work.wait()


@case("NVIDIA/nccl#1192", MAY_HANG, "reduce")
def a_reduce_and_a_message_cross(rank, g):
    used(g, (0, 3))
    if rank == 3:
        recv(0, g.world)
    work = dist.reduce(x(), group=g.world, group_dst=3, async_op=True)
    if rank == 0:
        send(3, g.world)
    work.wait()


@case("NVIDIA/nccl#1192, mended", SOUND)
def a_reduce_and_a_message_in_one_order(rank, g):
    used(g, (0, 3))
    work = dist.reduce(x(), group=g.world, group_dst=3, async_op=True)
    if rank == 0:
        send(3, g.world)
    if rank == 3:
        recv(0, g.world)
    work.wait()


@case("NVIDIA/nccl#195", MAY_HANG, "the first use of its communicator")
def two_groups_first_used_in_another_order(rank, g):
    order = (g.world, g.again) if rank else (g.again, g.world)
    wait(*[all_reduce(group, async_op=True) for group in order])


@case("NVIDIA/nccl#208", MAY_HANG, "the calls of all communicators are in one order")
def two_groups_in_another_order(rank, g):
    all_reduce(g.world)
    all_reduce(g.again)
    order = (g.world, g.again) if rank else (g.again, g.world)
    wait(*[all_reduce(group, async_op=True) for group in order])


@case("NVIDIA/nccl#208, mended", SOUND)
def two_groups_in_one_order(rank, g):
    wait(*[all_reduce(group, async_op=True) for group in (g.world, g.again) * 2])


@case("NVIDIA/nccl#1082", MAY_HANG, "the calls of all communicators are in one order")
def a_group_is_made_while_a_message_is_under_way(rank, g):
    used(g, (0, 1))
    work = send_later(1, g.world) if rank == 0 else None
    all_reduce(g.again)
    if rank == 1:
        recv(0, g.world)
    if work:
        work.wait()


@case("pytorch PR #116611", MAY_HANG, "all_gather")
def experts_are_gathered_before_or_after_the_rest(rank, g):
    dist.barrier(g.world)
    dist.barrier(g.again)
    order = (g.world, g.again) if rank % 2 else (g.again, g.world)
    wait(*[all_gather(x(16), x(), group=group, async_op=True) for group in order])


@case("pytorch#130102", HANGS, "has members [0, 1]", "fake")
def everyone_makes_its_own_group_alone(rank, g):
    pair = dist.new_group([0, 1] if rank < 2 else [2, 3])
    all_reduce(pair)


# ---- collectives that not all ranks call, or not alike ---------------------------------------------------


@case("DeepSpeed#5066", HANGS, "all_gather", "fake")
def an_expert_without_tokens(rank, g):
    if rank != 1:
        all_gather(x(16), x(), group=g.world)
    all_reduce(g.world)


@case("pytorch#77562", HANGS, "rank 0 stands at all_gather", "fake")
def some_save_and_some_go_on(rank, g):
    dist.reduce(x(), group=g.world, group_dst=0)
    if rank == 0:
        all_gather(x(16), x(), group=g.world)
    else:
        all_reduce(g.world)


@case("AReaL PR #1139", HANGS, "rank 3 comes to it, and that never happens", "fake")
def a_norm_that_returns_early(rank, g):
    if rank != 3:
        all_reduce(g.world, 1)


@case("pytorch#33148", HANGS, "and that never happens", "fake")
def uneven_numbers_of_batches(rank, g):
    for _ in range(3 if rank == 0 else 2):
        all_reduce(g.world)


@case("KempnerForge#49", HANGS, "barrier", "fake")
def a_background_thread_of_the_same_group(rank, g):
    for call in (all_reduce, dist.barrier) if rank else (dist.barrier, all_reduce):
        call(g.world)


@case("NVIDIA/nccl#1394", WRONG, "the sizes do not fit", "fake")
def other_shapes(rank, g):
    all_reduce(g.world, 4 + rank)


@case("pytorch#75373", WRONG, "the sizes do not fit", "fake")
def layers_in_another_order(rank, g):
    for n in (4, 8) if rank else (8, 4):
        all_gather(x(4 * n), x(n), group=g.world)


@case("pytorch#75373: types", WRONG, "the types differ", "fake")
def layers_of_another_type(rank, g):
    dist.all_reduce(x() if rank else x().double(), group=g.world)


@case("rule 6: roots", WRONG, "the roots differ", "fake")
def two_roots(rank, g):
    dist.broadcast(x(), group=g.world, group_src=rank % 2)


@case("rule 6: reductions", WRONG, "the reductions differ", "fake")
def two_reductions(rank, g):
    dist.all_reduce(x(), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=g.world)


@case("rule 6: pieces of an all-to-all", WRONG, "the sizes do not fit", "fake")
def pieces_that_do_not_fit(rank, g):
    splits = [1, 1, 1, 2] if rank else [2, 1, 1, 1]
    dist.all_to_all_single(x(5), x(5), [1, 1, 1, 2], splits, group=g.world)


@case("rule 6: pieces of an all-to-all, mended", SOUND)
def pieces_that_fit(rank, g):
    taken = [source + 1 for source in range(4)]
    dist.all_to_all_single(x(sum(taken)), x(4 * rank + 4), taken, [rank + 1] * 4, group=g.world)


@case("rule 6: equal calls", WRONG, "the other way round")
def equal_calls_in_another_order(rank, g):
    calls = [lambda: dist.all_reduce(x(), group=g.world)]
    calls += [lambda: dist.all_reduce(x(), group=g.world)]
    for call in calls[::-1] if rank == 2 else calls:
        call()


@case("rule 6: equal calls, of roots in turn", SOUND)
def roots_in_turn(rank, g):
    for root in range(4):
        if rank == root:
            dist.broadcast(x(), group=g.world, group_src=root)
        else:
            dist.broadcast(x(), group=g.world, group_src=root)


# ---- memory ----------------------------------------------------------------------------------------------


@case("pytorch#188655", WRONG, "is never waited for")
def a_work_is_dropped(rank, g):
    all_reduce(g.again)
    data = x()
    dist.all_reduce(data, group=g.world, async_op=True)
    dist.broadcast(data, group=g.again, group_src=0)


@case("rule 7: written to before its wait", WRONG, "was written to")
def written_to_before_its_wait(rank, g):
    data = x()
    work = dist.all_reduce(data, group=g.world, async_op=True)
    data += 1
    work.wait()


@case("rule 7: written to after its wait", SOUND)
def written_to_after_its_wait(rank, g):
    data = x()
    for _ in range(2):
        dist.all_reduce(data, group=g.world, async_op=True).wait()
        data += 1


@case("rule 7: written to beside it", SOUND)
def another_slice_is_written_to(rank, g):
    whole = x(8)
    work = dist.all_reduce(whole[:4], group=g.world, async_op=True)
    whole[4:] += 1
    work.wait()


@case("rule 7: a slice of it", WRONG, "was written to")
def a_slice_of_it_is_written_to(rank, g):
    whole = x(8)
    work = dist.all_reduce(whole[:4], group=g.world, async_op=True)
    whole[3:] += 1
    work.wait()


@case("rule 7: read before its wait", WRONG, "its output was read (cases.py:")
def read_before_its_wait(rank, g):
    data = x()
    work = dist.all_reduce(data, group=g.world, async_op=True)
    data.sum()
    work.wait()


@case("rule 7: a message, as the other operand", WRONG, "its output was read (cases.py:")
def received_and_read_before_its_wait(rank, g):
    used(g, (0, 1))
    if rank == 0:
        send(1, g.world)
    if rank == 1:
        data = x()
        work = irecv(data, group=g.world, group_src=0)
        x().add_(data)
        work.wait()


@case("rule 7: read, and never waited for", WRONG, "its output was read (cases.py:")
def read_and_never_waited_for(rank, g):
    data = x()
    dist.broadcast(data, group=g.world, group_src=0, async_op=True)
    torch.cat([data, data])


@case("rule 7: what may be done before the wait", SOUND)
def looked_at_and_sent_from(rank, g):
    data, mine = x(), x()
    work = dist.all_reduce(data, group=g.world, async_op=True)
    torch.empty_like(data.view(2, 2)).copy_(mine.view(2, 2))
    gathering = all_gather(x(16), mine, group=g.world, async_op=True)
    mine.sum()  # both may read it
    gathering.wait()
    data.sum()  # the wait also completes the earlier calls on the same communicator
    work.wait()


@case("rule 7: what a backend itself writes", SOUND)
def written_to_by_the_backend(rank, g):
    whole = x(16)
    all_gather(whole, whole[4 * rank : 4 * rank + 4], group=g.world)
    dist.all_reduce(x(), dist.ReduceOp.AVG, group=g.world)


@case("rule 7: what a backend itself writes", SOUND)
def coalesced_and_written_to_by_the_backend(rank, g):
    with dist._coalescing_manager(g.world):
        dist.all_reduce(x(), group=g.world)
        dist.all_reduce(x(8), group=g.world)


@case("rule 7: waited for by its future", SOUND)
def waited_for_by_its_future(rank, g):
    data = x()
    dist.all_reduce(data, group=g.world, async_op=True).get_future().wait()
    data.sum()


@case("rule 7: waited for by nobody", WRONG, "its output was read (cases.py:")
def a_functional_collective_without_a_wait(rank, g):
    torch.ops._c10d_functional.all_reduce(x(), "sum", g.world.group_name).sum()


@case("rule 7: waited for as it is used", SOUND)
def a_functional_collective(rank, g):
    all_reduced(x(), "sum", g.world).sum()


@case("rule 7: waited for in C++", SOUND)
def buckets_of_ddp(rank, g):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=g.world)
    for _ in range(2):
        model(x()).sum().backward()
        model.zero_grad(set_to_none=False)


@case("rule 7: received where it is sent from", WRONG, "two messages that use the same memory")
def received_where_it_is_sent_from(rank, g):
    data = x()
    batch((isend, data, (rank + 1) % 4, g.world), (irecv, data, (rank - 1) % 4, g.world))


@case("rule 7: a buffer of two pairs", WRONG, "is waited for later")
def a_buffer_of_two_pairs(rank, g):
    used(g, (0, 1), (1, 2))
    data = x()
    if rank == 0:
        send(1, g.world)
    if rank == 1:
        wait(irecv(data, group=g.world, group_src=0), isend(data, group=g.world, group_dst=2))
    if rank == 2:
        recv(1, g.world)
