"""Checkpoints of a model with experts: every layout of the experts loads what every other one saved, bit for bit."""

import math

import torch
import torch.distributed as dist

from labs.checkpoint import Held, load, save
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.moe import ExpertParallel, MoEGPT
from labs.moe.expert_parallel import AXES
from tests.moe.test_expert_parallel import ODD, batch

SHAPES = (1, 1), (1, 2), (2, 1), (1, 3), (2, 2)  # edp × ep


def laid_out(shape, seed):
    model = ExpertParallel(MoEGPT(ODD, seed), Mesh(shape, AXES))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, Held(model.module, optimizer=optimizer)


def first_saved(shape, folder):
    model, optimizer, held = laid_out(shape, seed=1)
    model(*batch(0, dist.get_rank())).backward()
    model.sync()
    optimizer.step()
    save(folder / "first", 1, held)


def loaded_and_saved(shape, folder):
    """Load the first checkpoint in this layout, save it again, and return the whole model and the optimizer's state."""
    model, optimizer, held = laid_out(shape, seed=2)
    load(folder / "first" / "step-1", held)
    save(folder / str(shape), 1, held)
    return numbers(model, optimizer)


def loaded(shape, folder, others):
    found = []
    for other in others:
        model, optimizer, held = laid_out(shape, seed=3)
        load(folder / str(other) / "step-1", held)
        found.append(numbers(model, optimizer))
    return found


def numbers(model, optimizer):
    own = {name: optimizer.state[p]["exp_avg"].sum().item() for name, p in model.module.named_parameters()}
    return {name: p.detach().clone() for name, p in model.full_parameters().items()}, own


def test_every_layout_of_experts_loads_every_other(tmp_path):
    run(first_saved, (2, 2), tmp_path, ranks=4)
    [(expected, states)] = run(loaded_and_saved, (1, 1), tmp_path, ranks=1)
    assert not any(
        torch.equal(p, expected[name]) for name, p in MoEGPT(ODD, 2).named_parameters() if "norm" not in name
    )
    for shape in SHAPES[1:]:
        run(loaded_and_saved, shape, tmp_path, ranks=math.prod(shape))
    for shape in ((1, 2), (1, 3)):
        for of_rank in run(loaded, shape, tmp_path, SHAPES, ranks=math.prod(shape)):
            for full, own in of_rank:
                assert full.keys() == expected.keys()
                assert all(torch.equal(full[name], p) for name, p in expected.items())
                assert all(states[name] == of for name, of in own.items())
