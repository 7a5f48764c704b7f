"""The cost of each pass of labs.kit.record: the same training step with and without it, in interleaved pairs.

    python -m bench.record_overhead

Both steps of a pair run in one job, one right after the other, and which comes first alternates, so that other work on
the machine slows both alike.  The job's flight recorder is on in both.  The program prints the median of the pairs'
ratios, with the quartiles as their spread.
"""

import statistics
import time

import torch
import torch.distributed as dist

from labs.ddp import Naive
from labs.kit.launch import run
from labs.kit.record import PASSES
from labs.model import GPT, PRESETS

PAIRS = 40
RANKS = 2
TARGET = {"time": "1.00", "communication": "at most 1.10", "memory": "no target"}


def pairs(kind: str) -> list[tuple[float, float]]:
    """Return pairs of a step's seconds, (without, with) the pass."""
    config = PRESETS["small"]
    model = Naive(GPT(config))  # one all-reduce per gradient: many calls for a pass to see
    optimizer = torch.optim.AdamW(model.parameters())
    x_BT, y_BT = torch.randint(config.vocab, (2, 8, config.context))

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(x_BT, y_BT).backward()
        model.sync()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def watched_step() -> float:
        with PASSES[kind]():
            return step()

    for _ in range(3):
        step(), watched_step()
    found = []
    for pair in range(PAIRS):
        if pair % 2:
            plain, watched = step(), watched_step()
        else:
            watched, plain = watched_step(), step()
        found.append((plain, watched))
    return found


def main() -> None:
    print(f"GPT small, naive data parallelism, {RANKS} ranks, {PAIRS} pairs of steps; torch {torch.__version__}")
    print(f"{'pass':<15}{'ms without':>12}{'ms with':>10}{'ratio':>8}{'quartiles':>16}   target")
    for kind, target in TARGET.items():
        found = run(pairs, kind, ranks=RANKS, timeout=600)[0]
        plain, watched = (1000 * statistics.median(times) for times in zip(*found, strict=True))
        low, ratio, high = statistics.quantiles([w / p for p, w in found], n=4)
        spread = f"{low:.3f} to {high:.3f}"
        print(f"{kind:<15}{plain:>12.1f}{watched:>10.1f}{ratio:>8.3f}{spread:>16}   {target}")


if __name__ == "__main__":
    main()
