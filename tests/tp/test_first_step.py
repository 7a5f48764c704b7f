"""Tests of labs.tp.first_step: a plan or job made wrong in one place is refused, and a right one is not."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labs.dtensor import Replicate, Shard
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan, parallelize
from labs.tp.first_step import Some

SMALL = Config(vocab=23, dim=24, depth=1, heads=6, kv_heads=3, hidden=41, context=16)
WHOLE, SEQUENCE = Replicate(), Shard(1)


class Model(nn.Module):
    """A model from tokens to logits or their mean square, through a block with a norm, a gate, a pair and two
    dropouts.
    """

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.norm, self.gate = nn.Embedding(7, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 1, bias=False)
        self.up, self.down, self.head = nn.Linear(6, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 7, bias=False)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)
        self.gated = False

    def forward(self, tokens):
        x = self.embed(tokens)
        h = self.inner(torch.tanh(self.up(self.norm(x))))
        x = x + self.outer(self.down(h * torch.sigmoid(self.gate(x)) if self.gated else h))
        return self.head(x)


PAIR = {"embed": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
SHARDS = {
    "embed": RowwiseParallel(output_layouts=SEQUENCE),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=SEQUENCE),
    "down": RowwiseParallel(output_layouts=SEQUENCE),
    "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE),
}


def split(plan, gated=False, **model):
    torch.manual_seed(0)
    mesh, model = Mesh((dist.get_world_size(),), ("tp",)), Model(**model)
    model.gated = gated
    return parallelize(model, mesh, plan)


def step(model):
    model(torch.arange(12).view(2, 6) % 7).square().mean().backward()
    return model


def refuse(make, text):
    with pytest.raises(RuntimeError, match=re.escape(text)):
        make()


def but(plan, name):
    return {other: plan[other] for other in plan if other != name}


def wrong_plans():
    refuse(lambda: step(split({**SHARDS, "up": ColwiseParallel()})), "the input of 'up' differs on ranks 0 and 1")
    for head in (ColwiseParallel(output_layouts=WHOLE), RowwiseParallel(input_layouts=WHOLE)):
        refuse(lambda head=head: step(split({**SHARDS, "head": head})), "the input of 'head' differs")
    norm = "'norm.weight' is in a module with SequenceParallel(), but all 2 ranks have the same x"
    refuse(lambda: step(split({**PAIR, "norm": SequenceParallel()})), norm)
    refuse(lambda: step(split(but(SHARDS, "head"))), "parameter 'head.weight' is not split, and its gradient differs")
    refuse(lambda: step(split(but(SHARDS, "norm"))), "parameter 'norm.weight' is not split, and its gradient differs")


def a_gate_of_all_for_a_piece():
    """Check a gate of which each rank knows only its piece's part of the gradient, and of x's gradient."""
    gradient = "the gradient of what 'embed' makes whole differs on ranks 0 and 1"
    refuse(lambda: step(split(PAIR, gated=True)), gradient)
    refuse(lambda: step(split({**PAIR, "gate": SequenceParallel()}, gated=True)), gradient)
    joined = {**PAIR, "gate": ColwiseParallel(output_layouts=WHOLE)}
    refuse(lambda: step(split(joined, gated=True)), gradient.replace("embed", "gate"))
    refuse(
        lambda: step(split(but(PAIR, "embed"), gated=True)), "parameter 'gate.weight' is not split, and its gradient"
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 1), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x))


def a_gate_in_a_gathered_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), Block())
    rows = RowwiseParallel(output_layouts=SEQUENCE)
    plan = {"0": rows, "1": PrepareModuleInput(input_layouts=SEQUENCE), "1.up": ColwiseParallel(), "1.down": rows}
    parallelize(model, Mesh((2,), ("tp",)), {**plan, "1.gate": SequenceParallel()})
    refuse(lambda: step(model), "the gradient of what '1' makes whole differs on ranks 0 and 1")


def pieces_of_the_logits():
    plan = gpt_plan(SMALL)
    plan.pop("loss")
    tokens = torch.arange(24).view(2, 12) % 9  # all of them in the first rank's part
    model = parallelize(GPT(SMALL), Mesh((2,), ("tp",)), plan)
    refuse(lambda: model(tokens, tokens), "the input of 'loss' differs on ranks 0 and 1")

    class Loss(Model):
        def forward(self, tokens):
            return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten() % 3)

    torch.manual_seed(0)
    model = parallelize(Loss(), Mesh((2,), ("tp",)), {"head": ColwiseParallel()})
    refuse(lambda: model(tokens % 7), "the loss differs on ranks 0 and 1: each has computed it from its own piece")


def random_numbers():
    refuse(
        lambda: step(split(PAIR, dropout=0.5)), "the state of random numbers differs on ranks 0 and 1 after the first f"
    )
    step(split({**PAIR, "inner": SequenceParallel()}, dropout=0.5))
    model = split({**PAIR, "inner": SequenceParallel()}, dropout=0.5).eval()
    step(model)
    torch.manual_seed(dist.get_rank())
    refuse(
        lambda: step(model.train()), "the state of random numbers differs on ranks 0 and 1: under tensor parallelism"
    )


def right_ones():
    """Check right ones, which are compared once: tokens that are all the same, gradients that are spoiled or zero."""
    model = step(split(SHARDS)).tensor_parallel
    assert model.inputs_compared and model.gradients_compared
    zeros = torch.zeros(2, 12, dtype=torch.long)
    for dtype in (torch.float32, torch.bfloat16):  # both shards have equal gradients in this dtype, bit by bit
        parallelize(GPT(SMALL).to(dtype), Mesh((2,), ("tp",)), gpt_plan(SMALL, True))(zeros, zeros).backward()
    for factor in (float("nan"), float("inf"), 0.0):
        model = split(SHARDS)
        (model(zeros % 7).sum() * factor).backward()
    model = split(but(SHARDS, "norm"))
    (model(torch.arange(6)[None]).square().sum() * float("inf")).backward()
    refuse(lambda: step(model), "parameter 'norm.weight' is not split")  # nothing could be detected before


JOBS = [
    wrong_plans,
    a_gate_of_all_for_a_piece,
    a_gate_in_a_gathered_block,
    pieces_of_the_logits,
    random_numbers,
    right_ones,
]


def all_jobs():
    for job in JOBS:
        job()


def test_what_ranks_must_have_alike_is_compared_in_the_first_step():
    run(all_jobs, ranks=2)


def test_numbers_are_alike_but_for_rounding_and_where_they_are_spoiled():
    x = torch.linspace(-1, 1, 1000, dtype=torch.bfloat16)
    assert Some.of(x) == Some.of(x + 0.01) and Some.of(x) != Some.of(-x) and Some.of(x) != Some.of(x[:-1])
    assert Some.of(torch.tensor([2.5])) != Some.of(torch.tensor([2.498])) and Some.of(x.long()) == Some.of(x.long())
    assert Some.of(torch.tensor([float("nan")])) == Some.of(torch.tensor([1.0]))
    assert Some.of(torch.empty(0)) == Some.of(torch.empty(0, 3)) and Some.of(torch.tensor(1.5)).numbers == [1.5]
