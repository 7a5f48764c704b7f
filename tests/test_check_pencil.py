"""The checks of exercises on paper against right answers, and against wrong ones that are known by name.

Right: the course's own, and answers that go another way about it.  Wrong: tests/wrong_answers/pencil.py.
"""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch

from labs import cost, pp
from labs.kit import check
from labs.kit.checks.pencil.held import held
from labs.model import PRESETS
from tests.answers.together import together
from tests.wrong_answers import formulas, pencil
from tests.wrong_answers.answers import ANSWERS, let_past

# ---- right answers ---------------------------------------------------------------------------------------


def buckets_by_recursion(nbytes, bucket_bytes):
    def rest(end):
        if end == 0:
            return ()
        start = end - 1
        while start > 0 and sum(nbytes[start:end]) < bucket_bytes:
            start -= 1
        return (tuple(range(end - 1, start - 1, -1)), *rest(start))

    return rest(len(nbytes))


def buckets_by_numpy(nbytes, bucket_bytes):
    places, buckets = np.arange(len(nbytes))[::-1], []
    while len(places):
        full = np.cumsum(np.array(nbytes)[places]) >= bucket_bytes
        count = int(full.argmax()) + 1 if full.any() else len(places)
        buckets.append(torch.from_numpy(places[:count].copy()))
        places = places[count:]
    return buckets


def buckets_by_accumulate(nbytes, bucket_bytes):
    def add(state, i):
        number, has = state
        return (number + 1, nbytes[i]) if has >= bucket_bytes else (number, has + nbytes[i])

    order = list(reversed(range(len(nbytes))))
    numbers = [number for number, _ in accumulate(order, add, initial=(-1, bucket_bytes))][1:]
    return [[i for i, n in zip(order, numbers, strict=True) if n == k] for k in range(max(numbers, default=-1) + 1)]


def held_by_shards(stage, layers, ranks, size):
    ranks = ranks if stage else 1
    shard = sum(math.ceil(n / ranks) for n in layers)
    return [b * shard * (1 if stage >= first else ranks) for b, first in zip(size, (3, 2, 1), strict=True)]


def held_by_division(stage, layers, ranks, size):
    padded = [n if stage == 0 or n % ranks == 0 else n + ranks - n % ranks for n in layers]
    P, G, S = (sum(padded) * b for b in size)
    match stage:
        case 0:
            return P, G, S
        case 1:
            return P, G, S / ranks
        case 2:
            return P, G / ranks, S / ranks
    return P / ranks, G / ranks, S / ranks


def held_by_tensors(stage, layers, ranks, size):
    n = torch.tensor(layers, dtype=torch.int64)
    n = (n + ranks - 1).div(ranks, rounding_mode="floor") * ranks if stage else n
    return torch.tensor(size) * n.sum() // torch.where(torch.tensor([3, 2, 1]) <= stage, ranks, 1)


def rings_in_fractions(ranks):
    part = Fraction(ranks - 1, ranks)
    return {"all_reduce": 2 * part} | dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), part)


def starts_in_tensors(tensors, buckets):
    return {
        "Naive": torch.tensor([0, tensors]),
        "Bucketed": np.array([0, buckets]),
        "Overlapped": [float(buckets), 0.0],
    }


def events_in_lists():
    return {event: list(stages) for event, stages in reversed(pencil.stages_by_event().items())}


def held_in_numpy(shards, replicas):
    return {name: np.array(pair) for name, pair in pencil.held_and_sent(shards, replicas).items()}


def bubbles_by_simulation(ranks, microbatches, stages_per_rank):
    lists = {
        "GPipe": pp.gpipe(ranks, microbatches),
        "1F1B": pp.one_f_one_b(ranks, microbatches),
        "interleaved": pp.interleaved(ranks, microbatches, stages_per_rank),
        "zero bubble": pp.zb1p(ranks, microbatches),
    }
    return {name: pp.simulate(each).bubble for name, each in lists.items()}


def tree_by_steps(size, ranks, latency, bandwidth):
    seconds, informed = 0.0, 1
    while informed < ranks:
        seconds += 2 * (latency + size / bandwidth)
        informed *= 2
    return seconds


def tree_in_parts(size, ranks, latency, bandwidth):
    rounds = len(bin(ranks - 1)) - 2 if ranks > 1 else 0
    return np.float64(2 * rounds * latency) + np.float64(2 * rounds * size) / bandwidth


def ring_by_rounds(size, ranks, latency, bandwidth):
    return math.fsum(latency + size / (ranks * bandwidth) for _ in range(2 * ranks - 2))


def ring_in_parts(size, ranks, latency, bandwidth):
    sent = torch.tensor(2 * (ranks - 1) * size / ranks, dtype=torch.float64)
    return sent / bandwidth + 2 * latency * (ranks - 1)


def bytes_by_tensors(parameters, mixed):
    held = dict.fromkeys("SGP", 0)
    for shape, trained in parameters:
        x = torch.zeros(shape, dtype=torch.bfloat16 if mixed else torch.float32)
        held["P"] += x.nbytes
        if trained:
            held["G"] += x.nbytes
            held["S"] += sum(t.nbytes for t in (x.float(),) * (2 + mixed)) + 4 * (not mixed)
    return held


def bytes_by_numpy(parameters, mixed):
    n = np.array([np.prod(shape, dtype=int) for shape, _ in parameters], dtype=int)
    trained = np.array([trained for _, trained in parameters], dtype=bool)
    width = 2 if mixed else 4
    remembered = 12 * n if mixed else 8 * n + 4
    return {"P": width * n.sum(), "G": width * n[trained].sum(), "S": remembered[trained].sum()}


def bytes_by_optimizer(parameters, mixed):
    """By torch's own AdamW, of masters where there are some."""
    models = [torch.nn.Parameter(torch.zeros(shape), requires_grad=trained) for shape, trained in parameters]
    masters = [p for p in models if p.requires_grad]
    for p in masters:
        p.grad = torch.zeros_like(p)
    states = {}
    if masters:
        optimizer = torch.optim.AdamW(masters)
        optimizer.step()
        states = optimizer.state
    kept = sum(x.nbytes for state in states.values() for x in state.values())
    total = sum(p.nbytes for p in masters)
    if mixed:
        return {"P": sum(p.nbytes for p in models) / 2, "G": total / 2, "S": kept - 4 * len(masters) + total}
    return {"P": sum(p.nbytes for p in models), "G": total, "S": kept}


RIGHT = {
    "ring_seconds": (formulas.ring_seconds, ring_by_rounds, ring_in_parts, cost.ring_seconds),
    "tree_seconds": (formulas.tree_seconds, tree_by_steps, tree_in_parts, cost.tree_seconds),
    "bytes_by_kind": (formulas.bytes_by_kind, bytes_by_tensors, bytes_by_numpy, bytes_by_optimizer),
    "fill_buckets": (pencil.fill_buckets, buckets_by_recursion, buckets_by_numpy, buckets_by_accumulate),
    "held_per_rank": (pencil.held_per_rank, held_by_shards, held_by_division, held_by_tensors),
}


def shard_by_numpy(elements, ranks, rank):
    longest = math.ceil(elements / ranks)
    return np.clip([rank * longest, (rank + 1) * longest], 0, elements)


RIGHT |= {
    "my_shard": (pencil.my_shard, shard_by_numpy),
    "sent_by_rings": (pencil.sent_by_rings, rings_in_fractions),
    "started_when": (pencil.started_when, starts_in_tensors),
    "stages_by_event": (pencil.stages_by_event, events_in_lists),
    "held_and_sent": (pencil.held_and_sent, held_in_numpy),
    "bubbles": (pencil.bubbles, bubbles_by_simulation),
}
LINES = {
    "ring_seconds": "✓ ring_seconds: right on all 10 examples",
    "tree_seconds": "✓ tree_seconds: right on all 10 examples",
    "bytes_by_kind": "✓ bytes_by_kind: right on all 16 examples",
    "my_shard": "✓ my_shard: right on all 87 examples",
    "fill_buckets": "✓ fill_buckets: right on all 13 examples",
    "sent_by_rings": "✓ sent_by_rings: right on all 6 examples",
    "started_when": "✓ started_when: right on all 3 examples",
    "stages_by_event": "✓ stages_by_event: right",
    "held_and_sent": "✓ held_and_sent: right on all 4 examples",
    "bubbles": "✓ bubbles: right on all 5 examples",
    "held_per_rank": "✓ held_per_rank: right on all 13 examples",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_are_accepted(name):
    for fn, answer in zip(RIGHT[name], together([(name, (fn,), False) for fn in RIGHT[name]]), strict=True):
        assert answer.ok is True and str(answer) == LINES[name], f"{fn.__name__}: {answer}"


@pytest.mark.parametrize("name", RIGHT)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name for answer in ANSWERS) > 7
    assert let_past(name) == ""


@pytest.mark.parametrize("name", RIGHT)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args):
        raise NotImplementedError("your turn")

    assert getattr(check, name)(stub).ok is None


@pytest.mark.parametrize("name", RIGHT)
def test_what_it_raises_is_told_with_its_line(name):
    def fn(*args):
        return args[99]

    answer = getattr(check, name)(fn)
    assert answer.ok is False and "IndexError" in answer.text and "args[99]" in answer.text


def test_a_wrong_table_says_of_which_stages():
    tables = [
        {"sync": ("reduce_scatter",) * 3},
        {"before_backward": ("", "", "")},
        {"gradient_ready": ("", "", "")},
        {"step": ["all_gather", "all_gather", None]},
        {"step": None},
    ]
    functions = [partial(pencil.stages_by_event, **table) for table in tables]
    first, second, third, *others = together([("stages_by_event", (fn,), False) for fn in functions])
    assert first.text.endswith("; wrong for stages 2 and 3") and "done already" in first.question
    assert second.text.endswith("; wrong for stage 3") and second.mistake == "a gather is missing"
    assert third.text.endswith("; wrong for stages 2 and 3") and "which part of it" in third.question
    assert all(answer.ok is False for answer in others)


@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_rank_holds_is_what_cost_predicts(stage, ranks):
    config = replace(PRESETS["tiny"], depth=3)
    layers = [sum(layer.sizes) for layer in cost.gpt_layers(config)]
    P, _, S = held(stage, layers, ranks, (4, 4, 8))
    predicted = cost.zero(cost.Job(config, 1, ranks), stage).held
    assert (P, S + 4 * len(layers)) == (predicted.P, predicted.S), "AdamW counts its steps, in 4 bytes a vector"
