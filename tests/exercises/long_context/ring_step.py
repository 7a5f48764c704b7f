"""Answers to ring_step (12): one step of ring attention."""

import torch
import torch.distributed as dist

from labs.cp import merge
from tests.answers import Exercise

answers = Exercise("ring_step")


@answers.right(line="rank 0 sent 384 bytes, its own piece")
def in_a_batch(pair, received, so_far, attend, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, pair, group=group, group_peer=(rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)
    works = dist.batch_isend_irecv([send, receive])
    part = attend(pair)
    total = part if so_far is None else merge(so_far, part)
    for work in works:
        work.wait()
    return total, received


@answers.right
def odd_ranks_receive_first(pair, received, so_far, attend, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    works = []
    for send in (True, False) if rank % 2 == 0 else (False, True):
        if send:
            works.append(dist.isend(pair, group=group, group_dst=(rank + 1) % ranks))
        else:
            works.append(dist.irecv(received, group=group, group_src=(rank - 1) % ranks))
    part = attend(pair)
    [work.wait() for work in works]
    return (part, received) if so_far is None else (merge(so_far, part), received)


spoil = answers.slips(in_a_batch)
ATTEND, WAIT = "    part = attend(pair)\n", "    for work in works:\n        work.wait()\n"
WORKS, MERGE = "    works = dist.batch_isend_irecv([send, receive])\n", "merge(so_far, part)\n"
TOTAL, SEND = (
    "part if so_far is None else merge(so_far, part)",
    "isend, pair, group=group, group_peer=(rank + 1) % ranks)",
)
ONE_BY_ONE = (
    "[dist.isend(pair, group=group, group_dst=send.group_peer), dist.irecv(received, group=group, group_src=receive"
)
spoil("the messages are posted after the attention", ATTEND, "", WORKS, ATTEND + WORKS)
spoil("waits before it attends", ATTEND, WAIT + ATTEND, MERGE + WAIT, MERGE)
spoil("a receive that nobody waited for", "for work in works:", "for work in works[:1]:")
spoil("the pair goes the other way", "(rank + 1)", "(rank + 7 * ranks - 1)", "(rank - 1)", "(rank + 1)")
spoil("nothing has arrived", "return total, received", "return total, pair")
spoil("the parts are not merged", TOTAL, "part")
spoil("the first part is merged with itself", TOTAL, "merge(part if so_far is None else so_far, part)")
spoil("attends to what has arrived", ATTEND, WAIT + "    part = attend(received)\n", MERGE + WAIT, MERGE)
spoil("right only in the steps after the first", TOTAL, "merge(so_far, part)")
spoil("right only on the group of all ranks", SEND, "isend, pair, (rank + 1) % ranks, group)", alone=True)
spoil("not posted together", "dist.batch_isend_irecv([send, receive])", ONE_BY_ONE + ".group_peer)]")


@answers.wrong()
def gathered(pair, received, so_far, attend, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = [torch.tensor(0) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor(pair.shape[3]), group=group)
    pairs = [pair.new_empty(*pair.shape[:3], int(size), pair.shape[4]) for size in sizes]
    work = dist.all_gather(pairs, pair, group=group, async_op=True)
    part = attend(pair)
    work.wait()
    total = part if so_far is None else merge(so_far, part)
    return total, received.copy_(pairs[rank - 1])
