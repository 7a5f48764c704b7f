import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--kill-at", type=int, help="a step at which the last rank is killed, the first time")
options = parser.parse_args()

# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 checkpoint.py
# Without the variable, ranks that are started again find the addresses of those that died (pytorch#135712).
dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device, generator = ("cuda", torch.cuda) if torch.cuda.is_available() else ("cpu", torch)
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

config = PRESETS["small"]
model = GPT(config).to(device)
for layer in model.layers.values():
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)


def state():
    parameters, moments = get_state_dict(model, optimizer)
    # Each rank's generator under a key of its own: of one key, one rank's would be saved, for all.
    return {"model": parameters, "optimizer": moments, f"generator-{rank}": generator.get_rng_state()}


# A checkpoint is there once it has .metadata, which is written last.
saved = [int(path.parent.name.removeprefix("step-")) for path in options.folder.glob("step-*/.metadata")]
first = max(saved, default=0)
if first:
    found, place = state(), options.folder / f"step-{first}"
    random, saved = f"generator-{rank}", dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    if random not in saved:  # fewer ranks have saved: this one begins with new numbers
        del found[random]
    dcp.load(found, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    generator.set_rng_state(found.get(random, generator.get_rng_state()))

for step in range(first, 10):
    if step == options.kill_at and rank == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
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
    if step % 2:
        dcp.save(state(), checkpoint_id=options.folder / f"step-{step + 1}")

dist.barrier()
dist.destroy_process_group()
