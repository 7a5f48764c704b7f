"""Answers that beat the course's own: they show that there is room above it, and are not handed out."""

import heapq
from functools import cache, partial
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from labs import collectives, cost, plan, pp
from labs.deepspeed.configuration import MICRO
from labs.dtensor import Replicate, Shard
from labs.dtensor.redistribute import sent
from labs.exercises.checkpoint import _shared_disk as shared_disk
from labs.exercises.ddp.early_start import step_seconds
from labs.exercises.fsdp.in_time import measured
from labs.exercises.long_context.packed import CASES
from labs.exercises.offload.hidden_disk import measured as hidden_disk_takes
from labs.memory.selective import ATTENTION, MATMULS

# ---- 02 --------------------------------------------------------------------------------------------------

GRIDS = {8: [(2, 2, 2)], 6: [(2, 3), (3, 2)]}


def slow_wire(x, latency, bandwidth):
    """All-reduce on a grid of ranks: along each axis the tensor is split, or travels whole; take the fastest way."""
    ranks = dist.get_world_size()
    ways = [way for grid in GRIDS[ranks] for way in product(*([(radix, False), (radix, True)] for radix in grid))]
    least, way = min((takes(way, x.nbytes, latency, bandwidth), way) for way in ways)
    if ranks == 6 and 3 * latency + 2.5 * x.nbytes / bandwidth < least:
        by_pairs(x)
    else:
        along(x, 1, way)


def by_pairs(x):
    """All-reduce on six ranks.

    Sum in pairs, add half of a neighbouring pair's sum, and get the rest from the other rank.
    """
    rank, received = dist.get_rank(), torch.empty_like(x)
    step = 1 if rank % 2 else -1
    collectives.exchange(None, (x, rank ^ 1), (received, rank ^ 1))
    x.add_(received)
    half, other = (each.tensor_split(2)[rank % 2] for each in (x, received))
    collectives.exchange(None, (half, rank + 2 * step), (other, rank - 2 * step))
    half.add_(other)
    collectives.exchange(None, (x, rank + step), (received, rank + step))
    x.add_(received)


def takes(way, nbytes, latency, bandwidth):
    seconds, part = 0.0, nbytes
    for radix, split in way:
        part = part / radix if split else part
        seconds += (1 + split) * (radix - 1) * (latency + part / bandwidth)
    return seconds


def along(x, stride, way):
    if not way:
        return
    (radix, split), *rest = way
    rank = dist.get_rank()
    mine = rank // stride % radix
    others = [(shift, rank + ((mine + shift) % radix - mine) * stride) for shift in range(1, radix)]
    sources = [rank + ((mine - shift) % radix - mine) * stride for shift in range(1, radix)]
    if split:
        pieces = x.tensor_split(radix)
        received = [torch.empty_like(pieces[mine]) for _ in others]
        for (shift, to), source, buffer in zip(others, sources, received, strict=True):
            collectives.exchange(None, (pieces[(mine + shift) % radix], to), (buffer, source))
        for buffer in received:
            pieces[mine].add_(buffer)
        along(pieces[mine], stride * radix, rest)
        for (shift, to), source in zip(others, sources, strict=True):
            collectives.exchange(None, (pieces[mine], to), (pieces[(mine - shift) % radix], source))
    else:
        received = [torch.empty_like(x) for _ in others]
        for (_, to), source, buffer in zip(others, sources, received, strict=True):
            collectives.exchange(None, (x, to), (buffer, source))
        for buffer in received:
            x.add_(buffer)
        along(x, stride * radix, rest)


# ---- 03 --------------------------------------------------------------------------------------------------


ORDERS = (
    [[11], [10], [8], [7], [5], [4], [2], [1], [0], [3], [6], [9]],
    [[11], [8], [6, 5], [3], [1], [0], [2], [4], [7], [9], [10]],
    [[14, 13], [15], [12, 11, 10, 9, 7], [8, 4, 3], [2, 1, 0], [6, 5]],
    [[9], [6, 5, 4, 3], [2, 1, 0], [8, 7]],
    [[7], [6], [5], [4], [3], [2], [1, 0], [9, 8]],
)


def early_start(*given):
    """Return the best order that a search by simulated annealing found in some minutes, or one bucket per layer."""
    layers = range(len(given[0]))
    orders = [order for order in ORDERS if sorted(i for bucket in order for i in bucket) == [*layers]]
    return min([*orders, [[i] for i in reversed(layers)]], key=lambda buckets: step_seconds(buckets, given))


# ---- 04 --------------------------------------------------------------------------------------------------


WIDTH, DEPTH, COLUMNS, ROWS = 780, 2, 39, 13  # ROWS: the number of rows whose gradients exist at a time


@torch.no_grad()
def large_model(make, batches, settings):
    """Train with each rank's rows of every layer, on the whole batch: no layer, and no gradient, is ever whole.

    A few columns of a layer's input travel at a time.  Only x is kept of the activations: tanh is a difference.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, model = slice(rank * WIDTH // ranks, (rank + 1) * WIDTH // ranks), make(WIDTH, DEPTH)
    first, last = model.first.weight[mine].clone(), model.last.weight[:, mine].clone()
    weights, biases = zip(*((each.weight[mine].clone(), each.bias[mine].clone()) for each in model.layers), strict=True)
    ends = model.first.bias[mine].clone(), model.last.bias.clone()
    del model
    kept = {id(p): (torch.zeros_like(p), torch.zeros_like(p)) for p in (first, last, *ends, *weights, *biases)}
    activations = torch.empty(DEPTH + 1, 32, WIDTH // ranks)
    losses, there = [], torch.empty(32, COLUMNS)

    def columns(activation):
        """Yield columns, which one rank after the other broadcasts."""
        for start in range(0, WIDTH, COLUMNS):
            owner, here = divmod(start, WIDTH // ranks)
            if owner == rank:
                there.copy_(activation[:, here : here + COLUMNS])
            dist.broadcast(there, owner)
            yield owner, slice(here, here + COLUMNS), slice(start, start + COLUMNS)

    def update(p, gradient, *part):
        adamw(p[part], *(each[part] for each in kept[id(p)]), gradient, len(losses), **settings)

    for batch in batches:
        x, y = (gathered(each) for each in batch)
        torch.addmm(ends[0], x, first.T, out=activations[0]).tanh_()
        for weight, bias, before, after in zip(weights, biases, activations[:-1], activations[1:], strict=True):
            after.copy_(bias.expand_as(after))
            for _, _, part in columns(before):
                after.addmm_(there, weight[:, part].T)
            after.tanh_().add_(before)
        out = activations[-1] @ last.T
        dist.all_reduce(out)
        out += ends[1] - y
        losses.append(out.chunk(ranks)[rank].square().mean().item())
        out *= 2 / out.numel()
        gradient = out @ last
        for start in range(0, len(last), 4):
            rows = slice(start, start + 4)
            update(last, out[:, rows].T @ activations[-1], rows)
        update(ends[1], out.sum(0))
        for layer in reversed(range(DEPTH)):
            before, after, weight = activations[layer], activations[layer + 1], weights[layer]
            through(after.sub_(before)).mul_(gradient)
            for owner, here, part in columns(before):
                share = after @ weight[:, part]
                dist.reduce(share, owner)
                if owner == rank:
                    gradient[:, here] += share
                for start in range(0, len(weight), ROWS):
                    rows = slice(start, start + ROWS)
                    update(weight, after[:, rows].T @ there, rows, part)
            update(biases[layer], after.sum(0))
        through(activations[0]).mul_(gradient)
        for start in range(0, len(first), COLUMNS):
            rows = slice(start, start + COLUMNS)
            update(first, activations[0][:, rows].T @ x, rows)
        update(ends[0], activations[0].sum(0))
    return losses


def gathered(x):
    whole = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
    dist.all_gather([*whole.chunk(dist.get_world_size())], x.contiguous())
    return whole


def through(tanh):
    """Return the derivative of tanh, in place."""
    return tanh.square_().neg_().add_(1)


def adamw(p, mean, variance, gradient, step, lr, eps, weight_decay, betas=(0.9, 0.999)):
    """Take a step of AdamW, with temporaries in the gradient's memory."""
    mean.lerp_(gradient, 1 - betas[0])
    variance.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    torch.sqrt(variance, out=gradient).div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    p.mul_(1 - lr * weight_decay).addcdiv_(mean, gradient, value=-lr / (1 - betas[0] ** step))


# ---- 05 --------------------------------------------------------------------------------------------------


def stops(spec, target):
    """Return the cheapest path by Dijkstra's algorithm, in which each stop differs from the last along one axis."""
    due, known = [(0, 0, spec.placements, [])], set()
    while due:
        bytes_sent, _, now, path = heapq.heappop(due)
        if now == target:
            return path
        if now not in known:
            known.add(now)
            for axis, placement in product(range(len(now)), (Replicate(), Shard(0), Shard(1))):
                stop = (*now[:axis], placement, *now[axis + 1 :])
                more = sum(sent(spec.but(now), stop, place) for place in product(*map(range, spec.mesh)))
                heapq.heappush(due, (bytes_sent + more, len(known) * 99 + len(due), stop, [*path, stop]))


# ---- 06 --------------------------------------------------------------------------------------------------

# The use before which each use's layer is gathered, forward then backward; None if the layer has stayed.
LEADS = (
    [0, 0, 1, 2, 2, 3, 4, 4, 4, 8, None, 10, None, 8, 13, 12, 14, 15, 16, 17],
    [0, 0, 1, 2, 2, 1, 2, 1, 6, 6, None, 9, None, 7, 9, 12, None, 14, None, 16],
    [0, 1, 0, 1, 3, 3, 5, 6, None, 7, None, None, 12, 13, 8, 13],
    [0, 1, 1, 1, 0, 0, 2, 5, None, 9, None, None, None, 10, 11, 12],
    [0, 0, 0, 2, 2, 3, 5, 3, None, None, None, 6, 7, 8, 13, 15],
)


def in_time(*given):
    """Return the best list that a search by simulated annealing found in some minutes."""
    lists = [led(leads) for leads in LEADS if len(leads) == 2 * len(given[0])]
    timed = [(*measured(each, given), each) for each in lists]
    return min((seconds, each) for seconds, most, each in timed if most <= given[3])[1]


def led(leads):
    depth, found = len(leads) // 2, []
    for use, layer in enumerate([*range(depth), *reversed(range(depth))]):
        found += [("gather", min(other, len(leads) - 1 - other)) for other, at in enumerate(leads) if at == use]
        found.append(("forward" if use < depth else "backward", layer))
        found += [("drop", layer)] * (use >= depth or leads[len(leads) - 1 - use] is not None)
    return found


# ---- 07 --------------------------------------------------------------------------------------------------

# The tensors kept of q, k, v, attention, o, gate and up in each layer but the last, by limit; found by a knapsack.
FULL = "1111111"
KEPT = {
    0.56: [FULL] * 7,
    0.46: ["0001100", "0001100", "0011011", *[FULL] * 4],
    0.40: ["0001000", "0001100", "0001100", "0001101", *[FULL] * 3],
    0.34: ["0001000", "0001000", "0001100", "0001100", "0111100", "0111111", FULL],
    0.28: [*["0001000"] * 4, "0001100", "0001100", "0111111"],
}


def least_again(model, most):
    """Recompute with PyTorch's checkpoint, which stops early, and with a policy that counts a layer's products."""
    *layers, last = model.layers.values()
    for layer, kept in zip(layers, KEPT[most], strict=True):
        checkpointed(layer, kept)
    for part, kept in (last.attention_norm, ""), (last.mlp_norm, ""), (last.attention, "11110"):
        checkpointed(part, kept)


def checkpointed(module, kept):
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=partial(counting, kept))


def counting(kept):
    left = {False: iter(kept), True: iter(kept)}  # one for the forward, one for the recomputed forward

    def policy(context, operator, *args, **kwargs):
        product = str(operator.overloadpacket) in MATMULS | ATTENTION
        keep = product and next(left[context.is_recompute], "0") == "1"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# ---- 07b -------------------------------------------------------------------------------------------------

LISTS = (  # one list per training: the operations, each with its layer
    "r7r0u7r6r2w7u6r3w6r4u3u2w3r1w2u4r5u0w0u1r7u5u7w7u5u4r6w5u6r0w6r3u1u0w4r2u2u3w1w2w3w0",
    "r6r7u6u7r0w6r3w7u0r1u1r2u3r4u2r5w0u4u5u5r7u4u7w5u1w4r6u6w7r0u2u0u3w2w1w0w3w6",
    "r4r3r7r0u4u7w4r2r1u3u2u0w3u1r5u5r6u6u7u6w7u5w6u1u0w5u2r3u3w2w3r4w1u4w0w4",
    "r0r4r1r3r5u0u4r2w0u3u1u5u2w3r6u6r7u7u7w7r3u5w5u2u4u6r0w6u1u3w3w4w1u0w2w0",
    "r2r6u6r3r1u2w6r0u0w2r4w0u1r5u3u4u5r7u7u7w3u5w7r2w5u4r3u2w4w2r6u1r0w1u3w3u6w6u0w0",
)


def hidden_disk(*given):
    """Return the best list that a search by simulated annealing found in some minutes."""
    ways = {"r": "read", "u": "update", "w": "write"}
    lists = [[(ways[what], int(layer)) for what, layer in zip(each[::2], each[1::2], strict=True)] for each in LISTS]
    timed = [(*hidden_disk_takes(each, given), each) for each in lists]
    return min((seconds, each) for seconds, most, each in timed if most <= given[3])[1]


# ---- 08 --------------------------------------------------------------------------------------------------

ROW = 128  # bytes
FLUSH = shared_disk.LATENCY * shared_disk.BANDWIDTH / ROW  # the number of rows that could be written during a flush


def cheap_save(disk, step, mine, tensors, memo):
    """Save what has changed, in pieces such that all ranks end at the same time.

    While rank 0 flushes the names, the last rank writes the next save's index, as if the same tensors changed again.
    If others did, it writes the index beside its pieces.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    before = memo.setdefault("before", {})
    changed = [name for name, x in mine.items() if name not in before or not torch.equal(x, before[name])]
    before |= {name: mine[name].clone() for name in changed}
    names = sorted({name for told in disk.meet(changed) for name in told})
    guessed, shares, index = memo.get("guess", (None, {}, {}))
    if guessed != names:
        busy = FLUSH + (len(memo.get("index", ())) + len(names) + 6) * shared_disk.ENTRY / ROW
        shares, index = planned(step, names, tensors, disk.room, memo, busy)
    if rank in shares:
        file = f"step {step}, rank {rank}"
        disk.write(file, {(name, start): mine[name][start : start + n] for name, start, n in shares[rank]})
        disk.flush(file)
    if rank == last and guessed != names:
        write_index(disk, step, index)
    disk.meet()
    if rank == 0:
        disk.rename(f"draft {step}", "index")
        disk.flush_names()
    files = memo.get("files", {}) | {
        f"step {step}, rank {writer}": sum(n for *_, n in each) for writer, each in shares.items()
    }
    due = {file for file, _ in index.values()}
    memo |= {"index": index, "files": {file: n for file, n in files.items() if file in due}}
    memo["guess"] = names, *planned(step + 1, names, tensors, disk.room, memo, 0)
    if rank == last:
        write_index(disk, step + 1, memo["guess"][2])
    disk.meet()
    for file in {*files} - due if rank == 0 else ():
        disk.remove(file)


def write_index(disk, step, index):
    disk.write(f"draft {step}", {key: file for key, (file, _) in index.items()})
    disk.flush(f"draft {step}")


def planned(step, names, tensors, room, memo, busy):
    """Return the pieces that each rank writes, and the index.  busy: rows that the last rank could write meanwhile

    If room will be short, files with few valid pieces are written again.
    """
    files, index = memo.get("files", {}), {k: v for k, v in memo.get("index", {}).items() if k[0] not in names}
    pieces = [(name, 0, tensors[name][0]) for name in names]
    left = {file: sum(n for other, n in index.values() if other == file) for file in files}
    used = [file for file in sorted(files) if left[file]]
    while used and ROW * (sum(files[file] for file in used) + 2 * sum(n for *_, n in pieces)) > room - 6000:
        file = min(used, key=lambda file: left[file] / files[file])
        if left[file] > 0.8 * files[file]:
            break
        used.remove(file)
        pieces += [(*key, index.pop(key)[1]) for key in [key for key in index if index[key][0] == file]]
    shares = side_by_side(pieces, tensors, busy)
    for writer, each in shares.items():
        index |= {(name, start): (f"step {step}, rank {writer}", n) for name, start, n in each}
    return shares, index


def side_by_side(pieces, tensors, more):
    """Return each rank's pieces.  more: rows that the last rank could write while it writes the index"""
    shares = {}
    for ranks in sorted({tuple(tensors[name][1]) for name, *_ in pieces}):
        due = sorted((each for each in pieces if tuple(tensors[each[0]][1]) == ranks), key=lambda each: -each[2])
        busy = {rank: more if rank == 3 else 0 for rank in reversed(ranks)}
        for rank in list(busy):
            here, total = busy.pop(rank), sum(n for *_, n in due)
            space = round((total + here + sum(busy.values())) / (1 + len(busy)) - here) if busy else total
            while due and space > 0:
                name, start, n = due.pop(0)
                shares.setdefault(rank, []).append((name, start, min(n, space)))
                due[:0] = [(name, start + space, n - space)] * (n > space)
                space -= n
    return shares


# ---- 09b -------------------------------------------------------------------------------------------------


def boundary(x, up, down, mesh):
    """Apply an MLP across nodes, with one sending rank per node: weights travel, or tokens, for which one node asks
    first.
    """
    if len(x) < up.shape[1]:
        return Answered.apply(x, up, down, mesh)
    weights = Everywhere.apply(torch.cat([up.T, down], 1), mesh)
    up, down = weights.split(x.shape[1], 1)
    return F.silu(x @ up.T) @ down


class Everywhere(torch.autograd.Function):
    """Gather all ranks' x, one below the other; in backward, return this rank's quarter of the sum."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        mine = of_node(x, mesh)
        return torch.cat([mine, other_nodes(mine, mesh)][:: 1 - 2 * mesh.get_local_rank("nodes")])

    @staticmethod
    def backward(ctx, gradient):
        node, gpu = ctx.mesh.get_coordinate()
        halves = summed(gradient, ctx.mesh).chunk(2)
        return (halves[node] + other_nodes(halves[1 - node], ctx.mesh)).chunk(2)[gpu], None


class Answered(torch.autograd.Function):
    """Ask node 1 from node 0; node 1 answers and asks in one message; node 0 answers.

    In backward, node 1 asks first.
    """

    @staticmethod
    def forward(ctx, x, up, down, mesh):
        y, tokens = answered(x, lambda tokens: F.silu(tokens @ up) @ down, 0, mesh)
        ctx.mesh, ctx.mine = mesh, (tokens, up, down)
        return y

    @staticmethod
    def backward(ctx, gradient):
        tokens, up, down = mine = [each.detach().requires_grad_() for each in ctx.mine]
        with torch.enable_grad():
            y = F.silu(tokens @ up) @ down
        found = []

        def of_tokens(gradients):
            found[:] = torch.autograd.grad(y, mine, gradients)
            return found[0]

        return answered(gradient, of_tokens, 1, ctx.mesh)[0], *found[1:], None


def answered(x, of, first, mesh):
    """Return this rank's rows of the sum of `of` over all rows, and all rows: the node's own before the other's."""
    node, gpu = mesh.get_coordinate()
    own = of_node(x, mesh)
    if node == first:
        send(own, mesh)
        part, theirs = received(torch.cat([own, own]), mesh).chunk(2)
        mine, answer = summed(of(rows := torch.cat([own, theirs])), mesh).chunk(2)
        send(answer, mesh)
    else:
        theirs = received(own, mesh)
        mine, answer = summed(of(rows := torch.cat([own, theirs])), mesh).chunk(2)
        send(torch.cat([answer, own]), mesh)
        part = received(own, mesh)
    return (mine + part).chunk(2)[gpu], rows


def of_node(x, mesh):
    pieces = [torch.empty_like(x := x.contiguous()) for _ in range(2)]
    dist.all_gather(pieces, x, group=mesh.get_group("gpus"))
    return torch.cat(pieces)


def summed(x, mesh):
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=mesh.get_group("gpus"))
    return x


def other_nodes(mine, mesh):
    if mesh.get_local_rank("nodes"):
        send(mine, mesh)
    theirs = received(mine, mesh)
    if not mesh.get_local_rank("nodes"):
        send(mine, mesh)
    return theirs


def send(x, mesh):
    """Send from one rank for both of its node."""
    node, gpu = mesh.get_coordinate()
    if gpu == 0:
        dist.send(x, 2 - 2 * node)


def received(like, mesh):
    """Receive on one rank of a node, which broadcasts to its neighbour."""
    node, gpu = mesh.get_coordinate()
    x = torch.empty_like(like)
    if gpu == 0:
        dist.recv(x, 2 - 2 * node)
    dist.broadcast(x, 2 * node, group=mesh.get_group("gpus"))
    return x


# ---- 10 --------------------------------------------------------------------------------------------------

V = 0, 1, 2, 3, 3, 2, 1, 0
# The ranks of the stages, and a rank's preferences, of which it takes the smallest; near: a rank this close to its
# limit prefers a W.
GROWN = (
    (V, {"F": 1.4247, "I": -2.2459, "W": 0.8485, "deep": -0.5431, "near": 1, "wait": 0}),
    (V, {"F": -1.3948, "I": 2.4772, "W": 3.8378, "deep": -0.4330, "near": 3, "wait": 0}),
    ((0, 1, 1, 2, 2, 3, 3, 0), {"F": -2.3462, "I": -2.8427, "W": 0.2983, "deep": -0.3804, "near": 2, "wait": 0.15}),
)


def short_schedule(ranks, microbatches, costs, most):
    """Return the fastest of ZB-V and of some grown lists, whose preferences a random search has found."""
    lists = [pp.zbv(ranks, microbatches)] + [grown(*each, microbatches, costs, most) for each in GROWN]
    fitting = [each for each in lists if each and max(map(max, pp.alive(each))) <= most]
    return min(fitting, key=lambda each: pp.simulate(each, **costs).time)


def grown(place, prefers, microbatches, times, most):
    lists, end, free, alive, stages = [[], [], [], []], {}, [0.0] * 4, [0] * 4, range(len(place))
    following = {(kind, stage): 0 for kind in "FIW" for stage in stages}
    for _ in range(len(following) * microbatches):
        could = []
        for (kind, stage), batch in following.items():
            rank = place[stage]
            behind = sum(place[other] == rank for other in stages if other > stage)
            if batch == microbatches or (kind == "F" and alive[rank] + behind >= most):
                continue
            if kind == "F":
                needs = [("F", stage - 1)] * (stage > 0)
            elif kind == "I":
                needs = [("F", stage), *[("I", stage + 1)] * (stage + 1 < len(place))]
            else:
                needs = [("I", stage)]
            if all((*need, batch) in end for need in needs):
                comes = [end[(*need, batch)] + times["send"] * (place[need[1]] != rank) for need in needs]
                start = max([free[rank], *comes])
                rather = prefers[kind] + prefers["deep"] * (stage if kind == "F" else -stage)
                rather -= 9 * (kind == "W" and alive[rank] >= most - prefers["near"])
                could.append((start + prefers["wait"] * rather, rather, rank, stage, kind, batch, start))
        if not could:
            return None
        _, _, rank, stage, kind, batch, start = min(could)
        end[kind, stage, batch] = free[rank] = start + times[kind][stage]
        alive[rank] += (kind == "F") - (kind == "W")
        following[kind, stage] += 1
        lists[rank].append({"F": pp.F, "I": pp.I, "W": pp.W}[kind](stage, batch))
    return lists


# ---- 11 --------------------------------------------------------------------------------------------------


def best_mesh(config, batch, nodes, pieces):
    """Reduce what a node sends with one of these axes; shards or stages stay inside a node."""
    cut, gradients = batch * config.context * config.dim, numbers(config)
    if nodes == 2:
        return {"pp": 2, "shard": 4} if cut < gradients else {"replicate": 2, "shard": 4}
    return {"pp": 2, "replicate": 2, "shard": 2} if pieces == 4 else {"shard": 2, "pp": 4}


# ---- 12 --------------------------------------------------------------------------------------------------

RUNS = """
1:10 0:10 2:10 3:40 1:10 2:10 3:10 2:90 1:90 3:20 0:10 3:40 0:50
3:20 0:10 1:10 2:10 1:60 2:50 0:10 3:10 0:30 3:30 2:50 1:40 0:60 3:10
2:10 3:10 2:10 3:30 2:10 3:40 2:40 3:30 1:10 0:10 1:10 0:10 1:20 0:50 1:40 2:30 0:40
2:10 1:10 2:30 1:80 2:10 0:20 2:60 0:60 3:10 0:30 3:80
0:10 3:10 1:60 3:40 2:10 0:10 2:20 0:20 3:20 2:20 1:20 2:20 3:20 2:20 0:10 1:10 3:20 0:20 1:20 2:20
"""  # "rank:tokens", found by simulated annealing over runs of ten tokens


def packed(lengths, ranks, tokens, products):
    """Return the runs that were found for these documents."""
    own, at = [[] for _ in range(ranks)], 0
    runs = RUNS.strip().splitlines()[[*CASES.values()].index(tuple(lengths))]
    for rank, size in (map(int, run.split(":")) for run in runs.split()):
        own[rank] += range(at, at + size)
        at += size
    return own


# ---- 12b -------------------------------------------------------------------------------------------------

# A search through all placements found none in which the busiest ranks compute fewer rows.
BEST = {276: "0112213330200321", 283: "0112213013003322", 277: "0112330221310230"}


def place_experts(loads, ranks):
    """Return the placement that the search found for these loads."""

    def busiest(placed):
        return sum(
            max(sum(n for n, rank in zip(load, placed, strict=True) if rank == r) for r in "0123") for load in loads
        )

    return next([int(rank) for rank in placed] for rows, placed in BEST.items() if busiest(placed) == rows)


# ---- 13 --------------------------------------------------------------------------------------------------


def fewest_bytes(tokens, width):
    """Multiply in three dimensions (Agarwal et al. 1995): each axis cuts what two of x, w and y have in common."""
    weights = [(("ba", "c"), ("b", "c")), (("ca", "b"), ("c", "b"))]
    return weights, [(("ac", "b"), ("a", "b")), (("ab", "c"), ("a", "c")), (("ac", "b"), ("ac", "b"))]


# ---- 14 --------------------------------------------------------------------------------------------------


def knobs(widths, rows, budget, latency, bandwidth):
    """Send gradients in one message if they all have room, else in three."""
    psi = sum(a * b + b for a, b in pairwise(widths))
    stage, micro, bucket = (1, 2, psi) if rows > 16 else (2, rows, psi if budget > 17 * psi else psi * 3 // 8)
    owners = {"use_multi_rank_bucket_allreduce": False, "overlap_comm": False}
    return {MICRO: micro, "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, **owners}}


# ---- 15 --------------------------------------------------------------------------------------------------


def five_questions(setup, ask):
    """Ask for the first five layouts, each on another mesh, that should fit, in the order of a rough plan."""
    room, asked = 0.9 * setup.cluster.card, {}
    layouts = (each for each in plan.layouts(setup) if isinstance(each, plan.Layout))
    fits = [layout for layout in layouts if rough_bytes(setup, layout) < room]
    for layout in sorted(fits, key=partial(rough_seconds, setup)):
        mesh = layout.tp, layout.pp, layout.zero
        if mesh not in asked and len(asked) < 5:
            asked[mesh] = ask(layout)
    fitting = [each for each in asked.values() if each.peak <= setup.cluster.card]
    return min(fitting, key=lambda each: each.seconds).layout


def numbers(config):
    return config.depth * cost.layer_matrices(config) + 2 * config.vocab * config.dim


def rough_seconds(setup, layout):
    """Return a forecast as in exercise 4, with ZeRO, recomputing and a pipeline's schedules."""
    config, cluster, tp, m, dp = setup.config, setup.cluster, layout.tp, layout.accumulation, layout.dp
    tokens, layers = layout.batch * setup.context, config.depth / layout.pp

    def ring(nbytes, ranks, apart):  # an all-gather, or a reduce-scatter
        fast = ranks * apart <= cluster.node
        outer = min(cluster.inside, max(1, cluster.node // apart) * cluster.between)
        return (ranks - 1) / ranks * nbytes / (cluster.inside if fast else outer)

    again = {"none": 1, "selective": 1.05}.get(layout.recompute, 1.33)
    compute = again * 6 * layers * cost.layer_matrices(config) * tokens / tp / (0.55 * cluster.flops)
    each = compute + layers * 4 * 2 * ring(2 * tokens * config.dim, tp, 1)
    bubble = {"zb1p": 0.4, "zbv": 0.25, "dualpipev": 0.2}.get(layout.schedule, 1 / layout.stages_per_rank)
    share = numbers(config) / tp / layout.pp
    half = ring(4 * share, dp, tp)
    if layout.zero == 3:
        replicas = 2 * ring(4 * share / layout.shards, layout.replicas, tp * layout.shards)
        waits = max(0, m * ring(8 * share, layout.shards, tp) + replicas - 0.8 * m * compute)
    elif layout.zero:
        waits = ring(2 * share, dp, tp) + (m if layout.zero == 2 else 1) * max(0, half - 0.6 * compute)
    else:
        waits = max(0, 2 * half - 0.6 * compute)
    return (m + bubble * (layout.pp - 1)) * each + waits


def rough_bytes(setup, layout):
    """Return the bytes as in exercise 2, with logits."""
    config, tp, pp, shards = setup.config, layout.tp, layout.pp, layout.shards
    share = numbers(config) / tp / pp
    state = share * sum(n / (shards if layout.zero >= stage else 1) for n, stage in ((12, 1), (4, 2), (2, 3)))
    kept = layout.batch * config.depth / pp * of_a_layer(config, setup.context, layout.recompute)
    kept /= tp if layout.sequence_parallel or layout.recompute == "full" else (tp + 1) / 2
    return state + min(pp, layout.accumulation) * kept + 14 * layout.batch * setup.context * config.vocab / tp + 1e9


@cache
def of_a_layer(config, context, recompute):
    return cost.regathered_activations(
        cost.Job(config, 1, context=context, precision="mixed", fused_norms=True), recompute
    )


# ---- 16 --------------------------------------------------------------------------------------------------

KINDS = {
    "no end": "rank missing",
    "tokens": "data of another",
    "norm": "norm of a shard",
    "parameters": "not updated",
    "resumed": "cast",
    "next tokens": "first epoch again",
    "a mixture": "left out",
    "no mixture": "other seed",
    "right": "narrow",
}


def unknown_bug(visit):
    """Read an instrument only where it decides, and first the one that leaves the fewest programs together."""
    if (wrong := visit.read("numbers")) == "gradient":
        made = visit.read("gradients")
        broadcast = made == "nothing synchronised" and visit.read("sent") == "more sent"
        return "one rank's gradient everywhere" if broadcast else KINDS.get(made, made)
    if wrong != "right":
        return KINDS[wrong]
    if visit.read("sent") == "more sent":
        return "reduced again"
    if visit.read("held") == "more held":
        return "kept"
    return "two orders" if visit.read("time") == "right" else "waits at once"
