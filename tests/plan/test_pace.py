"""Tests of the planned seconds: by hand where they are simple, and by their trends where they are not."""

from dataclasses import replace

import pytest

from labs import cost
from labs.model import PRESETS
from labs.plan import CLUSTERS, Layout, Setup, Step, plan, seconds

LLAMA, H100 = PRESETS["llama3-8b"], CLUSTERS["H100, InfiniBand"]
IDEAL = replace(
    Setup(LLAMA, H100, 32, 8192).constants,
    **dict.fromkeys(("matmul", "attention", "outer"), 1.0),
    **dict.fromkeys(("passes", "launch", "tangle", "exposed", "hidden", "ahead", "prefetched", "step"), 0.0),
)


def setup(gpus, batch=32, constants=IDEAL, cluster=H100, config=LLAMA):
    return Setup(config, cluster.of(gpus), batch, 8192, constants)


def test_computation_is_operations_over_what_the_gpu_does():
    """Check operations and moved bytes: 12 per number and micro-batch to accumulate gradients, and the logits."""
    operations = cost.model_operations(LLAMA, 8192) - 32 * cost.attention_operations(LLAMA, 8192)
    step = seconds(setup(1), Layout(accumulation=32))
    moved = 32 * (12 * (32 * cost.layer_matrices(LLAMA) + 128_256 * 4096) + 14 * 8192 * 128_256)
    assert step.compute == pytest.approx(32 * 8192 * operations / 989e12 + moved / 3.35e12)
    assert step.seconds == step.compute + step.rest


def test_the_bubble_is_costs():
    step = seconds(setup(4), Layout(pp=4, accumulation=32))
    equal = step.compute * 3 / 32
    assert 0.8 * equal < step.bubble < equal  # the others have less to do than the busiest
    assert (
        seconds(setup(4), Layout(pp=4, schedule="interleaved", stages_per_rank=2, accumulation=32)).bubble < equal / 1.8
    )


def test_gradients_take_what_a_ring_takes():
    n = 32 * cost.layer_matrices(LLAMA) + 2 * 128_256 * 4096
    link = H100.link(16, 1)
    step = seconds(setup(16), Layout(replicas=16, accumulation=2))
    messages = 4 * n / (25 * cost.MiB) * (link.begin + 30 * link.latency)
    assert step.data == pytest.approx(2 * 15 / 16 * 4 * n / link.bandwidth + messages)
    sharded = seconds(setup(16), Layout(shards=16, zero=1, accumulation=2))
    # half of its all-reduce, and parameters of half the bytes
    assert sharded.data == pytest.approx(step.data * 3 / 4, rel=0.1)
    gathered = seconds(setup(16), Layout(shards=16, zero=3, accumulation=2))
    messages = 3 * 32 * (link.begin + 15 * link.latency)  # two all-gathers and a reduce-scatter of each layer
    # both micro-batches pay for it
    assert gathered.data == pytest.approx(2 * (15 / 16 * 8 * n / link.bandwidth + messages))


def test_what_is_hidden_costs_nothing():
    hides = replace(IDEAL, hidden=1.0, prefetched=1.0)
    assert seconds(setup(16, constants=hides), Layout(shards=16, zero=3, accumulation=2)).data == 0
    slow = replace(H100, between=1e9)
    assert seconds(setup(16, constants=hides, cluster=slow), Layout(shards=16, zero=3, accumulation=2)).data > 0


def test_tensor_parallelism_that_crosses_a_node_is_dear():
    within, across = (
        seconds(setup(16, constants=replace(IDEAL, exposed=1.0)), layout).tensor
        for layout in (Layout(8, True, shards=2, zero=1, accumulation=16), Layout(16, True, accumulation=32))
    )
    assert across > 2 * within


def test_python_is_the_pace_of_small_layers():
    step = seconds(setup(8, constants=replace(IDEAL, launch=1.0)), Layout(tp=8, accumulation=32))
    assert step.compute + step.launch == pytest.approx(32 * 32 * 1.0, rel=0.01)


def test_recomputation_takes_a_forward_more():
    none, full, selective = (
        seconds(setup(1), Layout(accumulation=32, recompute=name)).compute for name in ("none", "full", "selective")
    )
    assert none == selective < full < 4 / 3 * none


def test_what_a_forward_sends_is_sent_again():
    exposed = setup(8, constants=replace(IDEAL, exposed=1.0))
    none, full, selective = (
        seconds(exposed, Layout(8, True, accumulation=32, recompute=name)).tensor
        for name in ("none", "full", "selective")
    )
    assert none == selective and full == pytest.approx(1.5 * none)


def test_a_crowded_card_is_slow():
    crowded = setup(1, constants=replace(IDEAL, crowded=1e-6, thrash=3.0))
    one = plan(crowded, Layout(accumulation=32))
    assert one.crowded and one.seconds == 3 * one.step.seconds and isinstance(one.step, Step)
