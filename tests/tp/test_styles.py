"""Tests of labs.tp on models and trainings of all kinds: equal to one process, or refused in a sentence."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import tp
from labs.dtensor import Replicate, Shard
from labs.kit.launch import run
from labs.model import GPT
from labs.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    gpt_plan,
    parallelize,
)
from tests.tp.common import SMALL, batch, largest_difference, refuse, split, tp_mesh

# ---- models of all kinds ---------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A model from tokens through embedding and block to a head, with shards of the sequence between them."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 6), block(), nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.block(self.embed(tokens))
        x += 1
        return self.head(x)

    @staticmethod
    def plan(**block):
        rows = RowwiseParallel(output_layouts=Shard(1))
        inside = {f"block.{name}": rows if style == "rows" else style for name, style in block.items()}
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        return {"embed": rows, "block": PrepareModuleInput(input_layouts=Shard(1)), **inside, "head": head}


class LowRank(nn.Module):
    """A block whose x was gathered, with a narrow place inside, which is whole."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(torch.tanh(self.wide(torch.tanh(self.narrow(x)))))


class Norm(nn.Module):
    """A block that begins with a norm, and is called with keywords in another order than its signature's."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x, mask=None):
        return self.down(torch.tanh(self.up(self.norm(x))) * (1 if mask is None else mask))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Norm()

    def forward(self, x):
        # The mask needs as many positions as all shards have together.
        return self.inner(mask=torch.linspace(0, 1, 6, dtype=x.dtype)[:, None], x=x)


class Repeated(nn.Module):
    """A block under two names, used three times; a frozen layer with a low-rank addition, all of it in place."""

    def __init__(self):
        super().__init__()
        block = Norm()
        self.blocks, self.addition = nn.ModuleList([block, block]), nn.ModuleList([nn.Linear(6, 2), nn.Linear(2, 6)])
        self.more = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        y = self.more(x)
        y += self.addition[1](self.addition[0](x))
        return y.mul_(2)


def odd_models():
    columns, rows, join = ColwiseParallel(), RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())
    tokens, x = torch.arange(12).view(2, 6) % 7, torch.linspace(-1, 1, 72, dtype=torch.float64).view(2, 6, 6)
    prepared = Sequence.plan(**{"inner.up": columns, "inner.down": "rows"})
    prepared["block.inner"] = prepared.pop("block")
    repeated = {"blocks.*.up": columns, "blocks.*.down": rows, "more": join, "addition.1": join}
    return [
        (lambda: Sequence(LowRank), Sequence.plan(narrow=join, wide=columns, out="rows"), tokens),
        (lambda: Sequence(LowRank), Sequence.plan(wide=columns, out="rows"), tokens),
        (lambda: Sequence(LowRank), {**Sequence.plan(narrow=columns, wide=rows, out=join), "head": join}, tokens),
        (lambda: Sequence(Norm), Sequence.plan(up=columns, down="rows"), tokens),
        (lambda: Sequence(ByKeyword), prepared, tokens),
        (Repeated, repeated, x),
        (Repeated, {**repeated, "more": RowwiseParallel(input_layouts=Replicate())}, x[:0]),
        (lambda: Sequence(Norm), Sequence.plan(up=columns, down="rows"), tokens[:0]),
    ]


def both(make, plan):
    """Return the split model and the whole one."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return parallelize(models[0], tp_mesh(), plan), models[1]


def every_odd_model():
    off = []
    for make, plan, given in odd_models():
        models, outputs, gradients = both(lambda make=make: make().double(), plan), [], []
        for model in models:
            x = given.clone().requires_grad_(given.is_floating_point())
            outputs.append(model(x))
            (outputs[-1] * torch.linspace(-1, 1, outputs[-1].numel()).view_as(outputs[-1])).sum().backward()
            gradients.append(x.grad if x.requires_grad else x)
        off += [(a - b).abs().max().item() for a, b in (outputs, gradients) if a.numel()]
        off.append(largest_difference(*models))
    return max(off)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_odd_models(ranks):
    assert max(run(every_odd_model, ranks=ranks)) < 1e-12


def around_it():
    """Train with gradients and an optimizer from before, with autocast, and with compilation before the first step."""
    model, reference = GPT(SMALL).double(), GPT(SMALL).double()
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1, eps=1e-3) for each in (model, reference)]
    x, y = batch(23, 12)
    for step in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(x, y).backward()
            if step:
                optimizer.step()
        if not step:
            parallelize(model, tp_mesh(), gpt_plan(SMALL, True))
    assert largest_difference(model, reference) < 1e-12 and abs(model(x, y) - reference(x, y)) < 1e-12

    pair = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), pair)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 6)).dtype == reference(torch.ones(2, 6)).dtype == torch.bfloat16
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), pair)
    compiled = torch.compile(model, backend="eager")
    for each in (compiled, reference):
        each(torch.ones(2, 6)).square().sum().backward()
    assert largest_difference(model, reference) < 1e-6


def test_earlier_gradients_autocast_and_compilation_are_right():
    run(around_it, ranks=2)


# ---- trainings of all kinds ------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6)

    def pair(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return (self.norm(self.pair(x)) - x).square().mean()


@dataclass
class Output:
    loss: torch.Tensor
    others: dict


class Nested(Pair):
    """A pair with a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.norm(self.pair(x))
        return Output(y.square().mean(), {"y": [y]})


PAIR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
JOINED = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
NORMED = {**PAIR, "norm": SequenceParallel(), "down": RowwiseParallel(output_layouts=Shard(0))}
ADAMW = partial(torch.optim.AdamW, eps=1e-3)


def given():
    return torch.linspace(-1, 1, 24, dtype=torch.float64).sin().view(4, 6).requires_grad_()


def plainly(model, optimizer, step):
    model(given()).backward()


def penalised(model, optimizer, step):
    loss = model(x := given())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def of_several_outputs(model, optimizer, step):
    output = model(given())
    (output.loss + output.others["y"][0].pow(3).sum()).backward()


def through_a_copy(model, optimizer, step):
    """Check that an average of the model leaves the model unchanged, and returns its loss."""
    average = deepcopy(model)
    for p, q in zip(average.parameters(), model.parameters(), strict=True):
        p.data.lerp_(q.data, 0.5)
    loss = model(given())
    assert torch.equal(average(given()), loss)
    loss.backward()


def trained(way, make=Pair, plan=PAIR, optimizer=ADAMW, clip=None, steps=3):
    """Return the largest difference of parameters and gradients."""
    models = both(lambda: make().double(), plan)
    for model in models:
        stepping = optimizer(model.parameters(), 0.1)
        for step in range(steps):
            stepping.zero_grad()
            way(model, stepping, step)
            if clip:
                clip(model.parameters(), 0.01)
            stepping.step()
    cuts, rank = models[0].tensor_parallel.cuts, dist.get_rank()
    parts = {name: cuts[name].part(p, rank) if name in cuts else p for name, p in models[1].named_parameters()}
    off = [(p - parts[name]).abs().max().item() for name, p in models[0].named_parameters()]
    return max(*off, largest_difference(*models))


def all_trainings():
    for way in (plainly, penalised, through_a_copy):
        assert trained(way) < 1e-11, way.__name__
    for plan in (JOINED, {**PAIR, "up": ColwiseParallel(output_layouts=Replicate()), "down": JOINED["down"]}):
        assert trained(penalised, plan=plan) < 1e-11
    assert trained(of_several_outputs, Nested) < 1e-11


def test_whatever_training_one_process_can_do():
    run(all_trainings, ranks=2)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.complex128) for sizes in ((6, 7), (7, 6)))

    def forward(self, x):
        return self.down(self.up(x)).abs().square().mean()


def other_types_and_inputs():
    """Check complex numbers, hooks from before, and a first input that is this rank's shard."""
    model, reference = both(Complex, PAIR)
    for each in (model, reference):
        each(given().detach().to(torch.complex128)).backward()
    assert largest_difference(model, reference) < 1e-12

    torch.manual_seed(0)
    model, seen = Pair().double(), []
    model.up.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    parallelize(model, tp_mesh(), PAIR)(given()).backward()
    assert seen[0] is model.norm.weight.grad and torch.equal(2 * seen[1], model.up.weight.grad)

    block = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": NORMED["down"], "norm": SequenceParallel()}
    model, reference = both(lambda: Shards().double(), block)
    x = given()
    reference(x).square().sum().backward()
    rank = dist.get_rank()
    mine = x.detach().chunk(2)[rank].requires_grad_()
    model(mine).square().sum().backward()
    assert largest_difference(model, reference) < 1e-12 and (mine.grad - x.grad.chunk(2)[rank]).abs().max() < 1e-12


class Shards(Pair):
    def forward(self, x):
        return self.norm(self.pair(x))


def test_complex_numbers_hooks_from_before_and_an_input_in_shards():
    run(other_types_and_inputs, ranks=2)


def of_matrices(kind, parameters, rate):
    return kind([p for p in parameters if p.ndim == 2], rate)


def bad_trainings():
    for name in ("Adafactor", "Muon", "LBFGS"):
        if kind := getattr(torch.optim, name, None):
            text = f"{name} looks at a whole matrix or at norms, and this rank has only its part of 'up.weight': under"
            refuse(lambda kind=kind: trained(plainly, optimizer=partial(of_matrices, kind)), text, TypeError)
    text = "is not split, and its gradient differs on ranks 0 and 1 as the optimizer begins, though not as backward"
    refuse(lambda: trained(plainly, clip=nn.utils.clip_grad_norm_), text, RuntimeError)
    assert trained(plainly, clip=nn.utils.clip_grad_value_) < 1e-11

    model = Pair().double()
    optimizer = torch.optim.AdamW(model.parameters())
    plainly(model, optimizer, 0)
    optimizer.step()
    loss = model(given())
    text = "parameter 'up.weight' is part of a graph that is still alive, of an earlier loss or a wrapper such as DDP"
    refuse(lambda: split(PAIR, model), text)
    del loss
    plainly(split(PAIR, model), optimizer, 0)
    refuse(optimizer.step, "the optimizer has state of 'up.weight' from before parallelize(), for all of it")

    for name, plan in (("up", PAIR), ("down", PAIR)):
        model = split(plan, Pair())
        getattr(model, name).weight = Pair().get_parameter(f"{name}.weight")
        refuse(lambda model=model: model(torch.ones(4, 6)), f"the weight of {name!r} was replaced by one of shape (")
    model = split(gpt_plan(SMALL))
    model.embed.weight = GPT(SMALL).embed.weight
    refuse(lambda: model(*batch(23)), "the weight of 'embed' was replaced by one of shape (23, 24), and this rank's pa")
    model = split(gpt_plan(SMALL))
    text = "the loss of a split vocabulary (LossParallel) has no second derivative, for which create_graph=True asks"
    loss = model(*batch(23))
    refuse(lambda: torch.autograd.grad(loss, model.norm.weight, create_graph=True), text, RuntimeError)


def test_a_training_that_would_be_wrong_is_refused_in_a_sentence():
    run(bad_trainings, ranks=2)


def test_names_of_pytorch_that_are_not_here_lead_out():
    for name, way in tp.LACKING.items():
        with pytest.raises(ImportError, match=f"labs.tp has no {name}: ") as told:
            exec(f"from labs.tp import {name}")
        assert str(told.value).endswith(way)
    assert not hasattr(tp, "anything_else")
