"""Tests of the refusals of labs.zero as it shards, each in a sentence."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import run
from labs.memory.precision import Masters
from labs.zero import Zero
from tests.models import Awkward
from tests.zero.common import ADAMW, SGD, words_of


def hooked(register):
    model = Awkward()
    register(model.scale)
    return model


CANNOT_BE_SHARDED = [
    (lambda: Zero(Awkward(), 4, ADAMW), "stage 4: ZeRO has the stages 1, 2 and 3"),
    (
        lambda: Zero(Awkward().requires_grad_(False), 2, ADAMW),
        "Awkward has no trainable parameters: there is nothing to shard",
    ),
    (
        lambda: Zero(model := Awkward(), 2, ADAMW, layers=model.layers),
        "layers miss 'scale', 'embed.weight', 'mixed.frozen.weight', 'mixed.frozen.bias', 'mixed.norm.weight', "
        "'mixed.norm.bias', 'branch.weight', 'branch.bias': add the modules that hold them, or the model itself",
    ),
    (lambda: Zero(Awkward(seed=dist.get_rank()), 3, ADAMW), "replicas differ from the start: parameter 'embed.weight'"),
    (
        lambda: Zero(Awkward(), 3, lambda shards: ADAMW([{"params": shards[1:]}, {"params": shards[:1]}])),
        "the optimizer takes the shards in another order than they were given",
    ),
    (lambda: Zero(model := Awkward(), 1, ADAMW, layers=nn.ModuleDict(model.mixed)), "is not a module of the model"),
    (lambda: [Zero(model, 1, ADAMW) for model in [Awkward()] * 2], "lies in vectors already: shard a model once"),
    (lambda: Zero(nn.Linear(2, 2, device="meta"), 3, ADAMW), "parameter 'weight' is on the meta device: say with"),
    (
        lambda: Zero(hooked(lambda p: p.register_post_accumulate_grad_hook(print)), 3, SGD),
        "parameter 'scale' has a hook, which would not be called: its gradient is a part of a vector's",
    ),
    (lambda: Zero(Awkward(), 1, partial(torch.optim.Muon, lr=0.1)), "Muon looks at matrices or norms, and a shard is"),
    (lambda: Zero(model := Awkward(), 1, lambda shards: SGD(model.parameters())), "was made of the model's parameters"),
    (
        lambda: Zero(Awkward(), 3, lambda shards: SGD([{"params": shards}, {"params": []}])),
        "the optimizer has a group without parameters",
    ),
    (lambda: Zero(Awkward(), 3, torch.optim.LBFGS), "LBFGS looks at matrices or norms"),
    (lambda: Zero(Awkward(), 3, partial(Masters, optimizer=torch.optim.Adafactor)), "Adafactor looks at matrices or"),
]


def test_what_cannot_be_sharded_is_refused_in_words():
    for words in run(lambda: [words_of(make) for make, _ in CANNOT_BE_SHARDED], ranks=2):
        for word, (_, sentence) in zip(words, CANNOT_BE_SHARDED, strict=True):
            assert sentence in (word or ""), word
