"""late_gather: all-gathers that could begin during the optimizer's step, and wait for its end."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn
from labs.kit.launch import run
from labs.kit.record import span

BUCKETS, SIZE = 4, 512


class Bucket:
    """Some of the parameters, of which a rank updates its shard; then all ranks gather the whole."""

    def __init__(self, seed: int, number: int) -> None:
        self.whole, self.number, me = drawn((SIZE,), seed, number), number, dist.get_rank()
        self.shard = self.whole.chunk(RANKS)[me].clone()
        self.gradient = drawn((SIZE,), seed, number, 1).chunk(RANKS)[me]

    def update(self) -> None:
        with record_function(f"update {self.number}"), span(f"update {self.number}"):
            self.shard -= 0.1 * self.gradient

    def gather(self) -> dist.Work:
        """Start to gather the whole; the returned work's wait() ends it."""
        return dist.all_gather(list(self.whole.chunk(RANKS)), self.shard, async_op=True)


def faulty(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.update()
    for bucket in buckets:
        bucket.gather().wait()


def right(buckets: Sequence[Bucket]) -> None:
    works = []
    for bucket in buckets:
        bucket.update()
        works.append(bucket.gather())
    for work in works:
        work.wait()


def job(fn: Callable[..., Any], seed: int) -> dict[str, Tensor]:
    buckets = [Bucket(seed, number) for number in range(BUCKETS)]
    fn(buckets)
    return {"parameters": torch.cat([bucket.whole for bucket in buckets])}


def alone(seed: int) -> list[dict[str, Tensor]]:
    updated = [drawn((SIZE,), seed, b) - 0.1 * drawn((SIZE,), seed, b, 1) for b in range(BUCKETS)]
    return RANKS * [{"parameters": torch.cat(updated)}]


def traced(fn: Callable[..., Any], seed: int = 0) -> str:
    """Return rank 0's trace by torch.profiler, the text of a file that Perfetto opens."""
    return run(profiled, fn, seed, ranks=RANKS, device="cpu")[0]


def profiled(fn: Callable[..., Any], seed: int) -> str:
    if dist.get_rank() > 0:
        job(fn, seed)
        return ""
    with hushed(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        job(fn, seed)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        return path.read_text(encoding="utf-8")


@contextmanager
def hushed() -> Iterator[None]:
    """Leave out what the profiler itself writes to the standard error."""
    before = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def in_order(trace: str) -> list[str]:
    """Return the names of a trace's updates and all-gathers, in the order in which rank 0 began them."""
    named = [event for event in json.loads(trace)["traceEvents"] if event.get("ph") == "X"]
    both = [event for event in named if event["name"].startswith(("update ", "c10d::allgather"))]
    return [event["name"] for event in sorted(both, key=itemgetter("ts"))]


# fmt: off
late_gather = clinic(
    "e", faulty, right, job, alone, number=5, tells={"time"},
    asks="`fn(buckets)`, which updates all buckets and leaves them gathered; buckets: Buckets of this file",
    threads=("deepspeedai/DeepSpeed/issues/6876 closed 2024-12-18", "hpcaitech/ColossalAI/pull/5898 merged 2024-07-10",
             "NVIDIA/apex/pull/1621 merged 2023-03-17"),
    mistake="all gathers wait for all updates",
    question="What must have happened before a bucket can be gathered, and what need not?",
)
# fmt: on
late_gather.traced, late_gather.in_order = traced, in_order
