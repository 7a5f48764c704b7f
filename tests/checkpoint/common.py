"""Shared code of the tests of labs.checkpoint: a small GPT in every layout, and the numbers that a rank holds."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs import fsdp, native, pp, tp
from labs.checkpoint import Held, HeldByZero
from labs.cp import context_parallel
from labs.memory.precision import Masters
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.parallel import AXES, Parallel
from labs.zero import Zero

CONFIG = Config(vocab=13, dim=12, depth=3, heads=2, kv_heads=2, hidden=10, context=6)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Extras(GPT):
    """A GPT with a frozen parameter and with two kinds of buffer."""

    def __init__(self, config, seed):
        super().__init__(config, seed=seed)
        self.norm.register_buffer("seen", torch.full((3,), float(seed)))
        self.norm.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.layers["0"].attention_norm.weight.requires_grad_(False)


def optimizer_of(model):
    return partial(Masters, optimizer=ADAMW) if next(model.parameters()).dtype == torch.bfloat16 else ADAMW


def alone(model):
    optimizer = optimizer_of(model)(p for p in model.parameters() if p.requires_grad)
    return Held(model, optimizer=optimizer), model, optimizer


def in_vectors(stage, model):
    zero = Zero(model, stage, optimizer_of(model))
    return HeldByZero(zero), model, zero


def sharded(model, mesh):
    for layer in model.layers.values():
        fsdp.fully_shard(layer, mesh=mesh)
    return alone(fsdp.fully_shard(model, mesh=mesh))


def sharded_by_pytorch(model, mesh):
    return alone(native.fsdp(model, [*model.layers.values()], native.device_mesh(mesh)))


def split(model, mesh):
    return alone(tp.parallelize(model, mesh, tp.gpt_plan(model.config)))


def cut_and_sharded(shape, model):
    mesh = Mesh(shape, ("dp", "cp"))
    context_parallel(model, mesh.get_group("cp"))
    return sharded(model, mesh._flatten())


def split_and_sharded(model):
    mesh = Mesh((2, 2), ("dp", "tp"))
    tp.parallelize(model, mesh["tp"], tp.gpt_plan(model.config))
    return sharded(model, mesh["dp"])


def in_stages(model):
    ranks = dist.get_world_size()
    pipeline = pp.Pipeline(pp.cut(model, ranks), pp.one_f_one_b(ranks, 2), model.loss)
    optimizer = optimizer_of(model)(p for p in pipeline.parameters() if p.requires_grad)
    return Held(*pipeline.stages.values(), optimizer=optimizer), pipeline.forward_backward, optimizer


def on_a_mesh(shape, model, axes=AXES):
    mesh, lists, make = Mesh(shape, axes), pp.one_f_one_b(2, 2), optimizer_of(model)
    parallel = Parallel(pp.cut(model, 2), lists, mesh, tp.gpt_plan(model.config))
    optimizer = make(p for p in parallel.parameters() if p.requires_grad)
    return Held(*parallel.stages.values(), optimizer=optimizer), parallel.forward_backward, optimizer


LAYOUTS = {  # the number of ranks, and the function that lays a model out on them
    "one": (1, alone),
    "ddp": (4, alone),
    "zero-1": (3, partial(in_vectors, 1)),
    "zero-2": (2, partial(in_vectors, 2)),
    "zero-3": (4, partial(in_vectors, 3)),
    "fsdp": (3, lambda model: sharded(model, Mesh((3,), ("dp",)))),
    "hsdp": (4, lambda model: sharded(model, Mesh((2, 2), ("replicas", "shards")))),
    "torch-fsdp": (3, lambda model: sharded_by_pytorch(model, Mesh((3,), ("dp",)))),
    "torch-hsdp": (4, lambda model: sharded_by_pytorch(model, Mesh((2, 2), ("replicas", "shards")))),
    "tp": (2, lambda model: split(model, Mesh((2,), ("tp",)))),
    "fsdp-tp": (4, split_and_sharded),
    "cp-3": (3, partial(cut_and_sharded, (1, 3))),
    "cp-4": (4, partial(cut_and_sharded, (1, 4))),
    "fsdp-cp": (4, partial(cut_and_sharded, (2, 2))),
    "pp": (3, in_stages),
    "pp-fsdp": (4, partial(on_a_mesh, (2, 1, 2, 1))),
    "pp-cp": (4, partial(on_a_mesh, (2, 1, 1, 2, 1), axes=(*AXES[:3], "cp", "tp"))),
    "pp-fsdp-tp": (8, partial(on_a_mesh, (2, 1, 2, 2))),
}


def steps(forward, optimizer, first, last):
    for step in range(first, last):
        torch.manual_seed(step)
        loss = forward(*torch.randint(0, CONFIG.vocab, (2, 4, CONFIG.context)))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def blocks(held):
    return {(key, block): x for key, part in held.parts().items() for block, x in part.blocks.items()}


def numbers(held):
    return {place: x.clone() for place, x in blocks(held).items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[place], x) for place, x in expected.items())


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def words_of(do):
    try:
        do()
    except (ValueError, OSError) as error:
        return str(error)
