"""Tests of labs.zero against one process that sees the same micro-batches one after the other.

Numbers: the reference never communicates.  It takes the gradients of every rank's micro-batches, adds them in the order
of the ranks, divides, and steps torch's own optimizer on the whole parameters.  labs.zero adds in that order, too.  In
float64 they must agree within 1e-12, and on two ranks bit by bit, because two numbers can be added in only one way.

Bytes held: a dispatch mode of this file looks at the memory behind every layer's vectors at every single operator of
the step, and knows nothing of the recorder.  Bytes sent: the recorder.
"""

import functools
import os
import random
import signal
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labs.clip import clip_gradients
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.model import GPT, Config, initial_value
from labs.zero import Zero
from tests.depth import deepen
from tests.models import Awkward, batch, trained_alone
from tests.zero.common import ADAMW, SGD, STAGES, Mean, train, words_of

TIED = Config(vocab=23, dim=12, depth=3, heads=3, kv_heads=1, hidden=20, context=8, tied=True)
TRAININGS = [  # dtype, optimizer, micro-batches, norm to clip at
    (torch.float64, ADAMW, 1, None),
    (torch.float64, SGD, 3, 0.05),
    (torch.float32, ADAMW, 1, None),
    (torch.bfloat16, ADAMW, 1, None),
]


def reference(ranks, dtype, optimizer, micro_batches, norm, steps=5):
    """Return the parameters after `steps` on one process."""
    model = Awkward(dtype)
    clip = norm and (lambda trained: torch.nn.utils.clip_grad_norm_(trained, norm))
    optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
    trained_alone(model, optimizer, lambda *at: model(batch(*at)), ranks, steps, micro_batches, clip)
    return model.state_dict()


@functools.cache
def references(ranks):
    """Run the references in a process like those of the ranks: with as many threads."""
    return run(lambda: [reference(ranks, *training) for training in TRAININGS], ranks=1)[0]


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, *deepen(1, 3, 4)])
def test_equals_one_process(ranks):
    results = run(lambda: [[train(stage, *training) for training in TRAININGS] for stage in STAGES], ranks=ranks)
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
        return zero.full_state_dict()

    one = reference(2, torch.float64, SGD, 1, None, steps=3)
    for ours in run(body, ranks=4):
        for name, p in one.items():
            torch.testing.assert_close(ours[name], p, rtol=1e-12, atol=1e-12)


# ---- held at every moment --------------------------------------------------------------------------------


class Most(TorchDispatchMode):
    """A watch of the most bytes of whole gradients, and of whole parameters, that existed at any operator.

    A hook of autograd's finds each gradient, which counts as long as anybody holds its memory.
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


@pytest.mark.parametrize("ranks", [3, *deepen(2)])
def test_never_more_than_the_layer_in_flight(ranks):
    for (one_g, one_p, sizes), (two_g, two_p, _), (three_g, three_p, _) in run(
        lambda: [most(stage) for stage in STAGES], ranks=ranks
    ):
        everything, layer = sum(sizes.values()), max(sizes.values())
        assert layer == sizes["layers.0.attention_norm.weight"] < everything / 3
        assert (one_g, one_p) == (everything + layer, everything)  # one more, for the second micro-batch
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

    for two, three in run(lambda: [body(stage) for stage in (2, 3)], ranks=3):
        for parts, (at_rest, gradients, whole) in ((1, two), (3, three)):
            assert parts * at_rest == whole and gradients == [None] * len(gradients)


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
    trainings = [(stage, micro_batches) for stage in STAGES for micro_batches in (1, 3)]
    recording = run(
        lambda: [train(stage, torch.float32, SGD, micro_batches, steps=2) for stage, micro_batches in trainings],
        ranks=2,
        record="communication",
    ).recording
    sent = {training: recording.sent(0, 2 * number + 1) for number, training in enumerate(trainings)}

    # 4 trained layers (the tied head is the embedding's), and one frozen: each is an even number of bytes on 2 ranks
    model = Awkward()
    whole = {flag: [p for p in model.parameters() if p.requires_grad is flag] for flag in (True, False)}
    trained, frozen = 77 + 2 * (7 * 13 + 13 + 13 * 7 + 7) + 14 + 1, 56
    unused = 56  # frozen, too: nobody gathers it
    assert [sum(p.numel() for p in whole[flag]) for flag in (True, False)] == [trained, frozen + unused]
    checksum = 8  # a checksum of the order of calls, to the other rank, once per step
    padded = 78 + 104 + 98 + 104 + 98 + 14 + 2  # embed; the linears, two by two; the norm; the scale
    once = checksum + sum(x.nbytes for x in model.buffers())  # which become rank 0's at the end of step()
    for micro_batches in (1, 3):
        assert sent[1, micro_batches] == once + 4 * padded // 2 * 2
        assert sent[2, micro_batches] == once + 4 * padded // 2 * (1 + micro_batches)
        # the embedding is gathered by the head, too, and the frozen layer, in forward and in backward
        gathered = 2 * (padded + 78 + frozen)
        assert sent[3, micro_batches] == once + 4 * (gathered + padded) // 2 * micro_batches


# ---- harder cases for stage 3 ----------------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_never_held_whole():
    def body(config):
        with torch.device("meta"):
            model = GPT(config)
        zero = Zero(model, 3, ADAMW, initial=partial(initial_value, seed=0))
        mark("step")
        return zero.full_state_dict(), sum(unit.shard.nbytes for unit in zero.units)

    deep = Config(vocab=16, dim=32, depth=12, heads=2, kv_heads=2, hidden=64, context=8)
    results = run(body, deep, ranks=2, record="memory")
    whole = GPT(deep).state_dict()
    start = results.recording.step_spans(0)[0].start
    held = max(sum(kinds.values()) for moment, kinds in results.recording.memory[0] if moment < start)
    layer = sum(p.nbytes for p in GPT(deep).layers["0"].parameters())
    assert results[0][1] == sum(p.nbytes for p in whole.values()) / 2
    assert held < results[0][1] + 4 * layer < 0.9 * 2 * results[0][1]
    assert all(torch.equal(results[0][0][name], p) for name, p in whole.items())


# ---- bad input -------------------------------------------------------------------------------------------


def changed_shard(zero, x):
    with torch.no_grad():
        zero.shards[0].zero_()
    zero.model(x)


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


def a_second_step(zero, x):
    zero.model(x).backward()
    zero.step()
    zero.step()


def a_loss_from_before_the_step(zero, x):
    loss = zero.model(x)
    loss.backward(retain_graph=True)
    zero.step()
    loss.backward()


def taken_before(zero, x):
    model = Awkward()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    Zero(model, zero.stage, SGD)
    assert "Moved(parameter 'scale'" in repr(early.param_groups[0]["params"][0])
    early.step()


def scaled(by):
    """Return a training whose steps have two parts, with this change of the shards in between."""

    def train(zero, x):
        for step in range(3):
            zero.model(batch(step, dist.get_rank())).backward()
            zero.sync()
            by(zero.shards)
            zero.step()

    return train


def each_by_its_own(shards):
    for shard in shards:
        shard.grad /= shard.grad.norm()


class Keeps(nn.Module):
    """A module that keeps something that needs its parameters, where nobody sees it: on itself."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Linear(5, 5)

    def forward(self, x):
        y = torch.tanh(self.trained(x))
        self.penalty = self.trained(x.tanh()).square().mean()
        return y


def read_without_being_gathered(zero, x):
    model = nn.Sequential(seeded(), Keeps(), seeded())
    Zero(model, zero.stage, SGD)
    (model(torch.ones(3, 5)).mean() + model[1].penalty).backward()


def seeded():
    torch.manual_seed(0)
    return nn.Linear(5, 5)


def reading(read):
    return lambda zero, x: read(zero.model.layers[0][0].weight)


CANNOT_BE_TRAINED = [  # trainings, with the stages in which they are refused
    (changed_shard, (1, 2), "was changed, and other ranks have what it was: after such a change, call zero.refresh("),
    (hooked_later, (3,), "has a hook, which backward does not call"),
    (loaded_later, STAGES, "load it before Zero shards it, or load what labs.checkpoint"),
    (a_loss_beside_the_output, (1, 2), "modified by an inplace operation"),
    (a_second_step, STAGES, "step() found no gradient: each step() needs a backward() before it"),
    (a_loss_from_before_the_step, STAGES, "backward() of a loss from before step()"),
    (taken_before, STAGES, "parameter 'scale' was taken from the model before it was sharded"),
    (scaled(lambda shards: nn.utils.clip_grad_norm_(shards, 0.01)), STAGES, "clip with labs.clip.clip_gradients(zero"),
    (scaled(each_by_its_own), (2,), "ranks scale their gradients differently: where rank 0 multiplied them by"),
    (read_without_being_gathered, (3,), "modified"),
    (reading(lambda p: p.sum()), (3,), "parameter 'layers.0.0.weight' is dropped"),
    (reading(lambda p: p + 1), (3,), "zero.full_state_dict() has everything"),
    (reading(lambda p: torch.sum(p)), (3,), "parameter 'layers.0.0.weight' is dropped"),
    (reading(lambda p: nn.functional.linear(torch.ones(7), p)), (3,), "parameter 'layers.0.0.weight' is dropped"),
]


def test_what_cannot_be_trained_is_refused_in_words():
    def body():
        cases = [(case, stage) for case, stages, _ in CANNOT_BE_TRAINED for stage in stages]
        return [words_of(lambda: case(Zero(Awkward(), stage, ADAMW), batch(0, 0))) for case, stage in cases]  # noqa: B023

    expected = [sentence for _, stages, sentence in CANNOT_BE_TRAINED for _ in stages]
    for words in run(body, ranks=2):
        for word, sentence in zip(words, expected, strict=True):
            assert sentence in (word or ""), (word, sentence)


def test_all_ranks_evaluate_the_same_model():
    def body():
        found = []
        for stage in STAGES:
            norm = nn.BatchNorm1d(1)
            norm.running_mean.fill_(dist.get_rank())
            zero = Zero(norm, stage, SGD)
            found.append(norm.running_mean.item())
            norm(torch.tensor([[0.0], [2.0]]) + 10 * dist.get_rank()).sum().backward()
            zero.step()
            found += [norm.running_mean.item(), norm.num_batches_tracked.item()]
        return found

    assert run(body, ranks=2) == [pytest.approx([0.0, 0.1, 1] * len(STAGES))] * 2


def test_zero_takes_a_model():
    with pytest.raises(TypeError, match=r"takes a model, and not a list: Zero\(model, stage, optimizer\)"):
        Zero([nn.Parameter(torch.ones(1))], 1, SGD)


def test_between_sync_and_step_gradients_may_be_changed_alike():
    def noisy(shards):
        for shard in shards:
            shard.grad += torch.rand_like(shard)

    def body():
        zero = Zero(Awkward(), 2, ADAMW)
        for by in (
            lambda shards: nn.utils.clip_grad_value_(shards, 1e-3),
            noisy,
            lambda shards: shards[0].grad.zero_(),
        ):
            scaled(by)(zero, None)
        for shards in (zero.shards[:1], zero.shards):  # some layers, or all, by the norm of all ranks
            scaled(lambda _: clip_gradients(shards, 1e-3, (None,)))(zero, None)  # noqa: B023

    run(body, ranks=3)


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_job():
    def body():
        zero = Zero(model := Awkward(), 3, ADAMW)
        for step in range(100):
            model(batch(step, 0)).backward()
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            zero.step()

    with pytest.raises(RankError) as error:
        run(body, ranks=3)
    assert error.value.kind == "died" and error.value.ranks == (1,)
    # the next job is as good as any
    assert len(run(train, 3, torch.float32, SGD, steps=1, ranks=3)) == 3


def kill_somewhere(times):
    """Kill a rank at some moment of some step: each time the job ends at once, and says which rank it was."""
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
            run(body, victim, rng.uniform(0.05, 0.3), ranks=3)
        assert error.value.kind == "died" and error.value.ranks == (victim,)


def test_killed_somewhere():
    kill_somewhere(3)


@pytest.mark.soak
def test_killed_everywhere():
    kill_somewhere(100)


# ---- odd models ------------------------------------------------------------------------------------------


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


class PassesOn(nn.Module):
    """A model that also returns its input."""

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

    first, *others = run(lambda: [body(stage) for stage in STAGES], ranks=2)[0]
    assert all(other == pytest.approx(first) for other in others)
