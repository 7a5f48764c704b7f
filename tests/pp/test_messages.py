"""Tests of labs.pp.messages: which rank waits for which, and what is sent, in jobs and on paper."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from labs import native
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT
from labs.pp import SCHEDULES, B, F, I, Pipeline, W, cut
from labs.pp.checker import stages_of
from labs.pp.messages import Receive, Send, Sent, plan
from tests.pp.common import DICE, LISTS
from tests.pp.trainings import PYTORCHS, SMALL, batch

MANY = LISTS | st.sampled_from([schedule(4, 8) for schedule in SCHEDULES.values()])


def messages_between(steps, other):
    return [step.message for step in steps if getattr(step, "to", getattr(step, "source", None)) == other]


@settings(max_examples=200)
@given(MANY)
def test_each_pair_of_ranks_has_its_messages_in_one_order(lists):
    """Check both directions in one order: a backend may have one queue per pair."""
    plans = plan(lists)
    assert [[x for x in steps if isinstance(x, F | B | I | W)] for steps in plans] == list(map(list, lists))
    for a, steps in enumerate(plans):
        for b, others in enumerate(plans):
            assert a == b or messages_between(steps, b) == messages_between(others, a)
        # Others may wait for the message: nothing comes before it.
        assert all(isinstance(x, F | B | I) for x, step in pairwise(steps) if isinstance(step, Send))
        made = [step.message for step in steps if isinstance(step, Send)]
        over = [step.message for step in steps if isinstance(step, Sent)]
        assert len(set(over)) == len(over) and set(over) <= set(made) and len(set(made)) == len(made)


@settings(max_examples=200)
@given(MANY)
def test_ranks_never_wait_in_a_circle_even_if_every_send_waits_for_its_receiver(lists):
    plans, at = plan(lists), [0] * len(lists)

    def next_of(rank):
        return plans[rank][at[rank]] if at[rank] < len(plans[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(plans)):
            match next_of(rank):
                case Send(message, to):
                    if next_of(to) == Receive(message, rank):
                        at[rank], at[to], moved = at[rank] + 1, at[to] + 1, True
                case Receive() | None:
                    pass
                case _:
                    at[rank], moved = at[rank] + 1, True
    assert at == list(map(len, plans))


def test_a_message_counts_as_sent_only_after_its_use_however_slow_a_rank_is():
    seen = []

    @settings(max_examples=200)
    @given(MANY, DICE)
    def holds(lists, draw):
        plans, at, sent, done = plan(lists), [0] * len(lists), set(), set()
        speeds = [draw.choice([1, 20]) for _ in plans]
        rank_of = {x.stage: rank for rank, order in enumerate(lists) for x in order}
        while any(place < len(steps) for place, steps in zip(at, plans, strict=True)):
            rank = draw.choices(range(len(plans)), speeds)[0]
            step = plans[rank][at[rank]] if at[rank] < len(plans[rank]) else None
            match step:
                case Send(message, _):
                    sent.add(message)
                case Sent(message):
                    seen.append(message)
                    reader = F(message.stage + 1, message.microbatch)
                    if isinstance(message, B):
                        reader = B(message.stage - 1, message.microbatch)
                    assert reader in done
                case F(stage, m) if stage and rank_of[stage - 1] != rank and F(stage - 1, m) not in sent:
                    continue
                case B(stage, m) | I(stage, m) if rank_of.get(stage + 1, rank) != rank and B(stage + 1, m) not in sent:
                    continue
                case F() | B() | I() | W():
                    done.add(B(step.stage, step.microbatch) if isinstance(step, I) else step)
                case None:
                    continue
            at[rank] += 1

    holds()
    assert len(seen) > 1000


def two_steps(config, side):
    """Take two steps with each schedule, one after the other."""
    for name, schedule in (SCHEDULES if side == "ours" else PYTORCHS).items():
        lists, model = schedule(dist.get_world_size(), 4), GPT(config)
        stages, mine = stages_of(lists), {x.stage for x in lists[dist.get_rank()]}
        x, y = batch(0, 8)
        if side == "ours":
            pipeline = Pipeline(cut(model, stages), lists, model.loss)
        else:
            theirs = native.pp(cut(model, stages), name, 4, model.loss)
        for _ in range(2):
            mark("step")
            if side == "ours":
                pipeline.forward_backward(x, y)
            else:
                theirs.step(*[x] * (0 in mine), **({"target": y} if stages - 1 in mine else {}))
        mark("end")


def sends(recording, rank, step):
    return Counter(e.sent for e in recording.select(rank, step) if e.op == "send" and not e.meta)


CROSSED = {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zb1p": 1, "zbv": 2, "dualpipev": 2}  # cuts between 2 ranks


def test_what_crosses_a_cut_is_sent_and_nothing_else():
    """Check that a micro-batch sends its activations one way and their gradient the other.

    In the first step, once, each cut also carries the shapes to come.   Before that, the ranks compare their inputs
    with an all-gather.   Each rank sends one of the two over each cut.   PyTorch sends the same, and announces shapes
    in its own way.
    """
    x = 2 * 5 * SMALL.dim * 4  # bytes of a micro-batch of 2 sequences
    recordings = {
        side: run(two_steps, replace(SMALL, depth=4), side, ranks=2, record="communication").recording
        for side in ("ours", "torch")
    }
    for number, (name, cuts) in enumerate(CROSSED.items()):
        for rank in (0, 1):
            steady = Counter({x: 4 * cuts})
            shapes = Counter({80: (cuts + 1 - rank) // 2})  # sent by the ranks that send forward
            assert sends(recordings["ours"], rank, 2 * number) == steady + shapes
            assert sends(recordings["ours"], rank, 2 * number + 1) == steady
            if name in PYTORCHS:
                assert sends(recordings["torch"], rank, 2 * number + 1) == steady
    ops = [{e.op for e in recordings["ours"].events if e.step == step} for step in range(2 * len(CROSSED))]
    assert ops == [{"send", "recv", "all_gather"}, {"send", "recv"}] * len(CROSSED)


def two_tied_steps(config, trained=True):
    for name in ("1f1b", "zbv"):
        lists, model = SCHEDULES[name](2, 2), GPT(config)
        model.embed.requires_grad_(trained)
        pipeline = Pipeline(cut(model, stages_of(lists)), lists, model.loss)
        for _ in range(2):
            mark("step")
            pipeline.forward_backward(*batch(0, 4))
        mark("end")


def test_a_tied_embeddings_gradient_is_sent_once_by_each_of_its_ranks():
    config = replace(SMALL, depth=4, tied=True)
    recording = run(two_tied_steps, config, ranks=2, record="communication").recording
    x, embedding = 2 * 5 * SMALL.dim * 4, SMALL.vocab * SMALL.dim * 4
    for rank in (0, 1):
        assert sends(recording, rank, 1) == Counter({x: 2, embedding: 1})
        assert sends(recording, rank, 3) == Counter({x: 4})  # one rank of a V has both ends
    frozen = run(two_tied_steps, config, False, ranks=2, record="communication").recording
    assert [sends(frozen, rank, 1) for rank in (0, 1)] == [Counter({x: 2})] * 2
