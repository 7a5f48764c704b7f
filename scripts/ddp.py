import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = "cpu"
if torch.cuda.is_available():
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)

config = PRESETS["tiny"]
model = DistributedDataParallel(GPT(config).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
batches = Batches(corpus().tokens, 12, config.context, rank=rank, ranks=ranks)

for step in range(15):
    x, y = (part.to(device) for part in batches[step])
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
