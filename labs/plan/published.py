"""Published runs as questions to the plan: the setup and the layout of each, and its measurements.

    read("torchtitan")        the cases of a table, and the number of rows that are left out, by reason

`published.csv` has all tables, a run per row; `published.md` explains its columns and names the sources.  A field of a
layout is free if its cell is empty, since the source does not tell it: the plan takes the fastest layout that fits.
"""

import csv
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from labs import cost
from labs.model import Config
from labs.plan.constants import FITTED, NANOTRON
from labs.plan.layout import Layout, Setup
from labs.plan.machines import CLUSTERS, Cluster
from labs.plan.sparse import SPARSE, Shape

RUNS = Path(__file__).with_suffix(".csv")
Row = dict[str, str]


@dataclass(frozen=True)
class PublishedRun:
    """A published run.

    group: its model and number of GPUs.
    tokens: the measured tokens per second and GPU; None if they were not measured.
    is_target: whether the plan's time is held to them.
    bytes: the measured bytes on the fullest rank, or on rank 0 if `of_first`; None if they were not measured.
    free: the fields of the layout that the table does not tell.
    source: the publisher of the table.
    """

    setup: Setup
    layout: Layout
    group: tuple[str, int]
    tokens: float | None
    is_target: bool
    bytes: float | None
    of_first: bool
    free: tuple[str, ...]
    source: str


def read(table: str = "", path: str | Path = RUNS) -> tuple[list[PublishedRun], Counter]:
    """Return the cases of a table, or of all of them, and the number of rows that are left out, by reason.

    Raises ValueError for a file of another form, or without this table.
    """
    rows = rows_of(path)
    if table and table not in (known := {row["table"]: None for row in rows}):
        raise ValueError(f"{path}: it has no table {table!r}, but {', '.join(known)}")
    cases, left_out = [], Counter()
    for row in rows:
        if table in ("", row["table"]):
            if reason := unusable(row):
                left_out[reason] += 1
            else:
                cases.append(case_of(row))
    return cases, left_out


def rows_of(path: str | Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(
                f"{path}: no table of runs that the plan knows, since it has no column {', '.join(missing)}: "
                "labs/plan/published.md explains them"
            )
        return list(reader)


SHAPE = ("vocab", "dim", "depth", "heads", "kv_heads", "hidden")
OTHERS = {"batch": "micro_batch", "cp": "context_ranks", "ep": "expert_ranks"}
FIELDS = dict(zip(Layout._fields, Layout._fields, strict=True)) | OTHERS  # columns of a layout
COLUMNS = (
    *("table", "source", "software", "precision", "model", *SHAPE, "tied", "cluster", "gpus", "context", "batch"),
    *FIELDS.values(),
    *("status", "tokens_per_gpu", "is_target", "gib", "gib_of"),
)
SIXTEEN_BITS = ("bf16", "fp16", "16 bits")
EIGHT_BITS = ("fp8", "fp8-cs", "fp8-mx", "mxfp8")  # one scale for a tensor, or for each 32 numbers


def unusable(row: Row) -> str:
    """Return why a row is no question to the plan; an empty string if it is one."""
    if row["status"] != "ok":
        return row["status"]
    if row["expert_ranks"] != "1" and row["model"] not in SPARSE:
        return "spreads experts over ranks, of a model whose shape is not known here"
    if row["precision"] not in (*SIXTEEN_BITS, *(EIGHT_BITS if row["software"] == "bridge" else ())):
        eight = "computes in 8 bits: this software's constants are those of 16"
        return eight if "8" in row["precision"] else "its precision is not 16 or 8 bits"
    if untold := [name for name in (*SHAPE, "context", "batch") if not row[name]]:
        return f"{', '.join(untold)}: not told"
    if row["cluster"] not in CLUSTERS:
        return f"on {row['cluster']}, which has no numbers here"
    if row["recompute"] not in ("", *cost.RECOMPUTE):
        return f"recomputes {row['recompute']!r}: it is not told what of a layer"
    each = [int(row[name] or 0) for name in ("replicas", "shards", "micro_batch", "accumulation")]
    if all(each) and each[0] * each[1] * each[2] * each[3] != int(row["batch"]):
        return "dp × micro-batch × accumulation is not the batch that is given"
    return ""


def case_of(row: Row) -> PublishedRun:
    shape, gpus, context = (int(row[name]) for name in SHAPE), int(row["gpus"]), int(row["context"])
    config = SPARSE.get(row["model"]) or Config(*shape, context=context, tied=row["tied"] == "1")
    cluster = replace(CLUSTERS[row["cluster"]], gpus=gpus)
    told = {field: row[column] for field, column in FIELDS.items() if row[column]}
    return PublishedRun(
        setup_of(
            config,
            cluster,
            *(int(row["batch"]), context, row["software"], row["source"], 8 if row["precision"] in EIGHT_BITS else 16),
        ),
        Layout(**{field: type(Layout._field_defaults[field])(as_number(cell)) for field, cell in told.items()}),
        (row["model"], gpus),
        float(row["tokens_per_gpu"]) if row["tokens_per_gpu"] else None,
        row["is_target"] == "1",
        float(row["gib"]) * 2**30 if row["gib"] else None,
        row["gib_of"] == "rank 0",
        tuple(field for field in FIELDS if field not in told),
        row["source"],
    )


def as_number(cell: str) -> int | str:
    return int(cell) if cell.isdecimal() else cell


@lru_cache(1 << 12)
def setup_of(config: Shape, cluster: Cluster, batch: int, context: int, software: str, source: str, bits: int) -> Setup:
    """Return a setup, the same object for equal arguments; without measured memory, no run counts as crowded."""
    constants = replace(FITTED[software], **KNOWN.get(source, NO_MEMORY))
    return Setup(config, cluster, batch, context, constants=constants, software=software, bits=bits)


NO_MEMORY = {"thrash": 1.0}
KNOWN = {"nanotron": NANOTRON, "torchtitan": {}}  # constants of sources that measured the memory
