"""Tests of labs.parallel against one process on the whole batch, in float64."""

import gc
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from labs import cost, native, pp, tp
from labs.agree import everybodys
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, IGNORED, counted
from labs.parallel import AXES, Parallel
from tests.depth import deepen
from tests.pp.trainings import SMALL, batch
from tests.recordings import held

SMALL = replace(SMALL, depth=4)
STEPS, SIZE, MAX_NORM = 2, 16, 0.3
CUT = "pp", "replicate", "shard", "cp", "tp"  # the axes of a mesh that also cuts sequences
TIED, ODD = {"config": replace(SMALL, tied=True)}, {"odd": True}


def data(number, odd=False):
    """Return a batch; an odd one has no equal pieces of sequences, and some targets are ignored."""
    x, y = batch(number, SIZE, tokens=7 if odd else 8)
    if odd:
        y[1:, 4:] = y[3] = IGNORED
    return x, y


def parallel(mesh, config=SMALL, schedule="1f1b", sequence=False, stages=1, microbatches=2, odd=False):
    ranks, model = mesh.size("pp"), GPT(config).double()
    lists = pp.SCHEDULES[schedule](ranks, microbatches)
    return Parallel(pp.cut(model, stages * ranks), lists, mesh, tp.gpt_plan(config, sequence))


def in_order(shape, order):
    """Return sizes and names of a mesh of this shape with its axes in another order."""
    return (shape, CUT) if len(shape) > 4 else (tuple(shape[AXES.index(axis)] for axis in order), order)


def part_of(mesh, batch):
    """Return this rank's part of a batch."""
    parts, part = mesh.size("replicate") * mesh.size("shard"), mesh["replicate", "shard"]._flatten().get_local_rank()
    return [each.chunk(parts)[part] for each in batch]


def one_process(config=SMALL, odd=False):
    """Return the loss of each batch, the norm of each step, and the final parameters."""
    model = GPT(config).double()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), 1e-2), [], []
    for step in range(STEPS):
        for number in range(2):
            losses.append(model(*data(2 * step + number, odd)))
            losses[-1].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], norms, dict(model.named_parameters(remove_duplicate=False))


def differences(reference, shape, order=AXES, **case):
    """Return how far this rank's losses, norms and parameters are from one process's, after clipped steps of two
    batches.
    """
    (losses, norms, expected), mesh = reference, Mesh(*in_order(shape, order))
    ours, off = parallel(mesh, **case), []
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-2)
    for step in range(STEPS):
        for number in range(2):
            mark("step")
            x, y = data(2 * step + number, "odd" in case)
            parts = mesh.size("replicate") * mesh.size("shard")
            of_each = ours.forward_backward(*part_of(mesh, (x, y)), counted(y) / parts if "odd" in case else None)
            mark("end")
            mean = sum(of_each, torch.zeros(()).double()) / ours.microbatches
            dist.all_reduce(mean)
            ends = mesh.size() // mesh.size("pp")
            off.append(abs(mean.item() / ends - losses[2 * step + number]))
        off.append(abs(ours.clip_gradients(MAX_NORM).item() - norms[step]))
        optimizer.step()
        optimizer.zero_grad()
    full = ours.full_parameters()
    assert {name for names in everybodys([*full], None).values() for name in names} >= {*expected} - {"head.weight"}
    return max([*off, *((p - expected[name]).abs().max().item() for name, p in full.items())])


PAIRS = [  # pp, replicate, shard, tp
    ((2, 2, 1, 1), TIED | {"schedule": "gpipe"}),
    ((2, 1, 2, 1), TIED),
    ((2, 1, 2, 1), {"schedule": "zbv", "stages": 2}),
    ((2, 1, 1, 2), TIED | {"sequence": True}),
    ((2, 1, 1, 2), TIED | {"schedule": "zbv", "stages": 2}),
    ((1, 2, 2, 1), TIED),
    ((1, 2, 1, 2), TIED | {"sequence": True}),
    ((1, 1, 2, 2), TIED),
    ((2, 1, 1, 2, 1), ODD | {"schedule": "zbv", "stages": 2}),
    ((1, 2, 1, 2, 1), ODD),
    ((1, 1, 2, 2, 1), TIED),
    ((1, 1, 1, 2, 2), {"sequence": True}),
]


EIGHT = [
    ((2, 1, 2, 2), TIED),
    ((2, 1, 2, 2), {"schedule": "zbv", "stages": 2, "sequence": True}),
    ((2, 2, 2, 1), TIED | {"microbatches": 4}),
    ((2, 2, 1, 2), {"order": ("tp", "replicate", "shard", "pp")}),
    ((1, 2, 2, 2), TIED | {"sequence": True}),
    ((2, 1, 1, 2, 2), TIED | {"sequence": True}),
]
BACKWARDS = 2 * STEPS  # each case takes this many


def all_differences(references, cases):
    return [differences(references["config" in case or 2 * ("odd" in case)], shape, **case) for shape, case in cases]


def natively(shape, schedule):
    """Return how far the norm and clipped gradients of PyTorch's own are from one process's."""
    mesh, whole, model = Mesh(shape, AXES), GPT(SMALL).double(), GPT(SMALL).double()
    mine, grid = pp.cut(model, 2)[mesh.get_local_rank("pp")], native.device_mesh(mesh)
    native.parallel([mine], grid, tp.gpt_plan(SMALL))
    stages = [mine if number == mesh.get_local_rank("pp") else None for number in range(2)]
    group = mesh.get_group("pp")
    x, y = data(0)
    own_x, own_y = part_of(mesh, (x, y))
    given = {"target": own_y} if mine.head else {}
    with loss_parallel():
        native.pp(stages, schedule, 2, model.loss, group).step(*[] if mine.head else [own_x], **given)
    whole(x, y).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    off = [abs(native.clip_gradients(mine.parameters(), MAX_NORM, group) - expected).item()]
    for name, p in mine.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        off.append((grad - whole.get_parameter(name).grad).abs().max().item())
    return max(off)


@pytest.fixture(scope="module")
def references():
    """Return the references of the untied and of the tied model, and of odd batches."""
    return run(lambda: [one_process(**case) for case in ({}, TIED, ODD)], ranks=1)[0]


@pytest.mark.parametrize(
    "shape, schedule",
    [((2, 1, 1, 2), "zb1p"), *(pytest.param((2, 1, 2, 2), name, marks=pytest.mark.depth) for name in ("1f1b", "zb1p"))],
)
def test_one_process_has_the_norm_and_gradients_of_pytorchs_own(shape, schedule):
    assert max(run(natively, shape, schedule, ranks=prod(shape))) < 1e-12


@pytest.mark.parametrize("cases", [PAIRS[::3], EIGHT[1::2], *deepen(PAIRS, EIGHT)])
def test_one_process_has_the_same_numbers_and_cost_the_bytes(cases, references):
    ranks = prod(cases[0][0])
    job = run(all_differences, references, cases, ranks=ranks, record="communication")
    for rank, found in enumerate(job):
        for number, (off, (shape, case)) in enumerate(zip(found, cases, strict=True)):
            assert off < 1e-12, (rank, shape, case)
            sent = job.recording.sent(rank, (number + 1) * BACKWARDS - 1)
            assert sent == 2 * predicted(shape, rank, **case).sent, (rank, shape, case)
    assert would_hang(job.recording).name == SOUND


def predicted(
    shape, rank, config=SMALL, schedule="1f1b", sequence=False, stages=1, microbatches=2, order=AXES, odd=False
):
    """Predict the job of a rank, in float32."""
    axes = dict(zip(AXES if len(shape) == 4 else CUT, shape, strict=True))
    if len(shape) == 4:
        seats = Mesh(*in_order(shape, order)).mesh.permute([order.index(axis) for axis in AXES])
        rank = seats.flatten().tolist().index(rank)  # the number of the rank in labs.cost
    lists = pp.SCHEDULES[schedule](shape[0], microbatches)
    each = SIZE // axes["replicate"] // axes["shard"] // microbatches
    job = cost.Job(config, each, prod(shape), rank, context=7 if odd else 8, accumulation=microbatches)
    return cost.parallel(job, pp.plan(lists), axes, sequence)


def held_by(shapes):
    for shape in shapes:
        mesh = Mesh(shape, CUT)
        lists = pp.one_f_one_b(shape[0], 2)
        ours = Parallel(pp.cut(GPT(SMALL), shape[0]), lists, mesh, tp.gpt_plan(SMALL))
        optimizer = torch.optim.AdamW(ours.parameters())
        for step in range(3):
            mark("step")
            ours.forward_backward(*part_of(mesh, data(step)))
            optimizer.step()
            optimizer.zero_grad()
        mark("end")
        del ours, optimizer
        gc.collect()


def test_a_rank_holds_the_states_and_activations_that_are_predicted():
    """Compare P, G and S, and about A, where parameters are sharded over cp, alone and with shard or tp."""
    shapes = (2, 1, 1, 2, 1), (1, 1, 2, 2, 1), (1, 1, 1, 2, 2)
    recording = run(held_by, shapes, ranks=4, record="memory").recording
    for (number, shape), rank in product(enumerate(shapes), range(4)):
        measured, known = held(recording, rank, number, 3), predicted(shape, rank).held
        assert {kind: measured[kind] for kind in "PGS"} == {kind: getattr(known, kind) for kind in "PGS"}, (shape, rank)
        assert measured["A"] == pytest.approx(known.A, rel=0.05) and known.peak is None, (shape, rank)


# ---- refusals --------------------------------------------------------------------------------------------


def refused():
    """Return the refusals' sentences on this rank."""
    mesh, said = Mesh((2, 1, 2, 1), AXES), []

    def attempt(do, *args, kind=ValueError):
        with pytest.raises(kind) as raised:
            do(*args)
        said.append(str(raised.value))

    def build(mesh=mesh, config=SMALL, stages=2, lists=None, device="cpu"):
        with torch.device(device):
            model = GPT(config)
        return Parallel(pp.cut(model, stages), lists or pp.one_f_one_b(2, 2), mesh, tp.gpt_plan(config))

    attempt(Mesh, (2, 1, 3, 1), AXES)
    attempt(build, Mesh((2, 2), ("pp", "dp")))
    attempt(build, Mesh((2, 1, 2, 1, 1), ("pp", "cp", "replicate", "shard", "tp")))
    attempt(build, mesh, SMALL, 2, pp.one_f_one_b(2, 1))
    attempt(build, mesh, SMALL, 4, pp.one_f_one_b(4, 4))
    attempt(build, mesh, TIED["config"], 4, pp.zbv(2, 2))
    attempt(build, mesh, SMALL, 2, None, "meta")
    attempt(native.pp, pp.cut(GPT(SMALL), 2), "1f1b", 1, GPT(SMALL).loss, mesh.get_group("pp"))
    attempt(native.parallel, pp.cut(GPT(TIED["config"]), 2), native.device_mesh(mesh), tp.gpt_plan(SMALL))
    cut, (x, y) = Mesh((2, 1, 1, 2, 1), CUT), data(0)
    attempt(native.parallel, pp.cut(GPT(SMALL), 2), native.device_mesh(cut), tp.gpt_plan(SMALL))
    own = x + cut.get_local_rank("cp")
    attempt(build(cut).forward_backward, own, y)
    ignored = torch.where(y == y[0, 0], IGNORED, y)
    attempt(build(cut).forward_backward, x, ignored)
    attempt(build(cut).forward_backward, x.repeat(1, 4), y.repeat(1, 4))
    attempt(build(cut).forward_backward, x, y[:, 1:])
    going = build(cut)
    going.forward_backward(x, y)
    attempt(going.forward_backward, x[:, 1:], y[:, 1:])
    attempt(going.forward_backward, x, ignored)
    going.evaluate(x[:, 1:], y[:, 1:])
    going.forward_backward(x, y)
    return said


FEW = "1 micro-batches are fewer than the 2 ranks along pp, some of which would always wait: cut the batch into 2"
SAID = [
    "world size 4 is not pp 2 × replicate 1 × shard 3 × tp 1: start 6 ranks, or change a size",
    "has the axes ('pp', 'dp'): give ('pp', 'replicate', 'shard', 'tp'), with size 1 where you want none, and cp right",
    "has the axes ('pp', 'cp', 'replicate', 'shard', 'tp'): give ('pp', 'replicate', 'shard', 'tp'), with size 1",
    FEW,
    "the schedule is for 4 ranks, and the group has 2",
    "stages 0 and 3 have a tied parameter, and are on one rank, where only one of them can shard it",
    "parameter 'embed.weight' is on the meta device, and has no numbers to be split: initialise it",
    FEW,
    "the head is tied to the embedding, and PyTorch's pipeline would leave the stage of each with its part",
    "the mesh has the axis 'cp', along which nothing would be averaged here: leave it out, or use",
    "ranks that differ in pp or cp alone read the same whole sequences, of which each cuts its own piece",
    "targets are -100, which a loss ignores",
    "32 tokens are more than the context of 30",
    "x and y have sequences of 7 and 8 tokens: give the targets of the same tokens",
    "x has 7 tokens in a sequence, and in the first step it had 8: give sequences of one length",
    "targets are -100, which a loss ignores",
]


def test_what_does_not_fit_together_is_refused_on_every_rank():
    for rank, said in enumerate(run(refused, ranks=4)):
        for sentence, is_said in zip(SAID, said, strict=True):
            assert sentence in is_said, rank
