"""Tests of labs.moe.exchange and labs.moe.expert_parallel against one process, in float64 and bit by bit in float32."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import tp
from labs.agree import everybodys
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.moe import ExpertParallel, MoEGPT
from labs.moe.expert_parallel import AXES
from tests.models import trained_alone
from tests.moe.test_mixture import DIM, mixture
from tests.moe.test_moe_gpt import SMALL

TOKENS = (5, 0, 3, 4)  # of each rank: one has none
ODD = replace(SMALL, shared=1, balance=0.1, dim=8, tied=True)
FOLDED = replace(ODD, balance=0.0, kv_heads=2)


def only(expert):
    """Return a function that lets a router choose this expert for all tokens, which are positive."""

    def act(layer):
        nn.init.zeros_(layer.router.gate.weight)
        layer.router.gate.weight.data[expert] = 1.0

    return act


CASES = {  # a layer, and what is done to it
    "two experts of each token": (partial(mixture, 5, 2), lambda layer: None),
    "as many experts as ranks": (partial(mixture, 4, 3), lambda layer: None),
    "a shared expert, and full ones": (partial(mixture, 6, 2, 0.7, True), lambda layer: None),
    "all to one expert": (partial(mixture, 5, 1), only(3)),
    "frozen experts": (partial(mixture, 5, 2), lambda layer: layer.experts.requires_grad_(False)),
    "a frozen router": (partial(mixture, 5, 2), lambda layer: layer.router.requires_grad_(False)),
}


def tokens_of(rank, different):
    """Return the tokens of a rank; if `different`, those of each rank choose experts of their own."""
    x = torch.rand(TOKENS[rank], DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) + 0.1
    return x * torch.eye(DIM, dtype=torch.float64)[rank] if different else x


def alone(make, change, ranks, different):
    """Return each rank's output and input's gradient, and the mean gradients of the layer, in one process."""
    layer, found = make(), []
    change(layer)
    for rank in range(ranks):
        x = tokens_of(rank, different).requires_grad_()
        y = layer(x)
        (y.square().sum() / ranks).backward()
        found.append((y.detach(), x.grad * ranks))
    return found, {name: p.grad for name, p in layer.named_parameters()}


def differences(shape):
    """Return {case: how far this rank's outputs and gradients, and the norm of all, are from one process's}."""
    mesh, rank, found = Mesh(shape, AXES), dist.get_rank(), {}
    for name, (make, change) in CASES.items():
        for different in (False, True):
            outputs, expected = alone(make, change, mesh.size(), different)
            layer = make()
            change(layer)
            parallel = ExpertParallel(layer, mesh)
            x = tokens_of(rank, different).requires_grad_()
            y = parallel(x)
            y.square().sum().backward()
            parallel.sync()
            norm = nn.utils.get_total_norm([g for g in expected.values() if g is not None])
            off = [parallel.clip_gradients(math.inf) - norm, y - outputs[rank][0], x.grad - outputs[rank][1]]
            for each, p in layer.named_parameters():
                assert (p.grad is None) == (expected[each] is None)
                off += [] if p.grad is None else [p.grad - expected[each]]
            found[name, different] = max(each.abs().max().item() for each in off if each.numel())
            own = torch.arange(len(make().experts)).tensor_split(mesh.size("ep"))[mesh.get_local_rank("ep")]
            assert list(layer.experts) == [str(e) for e in own.tolist()]
            assert parallel.full_parameters().keys() == dict(make().named_parameters()).keys()
    return found


def all_differences(*shapes):
    found = []
    for shape in shapes:
        mark("step")
        found.append(differences(shape))
    mark("end")
    return found


@pytest.mark.parametrize("shapes", [[(1, 4), (2, 2), (4, 1)], [(1, 3)]], ids=["4 ranks", "3 ranks"])
def test_values_gradients_and_norm_equal_one_process(shapes):
    job = run(all_differences, *shapes, ranks=math.prod(shapes[0]), record="communication")
    for found in job:
        for shape, of_shape in zip(shapes, found, strict=True):
            assert max(of_shape.values()) < 1e-12, (shape, of_shape)
    verdict = would_hang(job.recording)
    assert verdict.name == SOUND, verdict


# ---- bit by bit ------------------------------------------------------------------------------------------

STEPS = 3


def batch(step, part):
    x = torch.randint(ODD.vocab, (2, 7), generator=torch.Generator().manual_seed(100 * step + part))
    return x[:, :-1], x[:, 1:]


def trained(shape):
    mesh = Mesh(shape, AXES)
    model = ExpertParallel(MoEGPT(ODD), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        model(*batch(step, dist.get_rank())).backward()
        model.sync()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_parameters()


def test_layouts_with_one_order_of_sums_agree_bit_for_bit():
    """Compare ep = 1 and edp = 1 with one process; with both above 1, an expert's sum is a sum of sums."""
    for shapes in ([(1, 3), (3, 1)], [(1, 4), (4, 1), (2, 2)]):
        ranks, one = math.prod(shapes[0]), MoEGPT(ODD)
        optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
        trained_alone(one, optimizer, lambda step, part, one=one: one(*batch(step, part)), ranks, STEPS)
        for found in run(lambda shapes=shapes: [trained(shape) for shape in shapes], ranks=ranks):
            for shape, full in zip(shapes, found, strict=True):
                for name, p in one.named_parameters():
                    same = torch.equal(full[name], p) if 1 in shape else torch.allclose(full[name], p, atol=1e-5)
                    assert same, (shape, name)


# ---- with tensor parallelism -----------------------------------------------------------------------------


def folded(shapes):
    """Train on dp × tp ranks, whose experts are split over edp × ep; return the norms and the whole model of each."""
    dense, found = Mesh((2, 2), ("dp", "tp")), []
    for shape in shapes:
        model, norms = MoEGPT(FOLDED).double(), []
        parallel = ExpertParallel(model, Mesh(shape, AXES), dense.get_group("dp"))
        tp.parallelize(model, dense["tp"], tp.gpt_plan(FOLDED, sequence_parallel=True))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(STEPS):
            parallel(*batch(step, dense.get_local_rank("dp"))).backward()
            parallel.sync()
            norms.append(parallel.clip_gradients(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        own = {name: p.detach() for name, p in tp.full_parameters(model).items()}
        full = {name: p for its in everybodys(own, None).values() for name, p in its.items()}
        found.append((norms, full))
    return found


def test_tensor_parallelism_folds_onto_the_ranks_of_the_experts():
    one, norms = MoEGPT(FOLDED).double(), []
    optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
    for step in range(STEPS):
        sum(one(*batch(step, part)) / 2 for part in range(2)).backward()
        norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    shapes = [(1, 4), (2, 2)]
    for found in run(folded, shapes, ranks=4):
        for shape, (its, full) in zip(shapes, found, strict=True):
            assert its == pytest.approx(norms, rel=1e-12), shape
            assert max((full[name] - p).abs().max().item() for name, p in one.named_parameters()) < 1e-12, shape
    for config, sequence_parallel in ((FOLDED, False), (ODD, True)):
        with pytest.raises(ValueError, match="along tp each rank routes its own shard of the sequence"):
            tp.gpt_plan(config, sequence_parallel)


# ---- refused ---------------------------------------------------------------------------------------------


def refused():
    """Return the sentence of every refusal on this rank."""
    mesh, found = Mesh((1, 2), AXES), []

    def refuse(do):
        with pytest.raises((ValueError, RuntimeError)) as error:
            do()
        found.append(str(error.value))

    refuse(lambda: ExpertParallel(nn.Linear(2, 2), mesh))
    refuse(lambda: ExpertParallel(mixture(3, 2), Mesh((2,), ("ep",))))
    refuse(lambda: ExpertParallel(mixture(1, 1), mesh))
    split = mixture(3, 2)
    split.tensor_parallel = "its state"
    refuse(lambda: ExpertParallel(split, mesh))
    refuse(lambda: ExpertParallel(mixture(3, 2, seed=dist.get_rank()), mesh))
    tied = mixture(3, 2)
    tied.experts["2"][0].weight = tied.experts["0"][0].weight
    refuse(lambda: ExpertParallel(tied, mesh))
    layer, x = mixture(3, 2), torch.ones(2, DIM, dtype=torch.float64)
    parallel = ExpertParallel(layer, mesh)
    refuse(parallel.sync)
    weights = nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    optimizer = torch.optim.SGD([*parallel.parameters(), weights], lr=0.1)
    (parallel(x * (1 + dist.get_rank())) * weights).square().sum().backward()
    parallel.sync()
    refuse(optimizer.step)
    if dist.get_rank() == 1:
        x[0, 0] = math.nan
    refuse(lambda: parallel(x))
    return found


def test_what_cannot_be_split_is_refused_on_every_rank():
    texts = [
        "Linear has no labs.moe.Mixture whose experts could be split: build one",
        "give the axes ('edp', 'ep'), with size 1 where you want none",
        "1 experts cannot be split over ep=2 ranks, each of which needs one: make ep 1 or less, and edp larger",
        "the model is split by labs.tp already: split its experts first, and then the rest",
        "replicas differ from the start",
        "parameter 'experts.0.0.weight' of an expert has 2 names in the model",
        "has no gradient for 'router.gate.weight': call loss.backward() before sync()",
        "parameter 'number 1' of the optimizer is on every rank, and its gradient differs on ranks 0 and 1: ",
        "the router's weights are NaN on rank 1, and NaN chooses no experts: end the training",
    ]
    for found in run(refused, ranks=2):
        assert len(found) == len(texts)
        for sentence, text in zip(found, texts, strict=True):
            assert re.search(re.escape(text), sentence), sentence
