from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from labs.data import Batches, corpus
from labs.moe import MOE_PRESETS, MoEGPT

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())


class SplitExperts(nn.Module):
    """The experts of this rank; rows come to them from all ranks, and their results go back."""

    def __init__(self, experts):
        super().__init__()
        self.each = len(experts) // ranks  # the ranks must divide the experts
        self.experts = nn.ModuleList(list(experts.values())[rank * self.each : (rank + 1) * self.each])

    def forward(self, rows, counts):  # rows sorted by expert, and the number of rows of each expert
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sends, receives = (each.view(ranks, -1).sum(1).tolist() for each in (counts, received))
        rows = all_to_all_single_autograd(rows, receives, sends, dist.group.WORLD)
        parts = rows.split(received.tolist())  # rank by rank, and expert by expert
        results = torch.cat([self.experts[n % self.each](part) for n, part in enumerate(parts)])
        return all_to_all_single_autograd(results, sends, receives, dist.group.WORLD)


config = MOE_PRESETS["tiny-moe"]
model = MoEGPT(replace(config, balance=0.0)).to(device)  # a balance loss would be each rank's own
for layer in model.layers.values():
    layer.mlp.experts = SplitExperts(layer.mlp.experts)

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
batches = Batches(corpus().tokens, 8, config.context, rank=rank, ranks=ranks)
for step in range(10):
    x, y = (part.to(device) for part in batches[step])
    loss = model(x, y)
    loss.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:  # an expert's gradient has the tokens of all ranks already
            dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
