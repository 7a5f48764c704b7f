"""Reference: one process on the whole batch, in float64."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from labs import pp, tp
from labs.agree import everybodys
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.model import GPT
from labs.parallel import AXES, Parallel
from tests.pp.trainings import SMALL, batch

SMALL = replace(SMALL, depth=4)
STEPS, SIZE = 2, 8


def parallel(config, mesh, schedule="1f1b", sequence=False, stages=1, microbatches=2):
    ranks, model = mesh.size("pp"), GPT(config).double()
    lists = pp.SCHEDULES[schedule](ranks, microbatches * ranks // 2 or 1)
    return Parallel(pp.cut(model, stages * ranks), lists, mesh, tp.gpt_plan(config, sequence))


def part_of(mesh, batch):
    """What this rank reads."""
    parts, part = mesh.size("replicate") * mesh.size("shard"), mesh["replicate", "shard"]._flatten().get_local_rank()
    return [each.chunk(parts)[part] for each in batch]


def differences(mesh, max_norm=0.3, **case):
    """How far this rank's losses, norms and parameters are from one process's: steps of two batches each, clipped."""
    config = case.pop("config", SMALL)
    ours, whole = parallel(config, mesh, **case), GPT(config).double()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (ours, whole)]
    off = []
    for step in range(STEPS):
        for number in range(2):
            x, y = batch(2 * step + number, SIZE, tokens=6)
            losses = ours.forward_backward(*part_of(mesh, (x, y)))
            loss = whole(x, y)
            loss.backward()
            mean = torch.stack(losses).mean() if losses else torch.zeros(()).double()
            dist.all_reduce(mean)
            ends = dist.get_world_size() // mesh.size("pp")
            off.append(abs(mean / ends - loss).item())
        norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        off.append(abs(ours.clip_gradients(max_norm) - norm).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = ours.full_parameters()
    reference = dict(whole.named_parameters(remove_duplicate=False))
    everyones = {name for names in everybodys([*full], None).values() for name in names}
    assert everyones >= {name for name, _ in whole.named_parameters()}
    return max([*off, *((p - reference[name]).abs().max().item() for name, p in full.items())])


TIED = {"config": replace(SMALL, tied=True)}
PAIRS = [  # pp, replicate, shard, tp
    ((2, 2, 1, 1), TIED | {"schedule": "gpipe"}),
    ((2, 1, 2, 1), TIED),
    ((2, 1, 2, 1), {"schedule": "zbv", "stages": 2}),
    ((2, 1, 1, 2), TIED | {"sequence": True}),
    ((2, 1, 1, 2), TIED | {"schedule": "zbv", "stages": 2}),
    ((1, 2, 2, 1), TIED),
    ((1, 2, 1, 2), TIED | {"sequence": True}),
    ((1, 1, 2, 2), TIED),
]


def all_differences(cases):
    return [differences(Mesh(shape, AXES), **case) for shape, case in cases]


def test_every_pair_of_axes_has_one_process_s_numbers():
    for found in run(all_differences, PAIRS, ranks=4):
        assert {number: off for number, off in enumerate(found) if not off < 1e-12} == {}
