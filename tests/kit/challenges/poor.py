"""Answers that reach the floor, and answers that score nothing: wrong ones, and cheats.  The ranks import this file."""

import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labs import collectives, ddp, plan, pp
from labs.deepspeed.configuration import MICRO, from_fsdp, like_zero
from labs.dtensor import Replicate, Shard, redistribute
from labs.kit.watch import tap
from labs.memory import recompute
from labs.memory.selective import ATTENTION
from labs.model import Layer
from labs.tp.conjugate import gather, scatter


def untouched(*arguments):
    raise NotImplementedError("your turn")


# ---- 02 --------------------------------------------------------------------------------------------------


def ring(x, latency, bandwidth):
    collectives.all_reduce(x)


def nothing(x, latency, bandwidth):
    pass


def torchs_own(x, latency, bandwidth):
    dist.all_reduce(x)


def without_the_recorder(x, latency, bandwidth):
    listeners, tap.listeners[:] = tap.listeners[:], []
    collectives.all_reduce(x)
    tap.listeners[:] = listeners


def with_another_clock(x, latency, bandwidth):
    time.monotonic_ns = lambda: 0
    collectives.all_reduce(x)


def with_another_send(x, latency, bandwidth):
    dist.isend = lambda *message, **group: None
    collectives.all_reduce(x)


def in_float32(x, latency, bandwidth):
    mine = x.float()
    collectives.all_reduce(mine)
    x.copy_(mine)


def through_the_store(x, latency, bandwidth):
    """All-reduce through the store, with messages whose content nobody reads."""
    given = in_the_store(x)
    collectives.all_reduce(x)
    x.copy_(sum(given))


def in_the_store(x):
    """Return all ranks' x."""
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    in_the_store.calls = call = getattr(in_the_store, "calls", 0) + 1
    store.set(f"{call} {rank}", x.numpy().tobytes())
    given = [store.get(f"{call} {other}") for other in range(ranks)]
    return [torch.frombuffer(bytearray(each), dtype=x.dtype).view_as(x) for each in given]


def with_torchs_operators(x, latency, bandwidth):
    group, rank, ranks = dist.group.WORLD.boxed(), dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    works = [torch.ops.c10d.send([x], group, (rank + 1) % ranks, 0)]
    works += [torch.ops.c10d.recv_([received], group, (rank - 1) % ranks, 0)]
    for work in works:
        dist.Work.unbox(work).wait()
    collectives.all_reduce(x)


def without_waiting(x, latency, bandwidth):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, received = x.clone(), [torch.full_like(x, torch.nan) for _ in range(ranks - 1)]
    others = [other for other in range(ranks) if other != rank]
    works = [dist.isend(mine, other) for other in others]
    works += [dist.irecv(each, other) for each, other in zip(received, others, strict=True)]
    while any(bool(each.isnan().any()) for each in received):
        time.sleep(0.01)
    for each in received:
        x += each
    for work in works:
        work.wait()


# ---- 03 --------------------------------------------------------------------------------------------------


def one_for_each(nbytes, *seconds):
    return [[layer] for layer in reversed(range(len(nbytes)))]


def one_is_missing(nbytes, *seconds):
    return [list(range(1, len(nbytes)))]


def another_on_each_rank(nbytes, *seconds):
    layers = list(range(len(nbytes)))
    return [layers] if dist.get_rank() else [layers[:1], layers[1:]]


def a_number(*given):
    return 3


def without_an_end(*given):
    while True:
        pass


# ---- 04 --------------------------------------------------------------------------------------------------


def trained(wrap, make, batches, settings, width=128, depth=12, scale=1):
    model = wrap(make(width, depth))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y) * scale
        loss.backward()
        if wrap is ddp.Overlapped:
            model.sync()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def copies(*given):
    return trained(ddp.Overlapped, *given)


def nobody_averages(*given):
    return trained(lambda model: model, *given, width=8, depth=1)


def too_large(*given):
    return trained(ddp.Overlapped, *given, depth=20)


def too_large_after_the_last_batch(make, batches, settings):
    return too_large(make, list(batches), settings)


def too_large_until_the_last_batch(make, batches, settings):
    """Train without sharding, and skip the last update, whose result nobody sees."""
    model, losses = ddp.Overlapped(make(128, 20)), []
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for step, (x, y) in enumerate(batches):
        if step == 2:
            del optimizer
        with torch.set_grad_enabled(step < 2):
            loss = F.mse_loss(model(x), y)
        if step < 2:
            loss.backward()
            model.sync()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def no_losses(make, batches, settings):
    return [0.0] * len(list(batches))


# ---- 05 --------------------------------------------------------------------------------------------------


def straight(spec, target):
    return [target]


def elsewhere(spec, target):
    return [spec.placements]


def zeros(local, line, source, target):
    return local.new_zeros(line.shape)


def with_other_numbers(spec, target):
    """Replace a gather by zeros, so that nothing is sent."""
    redistribute.MOVES[Shard, Replicate] = replace(redistribute.MOVES[Shard, Replicate], move=zeros)
    return [target]


# ---- 06 --------------------------------------------------------------------------------------------------


def when_needed(nbytes, *given):
    uses = [("forward", layer) for layer in range(len(nbytes))]
    uses += [("backward", layer) for layer in reversed(range(len(nbytes)))]
    return [each for what, layer in uses for each in (("gather", layer), (what, layer), ("drop", layer))]


def all_at_once(nbytes, *given):
    layers = range(len(nbytes))
    uses = [each for each in when_needed(nbytes) if each[0] in ("forward", "backward")]
    return [*(("gather", layer) for layer in layers), *uses, *(("drop", layer) for layer in layers)]


def without_a_drop(*given):
    return [each for each in when_needed(*given) if each != ("drop", 3)]


def without_a_gather(*given):
    return when_needed(*given)[1:]


def without_the_last(*given):
    return when_needed(*given)[:-3]


# ---- 07 --------------------------------------------------------------------------------------------------


def all_but_attention(model, most):
    recompute.recompute(model.layers.values(), keep=ATTENTION)


def as_it_was(model, most):
    pass


def another_model(model, most):
    model.layers["3"].forward = lambda x_BTD: x_BTD


def without_dropout(model, most):
    """Replace the forward of the course's GPT, whatever its layers are."""
    for layer in model.layers.values():
        layer.forward = partial(recompute.checkpoint, partial(Layer.forward, layer))


def with_numpys_products(model, most):
    recompute.recompute(model.layers.values())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(NumPysProduct.apply, module.weight)


class NumPysProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(weight, x)
        return torch.from_numpy(x.numpy(force=True) @ weight.numpy(force=True).T)

    @staticmethod
    def backward(ctx, gradient):
        weight, x = ctx.saved_tensors
        return gradient.flatten(0, -2).T @ x.flatten(0, -2), gradient @ weight


# ---- 07b -------------------------------------------------------------------------------------------------


def one_by_one(nbytes, *given):
    layers = [*reversed(range(len(nbytes)))] * 2
    return [(what, layer) for layer in layers for what in ("read", "update", "write")]


def all_in_memory(nbytes, *given):
    layers = [*reversed(range(len(nbytes)))]
    ways = ("read", layers), ("update", layers), ("update", layers), ("write", layers)
    return [(what, layer) for what, due in ways for layer in due]


def only_one_step(nbytes, *given):
    return one_by_one(nbytes)[: 3 * len(nbytes)]


def a_step_ahead(*given):
    return [each for each in one_by_one(*given) for _ in range(1 + (each[0] == "update"))]


def not_read(*given):
    return one_by_one(*given)[1:]


# ---- 08 --------------------------------------------------------------------------------------------------


def written_by_the_first(disk, step, mine, tensors, memo, *, leave=None, same_file=False, meet=True, remove_now=False):
    """Let the first rank that has a tensor write it.  leave: the call that is left out"""
    rank, writer = dist.get_rank(), {name: ranks[0] for name, (_, ranks) in tensors.items()}

    def file(rank, step=step):
        return f"rank {rank}" if same_file else f"step {step}, rank {rank}"

    def call(what, *given):
        if what != leave:
            getattr(disk, what)(*given)

    disk.write(file(rank), {(name, 0): x for name, x in mine.items() if writer[name] == rank})
    disk.flush(file(rank))
    if meet:
        disk.meet()
    if step and remove_now:
        disk.remove(file(rank, step - 1))
    if rank == 0:
        disk.write("draft", {(name, 0): file(whose) for name, whose in writer.items()})
        disk.flush("draft")
        disk.rename("draft", "index")
        call("flush_names")
    disk.meet()
    if step and not same_file and not remove_now:
        call("remove", file(rank, step - 1))


over_the_last = partial(written_by_the_first, same_file=True)
without_a_meeting = partial(written_by_the_first, meet=False)
names_are_late = partial(written_by_the_first, leave="flush_names")
removed_too_early = partial(written_by_the_first, remove_now=True)
never_removed = partial(written_by_the_first, leave="remove")


def an_index_of_each(disk, step, mine, tensors, memo):
    disk.write("index", {(name, 0): "index" for name in tensors})


def nothing_has_changed(disk, step, mine, tensors, memo):
    if memo.setdefault("last", mine) is mine:
        written_by_the_first(disk, step, mine, tensors, memo)


def in_half_the_bytes(disk, step, mine, tensors, memo):
    written_by_the_first(disk, step, {name: x.float() for name, x in mine.items()}, tensors, memo)


# ---- 09b -------------------------------------------------------------------------------------------------


def in_one_group(x, up, down, mesh):
    every = mesh._flatten()
    return scatter(F.silu(gather(x, every, 0) @ up) @ down, every, 0)


def own_features(x, up, down, mesh):
    return F.silu(x @ up) @ down


def short_numbers(x, up, down, mesh):
    return in_one_group(x.float(), up.float(), down.float(), mesh).double()


def of_all_tokens(x, up, down, mesh):
    return gather(in_one_group(x, up, down, mesh), mesh._flatten(), 0)


def with_y_from_the_store(x, up, down, mesh):
    up_all, down_all = (torch.cat(in_the_store(each.detach()), dim) for each, dim in ((up, 1), (down, 0)))
    y = F.silu(x.detach() @ up_all) @ down_all
    rough = in_one_group(x, up, down, mesh)
    return rough + (y - rough.detach())


def with_y_in_backward(x, up, down, mesh):
    y = in_one_group(x, up, down, mesh)
    right = y.detach().clone()

    def fill_in(gradient):
        y.data.copy_(right)

    y.register_hook(fill_in)
    y.data.zero_()
    return y


# ---- 10 --------------------------------------------------------------------------------------------------


def zero_bubble(ranks, microbatches, *costs):
    return pp.zb1p(ranks, microbatches, 2)


def without_a_limit(ranks, microbatches, *costs):
    return pp.interleaved(ranks, microbatches, 2)


def only_half(ranks, microbatches, *costs):
    return pp.zb1p(ranks, microbatches // 2, 2)


def without_a_backward(ranks, microbatches, *costs):
    return [order[:-1] for order in pp.zb1p(ranks, microbatches, 2)]


# ---- 11 --------------------------------------------------------------------------------------------------


def as_in_the_notebook(*case):
    return {"pp": 2, "shard": 2, "tp": 2}


def a_copy_on_each_rank(*case):
    return {"replicate": 8}


def another_mesh_on_each_rank(*case):
    return {"tp": 2, "shard": 4} if dist.get_rank() else {"shard": 4, "tp": 2}


# ---- 13 --------------------------------------------------------------------------------------------------

ROWS, WHOLE = ("abc", ""), ("", "")


def as_fsdp(tokens, width, kept=ROWS, used=WHOLE, layers=2):
    return [(kept, used)] * layers, [(ROWS, ROWS)] * 3


# ---- 14 --------------------------------------------------------------------------------------------------


def as_stage_3(widths, rows, *given):
    zero = from_fsdp(reshard_after_forward=False)["zero_optimization"] | {"reduce_bucket_size": 1500}
    return {MICRO: min(rows, 16), "zero_optimization": zero}


def as_stage_2(widths, rows, *given):
    return {MICRO: rows, "zero_optimization": like_zero(2)["zero_optimization"]}


# ---- 15 --------------------------------------------------------------------------------------------------


def sharded(setup, **but):
    gpus = setup.cluster.gpus
    return plan.Layout(shards=gpus, zero=3, accumulation=setup.batch // gpus)._replace(**but)


def fully_sharded(setup, ask):
    return sharded(setup, recompute="full")


def with_all_kept(setup, ask):
    return sharded(setup)


def on_half_of_the_cluster(setup, ask):
    return sharded(setup, shards=8)


def a_plan(setup, ask):
    return ask(sharded(setup))


def one_question_too_many(setup, ask):
    return max(ask(sharded(setup)) for _ in range(6)).layout


def all_in_the_plan(setup, ask):
    return plan.search(setup.config, setup.cluster, setup.batch, setup.context).best.layout
