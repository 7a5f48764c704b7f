"""PyTorch's expert parallelism, as torchtitan composes it: DTensor experts, and an all-to-all with autograd.

Source: pytorch/torchtitan, torchtitan/distributed/expert_parallel.py, for the order of the steps.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from labs.moe import Experts, Mixture
from labs.native.distributed_data_parallel import ddp

MATRICES = "gate", "up", "down"


class GroupedExperts(nn.Module):
    """The matrices of all experts in three tensors, [expert, out, in], of which each rank along ep has its experts.

    Unlike in `labs.moe`, an expert computes the rows of all ranks in one product.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh):
        super().__init__()
        ranks, rank = mesh.size(), mesh.get_local_rank()
        if len(experts) % ranks:
            raise ValueError(f"{len(experts)} experts are not divisible by ep={ranks}: change one of them")
        self.group, self.each = mesh.get_group(), len(experts) // ranks
        for name in MATRICES:
            weights = [getattr(expert, name).weight.detach() for expert in experts.values()]
            own = torch.stack(weights[rank * self.each : (rank + 1) * self.each])
            self.register_parameter(name, nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False)))

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        received = torch.empty_like(counts_E)
        dist.all_to_all_single(received, counts_E, group=self.group)
        sends, receives = (counts.view(-1, self.each).sum(1).tolist() for counts in (counts_E, received))
        rows_MD = all_to_all_single_autograd(rows_MD, receives, sends, self.group)
        of_each = torch.arange(self.each).repeat(len(sends))
        order = of_each.repeat_interleave(received).argsort(stable=True)
        pieces = rows_MD[order].split(received.view(-1, self.each).sum(0).tolist())
        weights = zip(*(getattr(self, name).to_local() for name in MATRICES), strict=True)
        results = torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                for x, (gate, up, down) in zip(pieces, weights, strict=True)
            ]
        )
        return all_to_all_single_autograd(results[order.argsort()], sends, receives, self.group)


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model under DDP, which leaves its experts alone, and a function that averages these after backward.

    mesh: device mesh with the axes edp and ep; the model reads another part of the batch on each of its ranks.

    DDP averages over all ranks. An expert's gradient has the tokens of all ranks along ep already, so the sum of its
    copies is divided by the number of all ranks, and not by that of copies.
    """
    for mixture in [module for module in model.modules() if isinstance(module, Mixture)]:
        mixture.experts = GroupedExperts(mixture.experts, mesh["ep"])
    experts = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*experts])

    def average() -> None:
        for p in experts.values():
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("edp"))
            p.grad /= mesh.size()

    return ddp(model), average
