"""Tensor parallelism: every matrix of a transformer split over the ranks, by a plan.

In this order:

    conjugate         the borders of a split layer: what crosses them forward, and what its gradient does backward
    shares            which part of a parameter each rank has: features, heads
    vocabulary        an embedding and a cross-entropy of a split vocabulary
    optimizers        which ones can step a split model
    own_part          what a part of a parameter is taken for, and is not
    first_step        what must be the same on all ranks of a split model, compared in its first step
    parallel_layers   the modules of a split transformer
    as_whole          what the whole model computes, compared with the split one in its first forward
    styles            how a module is split, and what crosses its borders
    splittable        what can be split this way, and what is refused
    tp                the plan, and what obeys it
    async_tp          a split layer's gather while its matrices multiply

So it is used:

    parallelize(model, mesh, gpt_plan(model.config))
"""

# ruff: noqa: F401

from labs.tp.styles import ColwiseParallel, LossParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from labs.tp.tp import Plan, clip_gradients, copies, full_parameters, gpt_plan, parallelize, placements, slices
