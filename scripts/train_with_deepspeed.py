import deepspeed
import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS

device = "cuda" if torch.cuda.is_available() else "cpu"
# On CPUs, DeepSpeed would compile an operator for shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = device == "cuda"

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)

settings = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": device == "cuda"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 1 << 20, "memory_efficient_linear": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1 << 31,
}
config = PRESETS["small"]
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.chunk(ranks)[rank].to(device) for part in batches[step])
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / ranks:.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
