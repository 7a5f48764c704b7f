"""Published runs as cases for the planner: which setup and layout a row of a table is, and what was measured.

    read(path)          Cases of a file, and how many rows are left out, by reason

A file is recognised by its columns.  What a row does not say (a micro-batch, a schedule, what is recomputed) is None in
`Case.free`, and the plan takes the quickest of those that fit.  Runs differ from this course's model where another is
meant: an MLP of two matrices of width 4 D has as many numbers as one of three of width 8/3 D.
"""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from labs import cost
from labs.model import PRESETS, Config
from labs.plan.candidates import Layout, Setup
from labs.plan.machines import CLUSTERS, Cluster

Row = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A run.  group: its model and number of GPUs.  tokens: measured, per second and GPU, None where it is no target.
    bytes: measured on the fullest rank, or on rank 0 where of_first.  free: fields of the layout that are not told."""

    setup: Setup
    layout: Layout
    group: tuple[str, int]
    tokens: float | None
    bytes: float | None = None
    of_first: bool = False
    free: tuple[str, ...] = ()


def read(path: str | Path) -> tuple[list[Case], Counter]:
    """Raises ValueError for a table of another form."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set()
    for needed, reader in READERS.items():
        if set(needed.split()) <= columns:
            read_row = reader
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
            cases.append(case)
        else:
            left_out[case] += 1
    return cases, left_out


# ---- nanotron --------------------------------------------------------------------------------------------

MOST_TWINS, LEAST_MFU = 0.8, 10  # of a target: see the table's README


def playbook(row: Row) -> Case | str:
    if row["status"] != "ok":
        return "crashed or out of memory: it cannot be told which"
    if row["batch_consistent"] != "1":
        return "dp × micro-batch × accumulation is not the batch that is given"
    config = Config(
        *(whole(row, name) for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn")),
        context=whole(row, "seq"),
        tied=row["tied"] == "1",
    )
    is_target = number(row, "mfu_pct_as_printed") >= LEAST_MFU and number(row, "share_of_best_twin") >= MOST_TWINS
    setup = setup_of(config, CLUSTERS["H100, EFA"].of(whole(row, "gpus")), whole(row, "gbs_seqs"), config.context)
    return Case(
        setup,
        nanotron_layout(row, "mbs"),
        (row["model"], whole(row, "gpus")),
        number(row, "tok_s_gpu") if is_target else None,
        number(row, "mem_reserved_rank0_gib") * 2**30 or None,
        of_first=True,
    )


def nanotron(row: Row) -> Case | str:
    """Of an earlier nanotron, whose pipelines were much slower."""
    if row["status"] != "completed":
        return "crashed or out of memory: it cannot be told which"
    config = Config(50_257, 2048, 24, 32, 32, 4096, context=4096, tied=True)
    cluster = replace(CLUSTERS["H100, EFA"], gpus=whole(row, "gpus"), fitted="nanotron 2024, EFA")
    setup = setup_of(config, cluster, whole(row, "global_batch_seqs"), 4096)
    layout = nanotron_layout(row, "mbz")
    if layout.dp * layout.batch * layout.accumulation != setup.batch:
        return "dp × micro-batch × accumulation is not the batch that is given"
    size = number(row, "peak_reserved_MiB") * cost.MiB or None
    return Case(setup, layout, (row["model"], setup.cluster.gpus), number(row, "tok_s_gpu"), size, of_first=True)


def nanotron_layout(row: Row, batch: str) -> Layout:
    dp, zero = whole(row, "dp"), whole(row, "zero")
    replicas, shards, zero = (1, dp, zero) if zero and dp > 1 else (dp, 1, 0)
    tp, pp = whole(row, "tp"), whole(row, "pp")
    return Layout(tp, tp > 1, pp, "1f1b", 1, replicas, shards, zero, whole(row, batch), whole(row, "grad_acc"))


# ---- Megatron-LM -----------------------------------------------------------------------------------------


def gpt(vocab: int, dim: int, depth: int, heads: int, context: int) -> Config:
    """GPT-3's shapes, whose MLP has two matrices."""
    return Config(vocab, dim, depth, heads, heads, dim * 8 // 3, context=context, tied=True)


def megatron(row: Row) -> Case | str:
    if not row["seq"] or not row["vocab"]:
        return "sequence and vocabulary are not told"
    config = gpt(*(whole(row, name) for name in ("vocab", "hidden", "layers", "heads")), whole(row, "seq"))
    kind = "A100" if row["gpu"].startswith("A100") else "H100"
    cluster = replace(CLUSTERS[MEGATRON[kind]], gpus=whole(row, "gpus"), fitted=f"Megatron-LM, {kind}")
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context)
    tp, dp, recomputes = whole(row, "tp"), whole(row, "dp"), row["recompute"] == "full"
    layout = Layout(
        tp, kind == "H100" and tp > 1, whole(row, "pp"), replicas=dp, recompute="full" if recomputes else "none"
    )
    free = ("schedule", "batch", *(("zero", "recompute") if kind == "H100" else ()))
    if row["mbs"]:
        each = config.depth // layout.pp
        chunks = each // whole(row, "layers_per_virtual_stage") if row["layers_per_virtual_stage"] else 1
        batch = whole(row, "mbs")
        pipeline = {"schedule": "interleaved", "stages_per_rank": chunks} if chunks > 1 else {}
        layout, free = layout._replace(batch=batch, accumulation=setup.batch // dp // batch, **pipeline), ()
    operations = megatron_operations(config, full=recomputes)
    return Case(
        setup,
        layout,
        (f"{row['params_b']}B, {row['table']}", cluster.gpus),
        number(row, "tflops_gpu") * 1e12 / operations,
        free=free,
    )


MEGATRON = {"A100": "A100, 80 GB", "H100": "H100, InfiniBand"}


def megatron_operations(config: Config, full: bool) -> float:
    """For each token, as Narayanan et al. 2021, arXiv 2104.04473, count: 72 l h² (1 + s/6h + V/12lh), 96 with V/16lh
    where layers are computed twice."""
    d, depth = config.dim, config.depth
    times, head = (96, 16) if full else (72, 12)
    return times * depth * d**2 * (1 + config.context / 6 / d + config.vocab / head / depth / d)


def korthikanti(row: Row) -> Case | str:
    config = gpt(*(whole(row, name) for name in ("vocab", "hidden", "layers", "heads")), whole(row, "seq"))
    cluster = replace(CLUSTERS["A100, 80 GB"], gpus=whole(row, "gpus"), fitted="Megatron-LM 2022, A100")
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context)
    dp, batch, chunks = whole(row, "dp"), whole(row, "mbs"), whole(row, "interleave_m")
    layout = Layout(
        whole(row, "tp"),
        True,
        whole(row, "pp"),
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        dp,
        batch=batch,
        accumulation=setup.batch // dp // batch,
    )
    tokens = setup.batch * setup.context / number(row, "iter_s_sp_plus_selective") / cluster.gpus
    return Case(setup, layout, (f"{row['params_b']}B", cluster.gpus), tokens)


# ---- others ----------------------------------------------------------------------------------------------

LLAMA = {
    "8B": PRESETS["llama3-8b"],
    "70B": PRESETS["llama3-70b"],
    "405B": PRESETS["llama3-405b"],
    "Llama2-13B": Config(32_000, 5120, 40, 40, 40, 13_824, context=4096),
    "Llama2-70B": Config(32_000, 8192, 80, 64, 8, 28_672, context=4096),
}
EIGHT_BITS = "computes in 8 bits: the plan's are 16"
CONTEXT = "splits the sequence (context parallelism): the plan does not"


def llama3(row: Row) -> Case | str:
    if row["cp"] != "1":
        return CONTEXT
    config, gpus, dp = PRESETS["llama3-405b"], whole(row, "gpus"), whole(row, "dp")
    cluster = replace(CLUSTERS["H100, InfiniBand"], gpus=gpus, fitted="Llama 3")
    setup = setup_of(config, cluster, dp * whole(row, "batch_per_dp"), whole(row, "seq"))
    layout = Layout(whole(row, "tp"), True, whole(row, "pp"), "interleaved", shards=dp, zero=2)
    tokens = number(row, "tflops_gpu") * 1e12 / cost.model_operations(config, setup.context)
    return Case(setup, layout, ("405B", gpus), tokens, free=("schedule", "batch", "recompute", "zero"))


RECOMPUTES = {"none": "none", "full": "full", "selective": "selective", "selective per-op": "selective"}
TITAN_FITS = {"H100": "torchtitan, H100", "H200": "torchtitan, H100", "A100": "torchtitan, A100"}
TITANS = {"H100": "H100, 96 GB, 500 W", "A100": "A100, 80 GB", "H200": "H200"}


def torchtitan(row: Row) -> Case | str:
    if row["status"] != "ok":
        return "out of memory"
    if row["cp"] != "1":
        return CONTEXT
    if "float8" in row["techniques"]:
        return EIGHT_BITS
    if row["ac"] not in RECOMPUTES:
        return f"recomputes {row['ac']!r}: it is not told what of a layer"
    name = row["model"].removeprefix("Llama3.1-")
    cluster = CLUSTERS[TITANS[row["gpu"].split("-")[0].split()[0]]]
    config = replace(LLAMA[name], context=max(LLAMA[name].context, whole(row, "seq")))
    setup = setup_of(
        config,
        replace(cluster, gpus=whole(row, "gpus"), fitted=TITAN_FITS[cluster.name[:4]]),
        whole(row, "gbs_seqs"),
        whole(row, "seq"),
    )
    shards, tp, pp, batch = (whole(row, key) for key in ("fsdp", "tp", "pp", "lbs"))
    layout = Layout(
        tp, tp > 1, pp, shards=shards, zero=3 if shards > 1 else 0, batch=batch, recompute=RECOMPUTES[row["ac"]]
    )
    free = ("batch", "schedule") if pp > 1 else ()
    size = number(row, "mem_gib") * 2**30 or None
    return Case(setup, layout, (name, setup.cluster.gpus), number(row, "tok_s_gpu"), size, free=free)


MPT = {  # MosaicML's llm-foundry: dim, depth, heads
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
MOSAICS = {"h100_80gb": "H100, InfiniBand", "a100_80gb": "A100, 80 GB", "a100_40gb": "A100, 40 GB"}


def mosaic(row: Row) -> Case | str:
    if "fp8" in row["precision"]:
        return EIGHT_BITS
    dim, depth, heads = MPT[row["model"]]
    config = gpt(50_368, dim, depth, heads, whole(row, "seq"))
    gpus = whole(row, "gpus")
    cluster = replace(CLUSTERS[MOSAICS[row["gpu"]]], gpus=gpus, fitted=f"MosaicML, {row['gpu'][:4].upper()}")
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context)
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["sharding"]]
    layout = Layout(
        shards=gpus,
        zero=zero if gpus > 1 else 0,
        batch=whole(row, "mbs"),
        accumulation=whole(row, "grad_acc"),
        recompute="full" if row["act_ckpt"] == "True" else "none",
    )
    return Case(setup, layout, (f"{row['model']}, {row['gpu']}, {row['seq']}", gpus), number(row, "tok_s_gpu"))


def nvidia(row: Row) -> Case | str:
    precision = row["precision"] or "a precision that is not told"
    if precision != "BF16":
        return EIGHT_BITS if precision.startswith(("FP8", "MXFP8", "NVFP4")) else f"computes in {precision}"
    if row["cp"] not in ("", "1"):
        return CONTEXT
    model = row["model"]
    if model not in NVIDIA:
        return "a mixture of experts, or a hybrid"
    config, kind = NVIDIA[model], row["gpu"]
    if kind not in NVIDIAS:
        return f"on {kind}, which has no numbers here"
    cluster = replace(CLUSTERS[NVIDIAS[kind]], gpus=whole(row, "gpus"), fitted="NVIDIA")
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), whole(row, "seq"))
    chunks, dp = int(row["vp"] or 1), whole(row, "dp")
    layout = Layout(
        whole(row, "tp"),
        True,
        whole(row, "pp"),
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        1,
        dp,
        1 if dp > 1 else 0,
        whole(row, "mbs"),
        whole(row, "grad_acc"),
    )
    tokens = number(row, "tok_s_total") / cluster.gpus
    return Case(setup, layout, (model, cluster.gpus), tokens)


NVIDIA = {
    "Llama3.1-405B": PRESETS["llama3-405b"],
    "Nemotron4-340B": Config(256_000, 18_432, 96, 96, 8, 18_432 * 8 // 3, context=4096),
    "Nemotron4-15B": Config(256_000, 6144, 32, 48, 8, 6144 * 8 // 3, context=4096),
}
NVIDIAS = {"H100": "H100, InfiniBand", "GB200": "GB200"}


def experts(row: Row) -> str:
    if row["precision"] != "BF16":
        return EIGHT_BITS if row["precision"] else "computes in a precision that is not told"
    return "a mixture of experts, or a hybrid"


READERS: dict[str, Callable[[Row], Case | str]] = {
    "mem_reserved_rank0_gib share_of_best_twin batch_consistent": playbook,
    "mbz peak_reserved_MiB tok_s_gpu": nanotron,
    "tflops_gpu tflops_counts layers_per_virtual_stage": megatron,
    "iter_s_sp_plus_selective interleave_m": korthikanti,
    "batch_per_dp tokens_per_batch cp": llama3,
    "lbs techniques ac mem_gib": torchtitan,
    "mp_mode act_ckpt sharding": mosaic,
    "step_s tok_s_total vp": nvidia,
    "release system ep": experts,
}


@lru_cache(1 << 12)
def setup_of(config: Config, cluster: Cluster, batch: int, context: int) -> Setup:
    """One for all rows that ask the same."""
    return Setup(config, cluster, batch, context)


def whole(row: Row, name: str) -> int:
    return int(float(row[name]))


def number(row: Row, name: str) -> float:
    """0 where nothing is told."""
    return float(row[name] or 0)
