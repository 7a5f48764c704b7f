"""Tests of labs.cost on context parallelism: jobs of labs.cp that know nothing of it, and cases by hand.

The recorder measures what ranks send and hold: bytes sent, P, G, S and A to the byte, and the peak within 5 %.
"""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from labs import cost
from labs.cost import Job
from labs.kit.launch import run
from labs.kit.training.strategies import ROWS, train
from labs.model import GPT, Config
from tests.depth import deepen
from tests.recordings import as_predicted, held

STEPS = 3
JOBS = [  # config, sequences, micro-batches
    (Config(64, 64, 2, 4, 2, 96, context=500), 1, 1),  # attention holds the most, in several blocks
    (Config(64, 32, 2, 8, 4, 64, context=75, tied=True), 2, 2),  # nothing divides
    (Config(301, 24, 1, 6, 6, 77, context=16), 3, 1),  # the loss does
]


ALL = {name: replace(ROWS[name], axes=ROWS["cp-ring"].axes) for name in ("cp-ring", "cp-gather", "cp-ulysses")}


def jobs(ranks):
    """Return the row, config, sequences and micro-batches of each training; Ulysses needs a head for each rank."""
    return [
        (row, *job) for row, job in product(ALL.values(), JOBS) if row.name != "cp-ulysses" or job[0].kv_heads >= ranks
    ]


def train_all(ranks):
    for row, config, batch, micro_batches in jobs(ranks):
        x, y = torch.randint(
            config.vocab, (2, batch * micro_batches, config.context), generator=torch.Generator().manual_seed(0)
        )
        train(row, partial(GPT, config), [[(x, y)] * STEPS], micro_batches)
        gc.collect()


@pytest.mark.parametrize("ranks", [3, *deepen(2, 4, 5)])
def test_a_rank_sends_and_holds_what_is_predicted(ranks):
    sent, memory = (run(train_all, ranks, ranks=ranks, record=kind).recording for kind in ("communication", "memory"))
    for number, (row, config, batch, micro_batches) in enumerate(jobs(ranks)):
        for rank in range(ranks):
            predicted = row.predict(Job(config, batch, ranks, rank, accumulation=micro_batches))
            assert sent.sent(rank, (number + 1) * STEPS - 1) == predicted.sent, (row.name, number, rank)
            measured, known = as_predicted(held(memory, rank, number, STEPS), predicted.held)
            assert measured == known, (row.name, number, rank)


def test_by_hand():
    """Check 8 tokens on 2 ranks, with 3 heads of queries for each head of keys and values, 4 wide, in float32."""
    job = Job(Config(5, 24, 1, 6, 2, 3, context=8), 1, 2)
    sent = partial(cost.attention_sent, job)
    pair = 4 * 2 * 2 * 4 * 4  # bytes of k and v of 4 tokens
    assert sent("ring") == sent("gather") == {"forward": pair, "backward": 2 * pair}
    half = 4 * 4 * 4  # bytes of one head of 4 tokens
    assert sent("ulysses") == {"forward": (3 + 2 + 3) * half, "backward": (3 + 2 + 3) * half}
    for way in ("ring", "gather", "ulysses"):
        own = cost.cp(job, way)
        averaged = cost.ddp(replace(job, batch=1))
        assert own.sent - averaged.sent == sum(sent(way).values()) == own.textbook - averaged.textbook


def test_one_rank_sends_nothing():
    job = Job(Config(5, 24, 1, 6, 2, 3, context=8), 1)
    assert [cost.cp(job, way).sent for way in ("ring", "gather", "ulysses")] == [0, 0, 0]


def test_more_ranks_than_heads_are_refused_as_labs_cp_does():
    job = Job(Config(5, 24, 1, 6, 2, 3, context=8), 1, 3)
    with pytest.raises(ValueError, match="2 heads of keys and values are fewer than 3 ranks: use 2"):
        cost.cp(job, "ulysses")
    with pytest.raises(ValueError, match="way is 'spiral': it must be one of 'ring', 'gather', 'ulysses'"):
        cost.cp(job, "spiral")
