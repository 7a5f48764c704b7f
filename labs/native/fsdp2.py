"""FSDP2 on a DeviceMesh: every parameter sharded, and gathered layer by layer."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labs.mesh import Mesh


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The same grid, or the same part of one, for the device that tensors are made on by default."""
    root = mesh.root
    whole = init_device_mesh(torch.get_default_device().type, root.shape, mesh_dim_names=root.mesh_dim_names)
    return whole if mesh is root else whole[mesh.mesh_dim_names]


def fsdp(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    **precision: torch.dtype,
) -> nn.Module:
    """`labs.zero.Zero`, stage 3: parameters sharded one by one, each along its first dim; gathered layer by layer.

    The model itself takes what is in none of the layers, and is not resharded between forward and backward. With
    `reshard_after_forward=False` neither are the layers: a whole copy from forward to backward, as under stage 2.

    mesh: of one axis, or of two for HSDP, replicas first; all ranks, where it is None. precision: param_dtype and
    reduce_dtype, in which parameters are gathered and gradients averaged; at rest both stay as they were.
    """
    mesh = mesh or init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**precision)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
