"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

In this order:

    sharded           one parameter: a piece for the optimizer, all of it for its layer; PyTorch calls it FSDPParam
    parameter_group   the parameters of a layer, which travel together; PyTorch calls it FSDPParamGroup
    order             the order of layers: what comes next, and what came before
    shardable         what can be sharded this way, and what is refused
    shared_state      what the modules of a model have in common in a training step; PyTorch calls it FSDPStateContext
    sharding          the events of a training step; PyTorch calls what a module has of it its FSDPState
    fsdp              fully_shard, and what it adds to a module

On a first reading, follow one parameter from its shard to the whole and back: sharding, parameter_group, sharded.

So it is used:

    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters())           # after it: the model's parameters are shards now
"""

# ruff: noqa: F401

from labs.fsdp.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from labs.fsdp.sharded import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
