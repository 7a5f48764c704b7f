"""Tests of labs.fsdp.sharded_parameter: in its forward a layer finds whole parameters, also those lent by a caller.

The reference is the same in one process.
"""

import dataclasses
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from labs.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh
from tests.fsdp.common import full, linear, seeded

# ---- inside a forward ------------------------------------------------------------------------------------


class Lends(nn.Module):
    """A model that calls its layer with other parameters, and then with its own."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        lent = functional_call(self.inner, {"weight": torch.full((3, 3), 2.0), "bias": torch.ones(3)}, (x,))
        return (lent * self.inner(x)).sum()


class Learns(Lends):
    """A model that takes a step of MAML."""

    def forward(self, x):
        weight = self.inner.weight
        (gradient,) = torch.autograd.grad(self.inner(x).square().sum(), weight, create_graph=True)
        return functional_call(self.inner, {"weight": weight - 0.1 * gradient}, (x,)).sum()


class Penalised(Lends):
    def forward(self, x):
        assert all(isinstance(p, nn.Parameter) and not hasattr(p, "to_local") for p in self.parameters())
        assert self.get_parameter("inner.weight") is self.inner.weight
        return self.inner(x).sum() + sum(p.square().sum() for p in self.parameters())


class CallsItself(Lends):
    def forward(self, x, times=2):
        return self.inner(self(x, times - 1) if times else x).tanh()


class Outer(nn.Module):
    """A model whose layer is sharded by itself, and so resharded when its forward ends."""

    def __init__(self, make):
        super().__init__()
        self.layer = make()

    def forward(self, x):
        return self.layer(x).sum()


def gradients(make, shard, x):
    model = seeded(make)
    if shard:
        if isinstance(model, Outer):
            fully_shard(model.layer)
        fully_shard(model)
        shards = [*model.parameters()]
    for _ in range(2):
        model(x + dist.get_rank()).sum().backward()
    assert not shard or all(p is q for p, q in zip(model.parameters(), shards, strict=True)), "shards again"
    return {name: p.grad.full_tensor() if shard else p.grad for name, p in model.named_parameters()}


MODELS = [Lends, Learns, Penalised, CallsItself, *(partial(Outer, make) for make in (Lends, Penalised, CallsItself))]


def test_a_forward_computes_with_lent_tensors_and_with_whole_parameters():
    def body():
        wrong, x = [], torch.arange(6.0).view(2, 3) / 10
        for make in MODELS:
            ours, alone = (gradients(make, shard, x) for shard in (True, False))
            for name, gradient in alone.items():
                dist.all_reduce(gradient)
                if not torch.allclose(ours[name], gradient / 2, rtol=1e-5, atol=1e-6):
                    wrong.append((make, name, ours[name], gradient / 2))
        return [str(case) for case in wrong]

    assert run(body, ranks=2) == [[], []]


def test_outside_a_forward_parameters_are_shards():
    def body():
        model, found = fully_shard(linear(), reshard_after_forward=False), []
        loss = model(torch.ones(2, 3)).sum()
        found.append([p.to_local().shape[1:] == p.shape[1:] and p.is_leaf for p in model.parameters()])
        loss.backward()
        before = model.weight.grad.full_tensor()
        loss = model(torch.ones(2, 3)).sum()
        model.zero_grad()  # many loops do this between forward and backward
        loss.backward()
        found.append(torch.equal(model.weight.grad.full_tensor(), before))
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()  # gradients that wait for their reduction are discarded, too
        model.set_requires_gradient_sync(True)
        model.unshard()
        found.append(model.weight.shape == (3, 3) and not hasattr(model.weight, "to_local"))
        found.append(all(hasattr(x, "to_local") for x in model.state_dict().values()))
        model.reshard()
        model(torch.ones(2, 3)).sum().backward()
        found.append(torch.equal(model.weight.grad.full_tensor(), before))
        return found

    for found in run(body, ranks=2):
        assert found == [[True, True], True, True, True, True]


# ---- inputs and outputs of a module ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    others: list
    number: int = 3


class TakesPairs(nn.Linear):
    def forward(self, pair):
        return Pair(super().forward(pair.x), [pair.others[0].dtype, pair.others[0]], pair.number)


def test_dataclasses_are_cast_and_slices_are_not_sharded():
    def body():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = fully_shard(seeded(lambda: TakesPairs(3, 3)), mp_policy=policy)
        given = Pair(torch.ones(2, 3), [torch.ones(1)], 5)
        made = model(given)
        part = fully_shard(nn.Sequential(linear(), linear(), linear()))[:2]
        return (
            (made.x.dtype, made.others[0], made.others[1].dtype, made.number, given.x.dtype),
            (isinstance(part, FSDPModule), type(part), len(part)),
        )

    for cast, part in run(body, ranks=2):
        assert cast == (torch.float64, torch.bfloat16, torch.float64, 5, torch.float32)
        assert part == (False, nn.Sequential, 2)


# ---- refusals --------------------------------------------------------------------------------------------


def backward_of_inputs(model, loss):
    loss.backward(inputs=list(model.parameters()))


def gradients_of_shards(model, loss):
    torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_gradients_that_would_not_come_are_refused_and_those_of_inputs_come():
    def body():
        said = []
        for ask in (backward_of_inputs, gradients_of_shards):
            for reshard in (True, False):
                layer = fully_shard(linear(), reshard_after_forward=reshard)
                model = fully_shard(nn.Sequential(layer))
                try:
                    ask(model, model(torch.ones(2, 3)).sum())
                except RuntimeError as error:
                    said.append(str(error))
                model(torch.ones(2, 3)).sum().backward()  # the failed backward adds nothing
                assert torch.equal(layer.weight.grad.full_tensor(), torch.full((3, 3), 2.0))
                model.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        model(x).sum().backward(inputs=[x])
        expected = 2 * [full(model)["0.weight"].sum(0).tolist()]
        return said, x.grad.tolist() == expected, layer.weight.grad is None

    for said, right, none in run(body, ranks=2):
        assert len(said) == 4 and right and none
        assert all("backward(inputs=...) and autograd.grad do not bring a parameter" in text for text in said)


# ---- differences from PyTorch's --------------------------------------------------------------------------


def test_a_layer_thawed_after_a_frozen_forward_in_bfloat16_trains():
    """Check a case in which PyTorch 2.13 fails."""

    def body():
        model = linear().requires_grad_(False)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(torch.ones(2, 3))
        model.requires_grad_(True)
        model(torch.ones(2, 3)).sum().backward()
        return model.weight.grad.full_tensor().tolist()

    assert run(body, ranks=2) == [[[2.0] * 3] * 3] * 2


def test_an_inner_module_runs_before_the_root_and_a_step_after_unshard_is_seen():
    def body():
        mesh = Mesh((2,), ("dp",))
        model = nn.Sequential(linear(), linear())
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        first = model[0](torch.ones(2, 3))
        second = model(torch.ones(2, 3))
        one = linear()
        right = [torch.equal(first, one(torch.ones(2, 3))), torch.equal(second, one(one(torch.ones(2, 3))))]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(2, 3)).sum().backward()
        for begin in (partial(model[0].unshard, async_op=True), model[1].unshard):
            begin()
        optimizer.step()
        with torch.no_grad():
            stepped = model(torch.ones(2, 3))
        last = nn.Sequential(linear(), linear())
        last.load_state_dict(full(model))
        return [*right, torch.allclose(stepped, last(torch.ones(2, 3)))]

    assert run(body, ranks=2) == [[True] * 3] * 2
