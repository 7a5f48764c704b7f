"""ZeRO: data parallelism without the spare copies.

The files, in the order of reading:

    layers            the modules whose parameters are gathered together, and the places in which each parameter is used
    flattenable       the checks that Zero can train a model with an optimizer
    hidden_gradients  the vectors that model.parameters() shows: their numbers can be read, and their gradients cannot
    flat              layers as flat vectors, which are gathered, dropped and reduced at once; PyTorch calls such
                      a vector a FlatParameter
    zero              the events of a training step, and what each stage does at each event; PyTorch has stage 1 as
                      ZeroRedundancyOptimizer, and stage 3 as FullyShardedDataParallel (FSDP1)
    scale_check       the check that ranks multiplied their gradients by the same factor between sync() and step()

Usage:

    zero = Zero(model, stage=2, optimizer=partial(AdamW, lr=1e-3))      # in the optimizer's place
    model(x, y).backward()
    zero.step()
"""

# ruff: noqa: F401

from labs.zero.zero import Zero
