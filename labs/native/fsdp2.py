"""FSDP2 on a DeviceMesh: every parameter sharded, and gathered layer by layer."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labs.mesh import Mesh


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return a DeviceMesh with the same grid, or the same part of a grid, for PyTorch's default device."""
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
    """Shard each parameter along its first dim and gather layer by layer, as `labs.zero.Zero` does in stage 3.

    The model itself, as the root, has the parameters that are in none of the layers, and is not resharded between
    forward and backward. With `reshard_after_forward=False` the layers are not resharded either: every rank holds all
    parameters from forward to backward, as in stage 2.

    layers: the modules whose parameters are gathered together
    mesh: device mesh with one axis, or two for HSDP, replicas first; by default all ranks
    precision: param_dtype, in which parameters are gathered, and reduce_dtype, in which gradients are averaged; between
        steps, parameters and gradients have the model's dtype
    """
    mesh = mesh or init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**precision)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
