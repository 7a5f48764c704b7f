"""Tensor parallelism: every matrix of a transformer split over the ranks, by a plan.

The files, in the order of reading:

    conjugate          the borders of a split layer: its collectives in forward and in backward
    parameter_cuts     the part of a parameter that each rank holds, cut by features or by heads
    vocabulary         an embedding and a cross-entropy of a split vocabulary
    optimizers         checks that an optimizer can update a split model
    misused_parts      checks in the first step that no part of a parameter is used as the whole
    first_step         checks in the first step that ranks agree on inputs, activations and gradients
    parallel_layers    the modules of a split transformer
    whole_model_check  a check in the first forward that the split model computes what the whole one does
    styles             the ways to split a module, and the borders that it gets
    splittable         checks that a model can be split by a plan
    tp                 the plan, and the function that applies it
    async_tp           a split layer's gather, overlapped with its matrix products
    rank_types         the type of a tensor over ranks: a checker that finds a forgotten border without running a rank

Usage:

    parallelize(model, mesh, gpt_plan(model.config))
"""

# ruff: noqa: F401

from labs.tp.styles import ColwiseParallel, LossParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.tp import Plan, clip_gradients, copies, full_parameters, gpt_plan, parallelize, placements, slices

LACKING = {  # names of torch.distributed.tensor.parallel that users look for here
    "loss_parallel": "give the loss LossParallel(vocabulary), which computes it from each rank's piece of the logits",
    "PrepareModuleOutput": "give the last layer of the module the layout, as RowwiseParallel(output_layouts=Shard(1))",
    "PrepareModuleInputOutput": "give the input's layout to PrepareModuleInput(), and the output's to the last layer",
    "parallelize_module": "parallelize(model, mesh, plan) splits a model in place",
}


def __getattr__(name: str) -> object:
    if name in LACKING:
        # `from labs.tp import name` would replace an AttributeError by a sentence of its own.
        raise ImportError(f"labs.tp has no {name}: {LACKING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
