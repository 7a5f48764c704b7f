import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

dist.init_process_group()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
if dist.get_world_size() not in (4, 8, 16):
    raise SystemExit("start 4, 8 or 16 ranks: each shard cuts its part of 16 sequences into 4 micro-batches")
shards = dist.get_world_size() // 4
mesh = init_device_mesh(device.type, (2, shards, 2), mesh_dim_names=("pp", "dp", "tp"))
p, d, first = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_local_rank("pp") == 0

config = PRESETS["small"]
model = GPT(config)
layers = list(model.layers.values())[2 * p : 2 * p + 2]
for layer in layers:  # embedding, norms and head stay whole along tp
    split = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    split |= {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(layer.to(device), mesh["tp"], split)
stage = nn.Sequential(*[model.embed] * first, *layers, *[] if first else [model.norm, model.head]).to(device)
for module in (*layers, stage):  # gathered once a step, and not for every micro-batch
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)

its = PipelineStage(stage, p, 2, device, group=mesh.get_group("pp"))
schedule = Schedule1F1B(its, n_microbatches=4, loss_fn=model.loss)
optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.chunk(shards)[d].to(device) for part in batches[step])  # by dp alone
    losses = []
    schedule.step(*[x] * first, **({} if first else {"target": y, "losses": losses}))

    # Of a DTensor it is the norm of the whole; what is whole along tp counts once; stages add up.
    norms = [p.grad.norm() for p in stage.parameters()]
    square = sum(norm.full_tensor() ** 2 if isinstance(norm, DTensor) else norm**2 for norm in norms)
    dist.all_reduce(square, group=mesh.get_group("pp"))
    for parameter in stage.parameters():
        parameter.grad *= (1.0 / (square.sqrt() + 1e-6)).clamp(max=1.0)
    optimizer.step()
    optimizer.zero_grad()

    loss = torch.zeros((), device=device) if first else torch.stack(losses).mean()
    dist.all_reduce(loss)  # all ranks of the last stage have one: half of them
    if dist.get_rank() == 0:
        print(f"step {step}: loss {2 * loss.item() / dist.get_world_size():.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
