"""What a training says: a line, TensorBoard's logs and a JSON line for each step, all by rank 0.

    step   120/1000   loss 2.3141   norm 0.84   41,210 tokens/s   0.41 GB   MFU -

The MFU (model FLOPs utilization) is the part of a card's operations per second that the model needs, by the count

    6 (parameters without the embedding of the input) + 6 layers · hidden · sequence     FLOPs per token

in which experts that a token does not use are left out, and attention's products over the past count as half of those
over all positions.  Source: Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B, which counts 12 for all of them.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from labs.model import Config, parameters
from labs.moe import MoEConfig, active_parameters
from labs.plan.machines import CLUSTERS

JSON_LINES = "steps.jsonl"


def flops_per_token(config: Config, tokens: int) -> int:
    """Return the FLOPs per token of forward and backward; tokens: those of a sequence."""
    used = active_parameters(config) if isinstance(config, MoEConfig) else parameters(config)
    embedding = 0 if config.tied else config.vocab * config.dim
    return 6 * (used - embedding) + 6 * config.depth * config.dim * tokens


def peak_flops(card: str) -> float | None:
    """Return a card's 16-bit operations per second, or None if the card is not known."""
    name = card or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    known = [cluster for cluster in CLUSTERS.values() if cluster.name.partition(",")[0] in name]
    # The longest name counts: "GB200" has "B200" in it.
    return max(known, key=lambda cluster: len(cluster.name.partition(",")[0])).flops if known else None


def memory() -> int:
    """Return the most bytes that this rank has held: of its GPU's memory, or of the process."""
    if torch.cuda.is_available() and torch.get_default_device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Report:
    """The report of a training; on ranks other than 0 it says nothing.

    flops: the FLOPs per second that all cards of the job have together, or None.
    """

    def __init__(self, steps: int, tokens: int, per_token: int, flops: float | None, logs: Path | None) -> None:
        self.steps, self.tokens, self.per_token, self.flops = steps, tokens, per_token, flops
        self.speaks, self.stack = dist.get_rank() == 0, ExitStack()
        self.lines, self.board = None, None
        if self.speaks and logs is not None:
            from torch.utils.tensorboard import SummaryWriter

            logs.mkdir(parents=True, exist_ok=True)
            self.lines = self.stack.enter_context((logs / JSON_LINES).open("a", buffering=1))
            self.board = self.stack.enter_context(SummaryWriter(str(logs)))
        self.began = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.stack.close()

    def step(self, number: int, **values: float) -> None:
        """Report the step that has just ended; number: how many steps are done; values: loss, norm, lr."""
        now = time.perf_counter()
        pace, self.began = self.tokens / (now - self.began), now
        part = None if self.flops is None else self.per_token * pace / self.flops
        self.write(number, values | {"tokens_per_second": pace, "memory": memory(), "mfu": part})
        mfu = "-" if part is None else f"{part:.1%}"
        self.say(
            f"step {number:5}/{self.steps}   loss {values['loss']:.4f}   norm {values['norm']:.2f}   "
            f"{pace:,.0f} tokens/s   {memory() / 1e9:.2f} GB   MFU {mfu}"
        )

    def evaluation(self, number: int, loss: float) -> None:
        self.write(number, {"held_out_loss": loss})
        self.say(f"step {number:5}/{self.steps}   loss {loss:.4f} on text that it has not seen")
        self.began = time.perf_counter()

    def write(self, number: int, values: dict[str, float | None]) -> None:
        if self.lines is not None:
            self.lines.write(json.dumps({"step": number} | values) + "\n")
        for name, value in values.items() if self.board is not None else ():
            if value is not None:
                self.board.add_scalar(name, value, number)

    def say(self, line: str) -> None:
        if self.speaks:
            print(line, flush=True)
