"""Shared code of several tests of labs.pp in jobs: a small GPT in parts, trained on one process and on many."""

import torch

from labs.kit.launch import run
from labs.model import GPT, Config
from labs.pp import SCHEDULES, Pipeline, cut
from labs.pp.checker import microbatches_of, stages_of

# Every size is different, so that no axis can be mistaken for another.
SMALL = Config(vocab=23, dim=16, depth=8, heads=4, kv_heads=2, hidden=20, context=30)
V, HAS_V = ("zbv", "dualpipev"), torch.__version__ >= "2.12"
PYTORCHS = {name: schedule for name, schedule in SCHEDULES.items() if HAS_V or name not in V}


def batch(number, size, tokens=5):
    return torch.randint(23, (2, size, tokens), generator=torch.Generator().manual_seed(number))


def named(pipeline):
    return {name: p for stage in pipeline.stages.values() for name, p in stage.named_parameters()}


def train(backward, parameters, batches):
    """Take a step with the gradients of this many batches: losses, gradients, and the parameters after it."""
    losses = [loss for number in range(batches) for loss in backward(number)]
    torch.optim.AdamW(dict.fromkeys(parameters.values()), 1e-2).step()
    return losses, {name: p.grad for name, p in parameters.items()}, {name: p.data for name, p in parameters.items()}


def one_process(config, dtype, microbatches, batches=2):
    model = GPT(config).to(dtype)

    def backward(number):
        losses = []
        for x, y in zip(*(each.chunk(microbatches) for each in batch(number, microbatches)), strict=True):
            losses.append(model(x, y))
            (losses[-1] / microbatches).backward()
        return [loss.detach() for loss in losses]

    return train(backward, dict(model.named_parameters(remove_duplicate=False)), batches)


def references(*cases):
    return {case: one_process(*case) for case in cases}


def expected(*cases):
    return run(references, *cases, ranks=1)[0]  # runs in a job, where kernels have as many threads as on every rank


def piped(config, dtype, lists, layers=None):
    model = GPT(config).to(dtype)
    pipeline = Pipeline(cut(model, layers or stages_of(lists)), lists, model.loss)
    found = train(lambda number: pipeline.forward_backward(*batch(number, microbatches_of(lists))), named(pipeline), 2)
    mail = pipeline.mail
    assert not any((mail.made, mail.leaving, mail.arriving, pipeline.alive, pipeline.later, pipeline.xs, pipeline.ys))
    return found


def largest_difference(found, reference):
    """Return the largest difference of the losses, parameters and gradients that this rank has."""
    losses = zip(found[0], reference[0], strict=True) if found[0] else ()
    numbers = [(mine[name], whole[name]) for mine, whole in zip(found[1:], reference[1:], strict=True) for name in mine]
    return max((a - b).abs().max().item() for a, b in [*losses, *numbers])


def loss_of(y, target):
    return (y.sum(-1) - target).square().mean()
