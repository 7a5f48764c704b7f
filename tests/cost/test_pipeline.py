"""Tests of labs.cost on pipelines: cases by hand, and jobs that know nothing of it.

The recorder measures what ranks of labs.pp send and hold under each schedule, with uneven cuts and with tied weights.
"""

import dataclasses
from functools import partial

import pytest
import torch

from labs import cost, pp
from labs.cost import Job
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT, Config, initial_value
from labs.pp import SCHEDULES, Pipeline, alive, cut
from tests.depth import deepen
from tests.recordings import as_predicted, held

ODD = Config(vocab=29, dim=24, depth=5, heads=3, kv_heads=3, hidden=61, context=10)
TIED = Config(vocab=40, dim=16, depth=4, heads=4, kv_heads=2, hidden=36, context=8, tied=True)
JOBS = {  # number of ranks: config, sequences, schedule, micro-batches, layers of each stage
    2: [
        *((ODD, 1, name, 4, 2 if name in ("gpipe", "1f1b", "zb1p") else 4) for name in SCHEDULES),
        (ODD, 3, "1f1b", 3, [4, 1]),
        (TIED, 2, "gpipe", 2, 2),
        (TIED, 2, "zbv", 4, [1, 1, 1, 1]),
    ],
    3: [
        (ODD, 2, "1f1b", 5, [1, 3, 1]),
        (ODD, 2, "zb1p", 4, [2, 1, 2]),
        (dataclasses.replace(ODD, depth=7), 1, "interleaved", 6, [2, 1, 1, 1, 1, 1]),
        (TIED, 1, "1f1b", 3, 3),
    ],
}


def lists_of(ranks, name, microbatches):
    return SCHEDULES[name](ranks, microbatches)


def train_all(ranks, steps):
    for config, sequences, name, microbatches, layers in JOBS[ranks]:
        train(config, sequences * microbatches, lists_of(ranks, name, microbatches), layers, steps)


def train(config, batch, lists, layers, steps):
    with torch.device("meta"):  # each rank makes the parameters of its own stages only
        model = GPT(config)
    pipeline = Pipeline(cut(model, layers), lists, model.loss, initial=partial(initial_value, seed=0))
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    has_end = [number in pipeline.stages for number in (0, pipeline.last)]
    for _ in range(steps):
        mark("step")
        x, y = (torch.randint(config.vocab, (batch, config.context)) if has else None for has in has_end)
        losses = pipeline.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        del x, y, losses
    mark("end")


def predictions(ranks):
    """Yield (number in its job, rank, what was trained, prediction)."""
    for number, (config, sequences, name, microbatches, layers) in enumerate(JOBS[ranks]):
        plans = pp.plan(lists_of(ranks, name, microbatches))
        for rank in range(ranks):
            job = Job(config, sequences, ranks, rank, accumulation=microbatches)
            sizes = None if isinstance(layers, int) else layers
            yield number, rank, (name, layers), cost.pp(job, plans, sizes)


# ---- sent ------------------------------------------------------------------------------------------------


def test_sent_by_hand():
    # 2 ranks, 3 micro-batches of 2 x 8 tokens of 16 numbers; embedding and head have 40 x 16
    job, x, table = Job(TIED, 2, ranks=2, accumulation=3), 4 * 2 * 8 * 16, 4 * 40 * 16
    for rank in range(2):
        found = cost.pp(dataclasses.replace(job, rank=rank), pp.plan(pp.gpipe(2, 3)))
        assert found.sent == 3 * x + table and found.collectives == {"send": 4, "recv": 4}
        assert found.textbook == 3 * x
    # rank 0 has both ends of a V, rank 1 its turn, stages 1 and 2: two cuts, and nothing tied between ranks
    for rank in range(2):
        found = cost.pp(dataclasses.replace(job, rank=rank), pp.plan(pp.zbv(2, 3)))
        assert found.sent == 6 * x == found.textbook and found.collectives == {"send": 6, "recv": 6}


def test_each_cut_is_crossed_twice_by_each_micro_batch():
    config, x = dataclasses.replace(ODD, depth=8), 4 * 10 * 24
    for name, schedule in SCHEDULES.items():
        lists = schedule(4, 8)
        found = [cost.pp(Job(config, 1, 4, rank, accumulation=8), pp.plan(lists)) for rank in range(4)]
        cuts = {"interleaved": 7, "zbv": 6, "dualpipev": 6}.get(name, 3)
        assert sum(each.sent for each in found) == 2 * 8 * cuts * x, name
        assert found[0].textbook == 2 * 8 * cuts * x / 4


def test_activations_are_those_that_the_schedule_has_alive():
    """Check ranks in the middle, whose layers are all alike."""
    config = dataclasses.replace(ODD, depth=8)
    for name in ("gpipe", "1f1b"):
        lists = SCHEDULES[name](4, 8)
        one = cost.layer_activations(Job(config, 1))
        for rank in (1, 2):
            most = max(alive(lists)[rank])
            found = cost.pp(Job(config, 1, 4, rank, accumulation=8), pp.plan(lists)).held.A
            assert 0 <= found - most * 2 * one <= 4 * 10 * 24  # plus one that has arrived


def test_a_job_that_is_not_the_plans_is_refused():
    plans = pp.plan(pp.gpipe(2, 4))
    with pytest.raises(ValueError, match=r"for 2 ranks and 4 micro-batches: a job of 2 ranks and accumulation=3 is n"):
        cost.pp(Job(ODD, 1, ranks=2, accumulation=3), plans)
    with pytest.raises(ValueError, match=r"stages of \[5, 1\] layers: .* together they have 5"):
        cost.pp(Job(ODD, 1, ranks=2, accumulation=4), plans, [5, 1])


@pytest.mark.parametrize("ranks", JOBS)
def test_ranks_send_what_was_predicted(ranks):
    recording = run(train_all, ranks, 2, ranks=ranks, device="cpu", record="communication").recording
    for number, rank, what, predicted in predictions(ranks):
        last = 2 * number + 1
        assert recording.sent(rank, last) == predicted.sent, what
        assert recording.counts(rank, last) == predicted.collectives, what


# ---- held ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, *deepen(3)])
def test_ranks_hold_what_was_predicted(ranks):
    recording = run(train_all, ranks, 3, ranks=ranks, device="cpu", record="memory").recording
    for number, rank, what, predicted in predictions(ranks):
        found, known = as_predicted(held(recording, rank, number, 3), predicted.held)
        assert found == known, (what, rank)
