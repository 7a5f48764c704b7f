"""Tests of labs.cost on ZeRO, ours and PyTorch's: published volumes, cases by hand, and independent jobs.

The recorder measures what ranks of labs.zero and of labs.native send and hold.
"""

import gc
from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from labs import cost, native
from labs.cost import Job, LayerShapes
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.kit.record import mark
from labs.kit.training.strategies import Training, backward, step, trainable
from labs.memory.precision import Masters
from labs.memory.recompute import recompute
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.zero import Zero
from tests.depth import deepen
from tests.models import Tied
from tests.recordings import as_predicted, held

CONFIGS = {
    "odd sizes": Config(301, 30, 2, 3, 3, 77, context=11),
    "tied": Config(64, 32, 2, 4, 4, 96, context=16, tied=True),
    "wide mlp": Config(291, 30, 1, 3, 3, 220, context=31),
    "more parameters than activations": Config(300, 96, 2, 4, 2, 256, context=8),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def test_the_volumes_are_the_published_ones():
    # ZeRO, section 7: 2 Ψ, 2 Ψ, 3 Ψ, in the limit of many ranks
    assert [float(cost.zero_limit(1000, 10**9, stage)) for stage in (1, 2, 3)] == pytest.approx([2000, 2000, 3000])
    # four micro-batches: stage 1 reduces once, stage 2 after each; stage 3 does everything each time
    assert [cost.zero_limit(1000, 4, stage, accumulation=4) for stage in (1, 2, 3)] == [1500, 5 * 750, 12 * 750]
    assert cost.zero_limit(1000, 4, 1) == cost.zero_limit(1000, 4, 2) == cost.all_reduce_limit(1000, 4)


INSIDE, FROZEN, SCALE = LayerShapes(((7, 7), (7,))), LayerShapes(frozen=((7, 7),)), LayerShapes(((1,),))


def put_together(way, model, layers, precision="float32"):
    """Return the arguments of `labs.kit.training.strategies.step`."""
    match way:
        case 1 | 2 | 3:
            mixed = precision == "mixed"
            optimizer = partial(Masters, optimizer=ADAMW) if mixed else ADAMW
            zero = Zero(model.bfloat16() if mixed else model, way, optimizer)
            return Training(partial(backward, model), zero, zero.shards, dict, zero.sync)
        case "zero1":
            module, optimizer = native.zero1(model, torch.optim.AdamW, lr=1e-3)
            return Training(partial(backward, module, no_sync=module.no_sync), optimizer, trainable(model), dict)
    reshard = "kept" not in way
    if way.startswith("ours"):
        mesh = Mesh((dist.get_world_size(),), ("dp",))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        module = fully_shard(model, mesh=mesh)
    else:
        module = native.fsdp(model, layers, reshard_after_forward=reshard)
    return Training(partial(backward, module), ADAMW(trainable(model)), trainable(model), dict)


def train(way, model, layers, vocab, context, batch=2, accumulation=1, precision="float32", steps=4):
    training = put_together(way, model, layers, precision)
    for _ in range(steps):
        mark("step")
        step(training, *torch.randint(vocab, (2, accumulation * batch, context)), accumulation)
    mark("end")


def train_gpt(way, config, keep=None, **options):
    model = GPT(config)
    if keep is not None:
        recompute(model.layers.values(), keep)
    train(way, model, list(model.layers.values()), config.vocab, config.context, **options)


WAYS = (1, 2, 3, "zero1", "fsdp", "fsdp, kept", "ours", "ours, kept")


def predict(way, job):
    match way:
        case 1 | 2 | 3:
            return cost.zero(job, way)
        case "zero1":
            return cost.zero_redundancy(job)
    return (cost.fsdp if "ours" in way else cost.fully_shard)(job, reshard_after_forward="kept" not in way)


def sent_of_tied(way, ranks, rank, accumulation):
    match way:
        case 1 | 2 | 3:
            return cost.zero_sent([LayerShapes(((13, 7),), uses=2), INSIDE, FROZEN, SCALE], ranks, way, accumulation)
        case "zero1":
            return cost.zero_redundancy_sent([1, 91, 49, 7], ranks, rank)
    root = LayerShapes(((1,), (13, 7)), frozen=((7, 7),))
    return cost.fully_shard_sent(root, [INSIDE], ranks, "kept" not in way, accumulation)


def test_ranks_send_what_was_predicted():
    def body():
        for way, steps in zip(WAYS, steps_of, strict=True):
            for config in configs:
                train_gpt(way, config, accumulation=accumulation, steps=steps)
            model = Tied()
            train(way, model, [model.inside], 13, 5, accumulation=accumulation, steps=steps)

    accumulation, configs = 2, [CONFIGS["odd sizes"], CONFIGS["tied"]]
    steps_of = [3 if way == "zero1" else 2 for way in WAYS]  # DDP rearranges its buckets in the second step
    recording = run(body, ranks=3, record="communication").recording
    for rank in range(3):
        last = (end - 1 for end in accumulate(steps for steps in steps_of for _ in range(3)))
        for way in WAYS:
            for config in configs:
                predicted, step = predict(way, Job(config, 2, 3, rank, accumulation=accumulation)), next(last)
                assert recording.sent(rank, step) == predicted.sent, (way, rank)
                counts = recording.counts(rank, step)
                if "all_to_all" in counts:
                    counts["reduce_scatter"] = counts.pop("all_to_all")
                assert counts == predicted.collectives
                assert predicted.sent == pytest.approx(float(predicted.textbook), rel=0.3)
            assert recording.sent(rank, next(last)) == sent_of_tied(way, 3, rank, accumulation), (way, rank)


def test_sent_by_hand():
    # 7 elements on 3 ranks are padded to 9, and 2/3 of them sent each time; 5 elements to 6
    layers = [LayerShapes(((7,),)), LayerShapes(((5,),))]
    assert [cost.zero_sent(layers, 3, stage) for stage in (1, 2, 3)] == [
        16 + 4 * 2 * 10,
        16 + 4 * 2 * 10,
        16 + 4 * 3 * 10,
    ]
    assert [cost.zero_sent(layers, 3, stage, accumulation=2) for stage in (1, 2, 3)] == [
        16 + 80,
        16 + 4 * 3 * 10,
        16 + 240,
    ]
    # [5, 3] is padded to [6, 3] on 2 ranks and sent 9 elements a time; the root is sent once less
    group = LayerShapes(((5, 3),))
    assert cost.fully_shard_sent(group, [group], 2) == 4 * 9 * (2 + 3)
    assert cost.fully_shard_sent(group, [group], 2, reshard_after_forward=False) == 4 * 9 * (2 + 2)
    # rank 0 owns 6 and 2, rank 1 owns 5 and 3; all_reduce of 16: 16; broadcast to 1: 8
    assert cost.zero_redundancy_sent([2, 6, 5, 3], 2, 0) == cost.zero_redundancy_sent([2, 6, 5, 3], 2, 1) == 4 * 24
    with pytest.raises(ValueError, match="stage is 5: it must be 0, 1, 2 or 3"):
        cost.zero_sent(layers, 2, 5)


HELD = {  # number of ranks: way, config, accumulation
    2: [
        *((stage, "tied", 1) for stage in (1, 2, 3)),
        *((way, "wide mlp", 1) for way in WAYS),
        *((way, "more parameters than activations", 1) for way in (3, "fsdp", "ours")),
        ("ours", "tied", 1),
    ],
    3: [*((way, "odd sizes", 2) for way in WAYS), ("ours", "odd sizes", 1)],
}
STEPS = 3


def one_after_the_other(trainings, ranks):
    """Return the memory that the ranks of one job hold in each training: (way, config, options of train_gpt)."""

    def body():
        for way, config, options in trainings:
            train_gpt(way, config, **options, steps=STEPS)
            gc.collect()

    recording = run(body, ranks=ranks, record="memory").recording
    return [[held(recording, rank, number, STEPS) for rank in range(ranks)] for number in range(len(trainings))]


@pytest.mark.parametrize("ranks", [3, *deepen(2)])
def test_ranks_hold_what_was_predicted(ranks):
    """Check both ours and PyTorch's; PyTorch's leave a few bytes behind, so each has a job of its own."""
    trainings = [(way, CONFIGS[name], {"accumulation": accumulation}) for way, name, accumulation in HELD[ranks]]
    torchs = [[training] for training in trainings if training[0] in ("zero1", "fsdp", "fsdp, kept")]
    for job in [[training for training in trainings if [training] not in torchs], *torchs]:
        for (way, config, options), by_ranks in zip(job, one_after_the_other(job, ranks), strict=True):
            for rank in (0, ranks - 1):
                prediction = predict(way, Job(config, 2, ranks, rank, **options))
                found, known = as_predicted(by_ranks[rank], prediction.held)
                assert found == known, (way, config, options, rank)


def test_ranks_hold_what_was_predicted_where_layers_are_recomputed():
    config = CONFIGS["odd sizes"]
    trainings = [
        (stage, config, {"keep": (), "accumulation": accumulation}) for stage, accumulation in [(1, 1), (3, 2)]
    ]
    for (stage, _, options), (measured, _) in zip(trainings, one_after_the_other(trainings, 2), strict=True):
        job = Job(config, 2, 2, accumulation=options["accumulation"], recompute="full")
        found, known = as_predicted(measured, cost.zero(job, stage).held)
        assert found == known, stage


def test_ranks_hold_what_was_predicted_in_mixed_precision():
    config = CONFIGS["odd sizes"]
    by_stages = one_after_the_other([(stage, config, {"precision": "mixed"}) for stage in (1, 2, 3)], 3)
    for stage, (measured, *_) in enumerate(by_stages, 1):
        found, known = as_predicted(measured, cost.zero(Job(config, 2, 3, precision="mixed"), stage).held)
        assert {kind: found[kind] for kind in ("P", "S", "A", "peak")} == {
            kind: known[kind] for kind in ("P", "S", "A", "peak")
        }
        # 2 + 2 + 12 bytes per parameter, sharded by stage, apart from padding and counters
        psi = sum(cost.parameter_sizes(config))
        for kind, size in cost.bytes_held(psi, 3, stage, "mixed").items():
            if kind != "G":
                assert measured[kind] == pytest.approx(size, rel=0.01)
