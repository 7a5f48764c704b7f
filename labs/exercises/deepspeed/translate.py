"""translate: fully_shard's settings as a configuration of DeepSpeed, under which it sends, holds and trains the same.

DeepSpeed and PyTorch train a small model on real ranks.  The expected values are measured with PyTorch's fully_shard.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs import native
from labs.deepspeed import engine
from labs.exercises.deepspeed._files import REFUSED, STARTING, initialized, require_deepspeed
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.learner_job import job
from labs.exercises.engine.on_paper import Sheet, Written, WrongSheet, answer_is, judge, one_sheet, part_is, same
from labs.kit.watch.communication import CommunicationWatch

RANKS, STEPS = 2, 3  # DeepSpeed notes the order of the parameters in its first two steps, and tells the other ranks


class Settings(NamedTuple):
    """The settings of fully_shard, in the order of the learner's arguments."""

    reshard_after_forward: bool
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    offload: bool
    max_norm: float | None
    micro: int
    accumulation: int


class Little(nn.Module):
    """A small model, each of whose sizes is even, so that no rank's part is padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)


# ---- on a rank -------------------------------------------------------------------------------------------


def side_by_side(fn: Callable[..., Any], sheets: list[Sheet], seed: int) -> list[tuple[Sheet, Written]]:
    """Train with fully_shard and with DeepSpeed; return (sheet, answer) for each setting, up to the first wrong answer.

    PyTorch comes first, since DeepSpeed may change functions of torch for the whole process.
    """
    references = [by_fully_shard(Settings(*sheet.arguments), seed) for sheet in sheets]
    filled = []
    for sheet, (expected, trained) in zip(sheets, references, strict=True):
        written = one_sheet(fn, sheet)
        found = by_deepspeed(written.returned, Settings(*sheet.arguments), seed, trained)
        again = found if written.again == written.returned else written.again
        filled.append((replace(sheet, expected=expected), replace(written, returned=found, again=again)))
        wrong = torch.tensor(float(not same(found, expected)))
        dist.all_reduce(wrong)
        if wrong:
            break
    return filled


@cache  # the tests try many answers in a process
def by_fully_shard(settings: Settings, seed: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Train with fully_shard; return the expected values, and the parameters after training."""
    model = Little()
    layers = [layer for layer in model.layers if [*layer.parameters()]]
    dtypes = {"param_dtype": settings.param_dtype, "reduce_dtype": settings.reduce_dtype}
    native.fsdp(model, layers, None, settings.reshard_after_forward, **dtypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        with CommunicationWatch() as watch:
            for x, y in micro_batches(settings, seed, step):
                (model(x, y) / settings.accumulation).backward()
            if settings.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
            optimizer.step()
            optimizer.zero_grad()
    expected = {
        "sizes": [RANKS * settings.micro * settings.accumulation, settings.micro, settings.accumulation],
        "clips to": settings.max_norm or 0,
        "offloads": {part: "cpu" if settings.offload else "none" for part in ("param", "optimizer")},
        "computes in": str(settings.param_dtype),
        "P at rest": sum(p.to_local().numel() for p in model.parameters()),
        "trains the same": True,
        **sent(watch),
    }
    return expected, [p.full_tensor().detach() for p in model.parameters()]


def by_deepspeed(config: Any, settings: Settings, seed: int, trained: list[Tensor]) -> Any:
    """Train with DeepSpeed; return the same values, or a sentence if it does not take the configuration."""
    if not isinstance(config, dict):
        return config if config is None else [config]
    try:
        made = initialized(Little(), config)
    except (AssertionError, ValueError, RuntimeError) as error:
        return str(error).splitlines()[0]
    for step in range(STEPS):
        with CommunicationWatch() as watch:
            for x, y in micro_batches(settings, seed, step):
                made.backward(made(x, y))
                made.step()
    # A gradient midway between two numbers of bfloat16 may be rounded either way: 1.7e-5 was seen with seed 363204.
    dtypes = settings.param_dtype, settings.reduce_dtype
    close = partial(torch.allclose, atol={(F32, F32): 1e-5, (F32, BF16): 1e-4}.get(dtypes, 0.1))
    offloaded = {"param": made.zero_offload_param(), "optimizer": made.zero_offload_optimizer()}
    return {
        "sizes": [made.train_batch_size(), made.train_micro_batch_size_per_gpu(), made.gradient_accumulation_steps()],
        "clips to": made.gradient_clipping(),
        "offloads": {part: where.device if where else "none" for part, where in offloaded.items()},
        "computes in": str(next(made.module.parameters()).dtype),
        "P at rest": sum(p.numel() + getattr(p, "ds_tensor", p[:0]).numel() for p in made.module.parameters()),
        "trains the same": all(close(p.float(), q) for p, q in zip(engine.full(made).values(), trained, strict=True)),
        **sent(watch),
    }


def micro_batches(settings: Settings, seed: int, step: int) -> Iterator[Tensor]:
    """Yield pairs of this rank's tokens and targets, [micro] each."""
    generator = torch.Generator().manual_seed(RANKS * (STEPS * seed + step) + dist.get_rank())
    for _ in range(settings.accumulation):
        yield torch.randint(12, (2, settings.micro), generator=generator)


def sent(watch: CommunicationWatch) -> dict[str, int]:
    """Return the bytes of parameters, and those of gradients, that were sent: a collective's name tells which."""
    ops = "all_gather", "reduce_scatter"
    return {f"bytes of {op}": sum(row["sent"] for row in watch.tape if row["op"] == op) for op in ops}


# ---- what is seen ----------------------------------------------------------------------------------------


def offloaded(seen: WrongSheet, parts: int) -> str | None:
    """Return the sentence about offloading if this number of the two parts is on the CPU."""
    there = [*seen.received["offloads"].values()].count("cpu") if isinstance(seen.received, dict) else None
    return part_is("offloads")(seen) if there == parts else None


# fmt: off
TRANSLATED = (
    *REFUSED,
    Mistake("refused by DeepSpeed", "What does it want to be told instead?",
            answer_is(lambda found, expected: isinstance(found, str))),
    Mistake("other batch sizes", "Which size is a rank's, and which that of all of them?", part_is("sizes")),
    Mistake("clipped, though nobody clips", "What does DeepSpeed do where the file says nothing?",
            part_is("clips to", lambda found, expected: expected == 0)),
    Mistake("clipped to another norm", "Which key has clip_grad_norm_'s number?", part_is("clips to")),
    Mistake("computed in another dtype", "Which key is a dtype's, and what turns it on?", part_is("computes in")),
    Mistake("only a part is offloaded", "CPUOffloadPolicy moves parameters and what the optimizer has. Which two keys?",
            partial(offloaded, parts=1)),
    Mistake("on the wrong device", "Where are parameters and the optimizer's state between two steps?",
            part_is("offloads")),
    Mistake("whole parameters at rest", "Which stage shards parameters? From which size on, if nothing is said?",
            part_is("P at rest")),
    Mistake("left gathered from forward to backward", "Which distance is too far? What is fetched ahead of its use?",
            part_is("bytes of all_gather", lambda found, expected: found < expected)),
    Mistake("gathered twice, where it could stay", "What is the distance within which parameters stay gathered?",
            part_is("bytes of all_gather")),
    Mistake("gradients travel in another dtype", "Which key has the dtype of what is communicated?",
            part_is("bytes of reduce_scatter")),
    Mistake("another training", "What divides, scales or changes gradients here?", part_is("trains the same")),
)
# fmt: on
F32, BF16 = torch.float32, torch.bfloat16


@answered
def translate(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(reshard_after_forward, param_dtype, reduce_dtype, offload, max_norm, micro, accumulation) -> config`.

    Returns the text of the ✓ line.
    """
    require_deepspeed()
    draw = random.Random(seed)
    norm = draw.choice((0.2, 0.3, 0.4))
    cases = [
        Settings(True, F32, F32, False, None, 2, 1),
        Settings(False, F32, BF16, False, norm, 1, 3),
        Settings(True, BF16, F32, True, norm, 3, 2),
        Settings(False, BF16, BF16, False, None, 1, 1),
    ]
    draw.shuffle(cases)
    given = [Sheet(tuple(settings), None, told_of(settings), secret=True) for settings in cases]
    question = "What does fully_shard do here that the file does not say?"
    for filled in job(side_by_side, fn, given, seed, ranks=RANKS, record=None, seconds=STARTING):
        judge(*zip(*filled, strict=True), TRANSLATED, question)
    return f"DeepSpeed and fully_shard send the same bytes in {len(cases)} trainings, which end with the same numbers"


def told_of(settings: Settings) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings._asdict().items()).replace("torch.", "")
