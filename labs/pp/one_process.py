"""The oldest pipeline: one process, some layers on each device, and autograd across them.

    placed = Placed(cut(model, 2), ["cuda:0", "cuda:1"])
    for x, y in micro_batches:
        (model.loss(placed(x), y.to("cuda:1")) / len(micro_batches)).backward()

The stages need only a copy from one device to the next: in backward, autograd copies the gradient the other way.  So a
model may be larger than the memory of one device.  But training is no faster than on one device: a micro-batch needs
one device after the other, and while one device computes, the others wait.  The schedule of this pipeline, with a rank
for each device, is:

    naive(2, 2)                      rank 0   0F0  ·   ·   ·  0B0──── 0F1  ·   ·   ·  0B1────
                                     rank 1    ·  1F0 1B0────  ·   ·   ·  1F1 1B1────

GPUs compute while the process goes on, each in the order in which kernels were launched on it.  So only this order
makes the GPUs wait: with the forwards of all micro-batches first, and then all backwards, the same code is GPipe.  On
the CPU, the process itself computes, one operation at a time, whatever the order.  Source: Huang et al. 2019, arXiv
1811.06965, figure 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from labs.pp.instructions import B, F
from labs.pp.schedules import Schedule, require


class Placed(nn.Module):
    """A module that runs stages one after another, each on its device.

    Raises ValueError if there are not as many devices as stages, or if stages on two devices share a parameter.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device | str]):
        super().__init__()
        if len(stages) != len(devices):
            raise ValueError(f"{len(stages)} stages and {len(devices)} devices: give each stage its device")
        self.devices = [torch.empty(0, device=device).device for device in devices]
        require_apart(stages, self.devices)
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(stages, self.devices, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def require_apart(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise ValueError if stages on different devices share a parameter."""
    at: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            first = at.setdefault(p, number)
            if devices[first] != devices[number]:
                raise ValueError(
                    f"stages {first} and {number} share {name!r}, but are on {devices[first]} and {devices[number]}: "
                    "put them on one device, or give each its own parameter"
                )


def naive(ranks: int, microbatches: int) -> Schedule:
    """Return the schedule in which each micro-batch goes forward and backward through all stages before the next."""
    require("naive", ranks, microbatches, stages_per_rank=1)
    return Schedule([kind(rank, m) for m in range(microbatches) for kind in (F, B)] for rank in range(ranks))
