"""Tests of a pipeline's inputs, and of changes to them: missing parameters, wrapped stages, other losses and batches.

The reference for what is evaluated is one process, bit by bit.
"""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs import ddp
from labs.kit.launch import RankError, run
from labs.model import GPT
from labs.pp import SCHEDULES, Pipeline, cut, one_f_one_b
from labs.pp.checker import stages_of
from tests.pp.trainings import SMALL, batch, loss_of

M = 4


def made(change=None, loss=None):
    model = GPT(SMALL)
    pipeline = Pipeline(cut(model, 2), one_f_one_b(2, M), loss or model.loss)
    if change:
        change(model)
    return pipeline, model  # the pipeline alone would let the model go


def tie(model):
    model.layers["7"].mlp.down.weight = model.layers["0"].mlp.down.weight


def replace_a_layer(model):
    model.layers["5"] = copy.deepcopy(model.layers["5"])


def refused(kind, text, step):
    with pytest.raises(kind, match=re.escape(text)):
        step()


def changed_later():
    x, y = batch(0, M)
    pipeline, _model = made(replace_a_layer)
    refused(RuntimeError, "'layers.5' of a stage is no longer in the model", lambda: pipeline.forward_backward(x, y))
    pipeline, _ = made()
    pipeline.forward_backward(x, y)
    stage = next(iter(pipeline.stages.values()))
    assert pickle.loads(pickle.dumps(stage)).config == copy.deepcopy(stage).config == SMALL
    for given, name in [(({"x": x}, y), "x is a dict"), ((x, (y, y)), "y is a tuple")]:
        refused(TypeError, f"{name}: a pipeline cuts one tensor", lambda given=given: pipeline.forward_backward(*given))
    refused(
        TypeError, "mask: stages get x alone, so make it a part of x", lambda: pipeline.forward_backward(x, y, mask=x)
    )
    whole = GPT(SMALL)
    stages = cut(whole, 2)
    for wrap in (DistributedDataParallel, ddp.Overlapped):
        both = [wrap(stage) for stage in stages] if wrap is DistributedDataParallel else [wrap(stages[0]), stages[1]]
        text = f"stage 0 is wrapped in {wrap.__name__}, which averages gradients in each micro-batch's backward"
        refused(ValueError, text, lambda both=both: Pipeline(both, one_f_one_b(2, M), whole.loss))


def test_what_changes_after_the_cut_and_what_is_no_tensor_is_refused_on_all_ranks():
    run(changed_later, ranks=2)


class Head(nn.Module):
    """A loss with parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(23))

    def forward(self, logits, y):
        return nn.functional.cross_entropy((logits * self.weight).flatten(0, 1), y.flatten())


def vector(logits, y):
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")


@pytest.mark.parametrize(
    ("change", "loss", "text"),
    [
        (tie, None, "1F0 used a parameter of shape (16, 20) that no stage of this rank had when the Pipeline was made"),
        (None, Head(), "1F0 used a parameter of shape (23,) that no stage of this rank had when the Pipeline was made"),
        (None, vector, "the loss has shape (5,): let it return one number, the micro-batch's mean"),
    ],
)
def test_a_parameter_that_the_pipeline_lacks_is_refused_where_it_is_used(change, loss, text):
    with pytest.raises(RankError, match=re.escape(text)):
        run(step, change, loss, ranks=2)


def step(change, loss):
    pipeline, _ = made(change, loss)
    pipeline.forward_backward(*batch(0, M))


def scaled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipeline = Pipeline([*model], one_f_one_b(2, 1), lambda out, y: scaler.scale((out - y).square().mean()))
    optimizer, x = torch.optim.SGD(pipeline.parameters(), lr=0.1), torch.ones(2, 4)
    for _ in range(2):
        pipeline.forward_backward(x, x)
        scaler.scale(x.sum())  # on a rank without the loss
        if dist.get_rank():
            pipeline.parameters()[0].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()


def test_a_step_that_one_rank_would_skip_is_refused():
    with pytest.raises(RankError, match="a GradScaler looks for overflows in this rank's parts alone"):
        run(scaled, ranks=2)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


def evaluated():
    """Evaluate between two steps, on a batch of another size: one process's losses and outputs, and no other change."""
    for name, schedule in SCHEDULES.items():
        lists = schedule(2, M)
        torch.manual_seed(0)
        stages = [Normed() for _ in range(stages_of(lists))]
        whole = nn.Sequential(*copy.deepcopy(stages))
        pipeline = Pipeline(stages, lists, loss_of)
        x, y = torch.randn(2 * M, 6), torch.randn(2 * M)
        for size in (2 * M, M):
            rank = dist.get_rank()
            mine = pipeline.ranks[pipeline.last] == rank
            before = copy.deepcopy({s: stage.state_dict() for s, stage in pipeline.stages.items()})
            losses = pipeline.evaluate(x[:size], y[:size])
            outputs = pipeline.evaluate(x[:size] if pipeline.ranks[0] == rank else None)
            for s, stage in pipeline.stages.items():
                whole[s].load_state_dict(before[s])
                assert all(
                    torch.equal(a, b) for a, b in zip(before[s].values(), stage.state_dict().values(), strict=True)
                )
                assert all(module.training for module in stage.modules())
            full = [None, None]
            dist.all_gather_object(full, before)
            for part in full:
                for s, state in part.items():
                    whole[s].load_state_dict(state)
            whole.eval()
            with torch.no_grad():
                expected = [whole(each) for each in x[:size].chunk(M)]
            assert len(losses) == len(outputs) == M * mine, name
            assert all(map(torch.equal, outputs, expected))
            assert all(map(torch.equal, losses, map(loss_of, expected, y[:size].chunk(M))))
            pipeline.forward_backward(x, y)


def test_a_pipeline_evaluates_on_all_schedules():
    run(evaluated, ranks=2)
