"""configure: a configuration of DeepSpeed from a description, judged by its meaning (labs.deepspeed.configuration)."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from labs.deepspeed.configuration import batch_sizes, require_known
from labs.exercises.deepspeed._files import REFUSED, STARTING, initialized, require_deepspeed, section
from labs.exercises.engine.answer import Mistake, Wrong, answered
from labs.exercises.engine.learner_job import job
from labs.exercises.engine.on_paper import Sheet, on_paper, part_is, same

CLIPS = 1.0  # the norm to which DeepSpeed clips if the file says nothing


NUMBERS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}


RUN = 24, 5, 2, 0.5  # batch, most, ranks and clip of the configuration that DeepSpeed runs


def meaning(fn: Callable[..., Any], batch: int, most: int, ranks: int, clip: float | None) -> Any:
    """Return what the configuration means, or a sentence about what is wrong with it."""
    config = fn(batch, most, ranks, clip)
    if not isinstance(config, dict):
        return config if config is None else [config]  # a bare str would be taken for a sentence of ours
    try:
        require_known(config)
        sequences, micro, accumulation = batch_sizes(config, ranks)
    except ValueError as error:
        return str(error)
    return {
        "sequences": sequences,
        "micro": micro,
        "accumulation": accumulation,
        "clip": config.get("gradient_clipping", CLIPS),
        "numbers": next((short for key, short in NUMBERS.items() if section(config, key).get("enabled")), "fp32"),
        "stage": section(config, "zero_optimization").get("stage", 0),
    }


def described(batch: int, most: int, ranks: int, clip: float | None) -> dict[str, Any]:
    """Return the meaning that the configuration should have."""
    each = batch // ranks
    micro = max(size for size in range(1, most + 1) if each % size == 0)
    sizes = {"sequences": batch, "micro": micro, "accumulation": each // micro}
    return sizes | {"clip": clip or 0.0, "numbers": "bf16", "stage": 2}


def by_deepspeed(fn: Callable[..., Any]) -> dict[str, Any]:
    """Take a step with DeepSpeed on a rank; return what it has read in the configuration."""
    made = initialized(nn.Linear(4, 4), fn(*RUN))
    accumulation = made.gradient_accumulation_steps()
    for _ in range(accumulation):
        made.backward(made(torch.ones(made.train_micro_batch_size_per_gpu(), 4, dtype=made.module.weight.dtype)).sum())
        made.step()
    return {
        "sequences": made.train_batch_size(),
        "micro": made.train_micro_batch_size_per_gpu(),
        "accumulation": accumulation,
        "clip": made.gradient_clipping(),
        "numbers": "bf16" if made.module.weight.dtype == torch.bfloat16 else "another",
        "stage": made.zero_optimization_stage(),
    }


# fmt: off
SAID = (
    *REFUSED,
    Mistake("clipped, though nobody said so", "What does DeepSpeed do where the file says nothing?",
            part_is("clip", lambda found, expected: expected == 0),
            symptom="a loss that differs from last month's, and only DeepSpeed is another one"),
    Mistake("clipped to another norm", "What does the description say?", part_is("clip")),
    Mistake("a rank takes the whole batch", "How many ranks share the sequences of a step?",
            part_is("sequences", lambda found, expected: found > expected),
            symptom="a batch that grows with the number of GPUs, and a learning rate that no longer fits it"),
    Mistake("a step of fewer sequences", "Which key has the sequences of all ranks in a step?", part_is("sequences")),
    Mistake("more than a rank can take", "How many sequences fit?", part_is("micro", lambda found,
    expected: found > expected)),
    Mistake("smaller micro-batches than need be", "Which sizes divide a rank's share? Which of them fit?",
            part_is("micro")),
    Mistake("not in bfloat16", "Under which key are the numbers, and what turns them on?", part_is("numbers")),
    Mistake("another stage", "Where does the stage stand?", part_is("stage")),
)
# fmt: on


@answered
def configure(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(batch, most, ranks, clip) -> configuration`, by its meaning and by DeepSpeed's engine made of it.

    batch: the sequences of all ranks in a step
    most: the most sequences that a rank can take at a time
    clip: the norm to which gradients are clipped, or None

    Returns the ✓ line.
    """
    require_deepspeed()
    draw, sheets = random.Random(seed), []
    for share, most, clip in ((12, 5, None), (8, 16, 0.5), (9, 4, None), (15, 7, 1.0), (7, 3, 2.0), (16, 16, None)):
        ranks = draw.choice((2, 3, 4, 8))
        arguments = share * ranks, most, ranks, clip
        words = f"{share * ranks} sequences, at most {most} at a time, {ranks} ranks, clip={clip}"
        sheets.append(Sheet(arguments, described(*arguments), words))
    draw.shuffle(sheets)
    question = "What does each key say, and what is said by leaving it out?"
    right = on_paper(partial(meaning, fn), sheets, SAID, question)
    if not same(found := job(by_deepspeed, fn, ranks=RUN[2], seconds=STARTING)[0], described(*RUN)):
        raise Wrong(f"DeepSpeed reads {found}, and not {described(*RUN)}", question)
    return f"{right}, and DeepSpeed takes a step by one of them"
