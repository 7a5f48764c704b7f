"""Tests of labs.tp's refusals: plans, layouts, models and calls that do not fit, each in a sentence."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import parallel, placement_types
from torch.nn.utils import prune

from labs.dtensor import Partial, Replicate, Shard
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.memory.recompute import recompute
from labs.mesh import Mesh
from labs.model import GPT
from labs.tp import (
    ColwiseParallel,
    LossParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    gpt_plan,
    slices,
)
from labs.tp.parameter_cuts import Queries
from tests.tp.common import SMALL, batch, refuse, split, tp_mesh


def bad_plans():
    plan = gpt_plan(SMALL)
    refuse(
        lambda: split({"layers.*.atention.q": ColwiseParallel()}),
        "the plan has 'layers.*.atention.q', and no submodule is called that: did you mean 'layers.*.attention.q'?",
    )
    refuse(
        lambda: split({"norm": ColwiseParallel()}),
        "ColwiseParallel fits Linear, and 'norm' is of type RMSNorm",
    )
    refuse(lambda: split({"layers.0": SequenceParallel()}), "has modules in it: give SequenceParallel() to each")
    refuse(lambda: split({"head": LossParallel(23)}), "LossParallel fits CrossEntropy, and 'head' is of type Linear")
    refuse(
        lambda: split({"head": ColwiseParallel()}, GPT(replace(SMALL, tied=True))),
        "'embed.weight' and 'head.weight' are one parameter (tied), and the plan splits them differently",
    )
    model = GPT(SMALL)
    before = [p.shape for p in model.parameters()]
    refuse(lambda: split({**plan, "layers.*.attention.q": ColwiseParallel(heads=Queries(7, 7))}, model), "7 heads")
    assert before == [p.shape for p in model.parameters()], "nothing was changed"
    blocks = {name: style for name, style in gpt_plan(SMALL, True).items() if not isinstance(style, PrepareModuleInput)}
    refuse(
        lambda: split(blocks | {"layers.*": PrepareModuleInput(input_layouts=Shard(1))}),
        "'layers.0' gathers its sequence once, but leaves its split part at 'layers.0.attention.o' and 'layers.0.mlp.d",
    )
    refuse(lambda: split(plan, mesh=Mesh((1, 2), ("dp", "tp"))), "has 2 axes: tensor parallelism takes one")
    refuse(lambda: split(plan, GPT(SMALL, seed=dist.get_rank())), "replicas differ from the start")
    refuse(lambda: split({**plan, "norm": ColwiseParallel(input_layouts=Shard(0))}), "ColwiseParallel fits Linear")
    refuse(lambda: split({"q": ColwiseParallel()}, nn.Linear(2, 2)), "no submodule is called that: a Linear has none")
    refuse(lambda: split({"": SequenceParallel()}), "'' (GPT) has modules in it: give SequenceParallel() to each")
    refuse(lambda: split(ColwiseParallel()), "ColwiseParallel fits Linear, and '' is of type GPT")
    refuse(lambda: split(3), "is no plan: give a style, or a table of styles by the names of submodules", TypeError)
    for option in ("use_local_output", "desired_input_layouts"):
        refuse(
            lambda option=option: ColwiseParallel(**{option: True}), f"ColwiseParallel has no {option}=: ", TypeError
        )
    refuse(lambda: PrepareModuleInput(input_kwarg_layouts=None), "has no input_kwarg_layouts=: the first", TypeError)
    refuse(lambda: split({"head": ColwiseParallel}), "which is no style of labs.tp", TypeError)
    refuse(lambda: split({"head": parallel.ColwiseParallel()}), "which is no style of labs.tp", TypeError)
    refuse(lambda: split({}, mesh=2), "2 is no Mesh: give Mesh((4,), ", TypeError)


def bad_layouts():
    for end, layout, gives in (
        ("input_layouts", Partial(), "Replicate() or Shard(dim), of labs.dtensor"),
        ("output_layouts", Shard(1), "Replicate() or Shard(-1), of labs.dtensor"),
        ("input_layouts", placement_types.Shard(1), "Replicate() or Shard(dim), of labs.dtensor"),
    ):
        text = f"'head' has ColwiseParallel({end}={layout!r}): give {gives}"
        refuse(lambda end=end, layout=layout: split({"head": ColwiseParallel(**{end: layout})}), text)
    refuse(lambda: split({"head": RowwiseParallel(input_layouts=Shard(1))}), "Replicate() or Shard(-1), of labs")
    refuse(lambda: split({"layers.*": PrepareModuleInput(input_layouts=Partial())}), "Replicate() or Shard(dim), of l")
    bias = split({"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))}, nn.Sequential(whole(4)))
    refuse(lambda: bias(torch.ones(3, 4)), "'0' has a bias of 4 features, and its output is cut to 2 of them")


def whole(size):
    torch.manual_seed(0)
    return nn.Linear(size, size)


def bad_models():
    for option in ({"padding_idx": 0}, {"padding_idx": 3}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model, text = nn.Sequential(nn.Embedding(4, 2, **option)), f"'0' is an Embedding with {next(iter(option))}"
        refuse(lambda model=model: split({"0": RowwiseParallel()}, model), text)
    model = split({"norm": SequenceParallel(), "head": ColwiseParallel()})
    refuse(lambda: model.load_state_dict(GPT(SMALL).state_dict()), ": load state[name][labs.tp.slices(model)[name]]")
    model.load_state_dict(
        GPT(SMALL).state_dict() | {"head.weight": GPT(SMALL).head.weight[slices(model)["head.weight"]]}
    )
    refuse(lambda: split({"head": ColwiseParallel()}, model), "'norm' has been split by an earlier parallelize()")
    recomputed = GPT(SMALL)
    recompute([recomputed.layers["0"].attention])
    refuse(lambda: split(gpt_plan(SMALL, True), recomputed), "'layers.0.attention' has been given another forward")
    tied = nn.Sequential(whole(4), whole(4), whole(4))
    tied[2].weight = tied[1].weight
    plan = {"0": ColwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    refuse(lambda: split(plan, tied), "'1.weight' and '2.weight' are one parameter (tied)")
    refuse(lambda: split({"0": ColwiseParallel()}, nn.Sequential(nn.LazyLinear(2))), "parameter '0.weight' is lazy")
    pruned = nn.Sequential(prune.identity(whole(4), "weight"))
    refuse(lambda: split({"0": ColwiseParallel()}, pruned), "0.weight is computed from other parameters")
    sharded = fully_shard(GPT(SMALL), mesh=tp_mesh())
    refuse(lambda: split({}, sharded), "parameter 'embed.weight' is a DTensor already: parallelize() first")
    block = split({"0": PrepareModuleInput()}, nn.Sequential(nn.Embedding(4, 4)))
    refuse(lambda: block(torch.ones(3).long()), "'0' is prepared for a first input x that is split, and", TypeError)


def bad_calls():
    sequence = split(gpt_plan(SMALL, True))
    x, y = batch(23, 7)
    refuse(lambda: sequence(x, y), "7 positions (dim 1 of (2, 7, 24)) are not divisible by 2 ranks: use 6 or 8")
    model = split(gpt_plan(SMALL))
    refuse(lambda: model(x + 23), "token", IndexError)
    refuse(lambda: model(x, y.abs() + 30), "is not in the vocabulary, 0 to 22", IndexError)
    pieces = split({"layers.*.mlp.gate": ColwiseParallel(), "layers.*.mlp.up": ColwiseParallel()})
    refuse(lambda: pieces(x, y), "'layers.0.mlp.down' (Linear) is not split, takes all 41 features, and got 2")
    rows = split({"layers.*.mlp.down": RowwiseParallel()})
    refuse(lambda: rows(x, y), "takes this rank's part of its 41 features")
    fits = "do not fit logits of shape (2, 7, "
    refuse(lambda: model(x, y[:, 1:]), f"targets of torch.int64 (2, 6) {fits}")
    refuse(lambda: model(x, y.double()), f"targets of torch.float64 (2, 7) {fits}")


def test_what_does_not_fit_is_refused_in_a_sentence():
    run(lambda: [job() for job in (bad_plans, bad_layouts, bad_models, bad_calls)], ranks=2)
