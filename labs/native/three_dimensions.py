"""PyTorch's FSDP, TP and PP on one mesh, in the order of `labs.parallel`, and clipping by the norm over all axes."""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labs.native.fsdp2 import fsdp
from labs.native.parallelize_module import tp
from labs.tp import Plan, styles


def parallel(stages: Sequence[nn.Module], mesh: DeviceMesh, plan: Mapping[str, styles.Style]) -> None:
    """Split and shard this rank's stages over the four axes of `labs.parallel.Parallel`, but build no pipeline.

    The pipeline follows with `pp(stages, ..., group=mesh.get_group("pp"))`; run its steps within `loss_parallel()`.

    Raises ValueError for a fifth axis, and for stages of a GPT with tied weights, whose copies would silently diverge.
    """
    if others := {*mesh.mesh_dim_names} - {"pp", "replicate", "shard", "tp"}:
        raise ValueError(
            f"the mesh has the axis {min(others)!r}, along which nothing would be averaged here: leave it out, or use "
            "labs.parallel.Parallel, which takes 'cp' too"
        )
    for stage in stages:
        if stage.config.tied:
            raise ValueError(
                "the head is tied to the embedding, and PyTorch's pipeline would leave the stage of each with its part "
                "of the gradient: give tied=False"
            )
        if mesh["tp"].size() > 1:
            tp(stage, mesh["tp"], Plan(plan).within(stage))
        # HSDP with a single replica would do the same, but PyTorch takes longer to derive the shardings of a 3D mesh.
        data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        if data.size() > 1:
            fsdp(stage, stage.layers.values(), data, reshard_after_forward=False)
            stage.set_reshard_after_forward(False)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, group: ProcessGroup | None = None) -> Tensor:
    """Clip gradients by their norm over all stages, as `labs.parallel.Parallel.clip_gradients` does; return that norm.

    `nn.utils.clip_grad_norm_` would clip each stage by its own norm, and it fails for parameters on several meshes.

    group: the ranks along pp; left out without a pipeline
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [gradient.norm() for gradient in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    squares = sum(norm.double() ** 2 for norm in whole)
    if group is not None:
        dist.all_reduce(squares, group=group)
    for gradient in gradients:
        gradient.mul_((max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).to(gradient.dtype))
    return squares.sqrt()
