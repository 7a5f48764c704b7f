"""Tests of labs.fsdp.module_events: what people do around a training, and with it."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import ddp
from labs.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.zero import Zero
from tests.fsdp.common import ADAMW, awkward, full, layers_of, linear, seeded, sharded
from tests.models import batch

# ---- numbers ---------------------------------------------------------------------------------------------


def test_a_larger_piece_kept_between_forward_and_backward():
    def body():
        mesh, found, outputs = Mesh((4,), ("dp",)), [], []
        with pytest.raises(ValueError, match=r"reshard_after_forward=3 on 4 ranks: .* divides them \(\[2\]\)"):
            fully_shard(linear(), mesh=mesh, reshard_after_forward=3)
        for reshard in (2, True):
            model = sharded(awkward(), mesh, reshard_after_forward=reshard)
            for step in range(3):
                with torch.no_grad():
                    model(batch(step, dist.get_rank()))
                assert all(layer._sharding.group.kept is None for layer in layers_of(model))
                loss = model(batch(step, dist.get_rank()))
                kept = [layer._sharding.group.kept for layer in layers_of(model)]
                assert all((k is not None) == (reshard == 2) for k in kept)
                loss.backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
            loss = model(batch(0, 0))  # no backward follows this forward, whose kept gathers belong to another step
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            outputs.append(model(batch(0, 0)).detach())
            assert not torch.equal(loss, outputs[-1]), "the numbers from before the step"
        assert torch.equal(*outputs)
        return all(torch.equal(found[0][name], found[1][name]) for name in found[1])

    assert all(run(body, ranks=4))


# ---- odd models ------------------------------------------------------------------------------------------


def test_on_the_meta_device_only_shards_get_memory():
    def body():
        mesh = Mesh((2,), ("dp",))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        try:
            model(torch.ones(2, 5))
        except RuntimeError as error:
            early = str(error)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.ones_(p)
        held = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
        out = model(torch.ones(2, 5))
        out.sum().backward()
        return early, held, out.detach(), model[0].weight.grad.full_tensor()

    results = run(body, ranks=2)
    assert "parameter 'weight' is on the meta device: model.to_empty" in results[0][0]
    assert [held for _, held, *_ in results] == [4 * (2 * 5 + 2 + 3 * 3 + 3), 4 * (5 + 1 + 2 * 3 + 2)]
    for _, _, out, gradient in results:
        assert torch.equal(out, torch.full((2, 5), 19.0))
        assert torch.equal(gradient, torch.full((3, 5), 10.0))


def test_released_models_are_freed():
    """Check ours of DDP and ZeRO, too: hooks on parameters refer back to the object that registered them."""

    def trained(wrap):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        wrapped = wrap(model)
        model(torch.ones(2, 3)).sum().backward()
        return weakref.ref(model), weakref.ref(wrapped)

    def body():
        mesh, left = Mesh((1,), ("dp",)), {}
        ways = {"ddp": ddp.Overlapped, "fsdp": partial(sharded, mesh=mesh, layers=list)}
        ways |= {f"zero-{stage}": partial(Zero, stage=stage, optimizer=ADAMW) for stage in (1, 2, 3)}
        for name, wrap in ways.items():
            refs = trained(wrap)
            gc.collect()
            left[name] = [ref() for ref in refs if ref() is not None]
        return [name for name, objects in left.items() if objects]

    assert run(body, ranks=1) == [[]]


def test_a_compiled_model_is_the_same():
    def body():
        mesh, losses = Mesh((2,), ("dp",)), []
        for compiled in (False, True):
            model = sharded(awkward(), mesh)
            call = torch.compile(model, backend="eager") if compiled else model
            optimizer = ADAMW(model.parameters())
            for step in range(2):
                call(batch(step, dist.get_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(full(model))
        return all(torch.equal(losses[0][name], losses[1][name]) for name in losses[0])

    assert all(run(body, ranks=2))


def test_only_a_parameter_without_a_gradient_on_any_rank_has_none():
    """Check ranks 2 and 3, which have no row of the parameters: only their padding shows a missing gradient."""

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])

        def forward(self, x):
            return x + self.experts[dist.get_rank() % 2](x) * 0

    def body():
        model = seeded(Chosen)
        fully_shard(model)(torch.ones(1, 2)).sum().backward()
        p = model._sharding.group.parameters[0]
        p.pending, pieces = -torch.zeros(p.shape), torch.full((4, p.n), -0.0)
        p.pack(pieces, 1)
        return [p.grad is not None for p in model.parameters()], pieces.signbit().any().item()

    assert run(body, ranks=4) == [([True, True, True, True, False, False], False)] * 4


def habits(mesh):
    """Do what people do around a training, and return the outcome of each."""
    x, found = torch.ones(2, 3), {}

    layer, called = linear(), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.full_tensor()))
    layer.weight.register_hook(lambda gradient: gradient + dist.get_rank())
    layer.weight.decays = False
    fully_shard(layer, mesh=mesh).bias.register_post_accumulate_grad_hook(lambda p: called.append(p))
    layer(x * (1 + 2 * dist.get_rank())).sum().backward()
    found["hooks"] = torch.equal(called[0], torch.full((3, 3), 4.5)) and called[1] is layer.bias
    found["what is noted on a parameter"] = layer.weight.decays is False

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    found["output_dtype"] = fully_shard(linear(), mesh=mesh, mp_policy=policy)(x).dtype == torch.float64

    for reshard in (True, False):
        layer = fully_shard(linear(), mesh=mesh)
        layer.set_reshard_after_backward(reshard)
        layer(x).sum().backward()
        found[f"reshard_after_backward={reshard}"] = layer._sharding.group.gathered is not reshard
    return found


def test_habits():
    for found in run(lambda: habits(Mesh((2,), ("dp",))), ranks=2):
        assert all(found.values()), found


# ---- several modules, parameters left out, other methods -------------------------------------------------


class Tied(nn.Module):
    """A model with an embedding, layers, a norm, and a head that has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))

    def encode(self, tokens):
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x)

    def forward(self, tokens, headless=False):
        x = self.encode(tokens)
        return x.square().sum() if headless else self.head(x).logsumexp(-1).sum()

    @torch.no_grad()
    def generate(self, tokens, number):
        for _ in range(number):
            tokens = torch.cat([tokens, self.head(self.encode(tokens))[:, -1:].argmax(-1)], 1)
        return tokens

    @torch.no_grad()
    def longer(self, tokens):
        """Call forward several times."""
        return sum(self(tokens[:, : n + 1]) for n in range(3))


LISTS = {
    "norm and head": lambda m: ([m.embedding], [m.norm, m.head]),
    "embedding, norm and head": lambda m: ([m.embedding, m.norm, m.head],),
    "layers": lambda m: (list(m.layers),),
}


def grouped(lists, mesh, tied=True, **options):
    model = seeded(Tied)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    if mesh:
        for modules in LISTS[lists](model):
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, reshard_after_forward=True, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def tokens_of(step, rank):
    return torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(2 * step + rank))


def trained_in_groups(lists, mesh):
    model = grouped(lists, mesh, tied=lists == "embedding, norm and head")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = [dist.get_rank()] if mesh else [0, 1]
    for step in range(3):
        for rank in ranks:
            loss = model(tokens_of(step, rank), headless=step == 1) / len(ranks)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return full(model)


def test_modules_in_a_list_are_one_group():
    """Check one gather of them in forward, and one in backward, whether all of them run or not."""

    def body():
        mesh, wrong = Mesh((2,), ("dp",)), []
        for lists in LISTS:
            ours, alone = trained_in_groups(lists, mesh), trained_in_groups(lists, None)
            wrong += [(lists, key) for key, p in alone.items() if not torch.allclose(ours[key], p, atol=1e-6)]
        model = grouped("embedding, norm and head", mesh)
        gathers = []
        group, gather = model.embedding._sharding.group, model.embedding._sharding.group.gather
        group.gather = lambda *args: gathers.append(group.gathered or bool(group.arriving)) or gather(*args)
        model(tokens_of(0, 0)).backward()
        assert model.head._sharding is model.norm._sharding and not group.gathered
        return wrong, gathers.count(False)

    assert run(body, ranks=2) == [([], 2)] * 2


def test_methods_beside_forward_find_whole_parameters_if_they_are_registered():
    def body():
        mesh, found = Mesh((2,), ("dp",)), []
        model, alone = grouped("layers", mesh), seeded(Tied)
        for name in ("generate", "longer"):
            register_fsdp_forward_method(model, name)
            register_fsdp_forward_method(alone, name)  # a model that is not sharded stays as it is
        tokens = tokens_of(0, 0)
        for _ in range(2):
            found.append(torch.equal(model.generate(tokens, 3), alone.generate(tokens, 3)))
            found.append(torch.allclose(model.longer(tokens), alone.longer(tokens)))
            with torch.no_grad():
                for p in [*model.parameters(), *alone.parameters()]:
                    p.mul_(1.5)
        return found

    assert run(body, ranks=2) == [[True] * 4] * 2


def test_ignored_parameters_stay_as_they_are_and_the_divisor_may_be_another():
    def body():
        mesh, rank = Mesh((2,), ("dp",)), dist.get_rank()
        model = seeded(Tied)
        mine = {model.scale, model.layers[0].weight}
        fully_shard(model.layers[0], mesh=mesh, ignored_params=mine)
        fully_shard(model, mesh=mesh, ignored_params=mine)
        model.set_gradient_divide_factor(1.0)
        model.set_is_last_backward(False)
        model(tokens_of(0, rank)).backward()
        one = seeded(Tied)
        one(tokens_of(0, rank)).backward()
        right = [torch.allclose(model.scale.grad, one.scale.grad), type(model.layers[0].weight) is nn.Parameter]
        for name, divisor in {"norm.bias": 1, "layers.0.bias": 2}.items():
            dist.all_reduce(expected := one.get_parameter(name).grad)
            right.append(torch.allclose(model.get_parameter(name).grad.full_tensor(), expected / divisor, atol=1e-6))
        return right

    assert run(body, ranks=2) == [[True] * 4] * 2
