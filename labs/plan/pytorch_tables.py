"""Readers of tables of nanotron, torchtitan and MosaicML: each row becomes a case, or the reason to leave it out."""

from dataclasses import replace

from labs import cost
from labs.model import PRESETS, Config
from labs.plan.fitted import NANOTRON
from labs.plan.layout import Layout
from labs.plan.machines import CLUSTERS
from labs.plan.published_run import CONTEXT, EIGHT_BITS, NO_MEMORY, Case, Row, gpt, number, setup_of, whole

# ---- nanotron --------------------------------------------------------------------------------------------

MOST_TWINS, LEAST_MFU = 0.8, 10  # requirements of a target: see the table's README


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
    cluster = CLUSTERS["H100, EFA"].of(whole(row, "gpus"))
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context, row.get("software", ""), **NANOTRON)
    return Case(
        setup,
        nanotron_layout(row, "mbs"),
        (row["model"], whole(row, "gpus")),
        number(row, "tok_s_gpu") if is_target else None,
        number(row, "mem_reserved_rank0_gib") * 2**30 or None,
        of_first=True,
    )


def nanotron(row: Row) -> Case | str:
    """Read a row of an earlier nanotron, whose pipelines of 8 and 16 stages over nodes are all below LEAST_MFU."""
    if row["status"] != "completed":
        return "crashed or out of memory: it cannot be told which"
    config = Config(50_257, 2048, 24, 32, 32, 4096, context=4096, tied=True)
    cluster = replace(CLUSTERS["H100, EFA"], gpus=whole(row, "gpus"))
    setup = setup_of(config, cluster, whole(row, "global_batch_seqs"), 4096, row.get("software", ""), **NANOTRON)
    layout = nanotron_layout(row, "mbz")
    if layout.dp * layout.batch * layout.accumulation != setup.batch:
        return "dp × micro-batch × accumulation is not the batch that is given"
    size = number(row, "peak_reserved_MiB") * cost.MiB or None
    is_target = number(row, "model_tflops_gpu") * 1e12 >= LEAST_MFU / 100 * cluster.flops
    tokens = number(row, "tok_s_gpu") if is_target else None
    return Case(setup, layout, (row["model"], setup.cluster.gpus), tokens, size, of_first=True)


def nanotron_layout(row: Row, batch: str) -> Layout:
    dp, zero = whole(row, "dp"), whole(row, "zero")
    replicas, shards, zero = (1, dp, zero) if zero and dp > 1 else (dp, 1, 0)
    tp, pp = whole(row, "tp"), whole(row, "pp")
    return Layout(tp, tp > 1, pp, "1f1b", 1, replicas, shards, zero, whole(row, batch), whole(row, "grad_acc"))


# ---- torchtitan ------------------------------------------------------------------------------------------

LLAMA = {
    "8B": PRESETS["llama3-8b"],
    "70B": PRESETS["llama3-70b"],
    "405B": PRESETS["llama3-405b"],
    "Llama2-13B": Config(32_000, 5120, 40, 40, 40, 13_824, context=4096),
    "Llama2-70B": Config(32_000, 8192, 80, 64, 8, 28_672, context=4096),
}
RECOMPUTES = {"none": "none", "full": "full", "selective": "selective", "selective per-op": "selective"}
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
        cluster.of(whole(row, "gpus")),
        whole(row, "gbs_seqs"),
        whole(row, "seq"),
        row.get("software", ""),
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
    cluster = replace(CLUSTERS[MOSAICS[row["gpu"]]], gpus=gpus)
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context, row.get("software", ""), **NO_MEMORY)
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["sharding"]]
    layout = Layout(
        shards=gpus,
        zero=zero if gpus > 1 else 0,
        batch=whole(row, "mbs"),
        accumulation=whole(row, "grad_acc"),
        recompute="full" if row["act_ckpt"] == "True" else "none",
    )
    return Case(setup, layout, (f"{row['model']}, {row['gpu']}, {row['seq']}", gpus), number(row, "tok_s_gpu"))
