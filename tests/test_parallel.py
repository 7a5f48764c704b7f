"""Reference: one process on the whole batch, in float64."""

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import cost, pp, tp
from labs.agree import everybodys
from labs.kit.launch import run
from labs.kit.nccl.verdict import SOUND, would_hang
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT
from labs.parallel import AXES, Parallel
from tests.pp.trainings import SMALL, batch

SMALL = replace(SMALL, depth=4)
STEPS, SIZE, MAX_NORM = 2, 16, 0.3


def parallel(mesh, config=SMALL, schedule="1f1b", sequence=False, stages=1, microbatches=2):
    ranks, model = mesh.size("pp"), GPT(config).double()
    lists = pp.SCHEDULES[schedule](ranks, microbatches)
    return Parallel(pp.cut(model, stages * ranks), lists, mesh, tp.gpt_plan(config, sequence))


def part_of(mesh, batch):
    """What this rank reads."""
    parts, part = mesh.size("replicate") * mesh.size("shard"), mesh["replicate", "shard"]._flatten().get_local_rank()
    return [each.chunk(parts)[part] for each in batch]


def one_process(config):
    """Of each batch the loss, of each step the norm, and the parameters after all."""
    model = GPT(config).double()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), 1e-2), [], []
    for step in range(STEPS):
        for number in range(2):
            losses.append(model(*batch(2 * step + number, SIZE, tokens=6)))
            losses[-1].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], norms, dict(model.named_parameters(remove_duplicate=False))


def differences(reference, mesh, **case):
    """How far this rank's losses, norms and parameters are from one process's: steps of two batches each, clipped."""
    losses, norms, due = reference
    ours, off = parallel(mesh, **case), []
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-2)
    for step in range(STEPS):
        for number in range(2):
            mark("step")
            of_each = ours.forward_backward(*part_of(mesh, batch(2 * step + number, SIZE, tokens=6)))
            mark("end")
            mean = sum(of_each, torch.zeros(()).double()) / ours.microbatches
            dist.all_reduce(mean)
            ends = mesh.size() // mesh.size("pp")
            off.append(abs(mean.item() / ends - losses[2 * step + number]))
        off.append(abs(ours.clip_gradients(MAX_NORM).item() - norms[step]))
        optimizer.step()
        optimizer.zero_grad()
    full = ours.full_parameters()
    assert {name for names in everybodys([*full], None).values() for name in names} >= {*due} - {"head.weight"}
    return max([*off, *((p - due[name]).abs().max().item() for name, p in full.items())])


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


EIGHT = [
    ((2, 1, 2, 2), TIED),
    ((2, 1, 2, 2), {"schedule": "zbv", "stages": 2, "sequence": True}),
    ((2, 2, 2, 1), TIED | {"microbatches": 4}),
    ((2, 2, 1, 2), {}),
    ((1, 2, 2, 2), TIED | {"sequence": True}),
]
BACKWARDS = 2 * STEPS  # of a case


def all_differences(references, cases):
    return [differences(references["config" in case], Mesh(shape, AXES), **case) for shape, case in cases]


@pytest.fixture(scope="module")
def references():
    """Tied or not."""
    return [run(one_process, config, ranks=1)[0] for config in (SMALL, TIED["config"])]


@pytest.mark.parametrize("cases", [PAIRS, EIGHT], ids=["every pair of axes", "three axes and more"])
def test_one_process_has_the_same_numbers_and_cost_the_bytes(cases, references):
    ranks = prod(cases[0][0])
    job = run(all_differences, references, cases, ranks=ranks, record="communication")
    for rank, found in enumerate(job):
        for number, (off, (shape, case)) in enumerate(zip(found, cases, strict=True)):
            assert off < 1e-12, (rank, shape, case)
            sent = job.recording.sent(rank, (number + 1) * BACKWARDS - 1)
            assert sent == 2 * predicted(shape, rank, **case).sent, (rank, shape, case)
    assert would_hang(job.recording).name == SOUND


def predicted(shape, rank, config=SMALL, schedule="1f1b", sequence=False, stages=1, microbatches=2):
    """In float32."""
    axes = dict(zip(AXES, shape, strict=True))
    lists = pp.SCHEDULES[schedule](shape[0], microbatches)
    each = SIZE // axes["replicate"] // axes["shard"] // microbatches
    job = cost.Job(config, each, prod(shape), rank, context=6, accumulation=microbatches)
    return cost.parallel(job, pp.plan(lists), axes, sequence)
