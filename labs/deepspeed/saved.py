"""Checkpoints of DeepSpeed: for the number of ranks that saved them, or, once converted, for any number.

    engine.save_checkpoint(folder)      run on all ranks; each writes a file
    load(engine, folder)                run on the same number of ranks, under the same stage
    to_universal(folder)                run in one process; adds a folder for each parameter
    load(engine, folder)                run on any number of ranks, if the engine was made with config | UNIVERSAL

    folder/latest                       names the step that was saved last
          /global_step2/                in stages 1 and 2, the full model; each rank's part of the optimizer's vector
          /latest_universal
          /global_step2_universal/zero/embed.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt, each with a full tensor

A universal checkpoint of stage 1 or 2 cannot be loaded under stage 3, nor the other way round.  All files of
DeepSpeed's checkpoints are pickles, so a file from somebody else can run any code.
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
    """Convert the last checkpoint of a folder into a universal one; return its path.

    Raises ModuleNotFoundError if DeepSpeed is missing or too old, FileNotFoundError if there is no checkpoint.
    """
    if reason := missing():
        raise ModuleNotFoundError(reason)
    step = latest(Path(folder), LATEST)
    universal = step.with_name(f"{step.name}_universal")
    choose_accelerator()
    with uncompiled(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # hides a line for each file
        converter = import_module("deepspeed.checkpoint.ds_to_universal")
        alone = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
        settings = {
            "strict": True,
            "inject_missing_state": True,
        }  # adds the states that only Megatron's checkpoints have
        converter.main(Namespace(input_folder=str(step), output_folder=str(universal), **alone, **settings))
    Path(folder, LATEST_UNIVERSAL).write_text(universal.name)
    return universal


def load(engine: Any, folder: str | Path) -> None:
    """Load the last checkpoint of a folder into an engine, on all ranks.

    Raises FileNotFoundError if there is no checkpoint, or no universal one for an engine that needs it; ValueError for
    another number of ranks, and for a checkpoint of stage 3 under another stage, or the other way round.
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
            f"{step} was saved under {of}, and here is stage {stage}: load it under the stage that saved it"
        )
    engine.load_checkpoint(str(folder))


def latest(folder: Path, pointer: str) -> Path:
    if not (folder / pointer).exists():
        do = "save_checkpoint" if pointer == LATEST else "to_universal"
        raise FileNotFoundError(f"{folder} has no file {pointer!r}: call {do} first, which writes this file last")
    return folder / (folder / pointer).read_text().strip()
