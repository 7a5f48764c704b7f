"""Readers of tables of Megatron-LM, Llama 3 and NVIDIA: each row becomes a case, or the reason to leave it out."""

from dataclasses import replace

from labs import cost
from labs.model import PRESETS, Config
from labs.plan.layout import Layout
from labs.plan.machines import CLUSTERS
from labs.plan.published_run import CONTEXT, EIGHT_BITS, NO_MEMORY, Case, Row, gpt, number, setup_of, whole


def megatron(row: Row) -> Case | str:
    if not row["seq"] or not row["vocab"]:
        return "sequence and vocabulary are not told"
    config = gpt(*(whole(row, name) for name in ("vocab", "hidden", "layers", "heads")), whole(row, "seq"))
    kind = "A100" if row["gpu"].startswith("A100") else "H100"
    cluster = replace(CLUSTERS[MEGATRON[kind]], gpus=whole(row, "gpus"))
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context, row.get("software", ""), **NO_MEMORY)
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
    """Return the operations per token: 72 l h² (1 + s/6h + V/12lh), or 96 l h² (1 + s/6h + V/16lh) with recomputation.

    Source: Narayanan et al. 2021, arXiv 2104.04473.
    """
    d, depth = config.dim, config.depth
    times, head = (96, 16) if full else (72, 12)
    return times * depth * d**2 * (1 + config.context / 6 / d + config.vocab / head / depth / d)


def korthikanti(row: Row) -> Case | str:
    config = gpt(*(whole(row, name) for name in ("vocab", "hidden", "layers", "heads")), whole(row, "seq"))
    cluster = replace(CLUSTERS["A100, 80 GB"], gpus=whole(row, "gpus"))
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), config.context, row.get("software", ""), **NO_MEMORY)
    dp = whole(row, "dp")
    layout = split_layout(row, whole(row, "interleave_m"), setup.batch // dp // whole(row, "mbs"))
    tokens = setup.batch * setup.context / number(row, "iter_s_sp_plus_selective") / cluster.gpus
    layout = layout._replace(replicas=dp, recompute="selective")
    return Case(setup, layout, (f"{row['params_b']}B", cluster.gpus), tokens)


def llama3(row: Row) -> Case | str:
    if row["cp"] != "1":
        return CONTEXT
    config, gpus, dp = PRESETS["llama3-405b"], whole(row, "gpus"), whole(row, "dp")
    cluster = replace(CLUSTERS["H100, InfiniBand"], gpus=gpus)
    setup = setup_of(
        config, cluster, dp * whole(row, "batch_per_dp"), whole(row, "seq"), row.get("software", ""), **NO_MEMORY
    )
    layout = Layout(whole(row, "tp"), True, whole(row, "pp"), "interleaved", shards=dp, zero=2)
    tokens = number(row, "tflops_gpu") * 1e12 / cost.model_operations(config, setup.context)
    return Case(setup, layout, ("405B", gpus), tokens, free=("schedule", "batch", "recompute", "zero"))


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
    cluster = replace(CLUSTERS[NVIDIAS[kind]], gpus=whole(row, "gpus"))
    setup = setup_of(config, cluster, whole(row, "gbs_seqs"), whole(row, "seq"), row.get("software", ""), **NO_MEMORY)
    dp = whole(row, "dp")
    layout = split_layout(row, int(row["vp"] or 1), whole(row, "grad_acc"))
    tokens = number(row, "tok_s_total") / cluster.gpus
    return Case(setup, layout._replace(shards=dp, zero=1 if dp > 1 else 0), (model, cluster.gpus), tokens)


def split_layout(row: Row, stages_per_rank: int, accumulation: int) -> Layout:
    """Return a row's layout, with sequence parallelism and without data parallelism."""
    schedule = "interleaved" if stages_per_rank > 1 else "1f1b"
    tp, pp, batch = (whole(row, name) for name in ("tp", "pp", "mbs"))
    return Layout(tp, True, pp, schedule, stages_per_rank, batch=batch, accumulation=accumulation)


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
