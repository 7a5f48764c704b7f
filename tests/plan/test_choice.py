"""Tests of the plan in the field's scenarios, and of its answer if nothing fits."""

import re
from dataclasses import replace

import pytest

from labs.model import PRESETS, Config
from labs.plan import CLUSTERS, Layout, explain, mesh, plan, search, warnings
from labs.plan.layout import Setup
from labs.plan.reasons import crossings, fsdp_wins, with_cluster

H100 = CLUSTERS["H100, InfiniBand"]
GPT4 = Config(100_256, 18_432, 160, 144, 8, 64_512, context=8192)  # some 690 billion parameters


@pytest.fixture(scope="module")
def llama():
    return search(PRESETS["llama3-70b"], H100.of(32), batch=512, context=4096)


def test_70b_on_four_nodes_takes_tensor_parallelism_inside_a_node(llama):
    """Check that TP 8 inside a node with DP 4 across is among the best."""
    field = llama.best_where(tp=8, pp=1)
    assert field.layout.dp == 4 and field.seconds < 1.25 * llama.best.seconds
    assert 1 < llama.best.layout.tp <= 8
    assert llama.best_where(tp=16).seconds > llama.best.seconds


def test_70b_says_what_fsdp_would_cost_and_what_would_make_it_best(llama):
    says = " ".join(explain(llama))
    assert "FSDP over all 32 GPUs takes 1." in says and "Plain data parallelism does not fit: it holds" in says
    assert "Tensor parallelism of 8 inside a node and data parallelism across takes 1." in says
    assert re.search(r"A pipeline without tensor parallelism takes 1\.\d+ × as long at best \(pp ", says)
    assert "FSDP over all 32 GPUs would no longer be quicker than tensor parallelism of 8 inside a node with" in says


def test_what_would_make_fsdp_slower_does(llama):
    (says,) = crossings(llama)
    said = dict(re.findall(r"(cards|links)[a-z ]* of ([\d,]+) GB", says))
    now = {"cards": ("card", H100.card), "links": ("between", H100.between)}
    assert fsdp_wins(llama.setup) and said
    for what, number in said.items():
        field, value = now[what]
        assert not fsdp_wins(with_cluster(llama.setup, **{field: 1e9 * float(number) / value}))


def test_a_small_model_is_copied():
    found = search(Config(50_257, 1024, 24, 16, 16, 2752, context=1024), H100.of(8), batch=512)
    assert found.best.layout.zero < 3 and found.best.layout.tp == found.best.layout.pp == 1
    plain = found.best_where(tp=1, pp=1, zero=0)
    assert plain.seconds < 1.02 * found.best.seconds


def test_a_gpt4_class_model_does_not_fit_and_says_by_how_much():
    found = search(GPT4, H100.of(32), batch=256)
    assert found.best is None
    (says,) = explain(found)
    assert "No layout fits. The nearest is" in says and "× the card's 85.9 GB" in says
    assert "On 256 GPUs with 256 sequences it would fit" in says
    assert str(says) in repr(found)


def test_a_rejected_layout_has_its_reason(llama):
    assert {"tp", "pp"} <= {word for each in llama.impossible for word in each.layout.split()}
    assert all(each.reason for each in llama.impossible)
    too_large = llama.too_large[0]
    assert "more than the card's 85.9 GB" in too_large.reason and too_large.peak > H100.card
    assert len(llama.rejected) == len(llama.too_large) + len(llama.impossible)


def test_the_best_comes_first(llama):
    times = [round(each.seconds, 9) for each in llama.feasible]
    assert times == sorted(times) and all(each.peak <= H100.card for each in llama.feasible)
    assert "1 × " not in repr(llama).splitlines()[2] and len(repr(llama).splitlines()) == 12


def test_tensor_parallelism_across_nodes_is_a_warning_with_its_price(llama):
    wide = llama.best_where(tp=16)
    (says,) = warnings(wide)
    assert "tensor parallelism of 16 crosses nodes of 8: that costs" in says and warnings(llama.best) == []


def test_the_mesh_is_drawn_in_the_order_of_the_wire(llama):
    layout = Layout(tp=8, shards=4, zero=3, accumulation=128)
    assert str(mesh(layout)) == "Grid(shards=4, tp=8)" and mesh(layout).groups_of("tp")[0] == [*range(8)]
    assert str(mesh(Layout())) == "Grid(dp=1)"


def test_a_layout_is_timed_alone_as_in_the_search(llama):
    setup = Setup(PRESETS["llama3-70b"], H100.of(32), 512, 4096)
    alone = plan(setup, llama.best.layout)
    assert (alone.seconds, alone.peak) == (llama.best.seconds, llama.best.peak) and 0.3 < alone.mfu < 0.7


def test_16384_gpus_have_a_plan():
    """Check that TP 8 with a long pipeline is near the best, as is Llama 3's layout [arXiv 2407.21783, table 4]."""
    found = search(PRESETS["llama3-405b"], H100.of(16_384), batch=2048)
    assert found.best_where(tp=8, pp=32).seconds < 1.1 * found.feasible[0].seconds
    llama3 = plan(found.setup, Layout(8, True, 16, "interleaved", 4, 1, 128, 1, 1, 16, "selective"))
    assert 1 < llama3.seconds / found.feasible[0].seconds < 1.25


def test_larger_cards_are_never_slower():
    small, large = (search(PRESETS["llama3-8b"], replace(H100, gpus=8, card=c), 64) for c in (40e9, 80e9))
    assert large.best.seconds <= small.best.seconds
