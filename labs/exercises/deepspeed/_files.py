"""Sections of a DeepSpeed file, an engine made from it, and mistakes, which configure and translate have in common."""

from functools import partial
from typing import Any

import torch
from torch import nn

from labs.deepspeed import engine
from labs.deepspeed.configuration import BUCKET
from labs.exercises.engine.answer import Mistake, Wrong
from labs.exercises.engine.on_paper import answer_is

STARTING = 30.0  # s of processor time for a job that starts DeepSpeed


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    return config[key] if isinstance(config.get(key), dict) else {}


def initialized(model: nn.Module, config: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine for a model, with small buckets if the configuration names no size."""
    zero = {"reduce_bucket_size": BUCKET} | section(config, "zero_optimization")
    return engine.initialize(model, config | {"zero_optimization": zero}, partial(torch.optim.SGD, lr=0.5))


def require_deepspeed() -> None:
    if told := engine.missing():
        raise Wrong(told, "Has it been added to the course's own Python?")


# fmt: off
REFUSED = (
    Mistake("a key that DeepSpeed does not know",
            "It takes no notice of such a key. How is it spelt, and on which level does it stand?",
            answer_is(lambda found, expected: isinstance(found, str) and "is no key" in found)),
    Mistake("batch sizes that do not agree", "train = micro × accumulation × ranks. Which of them can be left out?",
            answer_is(lambda found, expected: isinstance(found, str) and "train" in found)),
)
# fmt: on
