import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

mesh = init_device_mesh(device, (1, ranks), mesh_dim_names=("replicate", "shard"))
low = torch.bfloat16 if device == "cuda" else None
options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}

config = PRESETS["small"]
model = GPT(config).to(device)
for layer in model.layers.values():
    fully_shard(layer, **options)
fully_shard(model, **options)

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.chunk(ranks)[rank].to(device) for part in batches[step])
    loss = model(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
