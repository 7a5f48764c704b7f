import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))

shard, whole = Shard(1), Replicate()
enter = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(whole,))
plan = {
    "embed": RowwiseParallel(input_layouts=whole, output_layouts=shard),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=shard, use_local_output=False),
}
layer = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": enter, "mlp": enter}
layer |= {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
layer |= {name: RowwiseParallel(output_layouts=shard) for name in ("attention.o", "mlp.down")}

config = PRESETS["small"]  # two heads of keys and values, so two ranks at most
model = GPT(config).to(device)
parallelize_module(model, mesh, plan | {f"layers.*.{name}": style for name, style in layer.items()})

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.to(device) for part in batches[step])  # all ranks read the same
    with loss_parallel():
        loss = model(x, y)
        loss.backward()
    for p in model.parameters():  # the norms' gradients are summands, which PyTorch 2.11 would leave unclipped
        p.grad = p.grad.redistribute(placements=p.placements)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
