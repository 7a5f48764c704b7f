"""Tests of layouts: every candidate multiplies out, and those that cannot be run say why."""

from math import prod

import pytest

from labs.model import GPT, PRESETS, Config
from labs.plan import CLUSTERS, Layout, Setup, layouts, plan, search
from labs.plan.candidates import Rejected, require
from labs.plan.layer_split import cut_by_work, split_layers
from labs.pp import cut

SETUP = Setup(PRESETS["llama3-8b"], CLUSTERS["H100, InfiniBand"].of(32), batch=64, context=8192)
ALL = [each for each in layouts(SETUP) if isinstance(each, Layout)]
REJECTED = [each for each in layouts(SETUP) if isinstance(each, Rejected)]


def test_all_of_them_multiply_out_and_none_comes_twice():
    assert {each.ranks for each in ALL} == {32} and len(set(ALL)) == len(ALL) > 1000
    assert {each.dp * each.batch * each.accumulation for each in ALL} == {64}
    for each in ALL:
        require(SETUP, each)


def test_all_kinds_are_there():
    assert {each.tp for each in ALL} == {1, 2, 4, 8, 16} and {each.pp for each in ALL} == {1, 2, 4, 8, 16, 32}
    assert {each.zero for each in ALL} == {0, 1, 2, 3} and {each.batch for each in ALL} == {1, 2, 4, 8, 16, 32}
    hybrid = {(each.replicas, each.shards) for each in ALL if each.replicas > 1 < each.shards and each.tp == 1}
    assert hybrid >= {(2, 16), (4, 8), (8, 4), (16, 2)}
    assert len({each.schedule for each in ALL}) == 6 and len({each.recompute for each in ALL}) == 4


@pytest.mark.parametrize(
    "says",
    [
        "2 micro-batches are fewer than 4 stages: give 4 or more, or a shorter pipeline",
        "64 stages for 32 layers",
        "dualpipev takes 8 micro-batches or more, not 4",
        "PyTorch's is silently wrong there",
    ],
)
def test_what_cannot_be_run_says_why(says):
    assert any(says in each.reason for each in REJECTED)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=8, shards=3, zero=3), r"pp 1 × replicas 1 × shards 3 × tp 8 = 24, but there are 32 GPUs"),
        (Layout(shards=32, zero=3, batch=3), "dp 32 × 1 micro-batches of 3 = 96 sequences, but a step has 64"),
        (Layout(pp=4, shards=8, zero=1, batch=4, accumulation=2), "2 micro-batches are fewer than 4 stages"),
        (Layout(tp=8, shards=4, zero=0, accumulation=16), "ZeRO stage 0 with 4 shards"),
        (Layout(tp=-8), "tp is -8: it must be a whole number, and at least 1"),
        (
            Layout(pp=4, schedule="zbv", shards=8, zero=1, accumulation=8),
            "zbv has 2 stages per rank, not 1: give",
        ),
        (
            Layout(pp=4, stages_per_rank=2, shards=8, zero=1, accumulation=8),
            "1f1b has 1 stage per rank",
        ),
        (Layout(tp=8, recompute="all"), "recompute is 'all': it must be one of 'none', 'selective'"),
    ],
)
def test_a_layout_that_does_not_fit_the_cluster(layout, says):
    with pytest.raises(ValueError, match=says):
        plan(SETUP, layout)


def test_heads_that_cannot_be_split():
    config = Config(100, 96, 4, 6, 2, 200, context=64)
    reasons = {each.reason for each in layouts(Setup(config, SETUP.cluster, 32, 64)) if isinstance(each, Rejected)}
    assert "6 query heads over 2 of keys and values cannot be split over 4 ranks" in reasons


@pytest.mark.parametrize("field", ["batch", "context"])
def test_a_setup_that_makes_no_sense(field):
    with pytest.raises(ValueError, match=f"{field} is 0: it must be a whole number, and at least 1"):
        Setup(**{"config": SETUP.config, "cluster": SETUP.cluster, "batch": 8, "context": 8} | {field: 0})


def test_names_are_refused_as_model_and_as_cluster():
    with pytest.raises(ValueError, match="config is 'llama3-8b': it must be a Config, such as PRESETS"):
        search("llama3-8b", SETUP.cluster, 8)
    with pytest.raises(ValueError, match="cluster is 'H200': it must be a Cluster, such as CLUSTERS"):
        search(SETUP.config, "H200", 8)


def test_layers_are_split_by_work():
    # the playbook's 1B: a head as large as four layers, so 20 in all
    config = Config(131_072, 2048, 16, 32, 32, 8192, context=4096, tied=True)
    assert split_layers(config, 4) == ((5, 5, 5, 1), 3)
    assert split_layers(config, 1) == ((16,), 0)
    # Megatron-LM's 1008B: a head of a sixth of a layer, and no stage of two layers for its sake
    assert (
        split_layers(Config(51_200, 25_600, 128, 160, 160, 25_600 * 8 // 3, context=2048), 64, "interleaved", 2)[0]
        == (2,) * 64
    )
    # eight stages, the head with a single layer: round robin, and in a V
    assert split_layers(config, 4, "interleaved", 2) == ((5, 4, 4, 3), 3)
    assert split_layers(config, 4, "zbv", 2) == ((4, 4, 4, 4), 0)


def test_layers_are_split_as_a_pipeline_can_be_cut():
    """Check that a head larger than all layers together leaves one layer to each stage, and stays with the last one."""
    heavy, even = Config(50_257, 64, 11, 4, 4, 170, context=64), Config(128, 64, 11, 4, 4, 170, context=64)
    assert split_layers(heavy, 2) == ((10, 1), 1) and split_layers(even, 2) == ((6, 5), 1)
    for config in (heavy, even):
        model = GPT(config)
        for stages in range(1, 12):
            assert len(cut(model, cut_by_work(config, stages))) == stages


def test_names():
    layout = Layout(8, True, 2, "interleaved", 4, 2, 2, 3, 1, 16, "full")
    assert str(layout) == (
        "pp 2 × replicas 2 × shards 2 × tp 8, FSDP, sequence parallel, interleaved with 4 stages a rank, "
        "16 micro-batches of 1, recompute full"
    )
    assert prod((layout.pp, layout.replicas, layout.shards, layout.tp)) == layout.ranks == 64
