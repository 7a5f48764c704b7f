"""Tests of labs.cost on tensor parallelism: published volumes, cases by hand, and jobs that know nothing of it.

The recorder measures, to the byte, what ranks of labs.tp and of labs.native send and hold; and, within 5 %, what a
layer of GPT-3 keeps for its backward, which was published.
"""

import dataclasses
import gc
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from labs import cost
from labs.cost import Job
from labs.dtensor import Replicate, Shard
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.rows.tp_rows import torch_tp
from labs.kit.training.strategies import Training, backward, step, trainable
from labs.memory.precision import Masters
from labs.mesh import Mesh
from labs.model import GPT, PRESETS, Config
from labs.tp import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, gpt_plan, parallelize
from labs.tp.async_tp import gather_linear, linear_scatter
from labs.tp.parameter_cuts import Queries
from tests.depth import deepen
from tests.models import GPT3Layer
from tests.recordings import as_predicted, held

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
JOBS = {  # number of ranks: config, sequences, micro-batches, precision
    2: [
        (Config(301, 32, 2, 4, 2, 77, context=12), 2, 1, "float32"),  # nothing divides
        (Config(64, 32, 1, 4, 4, 96, context=16, tied=True), 3, 2, "float32"),
        (Config(20, 64, 1, 4, 2, 33, context=64), 2, 1, "mixed"),  # activations dominate
    ],
    3: [(Config(23, 60, 1, 5, 5, 41, context=12), 2, 1, "float32")],  # heads that do not divide
    4: [
        (Config(5, 32, 1, 4, 2, 40, context=16), 2, 1, "float32"),  # a rank without a word, fewer kv_heads than ranks
        (Config(256, 64, 1, 4, 2, 160, context=16), 3, 2, "float32"),
        (Config(301, 64, 1, 8, 2, 77, context=12), 2, 1, "mixed"),
    ],
}
STEPS = 3


def train_all(ranks, steps):
    for config, batch, accumulation, precision in JOBS[ranks]:
        for sequence_parallel in (False, True):
            train(config, batch, accumulation, precision, sequence_parallel, steps)


def train(config, batch, accumulation, precision, sequence_parallel, steps):
    mixed, mesh = precision == "mixed", Mesh((dist.get_world_size(),), ("tp",))
    model = GPT(config).bfloat16() if mixed else GPT(config)
    parallelize(model, mesh, gpt_plan(config, sequence_parallel))
    trained = trainable(model)
    optimizer = Masters(trained, ADAMW) if mixed else ADAMW(trained)
    training = Training(partial(backward, model), optimizer, trained, dict)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        mark("step")
        x, y = torch.randint(config.vocab, (2, accumulation * batch, config.context), generator=generator)
        step(training, x, y, accumulation)
    mark("end")


def predictions(ranks):
    """Yield (number, rank, job, sequence_parallel) for each training of a job with this many ranks."""
    trainings = [(*each, sequence) for each in JOBS[ranks] for sequence in (False, True)]
    for number, (config, batch, accumulation, precision, sequence) in enumerate(trainings):
        for rank in range(ranks):
            job = Job(config, batch, ranks, rank, accumulation=accumulation, precision=precision)
            yield number, rank, job, sequence


# ---- sent ------------------------------------------------------------------------------------------------


def test_sent_by_hand():
    # 2 ranks, 3 tokens of width 4, one layer: an all-reduce of 12 numbers sends 12 on each rank, one of 3 numbers 3
    job = Job(Config(9, 4, 1, 1, 1, 8, context=3), 1, ranks=1)
    assert cost.tp(job).sent == 0 and cost.tp(job).collectives == {"all_reduce": 2}
    job = dataclasses.replace(job, config=Config(9, 8, 1, 2, 2, 8, context=4), ranks=2)
    x = 4 * 4 * 8  # bytes of x, and thus the bytes that an all-reduce on 2 ranks sends
    assert cost.tp_sent(job) == {
        "embedding": {"forward": x, "backward": 0},
        "a layer": {"forward": 2 * x, "backward": 2 * x},
        "norm": {"forward": 0, "backward": 0},
        "head": {"forward": 0, "backward": x},
        "loss": {"forward": 4 * 3 * 4, "backward": 0},
    }
    assert cost.tp_sent(job, sequence_parallel=True) == {
        "embedding": {"forward": x / 2, "backward": x / 2},
        "a layer": {"forward": 2 * x, "backward": 2 * x + 2 * 4 * 8},
        "norm": {"forward": 0, "backward": 4 * 8},
        "head": {"forward": x / 2, "backward": x / 2},
        "loss": {"forward": 4 * 3 * 4, "backward": 0},
    }
    assert cost.tp(job).sent == 6 * x + 48 and cost.tp(job).textbook == 6 * x
    assert cost.tp(job, sequence_parallel=True).sent == 6 * x + 48 + 3 * 32


def test_the_volume_is_the_published_one():
    """Check section 4.2.2 of Korthikanti et al.: 4 all-reduces per layer, or gathers and scatters with the
    same bytes.
    """
    job = Job(PRESETS["llama3-70b"], 1, ranks=8, precision="mixed")
    x = 2 * job.tokens * job.config.dim
    whole, shards = (cost.tp_sent(job, sequence)["a layer"] for sequence in (False, True))
    assert sum(whole.values()) == 4 * cost.all_reduce_limit(x, 8)
    assert sum(shards.values()) == sum(whole.values()) + 2 * 2 * cost.all_reduce(job.config.dim, 8).elements


def test_what_cannot_be_split_is_no_job():
    tiny = Job(PRESETS["tiny"], 1, ranks=2)
    with pytest.raises(ValueError, match=r"6 query heads over 3 of keys and values .* over 4 ranks: use 3 or 6"):
        cost.tp(Job(Config(9, 24, 1, 6, 3, 8, context=4), 1, ranks=4))
    with pytest.raises(
        ValueError, match="7 positions are not divisible by 2 ranks: use 6 or 8, or sequence_parallel=Fa"
    ):
        cost.tp(dataclasses.replace(tiny, context=7), sequence_parallel=True)
    with pytest.raises(ValueError, match=r"recompute is 'full': cost\.tp predicts jobs with 'none' only"):
        cost.tp(dataclasses.replace(tiny, recompute="full"))


@pytest.mark.parametrize("ranks", [4, *deepen(2, 3)])
def test_ranks_send_what_was_predicted(ranks):
    recording = run(train_all, ranks, 2, ranks=ranks, device="cpu", record="communication").recording
    for number, rank, job, sequence in predictions(ranks):
        prediction, last = cost.tp(job, sequence), 2 * number + 1
        assert recording.sent(rank, last) == prediction.sent
        assert renamed(recording.counts(rank, last)) == prediction.collectives
        assert prediction.sent == pytest.approx(float(prediction.textbook), rel=0.3)
        if job.accumulation == 1:
            assert by_part(recording.select(rank, last), job, sequence) == cost.tp_sent(job, sequence)


def renamed(counts):
    return Counter({op.replace("all_to_all", "reduce_scatter"): count for op, count in counts.items()})


def by_part(events, job, sequence):
    """Return bytes by part and phase. The model passes its parts in this order, and back; all layers send alike."""
    table = {part: {"forward": 0, "backward": 0} for part in ("embedding", "a layer", "norm", "head", "loss")}
    calls, left = list(cost.tp_calls(job, sequence)), list(events)
    layers = ["a layer"] * job.config.depth
    forward, back = ["embedding", *layers, "norm", "head", "loss"], ["loss", "head", "norm", *layers, "embedding"]
    for phase, parts in (("forward", forward), ("backward", back)):
        for part in parts:
            count = sum(call.times for call in calls if (call.part, call.phase) == (part, phase))
            sent, left = sum(event.sent for event in left[:count]), left[count:]
            assert part != "a layer" or table[part][phase] in (0, sent)
            table[part][phase] = sent
    assert not left
    return table


# ---- held ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, *deepen(4)])
def test_ranks_hold_what_was_predicted(ranks):
    recording = run(train_all, ranks, STEPS, ranks=ranks, device="cpu", record="memory").recording
    for number, rank, job, sequence in predictions(ranks):
        found, known = as_predicted(held(recording, rank, number, STEPS), cost.tp(job, sequence).held)
        assert found == known, (job, sequence)


EQUAL = [  # config, sequences, micro-batches that PyTorch can split
    (Config(64, 32, 2, 4, 4, 96, context=16), 2, 1),
    (Config(20, 64, 1, 4, 4, 32, context=64), 2, 2),  # activations dominate
    (Config(256, 64, 1, 8, 4, 160, context=16), 3, 2),
    (Config(2000, 16, 1, 4, 4, 32, context=16), 1, 1),  # the vocabulary dominates
]


def theirs(cases):
    return [(*each, sequence) for each in cases for sequence in (False, True)]


def train_theirs(cases):
    for config, batch, accumulation, sequence_parallel in theirs(cases):
        training = torch_tp(sequence_parallel, GPT(config), Mesh((dist.get_world_size(),), ("tp",)))
        generator = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            mark("step")
            x, y = torch.randint(config.vocab, (2, accumulation * batch, config.context), generator=generator)
            step(training, x, y, accumulation)
        mark("end")
        gc.collect()


@pytest.mark.parametrize("ranks", [2, *deepen(4)])
@pytest.mark.parametrize("cases", [EQUAL[2:3], *deepen(EQUAL)], ids=["one", "all"])
def test_ranks_of_torch_hold_what_was_predicted(cases, ranks):
    recording = run(train_theirs, cases, ranks=ranks, device="cpu", record="memory").recording
    for (number, (config, batch, accumulation, sequence)), rank in product(enumerate(theirs(cases)), range(ranks)):
        job = Job(config, batch, ranks, rank, accumulation=accumulation)
        predicted = cost.parallelize_module(job, sequence).held
        found, known = as_predicted(held(recording, rank, number, STEPS), predicted)
        assert found == known, (rank, job, sequence)


def test_what_a_rank_holds_has_its_limits():
    """Check that ranks divide P, G and S except norms, and activations except inputs of split layers, and angles."""
    job = Job(PRESETS["llama3-8b"], 1, precision="mixed", fused_norms=True)
    one, x, angles = cost.tp(job).held, 2 * job.tokens * job.config.dim, 4 * job.T * 2 * job.config.head_size
    for ranks in (2, 4, 8):
        whole, shards = (cost.tp(dataclasses.replace(job, ranks=ranks), sequence).held for sequence in (False, True))
        assert (shards.P, shards.G, shards.S) == (whole.P, whole.G, whole.S)
        for kind in "PS":
            assert getattr(whole, kind) == pytest.approx(getattr(one, kind) / ranks, rel=1e-3)
        others = job.config.depth * (1 - 1 / ranks)
        assert whole.A - one.A / ranks == pytest.approx(others * (4 * x + angles), rel=0.02)
        assert shards.A - one.A / ranks == pytest.approx(others * (2 * x + angles), rel=0.02)


# ---- published figures -----------------------------------------------------------------------------------

S, B, H, A = 64, 2, 64, 4


def plan_of(x, sequence):
    heads = Queries(A, A)
    plan = {
        "attention": PrepareModuleInput(input_layouts=x),
        "attention.[qkv]": ColwiseParallel(heads=heads),
        "attention.drop": SequenceParallel(),  # each rank has other heads
        "attention.o": RowwiseParallel(output_layouts=x, heads=heads),
        "mlp.fc_in": ColwiseParallel(input_layouts=x),
        "mlp.fc_out": RowwiseParallel(output_layouts=x),
    }
    return plan | ({"norms.*": SequenceParallel(), "drops.*": SequenceParallel()} if sequence else {})


def gather_again(layer, mesh):
    """Replace columns and rows by labs.tp.async_tp, which keeps shards, and gathers them once more in backward."""
    attention, mlp = layer.attention, layer.mlp

    def attend(x):
        qkv = gather_linear(x, [attention.q.weight, attention.k.weight, attention.v.weight], mesh)
        return linear_scatter(attention.core(*qkv), attention.o.weight, mesh)

    def feed_forward(x):
        return linear_scatter(mlp.act(*gather_linear(x, [mlp.fc_in.weight], mesh)), mlp.fc_out.weight, mesh)

    attention.forward, mlp.forward = attend, feed_forward


def layer_of_gpt3():
    """Run forward and backward with x whole, with shards, and with shards that are gathered again."""
    mesh = Mesh((dist.get_world_size(),), ("tp",))
    for sequence, again in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        layer = GPT3Layer(H, A).bfloat16()
        parallelize(layer, mesh, plan_of(Shard(1) if sequence else Replicate(), sequence))
        if again:
            gather_again(layer, mesh)
        x = torch.randn(B, S // mesh.size() if sequence else S, H, dtype=torch.bfloat16, requires_grad=True)
        mark("step")
        layer(x).sum().backward()
        mark("end")


@pytest.mark.parametrize("t", [2, *deepen(4)])
def test_korthikantis_formula_is_what_a_rank_keeps_of_gpt3s_layer(t):
    recording = run(layer_of_gpt3, ranks=t, device="cpu", record="memory").recording
    gathered = 2 * 2 * S * B * H * (1 - Fraction(1, t))  # two inputs, which the formula gathers once more
    whole, shards = (cost.korthikanti(S, B, H, A, t, sequence) for sequence in (False, True))
    for rank in range(t):
        kept = [recording.held(rank, step)["A"] for step in range(3)]
        assert kept == [pytest.approx(float(each), rel=0.05) for each in (whole, shards + gathered, shards)]
        assert kept[2] < kept[1] < kept[0]
