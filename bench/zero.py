"""A training step of the tour's model with ZeRO and FSDP: ours against PyTorch's own.

PyTorch's are `ZeroRedundancyOptimizer` with DDP for stage 1, and `fully_shard` for stage 3 and for FSDP.  Ours and
PyTorch's run in one job of 4 ranks.  They take a step each in turn, and which comes first alternates.  The notes show
the time of each phase, and, from a job of its own, how long a rank waits in how many collectives.
"""

import statistics

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from bench.step import BATCH, RANKS, WARM_UP, phases, rounds, slowest
from labs.kit.launch import run
from labs.kit.training.strategies import ROWS, train
from labs.model import GPT, PRESETS

NATIVE = {"zero-1": "torch-zero-1", "zero-3": "torch-fsdp"}
NATIVE |= {name: f"torch-{name}" for name in ("fsdp", "fsdp-no-reshard", "hsdp")}
WATCHED = 10  # steps


def figures(quick: bool) -> list[Figure]:
    found = []
    for ours, theirs in NATIVE.items():
        ranks = rounds([ours, theirs], 20 if quick else 60)
        pairs = zip(slowest(ranks[theirs]), slowest(ranks[ours]), strict=True)
        note = "; ".join(f"{name}: {phases(ranks[name])}, {waiting(name)}" for name in (ours, theirs))
        found.append(figure(f"zero: {ours} / {theirs}", ratios(pairs), target="at most 1.00", note=note))
    return found


def waiting(name: str) -> str:
    """Return the median wait of a step on rank 0: "waits 12.1 of 30.2 ms in 18 collectives"."""
    recording = run(watched, name, ranks=RANKS, record="communication", timeout=600).recording
    steps = range(WARM_UP, WATCHED)
    waited = statistics.median(sum(event.waited for event in recording.select(0, step)) for step in steps)
    long = statistics.median(span.end - span.start for span in recording.step_spans(0)[WARM_UP:])
    calls = recording.counts(0, WATCHED - 1).total()
    return f"waits {1000 * waited:.1f} of {1000 * long:.1f} ms in {calls} collectives"


def watched(name: str) -> None:
    config = PRESETS["tiny"]
    batches = [tuple(torch.randint(config.vocab, (2, BATCH, config.context))) for _ in range(WATCHED)]
    train(ROWS[name], lambda: GPT(config), [batches] * dist.get_world_size())
