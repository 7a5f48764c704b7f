"""The making of a DTensor from a whole tensor, which is distributed along one axis of the mesh after the other."""

from collections.abc import Sequence

from torch import Tensor

from labs.dtensor.dtensor import DTensor
from labs.dtensor.placement import Placement, normalised
from labs.dtensor.redistribute import Line, distribute
from labs.mesh import Mesh


def distribute_tensor(
    tensor: Tensor,
    device_mesh: Mesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute the first rank's tensor, and return a DTensor: a leaf, which requires gradients if the tensor does.

    placements: one for each axis of the mesh; by default Replicate()
    src_data_rank: place along each axis of the rank whose tensor is distributed; None if all ranks have the same
        tensor, so that nothing need be sent

    Raises RuntimeError for a tensor that was computed, since its gradient would end in the DTensor
    (DTensor.from_local passes it on), and ValueError for a DTensor in other placements.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf; for a computed tensor, DTensor.from_local keeps the gradient"
        )
    placements = normalised(placements, tensor.ndim, device_mesh.ndim)
    if isinstance(tensor, DTensor):
        if (tensor.device_mesh, tensor.placements) != (device_mesh, placements):
            raise ValueError(f"this tensor is placed as {list(tensor.placements)} already: redistribute it")
        return tensor
    local = tensor.detach()
    for axis, placement in enumerate(placements):
        place = device_mesh.get_coordinate()[axis]
        line = Line(tuple(local.shape), device_mesh.shape[axis], place, device_mesh.get_group(axis))
        local = distribute(local, line, placement, src_data_rank)
    return DTensor(local, device_mesh, placements, tensor, tensor.requires_grad)
