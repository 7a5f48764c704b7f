"""Answers that reach the floor, and wrong ones that score nothing.  The ranks import this file."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from labs import collectives, ddp, plan, pp
from labs.cp import contiguous, striped
from labs.deepspeed.configuration import MICRO, from_fsdp, like_zero
from labs.memory import recompute
from labs.memory.selective import ATTENTION
from labs.model import Layer
from labs.tp.conjugate import gather, scatter
from tests.exercises.engine import better


def untouched(*arguments):
    raise NotImplementedError("your turn")


# ---- 02 --------------------------------------------------------------------------------------------------


def ring(x, latency, bandwidth):
    collectives.all_reduce(x)


def nothing(x, latency, bandwidth):
    pass


# ---- 03 --------------------------------------------------------------------------------------------------


def one_for_each(nbytes, *seconds):
    return [[layer] for layer in reversed(range(len(nbytes)))]


def one_is_missing(nbytes, *seconds):
    return [list(range(1, len(nbytes)))]


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


def too_large(*given):
    return trained(ddp.Overlapped, *given, depth=20)


# ---- 05 --------------------------------------------------------------------------------------------------


def straight(spec, target):
    return [target]


def elsewhere(spec, target):
    return [spec.placements]


# ---- 06 --------------------------------------------------------------------------------------------------


def when_needed(nbytes, *given):
    uses = [("forward", layer) for layer in range(len(nbytes))]
    uses += [("backward", layer) for layer in reversed(range(len(nbytes)))]
    return [each for what, layer in uses for each in (("gather", layer), (what, layer), ("drop", layer))]


def all_at_once(nbytes, *given):
    layers = range(len(nbytes))
    uses = [each for each in when_needed(nbytes) if each[0] in ("forward", "backward")]
    return [*(("gather", layer) for layer in layers), *uses, *(("drop", layer) for layer in layers)]


# ---- 07 --------------------------------------------------------------------------------------------------


def all_but_attention(model, most):
    recompute.recompute(model.layers.values(), keep=ATTENTION)


def without_dropout(model, most):
    """Recompute layers as the course's GPT has them, even where the model's are others, with dropout."""
    for layer in model.layers.values():
        layer.forward = partial(recompute.checkpoint, partial(Layer.forward, layer))


# ---- 07b -------------------------------------------------------------------------------------------------


def one_by_one(nbytes, *given):
    layers = [*reversed(range(len(nbytes)))] * 2
    return [(what, layer) for layer in layers for what in ("read", "update", "write")]


def all_in_memory(nbytes, *given):
    layers = [*reversed(range(len(nbytes)))]
    ways = ("read", layers), ("update", layers), ("update", layers), ("write", layers)
    return [(what, layer) for what, due in ways for layer in due]


# ---- 08 --------------------------------------------------------------------------------------------------


def written_by_the_first(disk, step, mine, tensors, memo, same_file=False):
    """Write each tensor on the first rank that has it."""
    rank, writer = dist.get_rank(), {name: ranks[0] for name, (_, ranks) in tensors.items()}

    def file(rank, step=step):
        return f"rank {rank}" if same_file else f"step {step}, rank {rank}"

    disk.write(file(rank), {(name, 0): x for name, x in mine.items() if writer[name] == rank})
    disk.flush(file(rank))
    disk.meet()
    if rank == 0:
        disk.write("draft", {(name, 0): file(whose) for name, whose in writer.items()})
        disk.flush("draft")
        disk.rename("draft", "index")
        disk.flush_names()
    disk.meet()
    if step and not same_file:
        disk.remove(file(rank, step - 1))


over_the_last = partial(written_by_the_first, same_file=True)


# ---- 09b -------------------------------------------------------------------------------------------------


def in_one_group(x, up, down, mesh):
    every = mesh._flatten()
    return scatter(F.silu(gather(x, every, 0) @ up) @ down, every, 0)


def own_features(x, up, down, mesh):
    return F.silu(x @ up) @ down


# ---- 10 --------------------------------------------------------------------------------------------------


def zero_bubble(ranks, microbatches, *costs):
    return pp.zb1p(ranks, microbatches, 2)


def without_a_limit(ranks, microbatches, *costs):
    return pp.interleaved(ranks, microbatches, 2)


# ---- 11 --------------------------------------------------------------------------------------------------


def as_in_the_notebook(*case):
    return {"pp": 2, "shard": 2, "tp": 2}


def a_copy_on_each_rank(*case):
    return {"replicate": 8}


# ---- 12 --------------------------------------------------------------------------------------------------


def every_fourth(lengths, ranks, *most):
    return striped(sum(lengths), ranks)


def one_after_the_other(lengths, ranks, *most):
    return contiguous(sum(lengths), ranks)


# ---- 12b -------------------------------------------------------------------------------------------------


def side_by_side(loads, ranks):
    return [expert * ranks // len(loads[0]) for expert in range(len(loads[0]))]


def the_busiest_alone(loads, ranks):
    return [0, *[1 + expert % 3 for expert in range(15)]]


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


def one_question_too_many(setup, ask):
    return max(ask(sharded(setup)) for _ in range(6)).layout


# ---- 16 --------------------------------------------------------------------------------------------------


class Free:
    """The readings of a visit, which are all made at once, and then cost nothing."""

    def __init__(self, visit):
        names = "numbers", "gradients", "sent", "held", "time", "verdict"
        self.read = {name: visit.read(name) for name in names}.__getitem__


def all_instruments(visit):
    return better.unknown_bug(Free(visit))


def one_guess(visit):
    return "kept" if visit.read("held") == "more held" else "cast"
