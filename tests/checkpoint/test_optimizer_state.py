"""Tests of labs.checkpoint.optimizer_state: every optimizer's state passes through each layout, or is refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import fsdp
from labs.checkpoint import Held, HeldByZero, load, save
from labs.kit.launch import run
from labs.memory.offload import Offloaded
from labs.memory.precision import Masters
from labs.mesh import Mesh
from labs.zero import Zero
from tests.checkpoint.common import ADAMW, numbers, same, words_of
from tests.depth import deepen

optim = torch.optim
ZEROS = ("zero-1", "zero-3")


class Net(nn.Module):
    """A model with a layer used only from the second step on, a 0-dim parameter, and an empty one."""

    def __init__(self, seed, dtype=torch.float32, rows=0):
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.later = nn.Linear(3, 5), nn.Linear(5, 2)
        self.scale, self.none = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(rows, 2))
        self.to(dtype)

    def forward(self, step):
        h = torch.tanh(self.one(torch.full((2, 3), 0.1 * step + 0.1).to(self.scale))) * self.scale
        h = self.later(h) if step > 0 else h
        return h.square().mean() + self.none.sum()


class InFloat32(optim.SGD):
    """An optimizer that keeps a float32 tensor for a parameter in another dtype, and an integer."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.full(p.shape, 1 + 2**-20), "seen": torch.tensor(2**40)}


LOW = partial(Net, dtype=torch.bfloat16)


def in_groups(params):
    one, *others = params
    return ADAMW([{"params": [one], "lr": 0.25, "weight_decay": 0.0}, {"params": others, "betas": (0.5, 0.75)}])


def with_stops(params):
    optimizer = optim.SGD(params, lr=0.1)
    optimizer.param_groups[0] |= {"stops": [1, 2], "scales": (0.5, 0.75)}
    return optimizer


OPTIMIZERS = {  # the optimizer, the layouts that take it besides "one", and the model
    "sgd": (partial(optim.SGD, lr=0.1), (*ZEROS, "fsdp"), Net),
    "momentum": (partial(optim.SGD, lr=0.1, momentum=0.9), (*ZEROS, "fsdp"), Net),
    "amsgrad": (partial(ADAMW, amsgrad=True), (*ZEROS, "fsdp"), Net),
    "a tensor as lr": (lambda params: ADAMW(params, lr=torch.tensor(0.1)), (*ZEROS, "fsdp"), Net),
    "groups": (in_groups, (), Net),
    "options that are lists": (with_stops, (*ZEROS, "fsdp"), Net),
    "adagrad": (optim.Adagrad, ZEROS, Net),
    "adadelta": (optim.Adadelta, ZEROS, Net),
    "adamax": (optim.Adamax, ZEROS, Net),
    "rmsprop": (partial(optim.RMSprop, centered=True, momentum=0.5), ZEROS, Net),
    "nadam": (optim.NAdam, ZEROS, Net),
    "radam": (optim.RAdam, ZEROS, Net),
    "asgd": (optim.ASGD, ZEROS, Net),
    "rprop": (optim.Rprop, ZEROS, Net),
    "adafactor": (optim.Adafactor, (), partial(Net, rows=1)),
    "float32 of bfloat16": (partial(InFloat32, lr=0.1), (*ZEROS, "fsdp"), LOW),
    "masters": (partial(Masters, optimizer=ADAMW), (*ZEROS, "fsdp"), LOW),
    "masters of groups": (partial(Masters, optimizer=in_groups), (), LOW),
    "masters of float32": (partial(Masters, optimizer=ADAMW), (*ZEROS, "fsdp"), Net),
}


def laid_out(layout, model, optimizer):
    if layout in ZEROS:
        zero = Zero(model, int(layout[-1]), optimizer)
        return HeldByZero(zero), zero
    if layout == "fsdp":
        fsdp.fully_shard(model.one, mesh=Mesh((dist.get_world_size(),), ("dp",)))
    held = optimizer(model.parameters())
    return Held(model, optimizer=held), held


def steps(model, optimizer, first, last):
    for step in range(first, last):
        model(step).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # a schedule does the same
        optimizer.zero_grad()


def types(optimizer):
    return [{key: type(value) for key, value in group.items()} for group in optimizer.param_groups]


def through(folder, optimizer, layouts, make):
    """Return the layouts through which a training does not continue as if it had not been saved."""
    held, trained = laid_out("one", model := make(1), optimizer)
    steps(model, trained, 0, 2)
    save(folder, 2, held)
    expected, options = numbers(held), held.groups()
    steps(model, trained, 2, 4)
    wrong = []
    for layout in ("one", *layouts):
        other, _ = laid_out(layout, make(2), optimizer)
        load(folder / "step-2", other)
        save(folder / layout, 2, other)
        again, others = laid_out("one", model := make(3), optimizer)
        load(folder / layout / "step-2", again)
        loaded = same(numbers(again), expected) and again.groups() == options and types(others) == types(trained)
        steps(model, others, 2, 4)
        wrong += [] if loaded and same(numbers(again), numbers(held)) else [layout]
    return wrong


@pytest.mark.parametrize("most", [1, *deepen(4)])
def test_every_optimizer_continues(most, tmp_path):
    """Save in one process and in at most so many other layouts."""

    def body():
        rows = (
            (name, optimizer, layouts[::-1][:most], make) for name, (optimizer, layouts, make) in OPTIMIZERS.items()
        )
        return {name: through(tmp_path / name, *row) for name, *row in rows}

    for wrong in run(body, ranks=2):
        assert not any(wrong.values()), wrong


def test_parameters_that_an_optimizer_has_by_name_may_be_in_other_groups(tmp_path):
    def body():
        one, two = Net(1), Net(2)
        named = [*one.named_parameters()]
        save(tmp_path, 1, Held(one, optimizer=ADAMW([{"params": named[:2]}, {"params": named[2:]}])))
        optimizer = ADAMW(two.named_parameters())
        load(tmp_path / "step-1", Held(two, optimizer=optimizer))
        return optimizer.param_groups[0]["param_names"] == [name for name, _ in named]

    assert run(body, ranks=1) == [True]


def one_step(optimizer, make=Net, step=1):
    held, trained = laid_out("one", model := make(1), optimizer)

    def closure():
        trained.zero_grad()
        (loss := model(step)).backward()
        return loss

    closure()
    trained.step(*[closure] if optimizer is optim.LBFGS else [])
    return held


def at_once(model):
    return HeldByZero(Zero(model, 2, ADAMW, layers=[model]))


def saved(name, folder, held=None):
    """Save a checkpoint that a later row loads."""
    held = held or one_step(ADAMW)
    return save(folder / name, 1, held)


def of_two_groups(folder):
    load(saved("groups", folder, one_step(in_groups)), laid_out("one", Net(2), ADAMW)[0])


def more_of_one(folder):
    load(saved("more", folder, one_step(ADAMW, step=0)), at_once(Net(2)))


def another_count(folder):
    held, trained = laid_out("one", model := Net(1), ADAMW)
    steps(model, trained, 0, 2)
    load(saved("count", folder, held), at_once(Net(2)))


def of_one_rank(folder):
    saved("of one", folder, one_step(ADAMW if dist.get_rank() == 0 else optim.LBFGS, partial(Net, rows=1)))


def of_each_rank(folder):
    saved("each", folder, laid_out("one", Net(1), partial(ADAMW, lr=0.5 + dist.get_rank()))[0])


def offloaded(folder):
    laid_out("one", Net(1), partial(Offloaded, optimizer=ADAMW, where=folder / "state"))


REFUSED = [
    (of_one_rank, "LBFGS keeps 'func_evals', of type int: only tensors can be saved"),
    (offloaded, "Offloaded keeps its state in a place of its own: train with an optimizer of torch.optim, or with"),
    (of_each_rank, "'lr' of 'scale' is 0.5 on rank 0 and 1.5 on rank 1: give the optimizer the same options"),
    (
        of_two_groups,
        "is of another training: 'scale' and 'none' have different values of 'lr' in it, but share one here",
    ),
    (
        lambda folder: load(saved("kind", folder), laid_out("one", Net(2), partial(optim.SGD, lr=0.1))[0]),
        "is of another training: 'scale' was trained with AdamW, not SGD",
    ),
    (
        lambda folder: load(saved("masters", folder), laid_out("one", Net(2), partial(Masters, optimizer=ADAMW))[0]),
        "is of another training: 'scale' was trained with AdamW, not Masters of AdamW",
    ),
    (
        lambda folder: load(saved("none", folder, Held(Net(1))), laid_out("one", Net(2), ADAMW)[0]),
        "was saved without an optimizer: load it into Held(model)",
    ),
    (more_of_one, "'later.weight' are one parameter here, but have different optimizer state in it"),
    (another_count, "are one tensor here, and differ in it"),
]


def test_what_does_not_fit_is_reported_on_all_ranks_before_anything_has_changed(tmp_path):
    def body():
        return [words_of(lambda: case(tmp_path)) for case, _ in REFUSED]  # noqa: B023

    for said in run(body, ranks=2):
        for words, (_, sentence) in zip(said, REFUSED, strict=True):
            assert sentence in (words or ""), (words, sentence)
