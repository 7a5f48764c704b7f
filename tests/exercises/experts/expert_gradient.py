"""Answers to expert_gradient (12b): the mean gradients of experts, and of all else."""

import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("expert_gradient")
LINE = "on 2 × 4 ranks each sends 1 × the gradient of an expert, and 1.75 × any other"


@answers.right(line=LINE)
def by_group(gradient, is_expert, mesh):
    dist.all_reduce(gradient, group=mesh.get_group("edp") if is_expert else None)
    gradient /= mesh.size()


@answers.right(line=LINE)
def in_two_steps(gradient, is_expert, mesh):
    if is_expert:
        gradient.div_(mesh.size("ep"))
        dist.all_reduce(gradient, group=mesh.get_group("edp"))
        gradient.div_(mesh.size("edp"))
    else:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return gradient


# ---- wrong -----------------------------------------------------------------------------------------------

spoil = answers.slips(by_group)
GROUP, MEAN = 'mesh.get_group("edp") if is_expert else None', "gradient /= mesh.size()"

spoil("returned, and not in place", "dist.all_reduce", "gradient = gradient.clone()\n    dist.all_reduce",
      MEAN, "return gradient / mesh.size()")
spoil("an expert's gradient is ep times too large", MEAN, 'gradient /= mesh.size("edp") if is_expert else mesh.size()')
spoil("an expert's gradient is not divided", MEAN, "gradient /= 1 if is_expert else mesh.size()")
spoil("an expert's gradient has another divisor", MEAN, 'gradient /= mesh.size("ep") if is_expert else mesh.size()')
spoil("different experts are mixed", GROUP, "None")
spoil("different experts are mixed", '"edp"', '"ep"')
spoil("an expert's copies are not added up", "dist.all_reduce(", "if not is_expert:\n        dist.all_reduce(")
spoil("all else is added up along one axis alone", GROUP, 'mesh.get_group("edp")')
spoil("all else has another divisor", MEAN, 'gradient /= mesh.size() if is_expert else mesh.size("edp")')
spoil("several all-reduces", f"dist.all_reduce(gradient, group={GROUP})",
      'dist.all_reduce(gradient, group=mesh.get_group("edp"))\n    if not is_expert:\n        '
      'dist.all_reduce(gradient, group=mesh.get_group("ep"))')
spoil("a different dtype travels", "dist.all_reduce(gradient,", "total = gradient.double()\n    dist.all_reduce(total,",
      MEAN, "gradient.copy_(total / mesh.size())")
