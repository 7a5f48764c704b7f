"""Tests of a training that is killed and resumed: N steps equal k steps, a kill and N - k steps, bit for bit.

All is in float32.  The reference is the same training, undisturbed.
"""

import os
import random
import shutil
import signal

import numpy.random
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import ddp
from labs.checkpoint import Held, Saver, load, newest, random_state, set_random_state
from labs.data import Batches
from labs.kit.launch import RankError, run
from tests.checkpoint.common import numbers
from tests.depth import deepen

VOCAB, CONTEXT, BATCH, STEPS = 11, 4, 12, 8  # 5 steps in an epoch
TOKENS = torch.arange(5 * BATCH * (CONTEXT + 1)) ** 2 % VOCAB


def training(folder, steps=STEPS, dropout=0.0, killed_at=None):
    """Resume from the folder. Returns what each step read, its loss, and the final state."""
    rank, ranks, first, history = dist.get_rank(), dist.get_world_size(), 0, []
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCAB, 6), nn.Flatten(), nn.Dropout(dropout), nn.Linear(6 * CONTEXT, VOCAB)]
    model = ddp.Naive(nn.Sequential(*layers))
    torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    batches = Batches(TOKENS, BATCH, CONTEXT, rank=rank, ranks=ranks)
    held = Held(model.module, optimizer=optimizer)
    if checkpoint := newest(folder):
        found = load(checkpoint, held)
        first = found.step
        scaler.load_state_dict(found.values["scaler"])
        schedule.load_state_dict(found.values["schedule"])
        for options, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            options["lr"] = lr
        if len(found.own) == ranks:
            set_random_state(found.own[rank])
    with Saver(folder) as saver:
        for step in range(first, steps):
            if step == killed_at and rank == 1:
                saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            x_BT, y_BT = batches[step]
            chosen = (random.randrange(CONTEXT) + numpy.random.randint(2)) % CONTEXT if dropout else 0
            loss = nn.functional.cross_entropy(model(x_BT), y_BT[:, chosen])
            scaler.scale(loss).backward()
            model.sync()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            everyones = [torch.empty_like(x_BT) for _ in range(ranks)]
            dist.all_gather(everyones, x_BT)
            dist.all_reduce(loss)
            history.append((torch.cat(everyones), loss.item() / ranks))
            values = {"scaler": scaler.state_dict(), "schedule": schedule.state_dict()}
            saver.save(step + 1, held, values, random_state())
    return history, (numbers(held), scaler.state_dict(), schedule.state_dict()), random_state()


@pytest.mark.parametrize("at", [3, *deepen(6)])
def test_n_steps_equal_k_steps_a_kill_and_the_others(at, tmp_path):
    undisturbed = run(training, tmp_path / "undisturbed", dropout=0.3, ranks=2)
    assert undisturbed[0][-1] != undisturbed[1][-1]
    with pytest.raises(RankError, match="rank 1 "):
        run(training, tmp_path / "killed", dropout=0.3, killed_at=at, ranks=2)
    resumed = run(training, tmp_path / "killed", dropout=0.3, ranks=2)
    for (history, left, state), (full_history, expected, its) in zip(resumed, undisturbed, strict=True):
        torch.testing.assert_close((history, left), (full_history[at:], expected), rtol=0, atol=0)
        assert state == its


def test_on_another_number_of_ranks_the_same_data_follow_in_the_same_order(tmp_path):
    (full_history, expected, _), _ = run(training, tmp_path / "whole", ranks=2)
    run(training, tmp_path / "part", steps=3, ranks=2)
    for ranks in (1, 3, 4):
        shutil.copytree(tmp_path / "part", tmp_path / str(ranks))
        for history, left, _ in run(training, tmp_path / str(ranks), ranks=ranks):
            torch.testing.assert_close(history, full_history[3:], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(left, expected, rtol=1e-5, atol=1e-6)
