"""labs.zero against one process that sees the same micro-batches one after the other.

Numbers: the reference never communicates; it takes the gradients of every rank's micro-batches, adds them in the order
of the ranks, divides, and steps torch's own optimizer on the whole parameters.  labs.zero adds in that order, too.  In
float64 they must agree within 1e-12, and bit by bit on two ranks, where there is one way to add two numbers.

What is held: a dispatch mode of this file looks at the memory behind every layer's vectors at every single operator of
the step, and knows nothing of the recorder.  What is sent: the recorder.
"""

import contextlib
import functools
import os
import random
import signal
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from labs.clip import clip_gradients
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.memory.precision import Masters
from labs.model import GPT, Config, initial_value
from labs.zero import Zero
from tests.models import Awkward, batch

STAGES = (1, 2, 3)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TIED = Config(vocab=23, dim=12, depth=3, heads=3, kv_heads=1, hidden=20, context=8, tied=True)
TRAININGS = [  # dtype, optimizer, micro-batches, norm to clip at
    (torch.float64, ADAMW, 1, None),
    (torch.float64, SGD, 3, 0.05),
    (torch.float32, ADAMW, 1, None),
    (torch.bfloat16, ADAMW, 1, None),
]


def reference(ranks, dtype, optimizer, micro_batches, norm, steps=10):
    """The parameters after `steps` on one process."""
    model = Awkward(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer(trained)
    for step in range(steps):
        total = [torch.zeros_like(p) for p in trained]
        for rank in range(ranks):
            optimizer.zero_grad()
            for i in range(micro_batches):
                (model(batch(step, rank * micro_batches + i)) / micro_batches).backward()
            for sum_, p in zip(total, trained, strict=True):
                sum_ += p.grad
        for sum_, p in zip(total, trained, strict=True):
            p.grad = sum_ / ranks
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, norm)
        optimizer.step()
    return model.state_dict()


@functools.cache
def references(ranks):
    """In a process like those of the ranks: with as many threads."""
    return run(lambda: [reference(ranks, *training) for training in TRAININGS], ranks=1)[0]


def train(stage, dtype, optimizer, micro_batches=1, norm=None, steps=10, make=Awkward, after=None, **options):
    """`after`: a state to load first."""
    model = make(dtype)
    zero = Zero(model, stage, optimizer, **options)
    if after is not None:
        zero.load_state_dict(after)
    for step in range(steps):
        mark("step")
        for i in range(micro_batches):
            (model(batch(step, dist.get_rank() * micro_batches + i)) / micro_batches).backward()
        if norm is not None:
            zero.sync()
            clip_gradients(zero.shards, norm, groups=(None,))
        zero.step()
    mark("end")
    return zero.state_dict()


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(ranks):
    results = run(
        lambda: [[train(stage, *training)["model"] for training in TRAININGS] for stage in STAGES], ranks=ranks
    )
    for stage, by_training in zip(STAGES, results[0], strict=True):
        for (dtype, *_, norm), ours, one in zip(TRAININGS, by_training, references(ranks), strict=True):
            bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            bound = 0 if ranks <= 2 and norm is None else bound
            assert ours.keys() == one.keys()
            for name, p in one.items():
                assert p.dtype == ours[name].dtype
                torch.testing.assert_close(
                    ours[name], p, rtol=bound, atol=bound, msg=lambda text, at=(stage, dtype, name): f"{at}: {text}"
                )
    for rank in range(1, ranks):
        assert all(
            torch.equal(a[name], b[name])
            for one, other in zip(results[0], results[rank], strict=True)
            for a, b in zip(one, other, strict=True)
            for name in a
        )


def test_a_subgroup_shards_among_its_own_ranks():
    def body():
        pair = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = pair[dist.get_rank() % 2]
        model = Awkward(torch.float64)
        zero = Zero(model, 3, SGD, group=mine)
        for step in range(3):
            model(batch(step, dist.get_rank(mine))).backward()
            zero.step()
        return zero.state_dict()["model"]

    one = reference(2, torch.float64, SGD, 1, None, steps=3)
    for ours in run(body, ranks=4):
        for name, p in one.items():
            torch.testing.assert_close(ours[name], p, rtol=1e-12, atol=1e-12)


# ---- held at every moment --------------------------------------------------------------------------------


class Most(TorchDispatchMode):
    """The most bytes of whole gradients, and of whole parameters, that were there at any operator.

    A gradient is met by a hook of autograd's, and counts as long as anybody holds its memory.
    """

    def __init__(self, zero):
        super().__init__()
        self.units, self.met, self.gradients, self.parameters = zero.units, [], 0, 0
        for unit in zero.trained:
            unit.full.register_hook(lambda gradient: self.met.append(weakref.ref(gradient.untyped_storage())))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        gradients = [storage.nbytes() for ref in self.met if (storage := ref()) is not None]
        self.gradients = max(self.gradients, sum(gradients))
        self.parameters = max(self.parameters, sum(u.full.untyped_storage().nbytes() for u in self.units))
        return answer


def most(stage, config=TIED):
    model = GPT(config)
    zero = Zero(model, stage, ADAMW)
    with Most(zero) as seen:
        for step in range(2):
            for i in range(2):
                x, y = torch.randint(0, config.vocab, (2, 2, 8), generator=torch.Generator().manual_seed(10 * step + i))
                model(x, y).backward()
            zero.step()
    sizes = {next(iter(unit.layout.shapes)): unit.full.nbytes for unit in zero.units}
    return seen.gradients, seen.parameters, sizes


@pytest.mark.parametrize("ranks", [2, 3])
def test_never_more_than_the_layer_in_flight(ranks):
    for (one_g, one_p, sizes), (two_g, two_p, _), (three_g, three_p, _) in run(
        lambda: [most(stage) for stage in STAGES], ranks=ranks
    ):
        everything, layer = sum(sizes.values()), max(sizes.values())
        assert layer == sizes["layers.0.attention_norm.weight"] < everything / 3
        assert (one_g, one_p) == (everything + layer, everything)  # of the second micro-batch, one more
        assert (two_g, two_p) == (layer, everything)
        assert (three_g, three_p) == (layer, layer)


def test_between_steps_only_shards_are_left():
    def body(stage):
        zero = Zero(model := Awkward(), stage, ADAMW)
        for _ in range(2):
            model(batch(0, 0)).backward()
            zero.step()
        at_rest = sum(p.untyped_storage().nbytes() for p in model.parameters())
        return at_rest, [unit.full.grad for unit in zero.units], sum(unit.full.nbytes for unit in zero.units)

    for at_rest, gradients, whole in run(body, 2, ranks=3):
        assert at_rest == whole and gradients == [None] * len(gradients)
    for at_rest, gradients, whole in run(body, 3, ranks=3):
        assert 3 * at_rest == whole and gradients == [None] * len(gradients)


def test_evaluation_gathers_and_drops():
    def body():
        zero = Zero(model := Awkward(), 3, ADAMW)
        with torch.no_grad(), Most(zero) as seen:
            loss = model(batch(0, 0))
        return loss, seen.parameters, max(unit.full.nbytes for unit in zero.units), Awkward()(batch(0, 0))

    for loss, held, layer, one in run(body, ranks=2):
        assert torch.equal(loss, one.detach()) and held <= 2 * layer


# ---- sent ------------------------------------------------------------------------------------------------


def test_stages_2_and_3_reduce_every_micro_batch():
    def sent(stage, micro_batches):
        recording = run(
            train, stage, torch.float32, SGD, micro_batches, steps=2, ranks=2, record="communication"
        ).recording
        return [event.op for event in recording.events if event.rank == 0 and event.step == 1], recording.sent(0, 1)

    # 4 trained layers (the tied head is the embedding's), and one frozen: each is an even number of bytes on 2 ranks
    model = Awkward()
    whole = {flag: [p for p in model.parameters() if p.requires_grad is flag] for flag in (True, False)}
    trained, frozen = 77 + 2 * (7 * 13 + 13 + 13 * 7 + 7) + 14 + 1, 56
    unused = 56  # and frozen: nobody gathers it
    assert [sum(p.numel() for p in whole[flag]) for flag in (True, False)] == [trained, frozen + unused]
    checksum = 8  # of the order in which that was done, to the other rank, once a step
    padded = 78 + 104 + 98 + 104 + 98 + 14 + 2  # embed; the linears, two by two; the norm; the scale
    for micro_batches in (1, 3):
        assert sent(1, micro_batches)[1] == checksum + 4 * padded // 2 * 2
        assert sent(2, micro_batches)[1] == checksum + 4 * padded // 2 * (1 + micro_batches)
        # the embedding is gathered by the head, too, and the frozen layer, forward and backward
        gathered = 2 * (padded + 78 + frozen)
        assert sent(3, micro_batches)[1] == checksum + 4 * (gathered + padded) // 2 * micro_batches


# ---- a harder life for stage 3 ---------------------------------------------------------------------------


class Odd(nn.Module):
    """Layers in unusual positions."""

    def __init__(self, dtype=torch.float64, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.low = Product(5)
        self.twice = nn.Linear(5, 5)
        self.blind = Blind(5)
        self.last = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.0), nn.Linear(5, 5))
        self.recompute = recompute
        self.to(dtype)

    def forward(self, tokens):
        x = torch.nn.functional.one_hot(tokens % 5, 5).to(self.blind.dtype)
        x = self.low(self.base(self.twice(x)))
        skip = x
        for layer in (self.twice, self.blind, *self.last):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return (x * skip).square().mean()


class Product(nn.Module):
    """Its weight is a product, beside a frozen one: their gradients need them after the input's is known."""

    def __init__(self, dim):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(dim, dim) / dim) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(dim, dim) / dim, requires_grad=False)

    def forward(self, x):
        return x @ self.frozen + torch.tanh(x) + (self.a @ self.b @ self.frozen).sum(0)


class Blind(nn.Module):
    """Gives no gradient to its input."""

    def __init__(self, dim):
        super().__init__()
        self.inside = nn.Linear(dim, dim)
        self.dtype = torch.float64

    def forward(self, x):
        return {"answer": self.inside(x.detach())}["answer"]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_in_unusual_positions(recompute):
    def body(stage):
        return train(stage, torch.float64, ADAMW, steps=4, make=partial(Odd, recompute=recompute))["model"]

    model = Odd()
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        (model(batch(step, 0)) / 2).backward()
        (model(batch(step, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        for ours in run(body, stage, ranks=2):
            for name, p in model.state_dict().items():
                torch.testing.assert_close(ours[name], p, rtol=1e-12, atol=1e-12)


def test_a_model_on_the_meta_device_is_never_held_whole():
    def body(config):
        with torch.device("meta"):
            model = GPT(config)
        zero = Zero(model, 3, ADAMW, initial=partial(initial_value, seed=0))
        mark("step")
        return zero.state_dict()["model"], sum(unit.shard.nbytes for unit in zero.units)

    deep = Config(vocab=16, dim=32, depth=12, heads=2, kv_heads=2, hidden=64, context=8)
    results = run(body, deep, ranks=2, record="memory")
    whole = GPT(deep).state_dict()
    start = results.recording.step_spans(0)[0].start
    held = max(sum(kinds.values()) for moment, kinds in results.recording.memory[0] if moment < start)
    layer = sum(p.nbytes for p in GPT(deep).layers["0"].parameters())
    assert results[0][1] == sum(p.nbytes for p in whole.values()) / 2
    assert held < results[0][1] + 4 * layer < 0.9 * 2 * results[0][1]
    assert all(torch.equal(results[0][0][name], p) for name, p in whole.items())


# ---- in and out ------------------------------------------------------------------------------------------


def test_a_state_goes_on_in_another_stage_on_another_number_of_ranks():
    saved = run(train, 3, torch.float64, ADAMW, 1, None, 5, ranks=3)[0]

    def rest(stage, state, ranks):  # the same data, on any number of ranks
        zero = Zero(model := Awkward(torch.float64, seed=1), stage, ADAMW)
        zero.load_state_dict(state)
        for step in range(5):
            parts = [batch(100 + step, i) for i in range(6)]
            for part in parts[dist.get_rank() :: ranks]:
                (model(part) * ranks / 6).backward()
            zero.step()
        held = [entry for unit in zero.optimizer.state.values() for entry in unit.values()]
        assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in held)
        return zero.state_dict()

    model = Awkward(torch.float64)
    model.load_state_dict(saved["model"])
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = {i: deepcopy(saved["optimizer"][name]) for i, name in enumerate(names)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for step in range(5):
        for i in range(6):
            (model(batch(100 + step, i)) / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage, ranks in ((1, 2), (2, 1), (3, 2)):
        again = run(rest, stage, saved, ranks, ranks=ranks)[0]
        for name, p in model.state_dict().items():
            torch.testing.assert_close(again["model"][name], p, rtol=1e-12, atol=1e-12)
        assert again["optimizer"]["scale"]["step"] == 10


def test_the_hyperparameters_and_buffers_travel_along():
    def body():
        zero = Zero(model := Awkward(), 2, ADAMW)
        model.offset *= 3
        zero.optimizer.param_groups[0]["lr"] = 0.125
        other = Zero(Awkward(seed=1), 3, ADAMW)
        other.load_state_dict(zero.state_dict())
        return other.optimizer.param_groups[0]["lr"], other.model.offset.tolist()

    assert run(body, ranks=2) == [(0.125, [3.0] * 7)] * 2


def test_a_state_loaded_after_a_broken_backward_is_what_is_computed_with():
    def body():
        zero = Zero(model := Awkward(torch.float64), 3, ADAMW)
        broken = model.mixed["norm"].register_full_backward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(batch(0, 0)).backward()
        broken.remove()
        zero.load_state_dict(Zero(Awkward(torch.float64, seed=1), 3, ADAMW).state_dict())
        return model(batch(0, 0)).item() == Awkward(torch.float64, seed=1)(batch(0, 0)).item()

    assert run(body, ranks=2) == [True, True]


def test_a_state_of_another_model_is_refused():
    def body():
        zero = Zero(Awkward(), 1, ADAMW)
        state = zero.state_dict()
        state["model"]["extra"] = state["model"].pop("offset")
        state["model"]["layers.0.0.bias"] = torch.zeros(5)
        zero.load_state_dict(state)

    with pytest.raises(RankError) as error:
        run(body, ranks=2)
    for part in (
        "'offset' is not in it",
        "'extra' is not in the model",
        "'layers.0.0.bias' has shape (5,) in it and (13,) in the model",
    ):
        assert part in str(error.value)


# ---- bad input -------------------------------------------------------------------------------------------


def said(body, ranks=2):
    """What the first line of a failure says."""
    with pytest.raises(RankError) as error:
        run(body, ranks=ranks)
    return str(error.value).splitlines()[0]


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
    (lambda: Zero(nn.Sequential(nn.Embedding(5, 5, sparse=True)), 1, SGD), "'0' makes sparse gradients"),
    (
        lambda: Zero(hooked(lambda p: p.register_hook(print)), 1, SGD),
        "parameter 'scale' has a hook, which would not be",
    ),
    (
        lambda: Zero(hooked(lambda p: p.register_post_accumulate_grad_hook(print)), 3, SGD),
        "parameter 'scale' has a hook, which would not be called: its gradient comes as a part of a vector's",
    ),
    (lambda: Zero(Awkward(), 1, partial(torch.optim.Muon, lr=0.1)), "Muon looks at matrices or norms, and a shard is"),
    (lambda: Zero(Awkward(), 2, lambda shards: torch.optim.Adafactor(shards)), "Adafactor looks at matrices or norms"),
    (lambda: Zero(model := Awkward(), 1, lambda shards: SGD(model.parameters())), "was made of the model's parameters"),
    (
        lambda: Zero(Awkward(), 3, lambda shards: SGD([{"params": shards}, {"params": []}])),
        "the optimizer has a group without parameters",
    ),
    (lambda: Zero(Awkward(), 3, torch.optim.LBFGS), "LBFGS looks at matrices or norms"),
    (lambda: Zero(Awkward(), 3, partial(Masters, optimizer=torch.optim.Adafactor)), "Adafactor looks at matrices or"),
]


def words_of(function):
    """What it raises on this rank."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_what_cannot_be_sharded_is_refused_in_words():
    for words in run(lambda: [words_of(make) for make, _ in CANNOT_BE_SHARDED], ranks=2):
        for said, (_, sentence) in zip(words, CANNOT_BE_SHARDED, strict=True):
            assert sentence in (said or ""), said


def changed_shard(zero, x):
    with torch.no_grad():
        zero.shards[0].zero_()
    zero.model(x)


def added_later(zero, x):
    zero.model.beside = nn.Linear(2, 2)
    zero.model(x).backward()
    zero.step()


def hooked_later(zero, x):
    zero.shards[0].register_hook(print)
    zero.model(x)


def loaded_later(zero, x):
    zero.model.load_state_dict(Awkward().state_dict())


def a_loss_beside_the_output(zero, x):
    beside = sum(p.square().sum() for p in zero.model.parameters())
    zero.model(x).backward()
    zero.step()
    beside.backward()


CANNOT_BE_TRAINED = [  # with the stages in which that is so
    (changed_shard, (1, 2), "was changed, and other ranks have what it was: after such a change, call zero.refresh("),
    (added_later, STAGES, "parameter 'beside.weight' was added after the model was sharded"),
    (hooked_later, (3,), "has a hook, which backward does not call"),
    (loaded_later, STAGES, "load it before Zero shards it, or give zero.load_state_dict"),
    (a_loss_beside_the_output, (1, 2), "modified by an inplace operation"),
]


def test_what_cannot_be_trained_is_refused_in_words():
    def body():
        cases = [(case, stage) for case, stages, _ in CANNOT_BE_TRAINED for stage in stages]
        return [words_of(lambda: case(Zero(Awkward(), stage, ADAMW), batch(0, 0))) for case, stage in cases]  # noqa: B023

    due = [sentence for _, stages, sentence in CANNOT_BE_TRAINED for _ in stages]
    for words in run(body, ranks=2):
        for said, sentence in zip(words, due, strict=True):
            assert sentence in (said or ""), (said, sentence)


def test_a_shard_may_be_changed_if_all_ranks_are_told():
    def body():
        seen = []
        for stage in STAGES:
            zero = Zero(model := Awkward(), stage, ADAMW)
            with torch.no_grad():
                for shard in zero.shards:
                    shard.fill_(0.5)
            zero.refresh(zero.units)
            seen.append(model(batch(0, 0)).item())
        return seen

    results = run(body, ranks=2)
    assert len(set(results[0] + results[1])) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_step_is_refused(stage):
    def body():
        zero = Zero(model := Awkward(), stage, ADAMW)
        model(batch(0, 0)).backward()
        zero.step()
        zero.step()

    assert "step() found no gradient: each step() needs a backward() before it" in said(body)


@pytest.mark.parametrize(
    "read",
    [lambda p: p.sum(), lambda p: p + 1, lambda p: torch.sum(p), lambda p: nn.functional.linear(torch.ones(7), p)],
    ids=["method", "operator", "function", "linear"],
)
def test_a_dropped_parameter_says_so(read):
    def body():
        model = Awkward()
        Zero(model, 3, ADAMW)
        read(model.layers[0][0].weight)

    words = said(body)
    assert "parameter 'layers.0.0.weight' is dropped" in words and "zero.state_dict() has everything" in words


def test_a_dropped_parameter_can_be_shown_and_asked_for():
    def body():
        model = Awkward()
        Zero(model, 3, ADAMW)
        return repr(model.embed.weight), hasattr(model.embed.weight, "_repr_html_"), str(model)

    text, html, shown = run(body, ranks=2)[0]
    assert text.startswith("Dropped(parameter 'embed.weight' is dropped") and not html and "Embedding(11, 7)" in shown


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_job():
    def body():
        zero = Zero(model := Awkward(), 3, ADAMW)
        for step in range(100):
            model(batch(step, 0)).backward()
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            zero.step()

    with pytest.raises(RankError) as error:
        run(body, ranks=3, timeout=60)
    assert error.value.kind == "died" and error.value.ranks == (1,)
    # and the next job is as good as any
    assert len(run(train, 3, torch.float32, SGD, steps=1, ranks=3)) == 3


def kill_somewhere(times):
    """A rank is killed at some moment of some step: each time the job ends at once, and says which rank it was."""
    rng = random.Random(0)

    def body(victim, delay):
        zero = Zero(model := GPT(TIED), rng.choice(STAGES), ADAMW)
        if dist.get_rank() == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(100_000):
            model(*torch.randint(0, 23, (2, 2, 8))).backward()
            zero.step()

    for _ in range(times):
        victim = rng.randrange(3)
        with pytest.raises(RankError) as error:
            run(body, victim, rng.uniform(0.05, 0.3), ranks=3, timeout=60)
        assert error.value.kind == "died" and error.value.ranks == (victim,)


def test_killed_somewhere():
    kill_somewhere(3)


@pytest.mark.soak
def test_killed_everywhere():
    kill_somewhere(100)


def test_an_exception_in_a_layer_leaves_nothing_stale():
    def body():
        model = Awkward(torch.float64)
        zero = Zero(model, 3, SGD)
        for step in range(3):
            with contextlib.suppress(IndexError):
                model(torch.full((1, 1), 99))
            model(batch(step, 0)).backward()
            zero.step()
        return zero.state_dict()["model"]

    one = reference(1, torch.float64, SGD, 1, None, steps=3)
    for name, p in run(body, ranks=1)[0].items():
        torch.testing.assert_close(p, one[name], rtol=1e-12, atol=1e-12)


# ---- odd models ------------------------------------------------------------------------------------------


@dataclass
class Answer:
    hidden: torch.Tensor
    count: int = 1


class Unknown(OrderedDict):
    """A dict that torch's pytree does not know."""


class Inner(nn.Module):
    """Reads a trained and a frozen weight, from and into what the subclasses say."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)

    def compute(self, x):
        return torch.tanh(self.trained(x)) + self.frozen(torch.tanh(x))


class TakesNested(Inner):
    def forward(self, pair):
        return self.compute(pair[0]) + self.frozen(pair[1]["more"])


class GivesDataclass(Inner):
    def forward(self, x):
        return Answer(self.compute(x))


class GivesUnknownDict(Inner):
    def forward(self, x):
        return Unknown(hidden=self.compute(x))


class TakesDataclass(Inner):
    def forward(self, answer):
        return self.compute(answer.hidden)


class ChangesItsInput(Inner):
    def forward(self, x):
        return self.compute(x.mul_(2)) + x


class FillsAList(Inner):
    def forward(self, x, penalties):
        y = self.compute(x)
        penalties.append(self.trained(x.tanh()).square().mean())
        return y


class UnusedMask(Inner):
    def forward(self, x, mask=None):
        return self.compute(x)


class NoElements(Inner):
    def __init__(self):
        super().__init__()
        self.empty, self.single = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.single * self.compute(x) + self.empty.sum()


class Complex(Inner):
    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def forward(self, x):
        return self.compute(x) + (x.to(torch.complex128) @ self.turned).abs()


CALLS = {  # how a layer is called, and its output read
    "nested inputs": (TakesNested, lambda layer, x: layer([x, {"more": x.tanh()}])),
    "dataclass given": (GivesDataclass, lambda layer, x: layer(x).hidden),
    "dataclass taken": (TakesDataclass, lambda layer, x: layer(Answer(x))),
    "unknown dict": (GivesUnknownDict, lambda layer, x: layer(x)["hidden"]),
    "changes its input": (ChangesItsInput, lambda layer, x: layer(x * 1)),
    "fills a list": (FillsAList, lambda layer, x: layer(x, penalties := []) + sum(penalties)),
    "unused mask": (UnusedMask, lambda layer, x: layer(x, mask=x * 2)),
    "no elements, no dimensions": (NoElements, lambda layer, x: layer(x)),
    "complex": (Complex, lambda layer, x: layer(x)),
    "twice": (UnusedMask, lambda layer, x: layer(layer(x))),
    "lstm": (lambda: nn.LSTM(5, 5, 2), lambda layer, x: layer(x)[0]),
    "never": (UnusedMask, lambda layer, x: x),
}


class Around(nn.Module):
    """A layer between two others."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        make, self.call = CALLS[case]
        self.below, self.inner, self.above = nn.Linear(5, 5), make(), nn.Linear(5, 5)
        self.double()
        if case == "complex":
            self.inner.turned = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def forward(self, x):
        return self.above(self.call(self.inner, self.below(x))).square().mean()


def inputs(step, rank):
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def test_odd_layers_equal_one_process():
    def body():
        trained = {}
        for case in CALLS:
            for stage in STAGES:
                zero = Zero(model := Around(case), stage, SGD)
                for step in range(2):
                    model(inputs(step, dist.get_rank())).backward()
                    held = [unit.name for unit in zero.units if unit.full.untyped_storage().nbytes()]
                    assert stage < 3 or not held, f"{case}: {held} is still gathered after backward"
                    zero.step()
                trained[case, stage] = zero.state_dict()["model"]
        return trained

    for ours in run(body, ranks=2):
        for case, stage in ours:
            model = Around(case)
            optimizer = SGD([p for p in model.parameters() if p.requires_grad])
            for step in range(2):
                for rank in range(2):
                    (model(inputs(step, rank)) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            for name, p in model.state_dict().items():
                at = f"{case}, stage {stage}: {name}"
                torch.testing.assert_close(
                    ours[case, stage][name], p, rtol=1e-12, atol=1e-12, msg=lambda m, at=at: at + m
                )


class Experts(nn.Module):
    """Each rank uses another expert, of equal size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below, self.experts = nn.Linear(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x):
        return self.experts[dist.get_rank()](self.below(x)).square().mean()


def one_step(stage, model, before=lambda model: None, after=lambda model, loss: None):
    zero = Zero(model, stage, SGD)
    before(model)
    loss = model(torch.ones(3, 5))
    loss.backward(retain_graph=True)
    zero.step()
    after(model, loss)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_use_different_layers_of_equal_size_are_told(stage):
    words = said(lambda: one_step(stage, Experts()))
    did = "gathers the layer of" if stage == 3 else "reduces the gradient of"
    assert f"where rank 0 {did} 'experts.0.weight', rank 1 {did} 'experts.1.weight'" in words


def test_an_evaluation_with_different_layers_is_told_before_its_loss_is_used():
    def body():
        Zero(model := Experts(), 3, SGD)
        with torch.no_grad():
            model(torch.ones(3, 5))

    words = said(body)
    assert "where rank 0 gathers the layer of 'experts.0.weight', rank 1 gathers the layer of 'experts.1.w" in words


def test_a_compiled_model_equals_one_process():
    def body(compiled):
        losses = []
        for stage in STAGES:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), Mean()).double()
            zero = Zero(model, stage, SGD)
            called = torch.compile(model, backend="aot_eager") if compiled else model
            for _ in range(3):
                losses.append(loss := called(torch.ones(2, 5, dtype=torch.float64)))
                loss.backward()
                zero.step()
        return torch.stack(losses).tolist()

    assert run(body, True, ranks=2) == run(body, False, ranks=1) * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_from_before_the_step_is_refused(stage):
    def two_linears():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Mean())

    words = said(lambda: one_step(stage, two_linears(), after=lambda model, loss: loss.backward()))
    assert "backward() of a loss from before step()" in words


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


class Keeps(Inner):
    """Leaves something that needs its parameters, where nobody sees it: on itself."""

    def forward(self, x):
        y = self.compute(x)
        self.penalty = self.trained(x.tanh()).square().mean()
        return y


def test_what_is_read_without_being_gathered_is_an_error_and_no_crash():
    def body():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), Keeps(), nn.Linear(5, 5))
        Zero(model, 3, SGD)
        (model(torch.ones(3, 5)).mean() + model[1].penalty).backward()

    assert "modified" in said(body)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_taken_before_says_so(stage):
    def body():
        model = Awkward()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        Zero(model, stage, SGD)
        assert "Moved(parameter 'scale'" in repr(early.param_groups[0]["params"][0])
        early.step()

    assert "parameter 'scale' was taken from the model before it was sharded" in said(body)


def change_all(model, change):
    for p in model.parameters():
        change(p)


def shorten_data(p):
    p.data = p.data / 2


def write(p):
    with torch.no_grad():
        p.div_(2)


def replace(layer, attribute, value):
    setattr(layer, attribute, value)


@dataclass
class Change:
    """Something that is done with a model, and what stages 1 and 2 say to it, and stage 3; None, where it is right."""

    happens: Callable = lambda model: None  # before the second step
    flat: str | None = None
    dropped: str | None = None
    later: Callable = lambda model: None  # before the third
    loss: Callable = lambda model, x: model(x)


def gradient_penalty(model, x):
    loss = model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


reentrant = partial(checkpoint, use_reentrant=True)
UNFROZEN, DROPPED = (
    "was unfrozen after it was sharded, and no optimizer has it: load zero.state_dict()['model'] into",
    "is dropped: rank",
)
CHANGES = {  # three layers, the bias of the second one frozen
    "a layer is frozen": Change(lambda m: m[0].requires_grad_(False)),
    "and back": Change(lambda m: m[0].requires_grad_(False), later=lambda m: m[0].requires_grad_(True)),
    "all numbers are changed": Change(lambda m: change_all(m, write)),
    "one parameter's are": Change(lambda m: write(m[0].weight), None, DROPPED),
    "a frozen one's are": Change(lambda m: write(m[1].bias), None, DROPPED),
    "other memory": Change(lambda m: change_all(m, shorten_data), "'0.weight' was given other memory (by .data = ...)"),
    "for one": Change(lambda m: shorten_data(m[2].bias), "'2.bias' was given other memory (by .data = ...)", DROPPED),
    "unfrozen": Change(lambda m: m[1].requires_grad_(True), f"'1.bias' {UNFROZEN}", f"'1.bias' {UNFROZEN}"),
    "one frozen": Change(lambda m: m[0].bias.requires_grad_(False), "'0.bias' lies in one vector with", DROPPED),
    "one unfrozen": Change(lambda m: replace(m[1].bias, "requires_grad", True), f"'1.bias' {UNFROZEN}", DROPPED),
    "one of a frozen layer": Change(
        lambda m: m[0].requires_grad_(False),
        f"'0.bias' {UNFROZEN}",
        DROPPED,
        later=lambda m: replace(m[0].bias, "requires_grad", True),
    ),
    "another parameter": Change(
        lambda m: replace(m[0], "weight", nn.Parameter(torch.zeros(5, 5))),
        *["parameter '0.weight' was replaced after its model was sharded"] * 2,
    ),
    "no parameter": Change(lambda m: replace(m[0], "bias", None), *["parameter '0.bias' was replaced after"] * 2),
    "a hook": Change(lambda m: m[0].bias.register_hook(print), "'0.bias' has a hook, which the next step", DROPPED),
    "a copy": Change(deepcopy, *["this Linear cannot be copied or pickled: what it computes with is in"] * 2),
    "float": Change(lambda m: m.float(), *["became torch.float32 on cpu: convert or move a model before"] * 2),
    "compiled": Change(lambda m: m[0].compile(backend="eager"), *["Linear.compile() takes in Zero's hooks, too"] * 2),
    "weights of another layer": Change(dropped=DROPPED, loss=lambda m, x: m(x @ m[2].weight)),
    "gradient penalty": Change(dropped="create_graph=True: stage 3 has dropped", loss=gradient_penalty),
    "reentrant checkpoints": Change(loss=lambda m, x: m[2:](reentrant(m[1], reentrant(m[1], m[0](x))))),
    "less in the last micro-batch": Change(loss=lambda m, x: m(x).backward() or m[2:](x)),
}


def losses_of(change, stage):
    """Of four steps with Zero, or on one process (stage 0), and of an evaluation before each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), Mean()).double()
    model[1].bias.requires_grad_(False)
    optimizer, losses, x = Zero(model, stage, SGD) if stage else SGD(list(model.parameters())), [], torch.ones(3, 5)
    for step in range(4):
        for event in [change.happens] * (step == 1) + [change.later] * (step == 2):
            event(model)
        with torch.inference_mode():
            losses.append(model(x.double()))
        losses.append(change.loss(model, x.double()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def test_what_happens_to_a_sharded_model_is_right_or_told():
    right = [case for case, change in CHANGES.items() if None in (change.flat, change.dropped)]
    [plain] = run(lambda: {case: losses_of(CHANGES[case], 0) for case in right}, ranks=1)
    cases = [(case, stage) for case in CHANGES for stage in STAGES]

    def outcome(case, stage):
        try:
            return losses_of(CHANGES[case], stage)
        except RuntimeError as error:
            return str(error)

    for outcomes in run(lambda: [outcome(*case) for case in cases], ranks=2):
        for (case, stage), got in zip(cases, outcomes, strict=True):
            sentence = CHANGES[case].dropped if stage == 3 else CHANGES[case].flat
            if sentence is None:
                assert got == pytest.approx(plain[case]), (case, stage)
            else:
                assert sentence in str(got), (case, stage)


class PassesOn(nn.Module):
    """Returns what it was given, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x), x


def test_what_a_model_passes_on_may_live_longer_than_a_step():
    def body(stage):
        torch.manual_seed(0)
        zero, x = Zero(model := PassesOn(), stage, SGD), torch.ones(3, 5, requires_grad=True)
        for _ in range(2):
            y, same = model(x)
            (y.square().mean() + same.mean()).backward()
            zero.step()
        return x.grad.flatten().tolist()

    first, *others = (run(body, stage, ranks=2)[0] for stage in STAGES)
    assert all(other == pytest.approx(first) for other in others)


def test_a_vector_that_is_replaced_is_told():
    def body():
        for stage in STAGES:
            model = nn.Linear(2, 1, bias=False)
            nn.init.ones_(model.weight)
            Zero(model, stage, SGD)
            with pytest.raises(RuntimeError, match="was replaced, as"):
                torch.func.functional_call(model, {"flat0": torch.ones(2)}, (torch.ones(1, 2),))

    run(body, ranks=2)
