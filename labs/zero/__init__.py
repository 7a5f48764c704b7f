"""ZeRO: data parallelism without the spare copies.

The files, in the order of reading:

    layers        the modules whose parameters are gathered together, and the places of each parameter
    flattenable   the checks of a model and an optimizer, and what they refuse
    at_rest       the vectors that model.parameters() shows: they have numbers, and no gradient
    flat          layers as flat vectors, which are gathered, dropped and reduced at once; PyTorch calls one a
                  FlatParameter
    zero          the events of a training step, and what each stage does there; PyTorch has stage 1 as
                  ZeroRedundancyOptimizer, and stage 3 as FullyShardedDataParallel (FSDP1)
    scale_check   the factors by which ranks multiplied their gradients between sync() and step()

Usage:

    zero = Zero(model, stage=2, optimizer=partial(AdamW, lr=1e-3))      # in the optimizer's place
    model(x, y).backward()
    zero.step()
"""

# ruff: noqa: F401

from labs.zero.zero import Zero
