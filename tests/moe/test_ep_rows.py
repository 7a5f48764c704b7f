"""The rows of expert parallelism, ours and PyTorch's, through the claims of tests/test_contract.py.

numbers       the reference is one process with as many micro-batches as there are ranks, in float64 within 1e-12;
              in float32 bit by bit where the row promises it
bytes sent    the reference is labs.cost, for the loads that the routers counted: exact, on every rank
bytes held    the reference is labs.cost: P, G, S and the activations are exact, and the peak within 5 %
order         the job would neither hang on NCCL nor be wrong there
"""

import gc
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labs import cost
from labs.agree import everybodys
from labs.kit.dry import NeedsNumbers, dry
from labs.kit.launch import run
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.record import mark
from labs.kit.simulated.strategy_steps import rehearse
from labs.kit.training.strategies import EXPERTS, ONE_DEVICE, own_batch, set_up, step, train
from labs.moe import MOE_PRESETS, MoEGPT
from tests.depth import deepen
from tests.recordings import as_predicted

ODD = replace(MOE_PRESETS["tiny-moe"], vocab=13, dim=8, depth=2, heads=2, kv_heads=1, hidden=5, context=6, experts=6)
CONFIGS = {
    "shared and tied": replace(ODD, top_k=3, shared=1, tied=True),
    "biased, with full experts": replace(
        ODD, scores="sigmoid", is_biased=True, capacity=0.8, is_normed=True, head_width=6
    ),
}
BATCH, STEPS = 12, 3
DTYPES = torch.float64, torch.float32


def batches(parts):
    """Return [part][step]: the same random tokens, cut into any number of parts."""
    whole = torch.randint(ODD.vocab, (STEPS, 2, BATCH, ODD.context), generator=torch.Generator().manual_seed(0))
    return [[tuple(each.chunk(parts, dim=1)[part]) for each in whole] for part in range(parts)]


def model_of(name, dtype):
    return MoEGPT(CONFIGS[name]).to(dtype)


def loads_of(model):
    """Return the rows that each layer's experts have computed since they were asked for last, in one forward."""
    found = []
    for mixture in [layer.mlp for layer in model.layers.values()]:
        load, mixture.router.load_E = torch.as_tensor(mixture.router.load_E), 0
        found.append(load.clamp(max=math.ceil((mixture.capacity or load.numel()) * load.sum() / load.numel())).tolist())
    return found


def trained(rows, trainings, data, keep):
    """Train each model with each row, on data[part][step]; return [(parameters, loads in the last step)] of them."""
    found = []
    for row in rows:
        for name, dtype in trainings:
            model = model_of(name, dtype)
            training, part = set_up(row, model)
            for batch in data[part]:
                loads_of(model)
                mark("step")
                step(training, *own_batch(training, batch))
                mark("end")
            full = {name: p.detach().clone() for name, p in training.full().items()} if keep else {}
            found.append((full, loads_of(model)))
            del training, model
            if not keep:
                gc.collect()  # frees the cycles of this training
    return found


def one_process(trainings, ranks):
    """Return the parameters after each training on one process, with as many micro-batches as there are ranks."""
    return [train(ONE_DEVICE, partial(model_of, *each), batches(1), ranks, STEPS)[1] for each in trainings]


def predicted(row, name, ranks, rank, loads):
    return row.predict(cost.Job(CONFIGS[name], BATCH // ranks, ranks, rank), loads)


@pytest.mark.parametrize("ranks", [4, *deepen(2, 3)])
def test_numbers_and_bytes_sent(ranks):
    trainings = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
    job = run(trained, EXPERTS, trainings, batches(ranks), True, ranks=ranks, record="communication")
    [alone] = run(one_process, trainings, ranks, ranks=1)
    for number, (row, (name, dtype)) in enumerate((row, each) for row in EXPERTS for each in trainings):
        one = alone[trainings.index((name, dtype))]
        bound = 1e-12 if dtype == torch.float64 else 0.0 if ranks in row.bitwise else 1e-5
        loads = [of_rank[number][1] for of_rank in job]
        for rank in range(ranks):
            full = job[rank][number][0]
            assert {*full} == {*one}
            far = {each: (full[each] - p).abs().max().item() for each, p in one.items()}
            assert max(far.values()) <= bound, (row.name, name, dtype, far)
            if dtype == torch.float32:
                sent = job.recording.sent(rank, (number + 1) * STEPS - 1)
                assert sent == predicted(row, name, ranks, rank, loads).sent, (row.name, rank)
    verdict = would_hang(job.recording)
    assert verdict.name == SOUND, verdict


@pytest.mark.parametrize("ranks", [4, *deepen(3)])
def test_bytes_held(ranks):
    trainings = [(name, torch.float32) for name in CONFIGS]
    for row in EXPERTS:
        job = run(trained, [row], trainings, batches(ranks), False, ranks=ranks, record="memory")
        for number, name in enumerate(CONFIGS):
            loads = [of_rank[number][1] for of_rank in job]
            for rank in range(ranks):
                measured = job.recording.held(rank, (number + 1) * STEPS - 1)  # the step in which loads were counted
                measured, expected = as_predicted(measured, predicted(row, name, ranks, rank, loads).held)
                assert measured == expected, (row.name, name, rank)


def test_even_loads_approach_the_textbooks_bytes():
    job = cost.Job(replace(CONFIGS["shared and tied"], context=600), 4, 8)
    for predict in (cost.expert_parallel, cost.fsdp_experts, cost.torch_expert_parallel):
        found = predict(job, edp=4, ep=2)
        assert abs(found.sent / found.textbook - 1) < 1e-2
    assert cost.mixture_sent([[1, 2, 3], [4, 5, 6]], 0, dim=10) == 2 * 4 * 10 * (3 + 4 + 5) + 8
    assert [[*cost.own_experts(5, 3, rank)] for rank in range(3)] == [[0, 1], [2, 3], [4]]


def rehearsed(config, row):
    for _ in rehearse(row, config, 2):
        pass


def test_a_dry_run_has_even_loads_and_a_row_that_reads_them_is_refused():
    for rank, row, hidden in ((5, EXPERTS[0], 90), (6, EXPERTS[1], 5), (5, EXPERTS[1], 90)):
        config = replace(CONFIGS["shared and tied"], hidden=hidden)
        found = dry(rehearsed, config, row, ranks=16, rank=rank)
        known = row.predict(cost.Job(config, 2, 16, rank))
        assert found.communication.sent(rank, 1) == known.sent and not found.reads[rank]
        measured, expected = as_predicted(found.memory.steady(rank), known.held)
        assert measured == expected, (row.name, hidden)
    for name, row in (("shared and tied", EXPERTS[2]), ("biased, with full experts", EXPERTS[0])):
        with pytest.raises(NeedsNumbers):
            dry(rehearsed, CONFIGS[name], row, ranks=64)


def norms():
    """Return the norm of the gradients under each row on this rank, and of one process's."""
    found, ranks = [], dist.get_world_size()
    for row in EXPERTS:
        training, part = set_up(row, model_of("shared and tied", torch.float64))
        training.backward(*batches(ranks)[part][0], 1)
        training.finish()
        found.append(training.clip(float("inf")).item())
    one = model_of("shared and tied", torch.float64)
    for of_part in batches(ranks):
        (one(*of_part[0]) / ranks).backward()
    return [*found, torch.nn.utils.get_total_norm([p.grad for p in one.parameters()]).item()]


def test_each_expert_counts_once_in_the_norm():
    for found in run(norms, ranks=4):
        assert found == pytest.approx([found[-1]] * 4, rel=1e-12)


def test_one_rank_and_experts_that_pytorch_cannot_divide_are_refused():
    assert [row.fits(1) for row in EXPERTS] == [False] * 3 and EXPERTS[0].ranks(4) == 4
    with pytest.raises(ValueError, match="expert parallelism takes 2 ranks or more: not 1"):
        EXPERTS[0].axes(1)

    def five():
        with pytest.raises(ValueError, match="5 experts are not divisible by ep=2: change one of them"):
            set_up(EXPERTS[2], MoEGPT(replace(ODD, experts=5)))
        return everybodys(dist.get_rank(), None)

    assert run(five, ranks=2) == [{0: 0, 1: 1}] * 2
