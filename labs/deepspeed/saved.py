"""Checkpoints of DeepSpeed: for as many ranks as have saved them, or, once converted, for any number.

    engine.save_checkpoint(folder)      on all ranks; a file of each
    load(engine, folder)                on as many ranks, under the same stage
    to_universal(folder)                in one process: beside the others, for each parameter a folder
    load(engine, folder)                on any number of ranks, if the engine was made with config | UNIVERSAL

    folder/latest                       names the step that was saved last
          /global_step2/                under stage 1 and 2 the model, whole; each rank's part of the optimizer's vector
          /latest_universal
          /global_step2_universal/zero/embed.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, each of them whole

A universal checkpoint of the stages 1 and 2 is none of stage 3, nor the other way round.  All of these are pickles:
what somebody else has written can run whatever they like.
"""

import io
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labs.deepspeed.engine import choose_accelerator, missing, uncompiled

UNIVERSAL = {"checkpoint": {"load_universal": True}}
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
OPTIMIZER, MODEL_IN_SHARDS = "*zero_pp_rank_*_optim_states.pt", "zero_pp_rank_0_*_model_states.pt"


def to_universal(folder: str | Path) -> Path:
    """Convert what was saved last; where it is now.

    Raises ModuleNotFoundError where DeepSpeed is missing or too old, FileNotFoundError where nothing was saved.
    """
    if reason := missing():
        raise ModuleNotFoundError(reason)
    step = latest(Path(folder), LATEST)
    universal = step.with_name(f"{step.name}_universal")
    choose_accelerator()
    with uncompiled(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it tells of each file
        converter = import_module("deepspeed.checkpoint.ds_to_universal")
        alone = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        settings = {"strict": True, "inject_missing_state": True}  # what Megatron's checkpoints have besides
        converter.main(Namespace(input_folder=str(step), output_folder=str(universal), **alone, **settings))
    Path(folder, LATEST_UNIVERSAL).write_text(universal.name)
    return universal


def load(engine: Any, folder: str | Path) -> None:
    """Put what was saved last into an engine, on all ranks.

    Raises FileNotFoundError where nothing was saved, or nothing was converted for an engine that asks for it;
    ValueError for another number of ranks, and for a checkpoint of the other kind of stage.
    """
    universal, stage = engine.load_universal_checkpoint(), engine.zero_optimization_stage()
    step = latest(Path(folder), LATEST_UNIVERSAL if universal else LATEST)
    saved_by, ranks = len(list(step.glob(OPTIMIZER))), dist.get_world_size()
    if not universal and saved_by != ranks:
        raise ValueError(
            f"{step} was saved by {saved_by} ranks, and here are {ranks}: convert it with to_universal, and make the "
            "engine with config | UNIVERSAL"
        )
    in_shards = any(step.glob(MODEL_IN_SHARDS))
    if in_shards != (stage == 3):
        of = "stage 3" if in_shards else "stage 1 or 2"
        raise ValueError(
            f"{step} was saved under {of}, and here is stage {stage}: load it under the stage that it is of"
        )
    engine.load_checkpoint(str(folder))


def latest(folder: Path, pointer: str) -> Path:
    if not (folder / pointer).exists():
        do = "save_checkpoint" if pointer == LATEST else "to_universal"
        raise FileNotFoundError(f"{folder} has no file {pointer!r}: {do} writes it when all else is there")
    return folder / (folder / pointer).read_text().strip()
