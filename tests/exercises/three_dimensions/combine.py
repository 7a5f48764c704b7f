"""Answers to combine (11): what ranks make of their gradients, along each axis."""

import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("combine")
LINE = "on 2 × 2 × 2 ranks each sends, × the gradient: split 1, whole 1, summand 2, tied 2"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def axis_by_axis(gradient, kind, mesh):
    dist.all_reduce(gradient, group=mesh.get_group("dp"))
    gradient /= mesh.size("dp")
    if kind == "summand":
        dist.all_reduce(gradient, group=mesh.get_group("tp"))
    if kind == "tied":
        dist.all_reduce(gradient, group=mesh.get_group("pp"))


@answers.right(line=LINE)
def by_table(gradient, kind, mesh):
    also = {"summand": ["tp"], "tied": ["pp"]}.get(kind, [])
    for axis in [*also, "dp"]:
        if mesh.size(axis) > 1:
            dist.all_reduce(gradient, group=mesh.get_group(axis), async_op=True).wait()
    gradient.div_(mesh.size("dp"))


# ---- wrong -----------------------------------------------------------------------------------------------

OVER_DP = 'dist.all_reduce(gradient, group=mesh.get_group("dp"))'
MEAN, TP, PP = 'gradient /= mesh.size("dp")', 'if kind == "summand":', 'if kind == "tied":'
OF_TP = 'dist.all_reduce(gradient, group=mesh.get_group("tp"))'
OF_PP = 'dist.all_reduce(gradient, group=mesh.get_group("pp"))'
ALL = f"dist.all_reduce(gradient)\n    gradient /= mesh.size()\n    return\n    {OVER_DP}"

spoil = answers.slips(axis_by_axis)
spoil("parts of a matrix are mixed along tp", OVER_DP, ALL)
spoil("returned, and not in place", OVER_DP, f"gradient = gradient.clone()\n    {OVER_DP}",
    PP, f'if kind != "tied":\n        return gradient\n    {PP}')
spoil("not averaged along dp", OVER_DP, "pass", MEAN, "pass")
spoil("added up along dp, and not divided in place", MEAN, "pass")
spoil("the summands of tp are not added up", TP, "if False:")
spoil("summands are averaged along tp", OF_TP, f'{OF_TP}\n        gradient /= mesh.size("tp")')
spoil("added up along tp, where all have the same", TP, 'if kind in ("whole", "summand"):')
spoil("the other end's part is missing", PP, "if False:")
spoil("the two ends are averaged", OF_PP, f'{OF_PP}\n        gradient /= mesh.size("pp")')
spoil("gradients of different stages are mixed", PP, "if True:")
spoil("an all-reduce where a part is enough", TP,
    'if kind == "whole":\n        whole = gradient.clone()\n        '
    'dist.all_reduce(whole, group=mesh.get_group("tp"))\n    '
    + TP)
