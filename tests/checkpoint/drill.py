"""A training with everything that can be lost, and ranks that are killed at random moments.

training   dropout, AdamW, a schedule, epochs of three batches, and random numbers of each rank's own; it saves after
           every step, and begins at the newest checkpoint
Death      kills a rank once in each start of the ranks, except the last one
"""

import os
import random
import signal
import sys
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from labs.checkpoint import load, newest, random_state, save, set_random_state
from labs.data import Batches
from labs.mesh import Mesh
from labs.model import GPT
from tests.checkpoint.common import CONFIG, in_vectors, numbers, sharded

BATCH = 12  # summed over all ranks
TOKENS = torch.arange(3 * BATCH * (CONFIG.context + 1)).square() % CONFIG.vocab
STEP, DISK, DRAFT, ALARM = "a part of a step", "a look at the disk", "a look at a draft", "an alarm"


class Dropping(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.Sequential(self.norm, nn.Dropout(0.2))


def in_zero(model):
    return in_vectors(3, model)


def in_fsdp(model):
    return sharded(model, Mesh((dist.get_world_size(),), ("dp",)))


class AtOnce:
    """A saver for which training waits; a Saver writes in the background instead."""

    def __init__(self, folder):
        self.save = partial(save, folder)

    def wait(self):
        pass


def training(folder, steps, laid_out, saver, kills=0, seed=0):
    """Return what this rank holds after that many steps.  In each of the first `kills` starts, one rank dies."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    death = Death(folder, kills, seed)
    held, model, optimizer = laid_out(Dropping(CONFIG))
    saver = saver(folder)
    schedule = CosineAnnealingLR(held.kept.inner, steps)
    batches = Batches(TOKENS, BATCH, CONFIG.context, rank=rank, ranks=ranks)
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(rank)
    first = 0
    if (where := newest(folder)) is not None:
        remembered = load(where, held)
        first, state = remembered.step, remembered.values
        schedule.load_state_dict(state["schedule"])
        for group in held.kept.inner.param_groups:
            group["lr"] = state["lr"]
        set_random_state(remembered.own[rank])
    for step in range(first, steps):
        x, y = batches[step]
        if random.random() < 0.5:
            x, y = y.flip(1), x.flip(1)
        death.may_come(STEP, "forward")
        loss = model(x, y)
        death.may_come(STEP, "backward")
        loss.backward()
        death.may_come(STEP, "update")
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state = {"schedule": schedule.state_dict(), "lr": held.kept.inner.param_groups[0]["lr"]}
        saver.save(step + 1, held, state, random_state())
    saver.wait()
    death.comes()
    return numbers(held)


class Death:
    """The death of a random rank: before one of the next moments of a kind, or by an alarm, even during a call.

    A file beside the folder has a line for each.
    """

    def __init__(self, folder, kills, seed):
        self.folder, attempt = folder, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        drawn = random.Random(f"{seed} {attempt}")
        mine = drawn.randrange(dist.get_world_size()) == dist.get_rank()
        self.kind = (STEP, DISK, DRAFT, ALARM)[(seed + attempt) % 4] if mine and attempt < kills else None
        self.left, seconds = drawn.randint(1, 12), drawn.uniform(0, 0.2)
        if self.kind in (DISK, DRAFT):
            sys.addaudithook(self.look)
        if self.kind == ALARM:
            self.note(f"an alarm after {seconds:.3f} s")
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def look(self, event, arguments):
        """Count an event. Python calls this before it opens, renames, removes or lists a file."""
        if arguments and isinstance(arguments[0], str | os.PathLike):
            path = Path(arguments[0])
            if path.is_relative_to(self.folder):
                self.may_come(DISK, f"{event} {path}")
                if ".draft" in str(path):
                    self.may_come(DRAFT, f"{event} {path}")

    def may_come(self, kind, what):
        if kind == self.kind:
            self.left -= 1
            if self.left == 0:
                self.comes(what)

    def comes(self, what="the end"):
        if self.kind == ALARM:
            signal.pause()
        elif self.kind is not None:
            self.note(f"before {what}")
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, how):
        with open(f"{self.folder}.deaths", "a") as file:
            file.write(f"rank {dist.get_rank()}: {how}\n")
