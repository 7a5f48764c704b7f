"""Tests of labs.memory.recompute and selective against the same model without them, and torch.utils.checkpoint.

Computing twice must not change results: gradients must be equal bit by bit, with dropout inside.  Bytes are those that
StorageWatch sees, which test_memory.py checks against the allocator.  They are compared with torch's own checkpointing
and with a count by hand, per token and layer.
"""

import copy
import gc
import warnings
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.watch.memory import StorageWatch, timeline
from labs.memory.recompute import checkpoint, recompute
from labs.memory.selective import ATTENTION, MATMULS
from labs.model import GPT, PRESETS, Layer
from labs.zero import Zero

TINY = PRESETS["tiny"]
KEEPS = {"full": frozenset(), "attention": ATTENTION, "both": MATMULS | ATTENTION}


class WithDropout(nn.Module):
    """A layer that draws random numbers, and has a keyword argument that also needs a gradient."""

    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(6, 18, dtype=dtype), nn.Linear(18, 6, dtype=dtype)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x, *, scale):
        h = self.dropout(torch.relu(self.up(x)))
        return x + self.dropout(torch.tanh(self.down(h))) * scale


class Net(nn.Module):
    """A model of three such layers, the first and the last of them tied, the middle one partly frozen."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(WithDropout(dtype) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6, dtype=dtype))
        self.layers[2].up.weight = self.layers[0].up.weight
        self.layers[1].down.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return x.square().mean()


def batch(dtype):
    return torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(7))


def train(model, dtype=torch.float32, steps=3):
    """Return losses, parameters and the state of the random numbers after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(batch(dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.parameters()), torch.get_rng_state()


def recomputed(model, keep=()):
    recompute(model.layers.values() if isinstance(model.layers, nn.ModuleDict) else model.layers, keep)
    return model


def torch_recomputed(model, keep=()):
    """Recompute with torch's own, and its selective policy where operations are kept."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if str(op.overloadpacket) in keep else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if keep else {}
    for layer in model.layers.values():
        layer.forward = partial(torch_checkpoint, layer.forward, use_reentrant=False, **options)
    return model


def exactly_equal(mine, reference):
    torch.testing.assert_close(mine, reference, rtol=0, atol=0)


def gradients(model, x, y):
    model.zero_grad()
    model(x, y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def tokens(config, batch=2):
    return torch.randint(config.vocab, (2, batch, config.context), generator=torch.Generator().manual_seed(3))


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_bit_by_bit_with_dropout_tied_and_frozen_parameters(dtype, keep):
    exactly_equal(train(recomputed(Net(dtype), KEEPS[keep]), dtype), train(Net(dtype), dtype))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True)], ids=["untied", "tied"])
def test_the_gpt_equals_itself_and_torchs_checkpointing(config, keep):
    reference = gradients(GPT(config), *tokens(config))
    exactly_equal(gradients(recomputed(GPT(config), KEEPS[keep]), *tokens(config)), reference)
    exactly_equal(gradients(torch_recomputed(GPT(config), KEEPS[keep]), *tokens(config)), reference)


@pytest.mark.parametrize("keep", KEEPS)
def test_autocast_is_that_of_the_forward(keep):
    def train_in_bfloat16(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*tokens(TINY))
        loss.backward()  # outside of autocast, as torch's manual advises
        return [p.grad for p in model.parameters()]

    exactly_equal(train_in_bfloat16(recomputed(GPT(TINY), KEEPS[keep])), train_in_bfloat16(GPT(TINY)))


def test_the_second_run_disturbs_no_random_numbers():
    layer = recomputed(Net()).layers[0]
    y = layer(batch(torch.float32), scale=torch.ones(6))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_several_backwards_and_a_second_derivative():
    def derivatives(checkpoint):
        weight = torch.linspace(0.1, 1, 6, dtype=torch.float64, requires_grad=True)
        y = checkpoint(lambda x: (x * weight).sin().exp(), torch.ones(6, dtype=torch.float64)).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        (first,) = torch.autograd.grad(y, weight, create_graph=True)
        return weight.grad, *torch.autograd.grad(first.sum(), weight)

    exactly_equal(derivatives(checkpoint), derivatives(lambda fn, *args: fn(*args)))


def test_one_within_another():
    def nested(model):
        recompute([layer.attention for layer in model.layers.values()], keep=ATTENTION)
        return recomputed(model, keep=MATMULS)

    exactly_equal(gradients(nested(GPT(TINY)), *tokens(TINY)), gradients(GPT(TINY), *tokens(TINY)))


def test_arguments_of_any_nesting_and_outputs_of_any_kind():
    def fn(pair, *, named, flag):
        assert flag is None
        return {"out": pair[0].exp() * named["w"], "count": pair[1]}

    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    answer = checkpoint(fn, (x, 5), named={"w": w}, flag=None)
    answer["out"].sum().backward()
    assert answer["count"] == 5
    exactly_equal([x.grad, w.grad], [2 * torch.ones(3).exp(), torch.ones(3).exp()])


class Codebook(nn.Module):
    """A layer with two buffers, of which each forward replaces one and changes the other; both change its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x):
        h = self.linear(x)
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h.tanh() - self.mean * self.count


class OfFunctions(nn.Module):
    """A layer with statistics that PyTorch changes without counting a version."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(self.linear(x), self.mean, self.variance, training=True)


def remembering(how, make, keep):
    """Return parameters, buffers and losses of three steps with two micro-batches, whose backwards come after both."""
    torch.manual_seed(0)
    model = make()
    if how == "recompute":
        recompute([model], keep)
    calls = {
        "closure": lambda x: checkpoint(lambda x: model(x).sin(), x, keep=keep),
        "partial": lambda x: checkpoint(partial(nn.Module.__call__, model), x, keep=keep).sin(),
    }
    call = calls.get(how, lambda x: model(x).sin())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses = [call(torch.randn(8, 4)).square().sum() for _ in range(2)]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers(), *losses]


@pytest.mark.parametrize("keep", [(), MATMULS], ids=["full", "matmuls"])
def test_buffers_that_a_forward_changes_are_those_of_one_run(keep):
    makes = {
        "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)),
        "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
        "codebook": Codebook,
        "functions": OfFunctions,
    }
    for make in makes.values():
        expected = remembering("plain", make, ())
        for how in ("recompute", "closure", "partial"):
            exactly_equal(remembering(how, make, keep), expected)


def test_a_function_that_asks_autograd_itself():
    def forces(x):
        energy = (x @ w).pow(3).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (force @ w).sin()

    w, found = torch.full((2, 2), 0.5, requires_grad=True), []
    for call in (forces, partial(checkpoint, forces)):
        x = torch.eye(2, requires_grad=True)
        found.append(torch.autograd.grad(call(x).sum(), (x, w)))
    exactly_equal(*found)
    with pytest.raises(
        RuntimeError, match=r"keep= is not for a function that calls autograd itself: checkpoint it without"
    ):
        checkpoint(forces, x, keep=MATMULS)


def test_in_forward_mode_and_under_the_forwards_default_device():
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # PyTorch itself warns when it begins
        x = forward_ad.make_dual(torch.ones(2, requires_grad=True), torch.full((2,), 3.0))
        exactly_equal(forward_ad.unpack_dual(checkpoint(torch.sin, x)).tangent, 3 * torch.ones(2).cos())
    x = torch.ones(2, requires_grad=True, device="meta")
    with torch.device("meta"):
        y = checkpoint(lambda x: x * torch.ones(2), x).sum()
    y.backward()
    assert x.grad.is_meta


def test_arguments_of_a_layer_are_its_own():
    class Own(nn.Module):
        def forward(self, x, keep=(), fn=torch.exp, use_reentrant=0):
            return fn(x) * len(keep) + use_reentrant

    layer, x = Own(), torch.ones(1, requires_grad=True)
    recompute([layer])
    y = layer(x, keep=["aten.exp"], fn=torch.sin, use_reentrant=2)
    y.backward()
    exactly_equal([y, x.grad], [torch.ones(1).sin() + 2, torch.ones(1).cos()])


# ---- number and time of the runs -------------------------------------------------------------------------


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x).tanh()


def test_a_layer_runs_twice_in_training_and_once_otherwise():
    layer = Counting()
    recompute([layer])
    x = torch.ones(2, 4)
    with torch.no_grad():
        layer(x)
    assert layer.calls == 1
    loss = layer(x).sum()
    assert layer.calls == 2
    loss.backward()
    assert layer.calls == 3
    layer.requires_grad_(False)(x)
    assert layer.calls == 4


def test_what_is_kept_is_not_computed_again():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        matmuls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.matmuls += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def matmuls(model):
        loss = model(*tokens(TINY))
        with Count() as count:
            loss.backward()
        return count.matmuls

    plain = matmuls(GPT(TINY))
    assert matmuls(recomputed(GPT(TINY), MATMULS)) == plain
    assert matmuls(recomputed(GPT(TINY))) == plain + 7 * TINY.depth


def test_names_hooks_and_copies_are_those_of_the_module():
    model = GPT(TINY)
    names, seen = list(model.state_dict()), []
    recomputed(model)
    assert list(model.state_dict()) == names
    model.layers["0"].register_forward_hook(lambda *_: seen.append("forward"))
    copied = copy.deepcopy(model)
    for p in model.parameters():
        p.data.zero_()
    expected = gradients(GPT(TINY), *tokens(TINY))
    exactly_equal(gradients(copied, *tokens(TINY)), expected)  # the copy's layers run on its own parameters
    assert seen == ["forward"], "a hook of the layer stays outside of the second run"


# ---- bytes -----------------------------------------------------------------------------------------------


def bytes_held(model, config, batch=2):
    """Return (what the model's forward left for the backward, the most of A at any time, the peak)."""
    x, y = tokens(config, batch)
    with StorageWatch() as watch:
        loss = model(x, y)
        before = len(watch.changes)
        loss.backward()
    line = [held for _, held in timeline(watch.tape)]
    left = line[before - 1]
    return left["A"] + left["temporary"], max(held["A"] for held in line), max(sum(held.values()) for held in line)


def a_layer_more(apply):
    """Return the bytes that one more layer leaves for the backward, without the rotation's tables, which no batch
    enlarges.
    """
    by_batch = []
    for batch in (2, 4):
        two, three = (replace(TINY, depth=depth) for depth in (2, 3))
        by_batch.append(
            bytes_held(apply(GPT(three)), three, batch)[0] - bytes_held(apply(GPT(two)), two, batch)[0],
        )
    return by_batch[1] - by_batch[0]


def test_bytes_a_token_and_layer_are_those_of_the_table():
    D, H, KE, F = TINY.dim, TINY.heads, TINY.kv_heads * TINY.head_size, TINY.hidden
    table = {
        "none": 9 * D + 2 * KE + H + 4 * F + 2,
        "both": 5 * D + 2 * KE + H + 2 * F,
        "attention": 2 * D + H,
        "full": D,
    }
    more_tokens = 2 * TINY.context
    measured = {keep: a_layer_more(partial(recomputed, keep=ops)) for keep, ops in KEEPS.items()}
    measured["none"] = a_layer_more(lambda model: model)
    assert measured == {row: 4 * numbers * more_tokens for row, numbers in table.items()}


@pytest.mark.parametrize("keep", KEEPS)
def test_as_many_bytes_as_torchs_checkpointing(keep):
    left, _, peak = bytes_held(recomputed(GPT(TINY), KEEPS[keep]), TINY)
    their_left, _, their_peak = bytes_held(torch_recomputed(GPT(TINY), KEEPS[keep]), TINY)
    assert left == pytest.approx(their_left, rel=0.01)
    assert peak <= 1.02 * their_peak


def test_activations_of_one_layer_at_a_time():
    """Check that A is at most what the forward left, plus one layer's own activations, while backward runs."""
    deep = replace(TINY, depth=8)
    left, most, _ = bytes_held(recomputed(GPT(deep)), deep)
    one_layer = a_layer_more(lambda model: model)
    assert most <= left + 1.1 * one_layer
    assert bytes_held(GPT(deep), deep)[1] > 7.9 * one_layer


def tensors_alive():
    """Count the tensors that Python knows of, other than parameters."""
    return sum(type(x) is torch.Tensor for x in gc.get_objects())


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("trained", [True, False])
def test_activations_go_with_their_graph_and_only_the_module_waits_for_gc(trained, keep):
    layer = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    recompute([layer], KEEPS[keep])
    x, there = torch.ones(3, 5), weakref.ref(layer[0].weight)
    layer(x).sum().backward()  # the gradients stay
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        loss = layer(x).sum()
        if trained:
            loss.backward()
        del loss
        assert tensors_alive() == before
        del layer
        assert there() is not None, "no cycle any more: the head of labs/memory/recompute.py says otherwise"
    finally:
        gc.enable()
    gc.collect()
    assert there() is None


def test_an_outer_checkpoint_holds_no_inputs_of_inner_ones():
    def outer(model):
        inner = list(model.layers.values())
        recompute(inner)

        def chain(x):
            for layer in inner:
                x = layer(x)
            return x

        whole = partial(checkpoint, chain)
        model.layers = {"all": whole}  # no module: the chain stands where the layers stood
        return model

    deep = replace(TINY, depth=8)
    model = GPT(deep)
    del model._modules["layers"]
    model.__dict__["layers"] = GPT(deep).layers
    held = bytes_held(outer(model), deep)[0]
    alone = bytes_held(recomputed(GPT(deep)), deep)[0]
    assert alone - held == pytest.approx(7 * 4 * deep.dim * 2 * deep.context, rel=0.01)


# ---- mistakes --------------------------------------------------------------------------------------------


def test_a_forward_that_does_not_repeat_itself_is_reported():
    calls = []

    def forgetful(x):
        calls.append(x)
        return x.exp() if len(calls) == 1 else x.exp().sin()

    y = checkpoint(forgetful, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"forgetful did not do the same .* saved 1 tensors, its recomputation 2"):
        y.sum().backward()


def test_a_forward_that_saves_other_shapes_is_reported():
    sizes = iter((2, 3))

    def shrinking(x):
        return (x.expand(next(sizes))).exp().sum()

    y = checkpoint(shrinking, torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"as tensor 0 torch.float32 \(2,\), its recomputation torch.float32 \(3,\)"):
        y.backward()


def test_other_kept_operations_are_reported():
    transposed = iter((False, True))

    def fn(x):
        return torch.addmm(x, x, x) if next(transposed) else x @ x

    y = checkpoint(fn, torch.ones(2, 2, requires_grad=True), keep=MATMULS)
    with pytest.raises(RuntimeError, match=r"aten.addmm.default was called where the forward had called aten.mm"):
        y.sum().backward()


def test_a_change_in_place_is_reported():
    x = torch.ones(2, 2, requires_grad=True) * 1
    y = checkpoint(lambda x: x.exp(), x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"aten.mm.default is to be kept, but was changed in place"):
        checkpoint(lambda x: (x @ x).mul_(2), x, keep=MATMULS)
    z = checkpoint(lambda x: x @ x, x, keep=MATMULS)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_other_remembered_values_are_reported():
    """Remember other things: a generator of one's own, a number, a tensor that is no buffer."""

    class Counting(nn.Module):
        seen, noise = 0, torch.Generator().manual_seed(0)

        def forward(self, x, of):
            h, self.seen = x.exp(), self.seen + 1
            return h * (torch.rand(3, generator=self.noise) if of == "noise" else self.seen)

    layer = Counting()
    recompute([layer])
    for of in ("noise", "seen"):
        with pytest.raises(RuntimeError, match=r"Counting.forward gave another output .*: it must depend on nothing"):
            layer(torch.ones(3, requires_grad=True), of).sum().backward()
    nan = layer(torch.full((3,), torch.nan, requires_grad=True), "seen").sum()
    nan.backward()  # NaN cannot be compared


def test_a_shallow_copy_and_arguments_of_torchs_checkpoint_are_reported():
    layer = nn.Linear(1, 1)
    recompute([layer])
    with pytest.raises(RuntimeError, match=r"a shallow copy of a recomputed Linear: make it by copy.deepcopy\(\)"):
        copy.copy(layer)(torch.ones(1, 1))
    twin = copy.deepcopy(layer)
    twin.weight.data.zero_()
    exactly_equal(twin(torch.ones(1, 1)), twin.bias[None])
    for name in ("use_reentrant", "context_fn", "preserve_rng_state"):
        with pytest.raises(TypeError, match=f"{name}= is for torch.utils.checkpoint: leave it out here"):
            checkpoint(lambda x, **options: x, torch.ones(1), **{name: False})


def test_slips_of_the_pen():
    model = GPT(TINY)
    with pytest.raises(TypeError, match=r"not '0': for a ModuleDict, give its \.values\(\)"):
        recompute(model.layers)
    with pytest.raises(TypeError, match=r"a ModuleDict is never called: give recompute\(\) the modules in it"):
        recompute([model.layers])
    with pytest.raises(ValueError, match="no layer"):
        recompute([])
    for name in ("mm", "aten.mm.default", "aten.matmal"):
        with pytest.raises(ValueError, match=f"operations of the dispatcher, .* '{name}' is not among them"):
            recompute(model.layers.values(), keep=[name])
    recompute(model.layers.values())
    with pytest.raises(ValueError, match="this Layer is recomputed already"):
        recompute(model.layers.values())
    assert isinstance(model.layers["0"], Layer)


# ---- ZeRO ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["full", "both"])
def test_under_every_stage_of_zero(keep):
    """Check that a stage gathers a layer before the backward's second run of it, as before the first."""

    def train_sharded(stage, apply):
        model = apply(GPT(TINY))
        zero = Zero(model, stage=stage, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        for _ in range(2):
            model(*tokens(TINY)).backward()
            zero.step()
        return zero.full_state_dict()

    def body():
        apply = partial(recomputed, keep=KEEPS[keep])
        return [(train_sharded(stage, apply), train_sharded(stage, lambda model: model)) for stage in (1, 2, 3)]

    for results in run(body, ranks=2):
        for with_recomputation, without in results:
            exactly_equal(with_recomputation, without)


def test_stage_3_never_holds_more_than_its_layers_in_use_while_it_recomputes():
    def body(apply):
        model = apply(GPT(TINY))
        zero = Zero(model, stage=3, optimizer=partial(torch.optim.AdamW, lr=1e-3))
        for _ in range(2):
            mark("step")
            model(*tokens(TINY)).backward()
            zero.step()

    with_it, without = (
        run(body, apply, ranks=2, record="memory").recording.steady() for apply in (recomputed, lambda model: model)
    )
    assert with_it["A"] < 0.6 * without["A"]
    assert with_it["P"] == without["P"]
    assert with_it["comm"] <= 1.01 * without["comm"]


def test_kept_operations_that_draw_and_views_in_place():
    """Check a kept operation that draws, and so moves the random numbers on, and a matmul that squeezes in place."""
    w = torch.randn(4, 3)

    def draws(x):
        return torch.nn.functional.dropout(torch.bernoulli(torch.sigmoid(x)) * x @ w, 0.5)

    def squeezes(x):
        return torch.tanh(x[0]) @ w

    for fn, keep in ((draws, {"aten.bernoulli"}), (squeezes, MATMULS)):
        gradients = []
        for call in (fn, partial(checkpoint, fn, keep=keep)):
            torch.manual_seed(0)
            x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
            (call(x) * torch.rand(3)).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("op", ["aten.zeros_like", "aten.add_"])
def test_what_fills_or_changes_cannot_be_kept(op):
    with pytest.raises(ValueError, match="fills or changes a tensor"):
        recompute([torch.nn.Linear(2, 2)], keep=[op])
