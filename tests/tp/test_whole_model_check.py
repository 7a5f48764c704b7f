"""Tests of labs.tp.whole_model_check and misused_parts against the same model in one process, and of refusals."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, prune

from labs.dtensor import Replicate, Shard
from labs.kit.launch import run
from labs.tp import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    clip_gradients,
    full_parameters,
    parallelize,
    placements,
    slices,
)
from labs.tp.parameter_cuts import Queries
from tests.tp.common import largest_difference, refuse, tp_mesh

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
PAIR = {"up": COLUMNS, "down": ROWS}


def given():
    return torch.linspace(-1, 1, 64, dtype=torch.float64).sin().view(2, 4, 8)


class Fused(nn.Module):
    """An attention with q, k and v as one matrix, cut into three in one of several ways."""

    def __init__(self, cut, dropout=0.0):
        super().__init__()
        self.qkv, self.o, self.dropout, self.cut = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(dropout), cut

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.cut(self.qkv(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.o(y.transpose(1, 2).flatten(-2)))


class Between(nn.Module):
    """A pair with something between columns and rows."""

    def __init__(self, between, wide=12, narrow=12):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, wide), nn.Linear(narrow, 8), between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


CUTS = {
    "chunk": lambda y: y.chunk(3, -1),
    "split": lambda y: y.split(y.shape[-1] // 3, -1),
    "view": lambda y: y.unflatten(-1, (3, -1)).unbind(-2),
}
OF_ALL_FEATURES = {
    "softmax": lambda h: h.softmax(-1),
    "a norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "a mean": lambda h: h - h.mean(-1, keepdim=True),
    "the largest": lambda h: h / h.abs().amax(-1, keepdim=True),
    "places": lambda h: h * torch.arange(h.shape[-1]),
    "moved": lambda h: h.roll(1, -1),
    "a number of heads": lambda h: h.unflatten(-1, (2, -1)).softmax(-1).flatten(-2),
}
OF_EACH = {
    "tanh": torch.tanh,
    "heads": lambda h: h.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2),
    "nothing": lambda h: h,
}


def off(make, plan, x=None):
    """Return the largest difference of the output and of gradients from one process's."""
    outputs, models = [], []
    for number in range(2):
        torch.manual_seed(0)
        models.append(make().double())
        model = models[-1] if number else parallelize(models[0], tp_mesh(), plan)
        outputs.append(model(given() if x is None else x))
        outputs[-1].square().sum().backward()
    return max((outputs[0] - outputs[1]).abs().max().item(), largest_difference(*models))


def fused_ones():
    heads, found = {"o": RowwiseParallel(heads=Queries(4, 4))}, []
    for cut in CUTS.values():
        found.append(off(partial(Fused, cut), {**heads, "qkv": ColwiseParallel(parts=3, heads=Queries(4, 4))}))
        for dropout in (0.0, 0.5):
            text = "what 'o' makes of (2, 4, 8) is not what the whole model has there"
            refuse(
                lambda cut=cut, p=dropout: off(partial(Fused, cut, p), {**heads, "qkv": COLUMNS}), text, RuntimeError
            )
    glu = partial(Between, lambda h: F.glu(h, -1), 14, 7)
    found.append(off(glu, {**PAIR, "up": ColwiseParallel(parts=2)}))
    even = partial(Between, lambda h: F.glu(h, -1), 16, 8)
    refuse(lambda: off(even, PAIR), "Cut a fused matrix by its parts (ColwiseParallel(parts=3))", RuntimeError)
    model = parallelize(whole := glu(), tp_mesh(), {**PAIR, "up": ColwiseParallel(parts=2)})
    before = {name: p.clone() for name, p in glu().named_parameters()}
    for name, p in whole.named_parameters():
        assert name not in slices(model) or p.shape == before[name][slices(model)[name]].shape
    assert placements(model)["up.weight"] == Shard(0)
    refuse(lambda: off(glu, {**PAIR, "up": ColwiseParallel(parts=3)}), "'up' has 14 outputs, not 3 parts of one size")
    joined = ColwiseParallel(parts=2, output_layouts=Replicate())
    refuse(lambda: off(glu, {"up": joined}), "'up' is cut by heads or parts, and its output becomes whole")
    return max(found)


def between_columns_and_rows():
    found = [off(partial(Between, each), PAIR) for each in OF_EACH.values()]
    for each in OF_ALL_FEATURES.values():
        refuse(lambda each=each: off(partial(Between, each), PAIR), "an operation takes them for all", RuntimeError)
        joined = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
        found.append(off(partial(Between, each), joined))
    return max(found)


def losses_outside():
    def head():
        torch.manual_seed(0)
        return parallelize(nn.Sequential(nn.Linear(8, 12)), tp_mesh(), {"0": COLUMNS})

    x, y = given()[0].float(), torch.arange(4)
    text = "the loss takes a softmax over the model's output, of which each rank has a piece of 12 features"
    refuse(lambda: F.cross_entropy(head()(x), y).backward(), text, RuntimeError)
    refuse(lambda: head()(x).log_softmax(-1)[:, 0].sum().backward(), text, RuntimeError)
    for loss in (torch.sum, torch.mean, lambda y: y.square().sum()):
        loss(head()(x)).backward()


# ---- parts -----------------------------------------------------------------------------------------------


def taken(in_loss=None, between_steps=None, drawn=None, plan=PAIR):
    """Take a step whose penalty, change of gradients, or numbers use a rank's parts."""
    torch.manual_seed(0)
    model = parallelize(Between(torch.tanh), tp_mesh(), plan)
    if drawn:
        drawn(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (model(given().float()).square().sum() + (in_loss(model) if in_loss else 0)).backward()
    if between_steps:
        between_steps(model)
    optimizer.step()


def redrawn(model):
    torch.manual_seed(1)
    nn.init.normal_(model.up.weight)


def parts_for_the_whole():
    for penalty in (
        lambda m: m.up.weight.norm(),
        lambda m: 1e-4 * m.down.weight.square().sum(),
        lambda m: (m.up.weight.mean(0) ** 2).sum(),
        lambda m: m.up.bias.std(),
    ):
        refuse(lambda penalty=penalty: taken(penalty), "is split, and was used outside of its module", RuntimeError)
    taken(lambda m: m.down.bias.norm())  # the bias is whole
    own_norm = partial(clip_each, max_norm=0.01)
    refuse(lambda: taken(between_steps=own_norm), "and each has a part of one parameter: clip with", RuntimeError)
    for way in (
        lambda m: clip_gradients(m, 0.01),
        lambda m: clip_grad_value_(m.parameters(), 0.01),
        lambda m: [p.grad.mul_(0.5) for p in m.parameters()],
    ):
        taken(between_steps=way)
    refuse(lambda: taken(drawn=redrawn), "'up.weight' has the same numbers on ranks 0 and 1", RuntimeError)
    taken(drawn=lambda model: nn.init.zeros_(model.up.weight))


def clip_each(model, max_norm):
    clip_grad_norm_([model.up.weight], max_norm)


# ---- a model that changes --------------------------------------------------------------------------------


def replaced(model):
    model.up = nn.Linear(8, 12)


CHANGES = {
    "replaced": replaced,
    "pruned": lambda model: prune.l1_unstructured(model.up, "weight", 0.5),
    "parametrized": lambda model: parametrizations.weight_norm(model.down),
    "an adapter": lambda model: model.norm.register_parameter("more", nn.Parameter(torch.ones(8))),
    "a norm, parametrized": lambda model: parametrizations.weight_norm(model.norm, dim=None),
}


def changed_later():
    for change in CHANGES.values():
        model = Between(torch.tanh)
        model.norm = nn.LayerNorm(8)
        parallelize(model, tp_mesh(), {**PAIR, "norm": SequenceParallel()})
        change(model)
        for use in (full_parameters, slices, placements, partial(clip_gradients, max_norm=1.0), lambda m: m(given())):
            refuse(lambda use=use, m=model: use(m), "was changed after parallelize()", RuntimeError)


# ---- a module on shards that calls itself; the model's own input in parts --------------------------------


class Scale(nn.Module):
    """A module that calls itself: with its own weight, with another one, or with its bias read where modules
    keep it.
    """

    def __init__(self, how):
        super().__init__()
        self.weight, self.bias, self.how = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), how

    def forward(self, x, again=True):
        if not again:
            return x * self.weight
        if self.how == "lent":
            return functional_call(self, {"weight": self.weight * 10}, (x,), {"again": False})
        return self(x * self.weight, again=False) + self._parameters["bias"]


def off_of_parts(make, plan, dim, loss=torch.sum):
    """Return the largest difference if each rank gives the model its part of x."""
    x, models, found = torch.arange(16.0).view(4, 4).sin(), [], []
    for number in range(2):
        torch.manual_seed(0)
        models.append(make())
        model = models[-1] if number else parallelize(models[0], tp_mesh(), plan)
        mine = x if number else x.chunk(2, dim)[tp_mesh().get_local_rank()]
        loss(model(mine) if isinstance(plan, dict) else model(input=mine)).backward()
        found.append(max(p.grad.abs().max().item() for p in models[-1].parameters() if p.grad is not None))
    assert min(found) > 0
    return largest_difference(*models)


def on_shards():
    joined = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    found = [off_of_parts(lambda: nn.Sequential(Scale("twice")), {"0": SequenceParallel()}, 0)]
    lent = partial(nn.Sequential, Scale("lent"))
    torch.manual_seed(0)
    assert parallelize(lent(), tp_mesh(), {"0": SequenceParallel()})(torch.ones(2, 4)).sum() == 80
    plan = {"0": SequenceParallel(), "1": joined}
    found.append(off_of_parts(lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), plan, 0))
    for style in (RowwiseParallel(), ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())):
        found += [off_of_parts(lambda: nn.Sequential(nn.Linear(4, 4)), {"0": style}, 1)]
        found += [off_of_parts(partial(nn.Linear, 4, 4), plan, 1) for plan in (style, {"": style})]
    uneven = parallelize(nn.Sequential(nn.Linear(4, 4)), tp_mesh(), {"0": joined})
    text = "the shards that go into '0' are (3, 4) on rank 0 and (2, 4) on rank 1: ranks share the sequence equally"
    refuse(lambda: uneven(torch.ones(5, 4).chunk(2)[tp_mesh().get_local_rank()]), text, RuntimeError)
    return max(found)


class OwnLars(torch.optim.SGD):
    """An optimizer that scales each gradient by the norm of its weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * (p.norm() / p.grad.norm()).item())


class PerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.heat = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return self.down((self.up(x).unflatten(-1, (-1, 2)) * self.heat).flatten(-2))


def scaled_by_a_scaler():
    torch.manual_seed(0)
    model = parallelize(Between(torch.tanh), tp_mesh(), PAIR)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(given().float()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def told_by_a_note():
    torch.manual_seed(0)
    with pytest.raises(RuntimeError) as caught:
        parallelize(PerHead().double(), tp_mesh(), PAIR)(given())
    assert caught.value.__notes__[0].startswith("heat of '' is whole on each rank; between columns and rows")


def other_ways_of_a_step():
    torch.manual_seed(0)
    model = parallelize(Between(torch.tanh).double(), tp_mesh(), PAIR)
    model(given()).sum().backward()
    refuse(OwnLars(model.parameters(), 0.1).step, "OwnLars looks at more than one element")
    refuse(scaled_by_a_scaler, "a GradScaler looks for overflows in this rank's parts alone", RuntimeError)
    told_by_a_note()

    def pair():
        torch.manual_seed(0)
        return parallelize(Between(torch.tanh), tp_mesh(), PAIR)

    model = pair()
    loss = torch.func.grad(lambda x: model(x).sum())
    refuse(lambda: loss(given().float()), "torch.func.grad, vmap and the like cannot transform", RuntimeError)
    model, optimizer = (made := pair()), torch.optim.SGD(made.parameters(), 0.1)
    model(given().float()).sum().backward()
    if tp_mesh().get_local_rank():
        optimizer.zero_grad()
    refuse(optimizer.step, "has a gradient on one of the ranks 0 and 1 as the optimizer begins", RuntimeError)


JOBS = [other_ways_of_a_step, losses_outside, parts_for_the_whole, changed_later]


def test_a_fused_matrix_is_cut_by_its_parts_or_refused():
    assert max(run(fused_ones, ranks=2)) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_takes_some_features_for_all_is_refused(ranks):
    assert max(run(between_columns_and_rows, ranks=ranks)) < 1e-12


def test_modules_on_shards_and_a_first_input_in_parts():
    assert max(run(on_shards, ranks=2)) < 1e-6


def test_parts_taken_for_the_whole_and_models_that_change_are_refused():
    run(lambda: [job() for job in JOBS], ranks=2)
