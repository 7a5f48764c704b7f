"""Answers to clip (04): by the norm of all ranks' shards."""

import math

import torch
import torch.distributed as dist
from torch import nn

from labs import clip
from labs.group import all_gather
from tests.answers import Exercise

# fmt: off
answers = Exercise("clip")
LINE = "you sent {} bytes per rank at most, whatever the number of parameters; one number is enough"


def gradients(shards):
    return [shard.grad for shard in shards if shard.grad is not None]


def squares_of(shards, dtype=torch.float64):
    total = torch.zeros((), dtype=dtype)
    for g in gradients(shards):
        total += g.to(dtype).square().sum()
    return total


def scale(shards, factor):
    for g in gradients(shards):
        g.mul_(factor)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def usual(shards, max_norm):
    total = squares_of(shards)
    dist.all_reduce(total)
    norm = total.sqrt()
    scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@answers.right(line=LINE.format(16))
def as_the_course(shards, max_norm):
    return clip.clip_gradients(shards, max_norm, (None,))


@answers.right(line=LINE.format(8))
def with_numbers(shards, max_norm):
    squares = torch.tensor([sum((float((s.grad.float() ** 2).sum()) for s in shards if s.grad is not None), 0.0)])
    dist.all_reduce(squares)
    norm = squares.item() ** 0.5
    if norm > max_norm:
        for shard in shards:
            if shard.grad is not None:
                shard.grad *= max_norm / norm
    return norm


@answers.right(line=LINE.format(24))
def by_gathered_norms(shards, max_norm):
    own = [s.grad.float() for s in shards if s.grad is not None]
    mine = torch.nn.utils.get_total_norm(own).double().view(1)
    norms = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, mine)
    norm = torch.cat(norms).norm()
    torch.nn.utils.clip_grads_with_norm_(shards, max_norm, norm)
    return norm


@answers.right(blind=True)
def cl_all_gather(shards, max_norm):
    mine = squares_of(shards).reshape(1)
    everyones = mine.new_empty(dist.get_world_size())
    all_gather(everyones, mine)
    norm = float(everyones.sum().sqrt())
    if norm > max_norm:
        for shard in shards:
            if shard.grad is not None:
                shard.grad.copy_(shard.grad.double() * (max_norm / norm))
    return norm


@answers.right(blind=True)
def cl_norm_of_norms(shards, max_norm):
    norms = [torch.linalg.vector_norm(s.grad, dtype=torch.float64) for s in shards if s.grad is not None]
    mine = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0, dtype=torch.float64)
    total = (mine**2).clone()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
    scale(shards, factor)
    return norm


@answers.right(blind=True)
def cl_foreach(shards, max_norm):
    own = gradients(shards)
    total = torch.tensor([sum(float((g.float() ** 2).sum()) for g in own)], dtype=torch.float64)
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if own:
        torch._foreach_mul_(own, min(1.0, max_norm / (norm + 1e-12)))
    return norm


# ---- wrong: the norm -------------------------------------------------------------------------------------

SUM = "dist.all_reduce(total)"
SQUARES = "total = squares_of(shards)"
ROOT = "norm = total.sqrt()"
FACTOR = "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
SCALED = f"scale(shards, {FACTOR})"
OWN = "the norm of one rank's shards only"

spoil = answers.slips(usual)
spoil(OWN, SUM, "pass", blind=True)
spoil("clipped by the norm of each shard", SCALED,
    "[g.mul_(min(1, max_norm / float(g.norm() + 1e-6))) for g in gradients(shards)]")
spoil("norms are added, and not their squares",
    {SUM: "total = total.sqrt()\n    dist.all_reduce(total)",
     ROOT: "norm = total"}, blind=True)
spoil("the norms of all shards are added",
    {SQUARES: "total = sum(g.double().norm() for g in gradients(shards))",
     ROOT: "norm = total"})
spoil("the root is missing", ROOT, "norm = total", blind=True)
spoil("the squares are averaged over the ranks", ROOT, "norm = (total / dist.get_world_size()).sqrt()", blind=True)
spoil("",
    {SUM: "total = total.sqrt()\n    dist.all_reduce(total, op=dist.ReduceOp.MAX)",
     ROOT: "norm = total"}, blind=True)
spoil("", SUM, "dist.broadcast(total, 0)", long=True)
spoil("", SQUARES, "total = squares_of(shards[1:])", long=True)
spoil("",
    {SQUARES: "total = 0",
     SUM: "for g in gradients(shards):\n        total = total + g.double().square().sum()\n"
         "        dist.all_reduce(total)"}, long=True, alone=True)
spoil("rounded on the way", SQUARES,
    "total = torch.cat([torch.zeros(0, dtype=shards[0].dtype), *gradients(shards)]).square().sum().double()")
spoil("rounded on the way", SQUARES,
    "total = torch.zeros((), dtype=shards[0].dtype)\n    for g in gradients(shards):\n"
    "        total += g.square().sum().to(total.dtype)", blind=True)
spoil("", {SQUARES: "total = squares_of(shards).bfloat16()", ROOT: "norm = total.float().sqrt()"}, blind=True)
spoil("nobody waited", SUM, "dist.all_reduce(total, async_op=True)")
spoil("more than one number travels",
    {SQUARES: "total = torch.stack([squares_of([shard]) for shard in shards])",
     ROOT: "norm = total.sum().sqrt()"}, blind=True)
spoil("",
    {SQUARES: "parts = [squares_of([shard]) for shard in shards]",
     SUM: "[dist.all_reduce(part) for part in parts]",
     ROOT: "norm = sum(parts).sqrt()"}, blind=True)
spoil("", SQUARES, "if not gradients(shards):\n        return 0.0\n    total = squares_of(shards)", blind=True,
    alone=True)
spoil("", SQUARES, "total = sum(shard.grad.double().square().sum() for shard in shards)", blind=True, alone=True)

# ---- wrong: what is scaled, and by how much --------------------------------------------------------------

spoil("small gradients are made larger", ".clamp(max=1.0)", "", blind=True)
spoil("nothing is clipped", SCALED, f"for g in gradients(shards):\n        g = g * {FACTOR}")
spoil("scaled twice", SCALED, f"{SCALED}\n    {SCALED}")
spoil("zero divided by zero", "(max_norm / (norm + 1e-6))", "(max_norm * (norm / norm) / norm)")
spoil("", {ROOT: "norm = total.item() ** 0.5", FACTOR: "min(1.0, max_norm / norm)"}, blind=True, alone=True)
spoil("None is not None any more", SQUARES,
    "for shard in shards:\n"
    f"        shard.grad = torch.zeros_like(shard) if shard.grad is None else shard.grad\n    {SQUARES}")
spoil("not in place", SCALED,
    "for shard in shards:\n        if shard.grad is not None:\n"
    f"            shard.grad = (shard.grad * {FACTOR}).to(shard.dtype)", blind=True)
spoil("the direction has changed", SCALED,
    "bound = max_norm / float(norm + 1e-6) * max([float(g.abs().max()) for g in gradients(shards)])\n"
    "    [g.clamp_(-bound, bound) for g in gradients(shards)]", alone=True)
spoil("", SCALED, "[g.clamp_(-max_norm, max_norm) for g in gradients(shards)]", blind=True)
spoil("the parameters have changed", SCALED, f"for shard in shards:\n        shard.data.mul_({FACTOR})", blind=True)
spoil("", SCALED, f"scale(shards[:1], {FACTOR})", blind=True)
spoil("", SCALED, f"if dist.get_rank() == 0:\n        {SCALED}", long=True)
spoil("", "norm + 1e-6", "norm + 1", long=True)
spoil("", "max_norm / (norm", "max_norm / dist.get_world_size() / (norm", long=True)

# ---- wrong: what is returned -----------------------------------------------------------------------------

spoil("nothing is returned", "return norm", "pass")
spoil("the norm after clipping", "return norm", "return min(float(norm), max_norm)", blind=True)
spoil(OWN, {SQUARES: "total = squares_of(shards)\n    own = total.sqrt()", "return norm": "return own"})


@answers.wrong(OWN, blind=True)
def cl_torch_on_each(shards, max_norm):
    return nn.utils.clip_grad_norm_(shards, max_norm)


@answers.wrong("clipped by the norm of each layer")
def each_layer(shards, max_norm):
    total = squares_of(shards)
    dist.all_reduce(total)
    for shard in shards:
        if shard.grad is not None:
            usual([shard], max_norm)
    return total.sqrt()


@answers.wrong("the gradients travel")
def after_gathering(shards, max_norm):
    mine = torch.cat(gradients(shards))
    everything = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype)
    all_gather(everything, mine)
    norm = everything.double().norm()
    scale(shards, min(1.0, max_norm / (float(norm) + 1e-6)))
    return norm


@answers.wrong("the gradients travel", blind=True)
def cl_everything(shards, max_norm):
    mine = torch.cat([(torch.zeros_like(s) if s.grad is None else s.grad).detach().flatten().double() for s in shards])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    norm = torch.cat(everyones).norm()
    scale(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
