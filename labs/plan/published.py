"""Published runs as cases for the planner: which setup and layout a row of a table is, and what was measured.

    read(path)          Cases of a file, and how many rows are left out, by reason

A file is recognised by its columns; `software` says whose constants a row is asked with ("pytorch" where there is no
such column).  What a row does not say (a micro-batch, a schedule, what is recomputed) is free, and the plan takes the
quickest that fits.  Where a model differs from the course's, the nearest stands for it: an MLP of two matrices of width
4 D has as many numbers as one of three of width 8/3 D.
"""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from labs.plan.megatron_tables import experts, korthikanti, llama3, megatron, nvidia
from labs.plan.published_run import Case, Row
from labs.plan.pytorch_tables import mosaic, nanotron, playbook, torchtitan

READERS: dict[str, tuple[str, Callable[[Row], Case | str]]] = {
    "mem_reserved_rank0_gib share_of_best_twin batch_consistent": ("nanotron", playbook),
    "mbz peak_reserved_MiB tok_s_gpu": ("nanotron", nanotron),
    "tflops_gpu tflops_counts layers_per_virtual_stage": ("Megatron-LM", megatron),
    "iter_s_sp_plus_selective interleave_m": ("Megatron-LM", korthikanti),
    "batch_per_dp tokens_per_batch cp": ("Llama 3", llama3),
    "lbs techniques ac mem_gib": ("torchtitan", torchtitan),
    "mp_mode act_ckpt sharding": ("MosaicML", mosaic),
    "step_s tok_s_total vp": ("NVIDIA", nvidia),
    "release system ep": ("NVIDIA", experts),
}


def read(path: str | Path) -> tuple[list[Case], Counter]:
    """Raises ValueError for a table of another form."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set()
    for needed, source_and_reader in READERS.items():
        if set(needed.split()) <= columns:
            source, read_row = source_and_reader
            break
    else:
        known = "; ".join(READERS)
        raise ValueError(f"{path}: no table of runs that the plan knows: it has one of these sets of columns: {known}")
    cases, left_out = [], Counter()
    for row in rows:
        try:
            case = read_row(row)
        except (KeyError, ValueError) as error:  # a model or a GPU that nothing here knows, a number that is none
            case = f"is not understood: {error}"
        if isinstance(case, Case):
            cases.append(replace(case, source=source))
        else:
            left_out[case] += 1
    return cases, left_out
