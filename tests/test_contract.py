"""Every strategy of the table, ours and PyTorch's own, through the same three claims.

    numbers       the reference is one process on the same batch, cut into as many micro-batches as there are ranks:
                  float64 within 1e-12; float32 bit by bit where the strategy promises that, else within 1e-5; of a
                  row that computes in bfloat16, one that does so as well
    bytes sent    the reference is labs.cost: exact, on every rank
    bytes held    likewise: each kind exact, on a CPU; of the awkward model P, G and S, worked out by hand

Two models: the course's GPT, and a toy made to be awkward (tied weights, a frozen one, one element alone, odd sizes).
Then the claims themselves are tried: a strategy that is changed in one place must fail the one that it breaks.
"""

from dataclasses import asdict, replace
from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist
from models import Tied
from torch import nn
from torch.func import functional_call

from labs import cost, ddp
from labs.kit.launch import run
from labs.kit.strategies import ONE_DEVICE, STRATEGIES, average_with, replicated, train
from labs.kit.tour import faults_of
from labs.model import GPT, PRESETS

BATCH, STEPS, CONTEXT = 12, 3, 16
GPT_CONFIG = replace(PRESETS["tiny"], context=CONTEXT, depth=1)
RANKS = (2, 3, 4)


# Under ZeRO, a vector each: embed (and head), inside, frozen, and the model itself with its scale.
AWKWARD = [
    cost.Layer(((13, 7),), uses=2),
    cost.Layer(((7, 7), (7,))),
    cost.Layer(frozen=((7, 7),)),
    cost.Layer(((1,),)),
]
EMBED, LAYER, *REST = cost.gpt_layers(GPT_CONFIG)
LAYERS = {"GPT": ([EMBED, *REST], [LAYER]), "awkward": (AWKWARD, [])}  # what a container has is by itself
MODELS = {"GPT": (partial(GPT, GPT_CONFIG), GPT_CONFIG.vocab), "awkward": (Tied, 13)}
TRAININGS = [(name, dtype) for name in MODELS for dtype in (torch.float64, torch.float32)]


def batches(vocab: int, parts: int):
    """[part][step]: the same random tokens, into however many parts they are cut."""
    whole = torch.randint(vocab, (STEPS, 2, BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    return [[tuple(step.chunk(parts, dim=1)[part]) for step in whole] for part in range(parts)]


def train_all(strategy, micro_batches=1, trainings=TRAININGS):
    """All trainings, one after the other in one job: the parameters of each."""
    trained = []
    for name, dtype in trainings:
        make, vocab = MODELS[name]
        data = batches(vocab, strategy.parts(dist.get_world_size()))
        trained.append(train(strategy, lambda make=make, dtype=dtype: make().to(dtype), data, micro_batches, STEPS)[1])
    return trained


def job_of(strategy, ranks: int, rank: int = 0, micro_batches: int = 1) -> cost.Job:
    """What labs.cost is asked about."""
    each = BATCH // strategy.parts(ranks) // micro_batches
    return cost.Job(GPT_CONFIG, each, ranks, rank, context=CONTEXT, accumulation=micro_batches)


def in_bfloat16(model, mesh):
    """Each micro-batch goes through a copy of the model in bfloat16; its gradients are added up at full length."""

    def backward(x, y, micro_batches):
        losses = []
        for micro_x, micro_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            low = {name: p.detach().bfloat16().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
            losses.append(functional_call(model, low, (micro_x, micro_y)))
            losses[-1].backward()
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.grad = low[name].grad.to(p.dtype) + (0 if p.grad is None else p.grad)
        return losses

    return replicated(model, backward)


ONE = {torch.float32: ONE_DEVICE, torch.bfloat16: replace(ONE_DEVICE, apply=in_bfloat16)}


@lru_cache
def one_process(micro_batches: int, computes=torch.float32):
    return run(train_all, ONE[computes], micro_batches, ranks=1)[0]


@lru_cache
def watched(strategy, ranks: int):
    """What a strategy trained, and a recording of what it sent."""
    return run(train_all, strategy, ranks=ranks, record="communication")


def bound_of(strategy, ranks: int, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return 1e-12 if strategy.computes == torch.float32 else 1e-5
    return 0.0 if ranks in strategy.bitwise else 1e-5


def differences(strategy, ranks: int) -> list[tuple]:
    """(rank, model, dtype) whose parameters are not one process's."""
    found = []
    for rank, trained in enumerate(watched(strategy, ranks)):
        for training, ours, one in zip(TRAININGS, trained, one_process(ranks, strategy.computes), strict=True):
            bound = bound_of(strategy, ranks, training[1])
            if not all(torch.allclose(ours[name], p, rtol=bound, atol=bound) for name, p in one.items()):
                found.append((rank, *training))
    return found


def sizes_of(model: nn.Module) -> list[int]:
    return [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]


def sent(strategy, ranks: int, name: str) -> tuple[list[int], list[int]]:
    """Bytes sent in the last step in float32, by rank: predicted and measured."""
    recording = watched(strategy, ranks).recording
    last = (TRAININGS.index((name, torch.float32)) + 1) * STEPS - 1
    predicted = [strategy.sent(*LAYERS[name], ranks=ranks, rank=rank) for rank in range(ranks)]
    return predicted, [recording.sent(rank, last) for rank in range(ranks)]


def held(strategy, ranks: int, name: str) -> list[dict[str, int]]:
    """Bytes held in a steady step in float32, by rank: measured, in a job that trains nothing else."""
    build, vocab = MODELS[name]
    data = batches(vocab, strategy.parts(ranks))  # made here: the ranks only look at it
    recording = run(train, strategy, build, data, ranks=ranks, device="cpu", record="memory").recording
    return [recording.steady(rank) for rank in range(ranks)]


# ---- the claims ------------------------------------------------------------------------------------------

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
ON_RANKS = [(strategy, ranks) for strategy in STRATEGIES for ranks in RANKS if strategy.fits(ranks)]
on_ranks = pytest.mark.parametrize(
    ("strategy", "ranks"), ON_RANKS, ids=[f"{strategy.name}-{ranks}" for strategy, ranks in ON_RANKS]
)


@on_ranks
def test_numbers(strategy, ranks):
    assert differences(strategy, ranks) == []


@on_ranks
@pytest.mark.parametrize("name", MODELS)
def test_bytes_sent(strategy, ranks, name):
    predicted, measured = sent(strategy, ranks, name)
    assert measured == predicted
    if name == "GPT":
        steps = [strategy.predict(job_of(strategy, ranks, rank)) for rank in range(ranks)]
        assert [step.sent for step in steps] == predicted


@pytest.mark.parametrize("strategy", (ONE_DEVICE, *STRATEGIES), ids=lambda strategy: strategy.name)
def test_bytes_held_by_the_gpt(strategy):
    ranks = strategy.ranks(3 if strategy.fits(3) else 4)
    for rank, measured in enumerate(held(strategy, ranks, "GPT")):
        predicted = asdict(strategy.predict(job_of(strategy, ranks, rank)).held)
        assert measured.pop("peak") == pytest.approx(predicted.pop("peak"), abs=8)  # a loss of a step may outlive it
        assert measured == predicted


@every_strategy
def test_micro_batches(strategy):
    """Two on each of two ranks (three on each of four) are one process's batch; what is sent more is predicted."""
    ranks, each = (2, 2) if strategy.fits(2) else (4, 3)
    trainings = [("GPT", torch.float64), ("GPT", torch.float32)]
    job = run(train_all, strategy, each, trainings, ranks=ranks, record="communication")
    whole = one_process(each * ranks, strategy.computes)[TRAININGS.index(trainings[0])]
    bound = bound_of(strategy, ranks, torch.float64)
    for rank, (trained, _) in enumerate(job):
        assert all(torch.allclose(trained[name], p, rtol=bound, atol=bound) for name, p in whole.items())
        predicted = strategy.predict(job_of(strategy, ranks, rank, each))
        assert job.recording.sent(rank, step=2 * STEPS - 1) == predicted.sent


def by_hand(rank: int) -> dict[str, dict[str, int]]:
    """Bytes of P, G and S of the awkward model on a rank of 3, in a step; under HSDP on one of 2 × 2."""
    everything, sizes = 91 + 56 + 49 + 1, [91, 49, 7, 1]
    copies = {"P": 4 * everything, "G": 4 * sum(sizes), "S": 8 * sum(sizes) + 4 * len(sizes)}
    # ZeRO pads 91, 56, 49 (frozen) and 1 elements to multiples of 3. The embedding is the first that sync() reduces,
    # and the last but the scale whose gradient is ready.
    trained, frozen, state = 93 + 57 + 3, 51, 8 * 153 // 3 + 4 * 3
    # fully_shard cuts 13, 7, 7, 1 and 7 (frozen) rows in chunks of 5, 3, 3, 1 and 3. The padding has no state; in ours
    # it is not held with the parameters, either.
    chunks, own = 5 * 7 + 3 * 7 + 3 + 1, (5 * 7 + 3 * 7 + 3 + 1, 5 * 7 + 3 * 7 + 3, 3 * 7 + 7 + 1, 0)[rank]
    chunked = {"P": 4 * (chunks + 3 * 7), "G": 4 * chunks, "S": 8 * own + 4 * len(sizes)}
    unpadded = chunked | {"P": 4 * (own + (3, 3, 1, 0)[rank] * 7)}
    # Along two shards they are 7 and 6, 4 and 3, 4 and 3, 1 and none, 4 and 3; ranks 2 and 3 have those of 0 and 1.
    pairs, pair = 7 * 7 + 4 * 7 + 4 + 1, (7 * 7 + 4 * 7 + 4 + 1, 6 * 7 + 3 * 7 + 3)[rank % 2]
    in_pairs = {"P": 4 * (pairs + 4 * 7), "G": 4 * pairs, "S": 8 * pair + 4 * len(sizes)}
    return {
        "ddp-naive": copies,
        "ddp-bucketed": copies,
        "ddp-overlapped": copies | {"G": 4 * sum(sizes) + 4 * max(sizes)},  # one on its way into its bucket
        "torch-ddp": copies,
        "zero-1": {"P": 4 * (trained + frozen), "G": 4 * (trained + 31), "S": state},
        "torch-zero-1": copies | {"S": (8 * 91 + 4, 8 * 49 + 4, 8 * (7 + 1) + 8, 0)[rank]},  # dealt out whole
        "zero-2": {"P": 4 * (trained + frozen), "G": 4 * (19 + 93 + 31), "S": state},
        "fsdp-no-reshard": unpadded,
        "torch-fsdp-no-reshard": chunked,
        "zero-3": {"P": 4 * (trained + frozen) // 3, "G": 4 * trained // 3, "S": state},
        "fsdp": unpadded,
        "torch-fsdp": chunked,
        "hsdp": in_pairs | {"P": 4 * (pair + (4, 3)[rank % 2] * 7)},
        "torch-hsdp": in_pairs,
        "fsdp-bf16": unpadded,  # at rest, all is in float32
        "torch-fsdp-bf16": chunked,
    }


@every_strategy
def test_bytes_held_by_the_awkward_model(strategy):
    for rank, measured in enumerate(held(strategy, 3 if strategy.fits(3) else 4, "awkward")):
        assert {kind: measured[kind] for kind in "PGS"} == by_hand(rank)[strategy.name]


# ---- the claims, tried -----------------------------------------------------------------------------------


class SendsTwice(ddp.Bucketed):
    """One collective more, whose result nobody uses."""

    def average(self):
        super().average()
        self.all_reduce(next(iter(self.trainable.values())).grad.clone())


class Sums(ddp.Naive):
    """One division less."""

    def average(self):
        for p in self.trainable.values():
            self.all_reduce(p.grad)


class SkipsOne(ddp.Naive):
    """One collective less."""

    def average(self):
        *others, _ = self.trainable.values()
        for p in others:
            self.all_reduce(p.grad)
            p.grad /= self.ranks


class HoldsTwice(ddp.Naive):
    """One copy of every parameter more."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.spare = nn.ParameterList([nn.Parameter(p.detach().clone(), False) for p in model.parameters()])


NAIVE, BUCKETED = STRATEGIES[:2]


def test_a_collective_more_is_seen_in_the_bytes_alone():
    broken = replace(BUCKETED, apply=partial(average_with, SendsTwice))
    predicted, measured = sent(broken, 2, "awkward")
    assert all(m > p for p, m in zip(predicted, measured, strict=True))
    assert differences(broken, 2) == []


def test_a_collective_less_is_seen_in_the_bytes_and_in_the_numbers():
    broken = replace(NAIVE, apply=partial(average_with, SkipsOne))
    predicted, measured = sent(broken, 2, "awkward")
    assert all(m < p for p, m in zip(predicted, measured, strict=True))
    assert len(differences(broken, 2)) == 2 * len(TRAININGS)


def test_a_division_less_is_seen_in_the_numbers_alone():
    broken = replace(NAIVE, apply=partial(average_with, Sums))
    predicted, measured = sent(broken, 2, "awkward")
    assert measured == predicted
    assert len(differences(broken, 2)) == 2 * len(TRAININGS)


def test_a_spare_copy_is_seen_in_the_bytes_held():
    broken = replace(NAIVE, apply=partial(average_with, HoldsTwice))
    predicted = broken.predict(job_of(broken, 2))
    for measured in held(broken, 2, "GPT"):
        assert measured["P"] == 2 * predicted.held.P
        assert any("parameters" in fault for fault in faults_of(0.0, predicted, predicted.sent, measured))
