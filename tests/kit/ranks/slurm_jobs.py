"""Functions that the tests run on the nodes of a small Slurm, in a file that a rank imports quickly."""

import os
import signal
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist


def sums(add, at):
    """Return a value that only cloudpickle can make, a tensor, and what a rank sees of its place and its settings."""
    x = torch.ones(3, dtype=torch.get_default_dtype()) * dist.get_rank()
    dist.all_reduce(x)
    print(f"at {socket.gethostname()}")
    if at:
        (at / f"written-{dist.get_rank()}").touch()
    names = ("LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    return add(dist.get_rank()), x, [int(os.environ[name]) for name in names], torch.get_num_threads()


def rank_1_raises():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(1))


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(log: Path):
    log.touch()
    time.sleep(60)
