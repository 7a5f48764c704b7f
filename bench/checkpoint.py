"""The time for which training waits for a checkpoint of 100 MB: saved in the background, against saved at once.

Two ranks take turns at saving in the two ways, and the order of the ways alternates.  Before the next turn begins, each
rank waits until its thread has written.  A save is timed from a barrier to the return of the call on the slowest rank.

sharded     each rank holds one half, as with FSDP: it copies 50 MB, and writes them
replicated  each rank holds everything, as with DDP: it copies 100 MB, and writes half of it
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.figure import Figure, figure, ratios
from labs import fsdp
from labs.checkpoint import Held, Saver, save
from labs.kit.launch import run
from labs.mesh import Mesh

RANKS, WARM_UP = 2, 2
LAYERS, WIDTH = 25, 1000  # 4 MB each


def pairs(folder: Path, sharded: bool, count: int) -> list[tuple[float, float]]:
    """Return the seconds that a save takes on this rank, and those of a save in the background, as pairs."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    held = Held(fsdp.fully_shard(model, mesh=Mesh((RANKS,), ("dp",))) if sharded else model)
    saver = Saver(folder / "background")
    ways = [partial(save, folder / "at once"), saver.save]

    def timed(way: Callable[..., object], step: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        way(step, held)
        taken = time.perf_counter() - start
        saver.wait()
        return taken

    found = []
    for step in range(WARM_UP + count):
        turns = ways if step % 2 else ways[::-1]
        taken = {way: timed(way, step) for way in turns}
        found.append(tuple(taken[way] for way in ways))
        dist.barrier()
        if dist.get_rank() == 0:
            for way in folder.iterdir():
                shutil.rmtree(way)
    return found[WARM_UP:]


def figures(quick: bool) -> list[Figure]:
    found = []
    for sharded, how in ((True, "sharded"), (False, "replicated")):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run(pairs, Path(folder), sharded, 20 if quick else 40, ranks=RANKS, timeout=900)
        slowest = [tuple(map(max, zip(*turn, strict=True))) for turn in zip(*ranks, strict=True)]
        long, short = (1000 * statistics.median(times) for times in zip(*slowest, strict=True))
        note = f"{short:.0f} of {long:.0f} ms"
        name = f"checkpoint: training waits in the background / at once, {how}"
        found.append(figure(name, ratios(slowest), target="at most 0.10", note=note))
    return found
