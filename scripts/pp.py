import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

config = PRESETS["small"]  # four layers, so four ranks at most
model = GPT(config)
layers, first, last = list(model.layers.values()), rank == 0, rank == ranks - 1
mine = layers[len(layers) * rank // ranks : len(layers) * (rank + 1) // ranks]
stage = nn.Sequential(*[model.embed] * first, *mine, *[model.norm, model.head] * last).to(device)

schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, device), n_microbatches=8, loss_fn=model.loss)
optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.to(device) for part in batches[step])
    losses = []  # of the micro-batches; only the last stage has them
    schedule.step(*[x] * first, **({"target": y, "losses": losses} if last else {}))

    # The norm of all gradients: each rank knows its own stage's.
    norm = torch.nn.utils.get_total_norm([p.grad for p in stage.parameters()]).square()
    dist.all_reduce(norm)
    torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, norm.sqrt())
    optimizer.step()
    optimizer.zero_grad()

    loss = torch.stack(losses).mean() if last else torch.zeros((), device=device)
    dist.broadcast(loss, ranks - 1)
    if first:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
