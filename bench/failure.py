"""The latency of a failure: the time from the moment at which a rank fails to the RankError in the caller.

raises     rank 2 raises while the others wait for it
dies       rank 2 is killed by SIGKILL while the others wait for it
differs    rank 2 calls all_gather where the others call all_reduce: they would wait for ever
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.figure import Figure, figure
from labs.kit.launch import RankError, run

TARGETS = {"raises": "at most 1", "dies": "at most 1", "differs": "at most 2"}


def fails(how: str, moment: str) -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if dist.get_rank() == 2:
        Path(moment).write_text(str(time.monotonic()))  # all processes of a machine share one clock
        if how == "raises":
            raise ArithmeticError("on purpose")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_gather([torch.empty(1000) for _ in range(4)], tensor)
    dist.all_reduce(tensor)


def latency(how: str, moment: Path) -> float:
    """Return the seconds from the failure of rank 2 to the caller's RankError."""
    try:
        run(fails, how, str(moment), ranks=4, timeout=60)
    except RankError as error:
        assert 2 in error.ranks, error
        return time.monotonic() - float(moment.read_text())
    raise AssertionError(f"a job in which rank 2 {how} has succeeded")


def figures(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")
        return [
            figure(f"failure: a rank {how}", [latency(how, moment) for _ in range(5 if quick else 20)], "s", target)
            for how, target in TARGETS.items()
        ]
