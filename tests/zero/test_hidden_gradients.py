"""Tests of loops that use `model.parameters()` and `zero.optimizer` under ZeRO: one process's numbers, or a refusal.

Each loop trains a model of one weight with SGD and a learning rate of 1, so that the weight shows which gradients it
got.
"""

import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune

from labs.kit.launch import run
from labs.zero import Zero
from tests.test_optimizer_probe import Trust

STAGES = 1, 2, 3
NOT_HERE = "the gradient of 'weight' is not in model.parameters()"
OWN_STEP = "zero.optimizer.step() would change this rank's shards alone: call zero.step()"


SGD = partial(torch.optim.SGD, lr=1.0)


def made(stage, optimizer=SGD):
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    return model, Zero(model, stage, optimizer)


def backward(model, by=1.0):
    (by * model(torch.ones(1, 1)).sum()).backward()


# ---- a discarded batch -----------------------------------------------------------------------------------


def by_model(model, zero):
    model.zero_grad()


def by_optimizer(model, zero):
    zero.optimizer.zero_grad()


def by_hand(model, zero):
    for p in model.parameters():
        p.grad = None


def after_sync(model, zero):
    zero.sync()
    model.zero_grad(set_to_none=True)


THROWN_AWAY = by_model, by_optimizer, by_hand, after_sync


def moved(stage, throw_away):
    model, zero = made(stage)
    before = zero.full_state_dict()["weight"].item()
    backward(model, 100.0)
    throw_away(model, zero)
    backward(model)
    zero.step()
    return before - zero.full_state_dict()["weight"].item()


def test_a_discarded_batch_does_not_count():
    found = run(lambda: [moved(stage, way) for stage in STAGES for way in THROWN_AWAY], ranks=2)
    for rank in found:
        assert rank == pytest.approx([1.0] * len(rank))


# ---- values that differ between ranks --------------------------------------------------------------------


def reads(ask):
    def loop(stage):
        model, _ = made(stage)
        backward(model)
        ask(model)

    return loop


def hooked(stage):
    """Check an optimizer in backward."""
    model, zero = made(stage)
    [p] = model.parameters()
    p.register_post_accumulate_grad_hook(lambda p: p.grad.norm())
    backward(model)
    zero.step()


def sets(stage):
    model, _ = made(stage)
    [p] = model.parameters()
    p.grad = torch.ones_like(p)


def scaled(stage):
    """Let one rank's part overflow."""
    model, zero = made(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 1)).sum() * (float("inf") if dist.get_rank() else 1.0)).backward()
    zero.sync()
    scaler.step(zero.optimizer)


def by_shape(params):
    groups = [[p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]]
    return torch.optim.AdamW([{"params": group} for group in groups if group])


class Centred(torch.optim.SGD):
    """Treats matrices otherwise than vectors."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad -= p.grad.mean(1, keepdim=True) if p.ndim > 1 else 0
        super().step()


def by_length(params):
    return torch.optim.AdamW([{"params": [p for p in params if len(p.shape) < 2], "weight_decay": 0.0}])


def by_size(params):
    return torch.optim.AdamW(params, weight_decay=0.1 if len(params[0].size()) > 1 else 0.0)


def sized(params):
    """Return an optimizer after reading shapes in ways that are right."""
    assert all(torch.zeros(p.shape).numel() == p.size(0) == p.shape[0] for p in params)
    return torch.optim.SGD(params, lr=0.1)


def scaled_by_itself(stage):
    model, zero = made(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.step(zero)


def changed(how):
    def loop(stage):
        module = nn.Sequential(nn.Linear(4, 4))
        Zero(module, stage, sized)
        how(module[0])

    return loop


NO_PARAMETER = "does not have a parameter, a buffer"  # PyTorch's words: it looks for one in the module

REFUSED = [
    (reads(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)), NOT_HERE),
    (reads(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)), NOT_HERE),
    (reads(lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0)), NOT_HERE),
    (reads(lambda model: sum(p.grad.square().sum() for p in model.parameters())), NOT_HERE),
    (reads(lambda model: model.zero_grad(set_to_none=False)), NOT_HERE),
    (sets, "a gradient cannot be set here"),
    (scaled, f"{OWN_STEP}. A GradScaler cannot"),
    (lambda stage: made(stage)[1].optimizer.step(), OWN_STEP),
    (lambda stage: made(stage, Trust), "Trust looks at more than one element"),
    (lambda stage: made(stage, Centred), "Centred looks at more than one element"),
    (lambda stage: made(stage, by_shape), "factory reads the ndim of a parameter, and is given flat shards"),
    (lambda stage: made(stage, by_length), "factory reads the ndim of a parameter, and is given flat shards"),
    (lambda stage: made(stage, by_size), "factory reads the ndim of a parameter, and is given flat shards"),
    (scaled_by_itself, "a loss is scaled with labs.memory.precision.LossScale"),
    (changed(lambda linear: linear.share_memory()), "share_memory_() of the vector of"),
    (changed(lambda linear: parametrize.register_parametrization(linear, "weight", nn.Tanh())), NO_PARAMETER),
    (changed(lambda linear: prune.l1_unstructured(linear, "weight", 0.5)), "cannot assign"),
    (lambda stage: made(stage)[1].param_groups, "Zero has no param_groups: the optimizer is zero.optimizer"),
    (lambda stage: made(stage)[1].state_dict(), "labs.checkpoint saves both"),
    (lambda stage: made(stage)[1].step(lambda: 0), "run the closure, and backward(), before step()"),
    (lambda stage: pickle.dumps(made(stage)[0]), "cannot be copied or pickled"),
]


def said(loop, stage):
    try:
        loop(stage)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return str(error)
    return "nothing"


def test_what_a_rank_alone_would_see_is_refused_on_every_rank():
    for rank in run(lambda: [[said(loop, stage) for loop, _ in REFUSED] for stage in STAGES], ranks=2):
        for stage, sentences in zip(STAGES, rank, strict=True):
            for sentence, (_, words) in zip(sentences, REFUSED, strict=True):
                assert words in sentence, stage


def test_a_loss_of_what_the_model_shows_is_right_or_refused():
    def loop(stage):
        model, zero = made(stage)
        (model(torch.ones(1, 1)).sum() + sum(p.square().sum() for p in model.parameters())).backward()
        zero.step()
        return [p.sum().item() for p in model.parameters()]

    torch.manual_seed(0)
    weight = nn.Linear(1, 1, bias=False).weight.item()
    due = weight - (1 + 2 * weight)
    for first, second in run(lambda: [loop(stage) for stage in (1, 2)], ranks=2):
        assert first == second == [pytest.approx(due)]
    for sentence in run(lambda: said(loop, 3), ranks=2):
        assert "the shard of 'weight' got a gradient, since the loss reads model.parameters()" in sentence


def test_a_hook_on_what_the_model_shows_is_refused():
    for rank in run(lambda: [said(hooked, stage) for stage in STAGES], ranks=2):
        assert all(NOT_HERE in sentence or "has a hook" in sentence for sentence in rank)


def test_a_scheduler_takes_the_optimizer():
    def loop(stage):
        model, zero = made(stage)
        schedule = torch.optim.lr_scheduler.StepLR(zero.optimizer, 1, 0.5)
        for _ in range(2):
            backward(model)
            zero.step()
            schedule.step()
        return zero.optimizer.param_groups[0]["lr"]

    assert list(run(lambda: [loop(stage) for stage in STAGES], ranks=2)) == [[0.25] * 3] * 2


def test_a_mean_of_float16_that_no_sum_reaches():
    def loop(stage):
        torch.manual_seed(0)
        model = nn.Linear(1, 1, bias=False).half()
        zero = Zero(model, stage, partial(torch.optim.SGD, lr=1.0))
        (40000.0 * model(torch.ones(1, 1, dtype=torch.float16)).float().sum()).backward()
        zero.sync()
        return [shard.grad.item() for shard in zero.shards if len(shard.grad)]

    found = run(lambda: [loop(stage) for stage in STAGES], ranks=2)
    assert list(found[0]) == [[40000.0]] * 3
