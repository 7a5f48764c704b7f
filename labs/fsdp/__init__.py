"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

The files, in the order of reading:

    sharded_parameter     one parameter: a shard for the optimizer, the full tensor for its layer; in PyTorch, FSDPParam
    parameter_group       the parameters of a layer, gathered and reduced together; in PyTorch, FSDPParamGroup
    order                 the order of layers: the next one in forward, and the one before in backward
    what_can_be_sharded   the checks of a model before it is sharded, and what they refuse
    step_state            the state that all groups of a model share in a training step; in PyTorch, FSDPStateContext
    module_events         the events of a training step, for one group of parameters; in PyTorch, FSDPState
    fsdp                  fully_shard, and the methods that it adds to a module

On a first reading, follow one parameter from its shard to the full tensor and back, in this order of files:
module_events, step_state, parameter_group, sharded_parameter.  Each calls the next, and none calls back.

Usage:

    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters())           # after fully_shard: the model's parameters are shards now
"""

# ruff: noqa: F401

from labs.fsdp.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from labs.fsdp.sharded_parameter import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
