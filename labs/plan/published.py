"""Published runs as cases for the planner: the setup and the layout of each row of a table, and its measurements.

    read(path)          returns the cases of a file, and the number of rows that are left out, by reason

A file is recognised by its columns.  The column `software` selects the constants of a row; without it they are those of
"pytorch".  Fields that a row does not tell, such as a micro-batch, a schedule or recomputation, are free, and the plan
takes the fastest layout that fits.  A model that differs from the course's is replaced by the nearest: an MLP of two
matrices of width 4 D has as many parameters as one of three matrices of width 8/3 D.
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
    """Return the cases of a table, and the rows left out, by reason; raise ValueError for a table of another form."""
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
        except (KeyError, ValueError) as error:  # an unknown model or GPU, or a number that is none
            case = f"is not understood: {error}"
        if isinstance(case, Case):
            cases.append(replace(case, source=source))
        else:
            left_out[case] += 1
    return cases, left_out
