"""FSDP: stage 3 of ZeRO, one parameter at a time, and gathered before it is needed.

sharded           one parameter, sharded: a piece for the optimizer, all of it for its layer
parameter_group   the parameters of a layer, which travel together
order             the order of layers: what to gather ahead, and what to reduce
shardable         what can be sharded this way, and what is refused
fsdp              the events of a training step

for layer in model.layers.values():
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = AdamW(model.parameters())           # after it: the model's parameters are shards now
"""

# ruff: noqa: F401

from labs.fsdp.fsdp import FSDPModule, fully_shard
from labs.fsdp.sharded import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
