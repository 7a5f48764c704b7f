"""The memory explorer's picture: the bytes that each rank holds, by kind and by stage of ZeRO, beside common GPUs.

    picture({}, PRESETS, **BEGIN)       the predictions of labs.cost as bars, below their formulas

`labs.kit.play.memory` shows this picture below its controls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from labs import cost
from labs.kit.drawing.formulas import Captioned, Line, formula, term
from labs.kit.drawing.gpu_memory_bars import CARDS, GB, Bytes, cards, size
from labs.model import PRESETS, Config

STAGES = {"DDP": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
YOURS = "yours"  # the name of a model that is not one of the PRESETS

# CONTROLS has the values of each control, by its name: a sequence becomes a slider, a mapping becomes a menu.
# BEGIN has the control's first value.
CONTROLS: dict[str, Sequence | Mapping] = {
    "model": {name: name for name in PRESETS},
    "precision": {name: name for name in cost.PIE},
    "ranks": tuple(2**k for k in range(13)),
    "batch": (1, 2, 3, 4, 6, 8, 12, 16, 32),
    "context": tuple(2**k for k in range(4, 18)),
    "recompute": {name: name for name in cost.RECOMPUTE},
    "offload": {"nothing": "nothing", "optimizer state": "optimizer state"},
    "card": {f"{card} GB": card for card in CARDS},
}
BEGIN = {"model": "llama3-8b", "precision": "mixed", "ranks": 64, "batch": 1, "context": 8192}
BEGIN |= {"recompute": "none", "offload": "nothing", "card": "80 GB"}


def picture(
    measured: Mapping[str, Bytes], models: Mapping[str, Config], model: str, ranks: int, card: int, **settings: Any
) -> Captioned:
    """Draw the bytes that a rank holds with DDP and with each stage of ZeRO at these settings, and measured bytes.

    The predictions are for GPUs, where RMSNorm is one kernel.  Predictions for the model YOURS are for PyTorch on a
    CPU.

    measured: the bytes that a job measured, as {name: {kind: bytes, ..., "peak": bytes}}.
    models: {name: configuration} of the models to choose from.
    settings: the values of all other CONTROLS, by name.
    """
    batch, context, offload = settings["batch"], settings["context"], settings["offload"] != "nothing"
    config, kernel = replace(models[model], context=context), {"fused_norms": model != YOURS}
    job = cost.Job(config, batch, ranks, precision=settings["precision"], recompute=settings["recompute"])
    held = {name: vars(cost.per_rank(job, stage, offload, **kernel)) for name, stage in STAGES.items()}
    fits = {
        name: {each: cost.smallest_ranks(job, stage, each * GB, offload, **kernel) for each in CARDS}
        for name, stage in STAGES.items()
    }
    parameters = count(sum(cost.parameter_sizes(config)))
    where = f"on {ranks} rank{'s, each' * (ranks > 1)}"
    caption = f"{model}, {parameters} parameters, {where} with {batch} × {context:,} tokens"
    return formula(cards(held, fits, caption, measured, card), *formulas(job, offload), activations(job, held["DDP"]))


def formulas(job: cost.Job, offload: bool) -> list[Line]:
    """Return the formula of P + G + S as a line of terms, for DDP and for each stage of ZeRO."""
    psi, N = sum(cost.parameter_sizes(job.config)), term(f"/{job.ranks}", "ranks")
    p, g = (term(str(job.size[kind]), "precision") for kind in "PG")
    s = term("0" if offload else str(job.size["S"]), "precision", "offload")
    sums = {
        "DDP": ["(", p, " + ", g, " + ", s, ")"],
        "stage 1": ["(", p, " + ", g, " + ", s, N, ")"],
        "stage 2": ["(", p, " + (", g, " + ", s, ")", N, ")"],
        "stage 3": ["(", p, " + ", g, " + ", s, ")", N],
    }
    model = term(count(psi), "model")
    return [
        [f"{name}: P + G + S = ", model, " × ", *sums[name], f" bytes = {total(job, psi, stage, offload)}"]
        for name, stage in STAGES.items()
    ]


def total(job: cost.Job, psi: int, stage: int, offload: bool) -> str:
    held = cost.bytes_held(psi, job.ranks, stage, job.precision)
    return size(sum(held.values()) - offload * held["S"])


def activations(job: cost.Job, held: Bytes) -> Line:
    """Return the line of terms for the activations A, which are the same in all stages of ZeRO."""
    tokens = term(f"{job.batch} × {job.T:,} tokens", "batch", "context")
    return [f"A = {size(held['A'])} in all four: ", tokens, ", recompute: ", term(job.recompute, "recompute")]


def count(parameters: int) -> str:
    """Return a number of parameters in words: "8.03 billion", "205,376"."""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters:,}"
