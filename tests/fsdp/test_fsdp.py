"""labs.fsdp against one process, against PyTorch's fully_shard, and against a clock that tells what was in flight.

Many cases share a job: each returns what it saw, and the test judges.
"""

import copy
import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchsPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.utils.checkpoint import checkpoint

from labs import ddp
from labs.clip import clip_gradients
from labs.dtensor import DTensor, Shard, distribute_tensor
from labs.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, PRESETS
from labs.zero import Zero
from tests.models import Awkward, batch

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
CONFIG = PRESETS["tiny"]
BFLOAT16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def awkward(dtype=torch.float64):
    model = Awkward(dtype)
    model.scale = nn.Parameter(model.scale.data.view(1))  # there is nothing to cut in a parameter without dims
    return model


def layers_of(model):
    return [*model.layers, model.mixed["norm"]]


def sharded(model, mesh, layers=layers_of, **options):
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def full(model):
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


# ---- numbers ---------------------------------------------------------------------------------------------

TRAININGS = {  # micro-batches, norm to clip at, options of fully_shard
    "plain": (1, None, {}),
    "kept": (1, None, {"reshard_after_forward": False}),
    "micro-batches": (3, None, {}),
    "one sync": (3, None, {"reshard_after_forward": False}),
    "clipped": (1, 0.05, {}),
    "checkpointed": (1, None, {}),
    "offloaded": (1, None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def one_process(ranks, micro_batches, norm, steps=4):
    model = awkward()
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        for number in range(ranks * micro_batches):
            (model(batch(step, number), branch=step == 2) / micro_batches / ranks).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(name, mesh, steps=4):
    micro_batches, norm, options = TRAININGS[name]
    model = sharded(awkward(), mesh, **options)
    if name == "checkpointed":
        for layer in model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        for i in range(micro_batches):
            if name == "one sync":
                model.set_requires_gradient_sync(i == micro_batches - 1)
            tokens = batch(step, dist.get_rank() * micro_batches + i)
            (model(tokens, branch=step == 2) / micro_batches).backward()
        if norm is not None:
            clip_gradients(model.parameters(), norm, groups=(mesh.get_group(-1),))
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2), (1, 3)], ids=str)
def test_equals_one_process(sizes):
    """Frozen, tied and unused parameters, one of 1 element, shards that some ranks have nothing of."""
    names = ("replicate", "shard")[-len(sizes) :]
    ranks = torch.Size(sizes).numel()
    results = run(lambda: {name: train(name, Mesh(sizes, names)) for name in TRAININGS}, ranks=ranks)
    for name, (micro_batches, norm, _) in TRAININGS.items():
        one = one_process(ranks, micro_batches, norm)
        for ours in results:
            assert ours[name].keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(ours[name][key], value, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")


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
            loss = model(batch(0, 0))  # nobody goes back from here, and what was kept is of another step then
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            outputs.append(model(batch(0, 0)).detach())
            assert not torch.equal(loss, outputs[-1]), "the numbers from before the step"
        assert torch.equal(*outputs)
        return all(torch.equal(found[0][name], found[1][name]) for name in found[1])

    assert all(run(body, ranks=4))


# ---- beside PyTorch's ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a GPT is sharded, by us or by PyTorch."""

    sizes: tuple[int, ...] = (4,)
    reshard: bool | int = True
    precision: bool = False
    micro_batches: int = 1
    one_sync: bool = False
    layers: str = "layers"
    config: object = CONFIG

    @property
    def dtype(self):
        """In float32 AdamW makes of rounding, which differs between CPUs, as long a step as of a gradient."""
        return torch.float32 if self.precision else torch.float64


WAYS = {
    "each layer": Way(),
    "not resharded": Way(reshard=False),
    "resharded to two": Way(reshard=2),
    "hybrid": Way((2, 2)),
    "bfloat16": Way(precision=True),
    "bfloat16, hybrid": Way((2, 2), precision=True),
    "micro-batches": Way(micro_batches=3),
    "one sync": Way(micro_batches=3, one_sync=True),
    "the root only": Way(layers="none"),
    "three ranks": Way((3,)),
}


def build(way, ours):
    torch.manual_seed(0)
    model = GPT(way.config).to(way.dtype)
    names = ("replicate", "shard")[-len(way.sizes) :]
    if ours:
        shard, mesh = fully_shard, Mesh(way.sizes, names)
        policy = MixedPrecisionPolicy(**BFLOAT16) if way.precision else MixedPrecisionPolicy()
    else:
        shard, mesh = torchs, init_device_mesh("cpu", way.sizes, mesh_dim_names=names)
        policy = TorchsPolicy(**BFLOAT16) if way.precision else TorchsPolicy()
    for layer in model.layers.values() if way.layers == "layers" else ():
        shard(layer, mesh=mesh, reshard_after_forward=way.reshard, mp_policy=policy)
    return shard(model, mesh=mesh, mp_policy=policy)


def steps(way, ours, number=3):
    model = build(way, ours)
    optimizer = ADAMW(model.parameters())
    for step in range(number):
        mark("step")
        for i in range(way.micro_batches):
            if way.one_sync:
                model.set_requires_gradient_sync(i == way.micro_batches - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + i)
            x, y = torch.randint(0, CONFIG.vocab, (2, 1, CONFIG.context), generator=generator)
            mark("forward")
            loss = model(x, y) / way.micro_batches
            mark("backward")
            loss.backward()
        mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
    mark("end")
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


NAMES = {"all_to_all": "reduce_scatter"}  # what stands for it on gloo


def sent(recording, rank):
    """In the last step, by group and phase: how often each collective, and the bytes."""
    start, end = recording.window(rank, 2)
    phases = [s for s in recording.spans if s.rank == rank and s.name != "step" and start <= s.start < end]
    counts, nbytes = Counter(), Counter()
    for event in recording.select(rank, 2):
        (phase,) = (span.name for span in phases if span.start <= event.start < span.end)
        key = NAMES.get(event.op, event.op), event.ranks, phase
        counts[key] += 1
        nbytes[key] += event.sent
    return counts, nbytes


@pytest.mark.parametrize("name", WAYS)
def test_sends_what_pytorchs_sends_and_learns_the_same(name):
    way = WAYS[name]
    ranks = torch.Size(way.sizes).numel()
    mine, theirs = (run(steps, way, ours, ranks=ranks, record="communication") for ours in (True, False))
    assert sent(mine.recording, 0) == sent(theirs.recording, 0)
    tolerance = 2e-2 if way.precision else 1e-10
    for name, p in theirs[0].items():
        torch.testing.assert_close(mine[0][name], p, rtol=tolerance, atol=tolerance, msg=name)
        assert all(torch.equal(mine[0][name], other[name]) for other in mine)


@pytest.mark.parametrize("name", ["each layer", "not resharded", "hybrid", "three ranks", "bfloat16"])
def test_holds_what_pytorchs_holds(name):
    """And at the peak no more, though its gathers are under way while it computes; at rest, the model and padding."""
    way = WAYS[name]
    ranks = torch.Size(way.sizes).numel()
    mine, theirs = (run(steps, way, ours, ranks=ranks, record="memory").recording for ours in (True, False))
    padding = 0
    for rank in range(ranks):
        ours, torchs = mine.steady(rank), theirs.steady(rank)
        assert {kind: ours[kind] for kind in "GSA"} == {kind: torchs[kind] for kind in "GSA"}
        assert ours["P"] <= torchs["P"]
        assert ours["peak"] <= 1.05 * torchs["peak"]
        padding += torchs["P"] - ours["P"]
    replicas = ranks // way.sizes[-1]
    whole = sum(p.nbytes for p in GPT(way.config).to(way.dtype).parameters())
    assert sum(mine.steady(rank)["P"] for rank in range(ranks)) == replicas * whole, "ours are without padding"


# ---- in flight -------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """A layer that notes when its forward begins, and when its backward has ended."""

    def __init__(self, number, notes):
        super().__init__()
        self.number, self.notes = number, notes
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.notes.append(("forward", self.number))
        x = x.view_as(x)
        x.register_hook(lambda _: self.notes.append(("backward", self.number)))
        return self.linear(x)


class InOrder(nn.Module):
    """Its layers, one after the other, in the order that it is told."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x)
        return x


def in_flight(prefetch, *orders):
    """When layers computed, and when each group was gathered and dropped; the most that were held at once."""
    torch.manual_seed(0)
    notes, mesh = [], Mesh((dist.get_world_size(),), ("dp",))
    layers = [Slow(number, notes) for number in range(4)]
    model = fully_shard(InOrder([fully_shard(layer, mesh=mesh) for layer in layers]), mesh=mesh)
    for number, layer in enumerate(layers):
        group = layer._sharding.group

        def noted(what, number=number, group=group):
            original = getattr(group, what)

            def wrapper(*args):
                there = group.gathered or group.arriving
                value = original(*args)
                if bool(there) != bool(group.gathered or group.arriving):
                    notes.append((what, number))
                return value

            setattr(group, what, wrapper)

        noted("gather")
        noted("drop")
    if not prefetch:
        for layer in layers:
            layer.set_modules_to_forward_prefetch([])
            layer.set_modules_to_backward_prefetch([])
    for order in orders or [range(4)] * 2:  # the first step has no order to go by
        notes.clear()
        model(torch.ones(2, 8, requires_grad=True), order).sum().backward()
    held = most = 0
    for what, _ in notes:
        held += {"gather": 1, "drop": -1}.get(what, 0)
        most = max(most, held)
    return notes, most


def test_the_next_layer_is_on_its_way_while_one_computes():
    notes, most = run(in_flight, True, ranks=2)[0]
    order = {note: place for place, note in reversed([*enumerate(notes)])}
    last = {note: place for place, note in enumerate(notes)}
    for number in range(3):
        assert order["gather", number + 1] < order["forward", number]
        assert last["gather", number] < order["backward", number + 1]
    assert most == 2


def test_nothing_is_sent_for_where_a_forward_begins_otherwise_than_the_last():
    notes, _ = run(in_flight, True, [0, 1, 2, 3], [1, 0, 3, 2], ranks=2)[0]
    assert notes[:3] == [("gather", 0), ("gather", 1), ("forward", 1)]
    assert notes.index(("gather", 3)) < notes.index(("gather", 2)) < notes.index(("backward", 2))


def test_a_layer_used_twice_has_another_one_before_it_each_time():
    notes, _ = run(in_flight, True, *[[0, 1, 2, 1, 3]] * 2, ranks=2)[0]
    begun = [note for note in notes if note[0] in ("gather", "backward")]
    ends = begun[begun.index(("backward", 3)) :]
    assert [number for what, number in ends if what == "gather"] == [2, 1, 0]
    assert [number for what, number in ends if what == "backward"] == [3, 1, 2, 1, 0]


def test_what_was_sent_for_in_vain_is_dropped():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

        def forward(self, x, skip):
            for number, layer in enumerate(self.layers):
                x = x if number == skip else layer(x)
            return x

    def body():
        torch.manual_seed(0)
        mesh, model = Mesh((2,), ("dp",)), Skips()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 3), skip=0)
        with torch.no_grad():
            model(torch.ones(2, 3), skip=None)
            whole = model(torch.ones(2, 3), skip=2)
        held = [layer._sharding.group.gathered or layer._sharding.group.arriving for layer in model.layers]
        model(torch.ones(2, 3), skip=2).sum().backward()
        return whole, held, [layer.weight.grad is not None for layer in model.layers]

    for _, held, gradients in run(body, ranks=2):
        assert not any(held)
        assert gradients == [True, True, False]


def test_without_prefetch_each_layer_is_sent_for_when_it_begins():
    notes, most = run(in_flight, False, ranks=2)[0]
    order = {note: place for place, note in reversed([*enumerate(notes)])}
    for number in range(3):
        assert order["gather", number + 1] > order["forward", number]
    assert most == 1


# ---- odd models ------------------------------------------------------------------------------------------


@dataclass
class Out:
    x: torch.Tensor
    others: list


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 3)

    def forward(self, data, *, mask=None):
        x = self.linear(data["x"][0])
        return Out(x if mask is None else x * mask, [x.tanh(), None])


class Odd(nn.Module):
    """Nested inputs, a dataclass as output, a layer used twice and one never, an RNN, nothing of its own."""

    def __init__(self):
        super().__init__()
        self.nested, self.never, self.rnn = Nested(), nn.Linear(5, 5), nn.LSTM(5, 5)

    def forward(self, x):
        out = self.nested({"x": [x]})
        again = self.nested({"x": [out.others[0]]}, mask=torch.ones(5, dtype=x.dtype))
        return self.rnn(again.x)[0].square().mean()


def odd_model():
    torch.manual_seed(0)
    return Odd().double()


def test_odd_models_are_right():
    x = torch.arange(20.0, dtype=torch.float64).view(4, 5).sin()

    def body():
        mesh, found = Mesh((3,), ("dp",)), []
        for reshard in (True, False):
            model = odd_model()
            for layer in model.children():
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh)
            for _ in range(2):  # the second adds to the first
                model(x + dist.get_rank()).backward()
            with torch.no_grad():
                loss = model(x)
            grads = {name: p.grad for name, p in model.named_parameters()}
            found.append((loss, {name: grad if grad is None else grad.full_tensor() for name, grad in grads.items()}))
        return found

    one = odd_model()
    for _ in range(2):
        (sum(one(x + rank) for rank in range(3)) / 3).backward()
    for loss, gradients in run(body, ranks=3)[1]:
        torch.testing.assert_close(loss, one(x).detach())
        for name, p in one.named_parameters():
            assert (p.grad is None) == (gradients[name] is None), name
            if p.grad is not None:
                torch.testing.assert_close(gradients[name], p.grad, msg=name)


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


def test_after_a_backward_that_failed_the_next_one_is_right():
    def body():
        mesh, found = Mesh((2,), ("dp",)), []
        for fails in (False, True):
            model = sharded(awkward(), mesh)
            model(batch(0, dist.get_rank())).backward()
            model.zero_grad()
            if fails:  # inside of a layer, and with a micro-batch before that waits
                model.set_requires_gradient_sync(False)
                model(batch(1, dist.get_rank())).backward()
                model.set_requires_gradient_sync(True)
                handle = model.layers[0][1].register_full_backward_pre_hook(lambda *_: 1 / 0)
                try:
                    model(batch(1, dist.get_rank())).backward()
                except ZeroDivisionError:
                    found.append("failed")
                handle.remove()
                model.zero_grad()
            model(batch(2, dist.get_rank())).backward()
            found.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
        return found

    for right, failed, after in run(body, ranks=2):
        assert failed == "failed"
        assert right.keys() == after.keys()
        assert all(torch.equal(right[name], after[name]) for name in right)


def test_what_is_let_go_of_is_freed():
    """Ours of DDP and ZeRO, too: hooks on parameters lead back to whoever hung them there."""

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


def test_only_what_no_rank_had_a_gradient_for_has_none():
    """Ranks 2 and 3 have no row of the parameters: padding alone tells them."""

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
        p.pack(pieces)
        return [p.grad is not None for p in model.parameters()], pieces.signbit().any().item()

    assert run(body, ranks=4) == [([True, True, True, True, False, False], False)] * 4


def habits(mesh):
    """What people do around a training, each with what comes of it."""
    x, found = torch.ones(2, 3), {}

    layer = fully_shard(linear(), mesh=mesh)
    with torch.inference_mode():
        first = layer(x)
    layer(x).sum().backward()
    found["in inference mode"] = torch.equal(first, linear()(x)) and layer.weight.grad is not None

    layer = fully_shard(linear(), mesh=mesh)
    layer(x)
    for p in layer.parameters():
        p.data = p.data * 2
    found["data exchanged"] = torch.equal(layer(x), 2 * linear()(x))

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


# ---- bad input -------------------------------------------------------------------------------------------


def seeded(make):
    torch.manual_seed(0)
    return make()


def linear():
    return seeded(lambda: nn.Linear(3, 3))


def twice(mesh):
    fully_shard(fully_shard(linear(), mesh=mesh), mesh=mesh)


def without_dims(mesh):
    fully_shard(Awkward(), mesh=mesh)


def tied_across_groups(mesh):
    both = nn.Sequential(linear(), linear())
    both[1].weight = both[0].weight
    for layer in both:
        fully_shard(layer, mesh=mesh)


def of_two_dtypes(mesh):
    fully_shard(nn.Sequential(linear(), linear().double()), mesh=mesh)


def from_other_seeds(mesh):
    torch.manual_seed(dist.get_rank())
    fully_shard(nn.Linear(3, 3), mesh=mesh)


def replicas_from_other_seeds(mesh):
    from_other_seeds(Mesh((2, 1), ("replicate", "shard")))


def of_other_shapes(mesh):
    fully_shard(nn.Linear(3, 3 + dist.get_rank()), mesh=mesh)


def converted_later(mesh):
    fully_shard(linear(), mesh=mesh).double()(torch.ones(2, 3, dtype=torch.float64))


def optimizer_before(mesh):
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fully_shard(layer, mesh=mesh)(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def step_before_backward(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    loss = layer(torch.ones(2, 3)).square().sum()
    optimizer.step()
    loss.backward()


def around_forward(mesh):
    nn.functional.linear(torch.ones(2, 3), fully_shard(linear(), mesh=mesh).weight)


class Does(nn.Module):
    """A Linear, and something else in its forward: do(module, x)."""

    def __init__(self, do=lambda module, x: None, inner=linear):
        super().__init__()
        self.inner, self.do = inner(), do

    def forward(self, x):
        found = self.do(self, x)
        return self.inner(x) if found is None else found


def trained(do, mesh, inner=linear, inputs=None):
    model = fully_shard(Does(do, inner), mesh=mesh)
    model(torch.ones(2, 3) if inputs is None else inputs).sum().backward()
    return model


def parameters_in_forward(mesh):
    trained(lambda module, x: x @ next(module.parameters()), mesh)


def renormalised(mesh):
    trained(lambda module, x: None, mesh, lambda: seeded(lambda: nn.Embedding(4, 3, max_norm=0.1)), torch.tensor([1]))


def written_in_place(mesh):
    def normalise(module, x):
        with torch.no_grad():
            module.inner.weight.div_(2)

    trained(normalise, mesh)


def replaced_in_forward(mesh):
    def normalise(module, x):
        module.inner.weight.data = module.inner.weight.data / 2

    trained(normalise, mesh)


def frozen_and_replaced(mesh):
    def normalise(module, x):
        module.inner.weight.data = module.inner.weight.data / 2

    trained(normalise, mesh, lambda: linear().requires_grad_(False), torch.ones(2, 3, requires_grad=True))


def hook_after(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    layer(torch.ones(2, 3))


def gradient_before(mesh):
    layer = linear()
    layer(torch.ones(2, 3)).sum().backward()
    fully_shard(layer, mesh=mesh)


def plain_data(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer.weight.data = torch.ones(3, 3)


def a_loss_beside_the_output(mesh):
    kept = []
    trained(lambda module, x: kept.append(module.inner.weight.square().sum()), mesh)
    kept[0].backward()


def added_later(mesh):
    model = fully_shard(Does(lambda module, x: None, linear), mesh=mesh)
    model.inner.beside = nn.Linear(3, 3)
    model(torch.ones(2, 3))


def taken_out(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    del layer.weight
    layer(torch.ones(2, 3))


def copied(mesh):
    copy.deepcopy(nn.Sequential(fully_shard(linear(), mesh=mesh)))


def gradient_penalty(mesh):
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(fully_shard(linear(), mesh=mesh)(x).sum(), x, create_graph=True)


def frozen_on_one_rank(mesh):
    fully_shard(linear().requires_grad_(dist.get_rank() == 0), mesh=mesh)


def frozen_later_on_one_rank(mesh):
    layer = fully_shard(linear(), mesh=mesh)
    layer(torch.ones(2, 3)).sum().backward()
    (layer.weight, layer.bias)[dist.get_rank()].requires_grad_(False)
    layer(torch.ones(2, 3))


def taking_one(mesh, do):
    model = Does(do)
    model.layers = nn.ModuleList([linear(), linear(), linear()])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def different_layers(mesh):
    taking_one(mesh, lambda model, x: model.layers[dist.get_rank()](x))(torch.ones(2, 3))


def different_layers_without_gradient(mesh):
    with torch.no_grad():
        different_layers(mesh)


def different_layers_on_replicas(mesh):
    different_layers(Mesh((2, 1), ("replicate", "shard")))


def different_layers_later(mesh):
    model = taking_one(mesh, lambda model, x: sum(model.layers[number](x) for number in model.numbers))
    for model.numbers in ([0, 1], [dist.get_rank()]):
        model(torch.ones(2, 3)).sum().backward()


def different_way_back(mesh):
    model = taking_one(mesh, lambda model, x: [layer(x) for layer in model.layers][1 + dist.get_rank()])
    model(torch.ones(2, 3)).sum().backward()


class Passes(nn.Linear):
    def forward(self, x):
        return super().forward(x) if dist.get_rank() == 0 else x


def passed_on_by_one_rank(mesh):
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), Passes(3, 3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)(torch.ones(2, 3))


def no_divisor(mesh):
    fully_shard(linear(), mesh=mesh, reshard_after_forward=3)


def of_a_list(mesh):
    fully_shard(nn.ModuleList([linear()]), mesh=mesh)


def lazy(mesh):
    fully_shard(nn.LazyLinear(3), mesh=mesh)


def distributed_already(mesh):
    layer = linear()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    fully_shard(layer, mesh=mesh)


REFUSED = {
    twice: "fully_shard twice on the same FSDPLinear",
    without_dims: "parameter 'scale' has no dim to cut along: give it the shape (1,)",
    tied_across_groups: "parameter 'weight' is shared with a module that was sharded before",
    of_two_dtypes: "'0.bias' (torch.float32) and '1.bias' (torch.float64) cannot be gathered at once",
    from_other_seeds: "replicas differ from the start: parameter 'weight'",
    replicas_from_other_seeds: "replicas differ from the start: parameter 'weight'",
    of_other_shapes: "replicas differ from the start: parameter 'weight' is torch.float32 of shape (3, 3)",
    converted_later: "was sharded as a DTensor of torch.float32, and a DTensor of torch.float64 stands there now",
    optimizer_before: "make the optimizer after fully_shard",
    step_before_backward: "backward() of a loss from before step()",
    around_forward: "a DTensor and a plain tensor of shape (2, 3)",
    parameters_in_forward: "after fully_shard, parameters() gives DTensors",
    renormalised: "parameter 'inner.weight' was written to in a forward",
    written_in_place: "parameter 'inner.weight' was written to in a forward",
    replaced_in_forward: "parameter 'inner.weight' was written to in a forward",
    frozen_and_replaced: "parameter 'inner.weight' was written to in a forward",
    hook_after: "parameter 'weight' has a hook that backward would not call",
    gradient_before: "parameter 'weight' has a gradient",
    plain_data: ".data of a DTensor (torch.float32, (3, 3) as [Shard(0)]) takes one that is all of this",
    a_loss_beside_the_output: "has been modified by an inplace operation",
    added_later: "parameter 'inner.beside.weight' was added after the model was sharded",
    taken_out: "parameter 'weight' was taken out of its module after fully_shard",
    copied: "copy.deepcopy of a FSDPLinear",
    gradient_penalty: "a backward with create_graph=True goes through fully_shard",
    frozen_on_one_rank: "parameter 'weight' is torch.float32 of shape (3, 3)",
    frozen_later_on_one_rank: "ranks train different parameters: rank 0 ['bias'], rank 1 ['weight']",
    different_layers: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1 ['the model', 'layers.1']",
    different_layers_without_gradient: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_layers_on_replicas: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_layers_later: "ranks use different layers: rank 0 ['the model', 'layers.0'], rank 1",
    different_way_back: "ranks go back through different layers: rank 0 ['layers.1', 'the model'], rank 1",
    passed_on_by_one_rank: "ranks can go back through different layers: rank 0 ['0', '1', 'the model'], rank 1 ['0',",
    no_divisor: "reshard_after_forward=3 on 2 ranks: give True, False, or a smaller number",
    of_a_list: "fully_shard of a ModuleList, which has no forward",
    distributed_already: "parameter 'weight' is a DTensor already",
    lazy: "parameter 'weight' is lazy: run a forward before fully_shard",
}


def test_bad_input_is_refused_in_a_sentence():
    def body():
        mesh, said = Mesh((2,), ("dp",)), {}
        for case in REFUSED:
            try:
                case(mesh)
            except (ValueError, RuntimeError) as error:
                said[case.__name__] = str(error)
        return said

    for said in run(body, ranks=2):
        for case, text in REFUSED.items():
            assert text in said.get(case.__name__, "nothing"), case.__name__
