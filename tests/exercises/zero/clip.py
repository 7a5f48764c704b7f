"""Answers to clip (04): by the norm of all ranks' shards."""

import torch
import torch.distributed as dist

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


# ---- wrong: the norm -------------------------------------------------------------------------------------

SUM = "dist.all_reduce(total)"
SQUARES = "total = squares_of(shards)"
ROOT = "norm = total.sqrt()"
FACTOR = "(max_norm / (norm + 1e-6)).clamp(max=1.0)"
SCALED = f"scale(shards, {FACTOR})"
OWN = "the norm of one rank's shards only"

spoil = answers.slips(usual)
spoil(OWN, SUM, "pass")
spoil("norms are added, and not their squares",
    {SUM: "total = total.sqrt()\n    dist.all_reduce(total)",
     ROOT: "norm = total"})
spoil("the root is missing", ROOT, "norm = total")
spoil("the squares are averaged over the ranks", ROOT, "norm = (total / dist.get_world_size()).sqrt()")
spoil("more than one number travels",
    {SQUARES: "total = torch.stack([squares_of([shard]) for shard in shards])",
     ROOT: "norm = total.sum().sqrt()"})

# ---- wrong: what is scaled, and by how much --------------------------------------------------------------

spoil("nothing is clipped", SCALED, f"for g in gradients(shards):\n        g = g * {FACTOR}")
spoil("small gradients are made larger", ".clamp(max=1.0)", "")
spoil("zero divided by zero", "(max_norm / (norm + 1e-6))", "(max_norm * (norm / norm) / norm)")
spoil("None is not None any more", SQUARES,
    "for shard in shards:\n"
    f"        shard.grad = torch.zeros_like(shard) if shard.grad is None else shard.grad\n    {SQUARES}")
spoil("not in place", SCALED,
    "for shard in shards:\n        if shard.grad is not None:\n"
    f"            shard.grad = (shard.grad * {FACTOR}).to(shard.dtype)")
spoil("the direction has changed", SCALED,
    "bound = max_norm / float(norm + 1e-6) * max([float(g.abs().max()) for g in gradients(shards)])\n"
    "    [g.clamp_(-bound, bound) for g in gradients(shards)]", alone=True)
spoil("the parameters have changed", SCALED, f"for shard in shards:\n        shard.data.mul_({FACTOR})")

# ---- wrong: what is returned -----------------------------------------------------------------------------

spoil("the norm after clipping", "return norm", "return min(float(norm), max_norm)")


@answers.wrong("the gradients travel")
def after_gathering(shards, max_norm):
    mine = torch.cat(gradients(shards))
    everything = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype)
    all_gather(everything, mine)
    norm = everything.double().norm()
    scale(shards, min(1.0, max_norm / (float(norm) + 1e-6)))
    return norm
