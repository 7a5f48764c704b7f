"""The settings of `fully_shard` in DeepSpeed's words, and the other way round, as tables for two explorers.

in_its_words(reshard_after_forward=True, …)     the configuration that labs.deepspeed.from_fsdp makes
in_fsdps_words(stage=3, …)                      the settings that labs.deepspeed.to_fsdp finds, or why there are none
"""

import json
from typing import Any

import torch

from labs.deepspeed.configuration import FAR, from_fsdp, to_fsdp
from labs.kit.drawing.tables import Table, table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FSDPS = {
    "param_dtype": DTYPES,
    "reduce_dtype": DTYPES,
    "reshard_after_forward": [True, False],
    "offload": [False, True],
}
ITS = {"stage": [3, 2, 1], "reuse": [0, FAR, 10 * FAR], "device": ["none", "cpu", "nvme"], "bf16": [False, True]}
PARAMETERS = 7_000_000_000  # of the model whose file is translated back


def in_its_words(**settings: Any) -> Table:
    config = from_fsdp(**settings)
    lines = {**config.pop("zero_optimization"), **config}
    rows = [{"DeepSpeed": key, "": json.dumps(value)} for key, value in lines.items()]
    return table(rows, caption=f"fully_shard: {settings}")


def in_fsdps_words(stage: int, reuse: int, device: str, bf16: bool) -> Table:
    there = {"device": device}
    zero = {"stage": stage, "offload_param": there, "offload_optimizer": there}
    zero["stage3_max_reuse_distance"] = reuse
    config = {"zero_optimization": zero, "bf16": {"enabled": bf16}}
    try:
        found = {name: str(value) for name, value in to_fsdp(config, parameters=PARAMETERS).items()}
    except ValueError as told:
        found = {"no counterpart": str(told)}
    return table([found], caption=f"DeepSpeed: {config}")
