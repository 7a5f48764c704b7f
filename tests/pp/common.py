"""Shared code of several tests of labs.pp: lists, a small model in parts, and its trainings."""

from unittest import mock

import torch.distributed.pipelining.schedules as theirs
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage

from labs.pp import SCHEDULES, B, F, I, W

PYTORCHS = {
    "gpipe": (theirs.ScheduleGPipe, [1]),
    "1f1b": (theirs.Schedule1F1B, [1]),
    "interleaved": (theirs.ScheduleInterleaved1F1B, [2, 3, 4]),
    "zb1p": (theirs.ScheduleInterleavedZeroBubble, [1, 2, 3]),
    "zbv": (theirs.ScheduleZBVZeroBubble, [2]),
    "dualpipev": (theirs.ScheduleDualPipeV, [2]),
}


def pytorchs(name, ranks, microbatches, stages_per_rank):
    """Return PyTorch's schedule, with stages that have no model, and are on no rank."""
    kind, _ = PYTORCHS[name]
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * stages_per_rank
    single = issubclass(kind, theirs.PipelineScheduleSingle)
    return kind(stage if single else [stage] * stages_per_rank, microbatches)


def random_lists(draw, ranks, stages, microbatches):
    """Return a random valid schedule, with all instructions in any possible order. draw: a random.Random."""
    rank_of = [draw.randrange(ranks) for _ in range(stages)]
    split = draw.choice([0, 0.5, 1])
    lists, ready = [[] for _ in range(ranks)], [F(0, m) for m in range(microbatches)]
    while ready:
        x = ready.pop(draw.randrange(len(ready)))
        lists[rank_of[x.stage]].append(x)
        s, m = x.stage, x.microbatch
        if isinstance(x, F):
            follows = [F(s + 1, m)] if s + 1 < stages else [(I if draw.random() < split else B)(s, m)]
        else:
            follows = [(I if draw.random() < split else B)(s - 1, m)] if s and not isinstance(x, W) else []
            follows += [W(s, m)] if isinstance(x, I) else []
        ready += follows
    return lists


DICE = st.randoms(use_true_random=True)  # drawing each choice with Hypothesis would take a hundred times as long
LISTS = st.builds(random_lists, DICE, st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))


def changed(name, *changes, sizes=(2, 3)):
    """Return a schedule in which these (rank, from, to) were moved, or, without a `to`, left out."""
    lists = [list(order) for order in SCHEDULES[name](*sizes)]
    for rank, place, *to in changes:
        x = lists[rank].pop(place)
        if to:
            lists[rank].insert(to[0], x)
    return lists
