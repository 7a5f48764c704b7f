"""Tests of labs.cost on memory: published tables, cases worked out by hand, and independent measurements.

Autograd's own hook measures, to the byte, the activations of GPT-3's layer and of the course's in 16 bit.  The recorder
measures what recomputation leaves of the activations.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from labs import cost
from labs.cost import Job
from labs.kit.launch import run
from labs.kit.record import mark
from labs.memory.recompute import recompute
from labs.memory.selective import ATTENTION, MATMULS
from labs.model import GPT, PRESETS, Config
from tests.models import GPT3Layer

GB = 10**9
CONFIGS = {
    "odd sizes": Config(301, 30, 2, 3, 3, 77, context=11),
    "tied": Config(64, 32, 2, 4, 4, 96, context=16, tied=True),
}

# ---- published figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "billions, ranks, gigabytes",  # ZeRO, table 1, and above it figure 1
    [
        (7.5, 1, (120, 120, 120)),
        (7.5, 4, (52.5, 41.25, 30)),
        (7.5, 64, (31.4, 16.6, 1.88)),
        (7.5, 1024, (30.1, 15.1, 0.12)),
        (128, 16, (608, 368, 128)),
        (1000, 64, (4187.5, 2218.75, 250)),
        (1000, 1024, (4011, 2013, 15.6)),
    ],
)
def test_the_stages_hold_what_was_published(billions, ranks, gigabytes):
    totals = [sum(cost.bytes_held(int(billions * GB), ranks, stage).values()) / GB for stage in range(4)]
    assert totals[0] == 16 * billions
    assert totals[1:] == pytest.approx(gigabytes, rel=0.004, abs=0.005)


def test_the_conventions_by_hand():
    # Megatron-LM's distributed optimizer: 6 + 12/N; PyTorch's own default: 8 + 8/N
    assert cost.bytes_held(100, 4, 1, "mixed, float32 gradients") == {"P": 200, "G": 400, "S": 300}
    assert cost.bytes_held(100, 4, 1, "float32") == {"P": 400, "G": 400, "S": 200}
    assert cost.bytes_held(100, 4, 3, "float32") == {"P": 100, "G": 100, "S": 200}
    with pytest.raises(ValueError, match="precision is 'fp8': it must be one of 'float32', 'mixed'"):
        cost.bytes_held(100, 4, 1, "fp8")
    with pytest.raises(ValueError, match="stage is 4: it must be 0, 1, 2 or 3"):
        cost.bytes_held(100, 4, 4)


def test_the_layer_of_gpt_3_is_as_published():
    gpt_3, mt_nlg = dict(s=2048, b=1, h=12_288, a=96), dict(s=2048, b=1, h=20_480, a=128)
    for model, core, saved in ((gpt_3, 80, 0.70), (mt_nlg, 64, 0.65)):  # Korthikanti, section 5
        sbh = model["s"] * model["b"] * model["h"]
        assert cost.korthikanti(**model) == sbh * (34 + core)
        assert cost.korthikanti(**model, recompute="selective") == 34 * sbh
        assert 1 - Fraction(34, 34 + core) == pytest.approx(saved, abs=0.005)
        assert cost.korthikanti(**model, recompute="full") == 2 * sbh
        # table 2, 8 tensor-parallel ranks: 10 + 24/t + 5as/ht; with sequence parallelism (34 + 5as/h) / t
        assert cost.korthikanti(**model, t=8) == sbh * (10 + 3 + core // 8)
        assert cost.korthikanti(**model, t=8, sequence_parallel=True) == sbh * Fraction(34 + core, 8)
        assert cost.korthikanti(**model, t=8, recompute="selective") == 13 * sbh
    with pytest.raises(ValueError, match="recompute is 'some'"):
        cost.korthikanti(**gpt_3, recompute="some")


# ---- activations -----------------------------------------------------------------------------------------


def saved_by(model, *inputs) -> int:
    """Return the bytes that autograd saves in a forward, without the parameters."""
    parameters, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*inputs)
    del output
    return sum(storage.nbytes() for storage in saved.values())


def test_the_formula_of_korthikanti_is_what_autograd_keeps_of_that_layer():
    s, b, h, a = 32, 2, 64, 4
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    statistics = 2 * s * b * (2 + 2)  # mean and 1 / deviation of each norm
    assert saved_by(GPT3Layer(h, a).bfloat16(), x) == cost.korthikanti(s, b, h, a) + statistics


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_in_16_bit_are_what_autograd_saves(name):
    config = CONFIGS[name]
    tokens, targets = torch.randint(0, config.vocab, (2, 3, config.context)).unbind()
    measured = saved_by(GPT(config).bfloat16(), tokens.clone(), targets.clone())
    assert sum(cost.activations(Job(config, 3, precision="mixed")).values()) == measured


KEEP = {"none": None, "selective": MATMULS | ATTENTION, "all but attention": ATTENTION, "full": ()}
STEPS = 3
LAYERS = Config(50, 24, 3, 3, 1, 40, context=20)


def train_recomputed():
    """Train with each way of recomputing, in float32 and in bfloat16, one after the other."""
    for dtype in (torch.float32, torch.bfloat16):
        for keep in KEEP.values():
            model = GPT(LAYERS).to(dtype)
            if keep is not None:
                recompute(model.layers.values(), keep=keep)
            for _ in range(STEPS):
                mark("step")
                model(*torch.randint(0, LAYERS.vocab, (2, 2, LAYERS.context)).unbind()).backward()
    mark("end")


def test_recomputation_leaves_what_was_predicted():
    recording = run(train_recomputed, ranks=1, record="memory").recording
    jobs = [Job(LAYERS, 2, precision=precision, recompute=name) for precision in ("float32", "mixed") for name in KEEP]
    for number, job in enumerate(jobs):
        measured = recording.held(step=STEPS * number + STEPS - 1)["A"]
        assert cost.most_activations(job) == measured, job
    assert tuple(KEEP) == cost.RECOMPUTE


def test_recomputation_by_hand():
    # numbers per token and layer, with D = 24, KE = 8, H = 3, F = 40, from the table of labs.memory.recompute
    numbers = {"selective": 5 * 24 + 2 * 8 + 3 + 2 * 40, "all but attention": 2 * 24 + 3, "full": 24}
    beside = 4 * 40 * (2 * 24 + 1) + 4 * 40 * (24 + 50) + 2 * 8 * 40 + 4  # last norm, head, tokens, loss
    for name, number in numbers.items():
        assert sum(cost.activations(Job(LAYERS, 2, recompute=name)).values()) == 3 * 4 * 40 * number + beside


def test_the_textbook_is_the_limit_of_what_is_held():
    psi = sum(cost.parameter_sizes(PRESETS["llama3-8b"]))
    for stage in range(4):
        held = cost.per_rank(Job(PRESETS["llama3-8b"], 1, ranks=64, context=64, precision="mixed"), stage)
        for kind, size in cost.bytes_held(psi, 64, stage, "mixed").items():
            if kind != "G":  # the peak of gradients has a layer's in flight, and one in float32
                assert getattr(held, kind) == pytest.approx(size, rel=1e-3)


# ---- does it fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recompute, offload", [("none", False), ("full", False), ("none", True)])
def test_the_smallest_number_of_ranks_fits_and_half_of_it_does_not(stage, recompute, offload):
    job = Job(PRESETS["llama3-70b"], 1, context=2048, precision="mixed", recompute=recompute)

    def peak(ranks):
        return cost.per_rank(replace(job, ranks=ranks), stage, offload).peak

    card = peak(48)  # enough for 48 ranks and for 64, too small for 32
    ranks = cost.smallest_ranks(job, stage, card, offload)
    assert ranks == (64 if peak(32) > card else ranks)
    assert peak(ranks) <= card
    assert ranks == 1 or peak(ranks // 2) > card


def test_what_never_fits_and_what_always_does():
    job = Job(PRESETS["llama3-8b"], 1, precision="mixed")
    assert cost.smallest_ranks(job, stage=1, card_bytes=16 * GB) is None  # P alone has 16.06 GB
    assert cost.smallest_ranks(job, stage=0, card_bytes=100 * GB) is None
    assert cost.smallest_ranks(job, stage=0, card_bytes=300 * GB) == 1


def test_offload_takes_the_optimizer_state_away_and_nothing_else():
    job = Job(PRESETS["tiny"], 1, ranks=4, precision="mixed")
    here, elsewhere = cost.per_rank(job, stage=3), cost.per_rank(job, stage=3, offload=True)
    assert elsewhere.S == 0 and (elsewhere.P, elsewhere.A, elsewhere.comm) == (here.P, here.A, here.comm)
    assert elsewhere.peak == here.peak - here.S
