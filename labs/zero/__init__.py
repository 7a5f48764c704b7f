"""ZeRO: data parallelism without the spare copies.

In this order:

    layers        the modules whose parameters come and go together, and where each parameter stands
    flattenable   what can lie in vectors, and what is refused
    at_rest       what model.parameters() has of a vector: its numbers, and not its gradient
    flat          layers as flat vectors: what is gathered, dropped and reduced at once; PyTorch calls one a
                  FlatParameter
    zero          the events of a training step, and what each stage does there; PyTorch has stage 1 as
                  ZeroRedundancyOptimizer, and stage 3 as FullyShardedDataParallel (FSDP1)
    scaled        what ranks did to gradients between sync() and step(): clipped by another norm each?

So it is used:

    zero = Zero(model, stage=2, optimizer=partial(AdamW, lr=1e-3))      # where the optimizer stood
    model(x, y).backward()
    zero.step()
"""

# ruff: noqa: F401

from labs.zero.zero import Zero
