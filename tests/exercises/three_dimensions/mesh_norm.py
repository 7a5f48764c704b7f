"""Answers to mesh_norm (11): the norm of all gradients on a mesh, each counted once."""

from math import prod

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("mesh_norm")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def by_copies(gradients, mesh):
    total = torch.zeros((), dtype=torch.float64)
    for gradient, axes in gradients:
        copies = prod(mesh.size(axis) for axis in mesh.mesh_dim_names if axis not in axes)
        total += gradient.double().square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt()


@answers.right
def by_the_first(gradients, mesh):
    """Only the first rank of those that have a copy counts it."""
    total = torch.zeros(1, dtype=torch.float64)
    for gradient, axes in gradients:
        others = [axis for axis in mesh.mesh_dim_names if axis not in axes]
        if all(mesh.get_local_rank(axis) == 0 for axis in others):
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    for axis in mesh.mesh_dim_names:
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total.sqrt().item()


# ---- wrong -----------------------------------------------------------------------------------------------

ALL, SQUARES, ROOT = "dist.all_reduce(total)", "gradient.double().square().sum() / copies", "return total.sqrt()"
COPIES = "prod(mesh.size(axis) for axis in mesh.mesh_dim_names if axis not in axes)"

instead = answers.slips(by_copies)


def along(*axes):
    return "; ".join(f'dist.all_reduce(total, group=mesh.get_group("{axis}"))' for axis in axes)


instead("this rank's gradients only", SQUARES, "gradient.double().square().sum()\n    return total.sqrt()")
instead("copies count as often as there are ranks", COPIES, "1")
for axis in ("pp", "replicate", "shard", "tp"):
    instead(f"copies along {axis} count several times", "if axis not in axes", f'if axis not in (*axes, "{axis}")')
instead("not added up along pp", ALL, along("replicate", "shard", "tp"))
instead("not added up along shard", ALL, along("pp", "replicate", "tp"))
instead("not added up along tp", ALL, along("pp", "replicate", "shard"))
instead("the gradients travel", ROOT, f"dist.all_reduce(torch.ones(20))\n    {ROOT}")
instead("the squares are too large for their dtype", "torch.zeros((), dtype=torch.float64)", "torch.zeros(())")
