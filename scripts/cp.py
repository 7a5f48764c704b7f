import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS
from labs.rope import rotate

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

config = PRESETS["small"]
chunks = torch.arange(config.context, device=device).chunk(2 * ranks)  # 2 N must divide the context
pieces = [torch.cat((chunks[r], chunks[-1 - r])) for r in range(ranks)]  # in zigzag
places = pieces[rank]


def pass_on(x):
    """Send x to the next rank and receive the previous rank's, in one call; return a function that waits for it."""
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % ranks)
    works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, (rank - 1) % ranks)])
    return lambda: [work.wait() for work in works] and received


def steps(pair):
    """Yield the places and the pair of keys and values of each step, while the next pair is in flight."""
    for step in range(ranks):
        arrived = pass_on(pair) if step < ranks - 1 else None
        yield pieces[(rank - step) % ranks], pair
        pair = arrived() if arrived else pair


def scores(q, k, keys):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return s.masked_fill(keys > places[:, None], -torch.inf)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, pair):
        output, total = torch.zeros_like(q), torch.full_like(q[..., :1], torch.finfo(q.dtype).min)
        for keys, (k, v) in steps(pair):
            s = scores(q, k, keys)
            both = torch.logaddexp(total, s.logsumexp(-1, keepdim=True))
            output = (total - both).exp() * output + (s - both).exp() @ v
            total = both
        ctx.save_for_backward(q, pair, output, total)
        return output

    @staticmethod
    def backward(ctx, g):
        q, pair, output, total = ctx.saved_tensors
        dq, dot, arrived, own = torch.zeros_like(q), (output * g).sum(-1, keepdim=True), None, None
        for keys, (k, v) in steps(pair):
            p = (scores(q, k, keys) - total).exp()
            ds = p * (g @ v.transpose(-1, -2) - dot) * q.shape[-1] ** -0.5
            dq += ds @ k
            part = torch.stack((ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g))
            if own is None:
                own = part
                continue
            arrived = pass_on(part + arrived() if arrived else part)  # gradients follow one step behind
        return dq, own + arrived() if arrived else own


class Core(torch.nn.Module):
    def forward(self, q, k, v):
        q, k = (rotate(x, places, config.rope_base) for x in (q, k))
        k, v = (x.repeat_interleave(config.heads // config.kv_heads, dim=1) for x in (k, v))
        return Ring.apply(q, torch.stack((k, v)))


model = GPT(config).to(device)
for layer in model.layers.values():
    layer.attention.core = Core()

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
batches = Batches(corpus().tokens, 16, config.context)
for step in range(10):
    x, y = (part.to(device)[:, places] for part in batches[step])  # all ranks read the same, and each takes its piece
    loss = model(x, y)  # all pieces have as many tokens, so that the mean of the ranks' means is right
    loss.backward()
    for value in (loss.data, *(p.grad for p in model.parameters())):
        dist.all_reduce(value)
        value /= ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

dist.barrier()
dist.destroy_process_group()
