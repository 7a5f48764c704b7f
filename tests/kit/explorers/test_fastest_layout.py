"""Tests of the planner explorer: it says what the plan says."""

import pytest

from labs import plan
from labs.kit import play
from labs.kit.explorers import fastest_layout
from labs.plan.layout import Setup

H100 = plan.CLUSTERS["H100, InfiniBand"]


def test_it_says_what_the_plan_says():
    widget = play.planner(model="llama3-8b", gpus=8, sequences=64, context=8192)
    found = plan.search(fastest_layout.MODELS["llama3-8b"], H100.of(8), 64)
    bars, layouts = widget.still.pictures
    assert f"the plan       {found.best.seconds:.3g} s" in bars.text
    assert f"plain DP       does not fit: {found.setup.cluster.card / 1e9:.1f} GB" not in bars.text
    assert "plain DP       does not fit: " in bars.text and ", the card has 85.9 GB" in bars.text
    held, per_gpu = f"{found.best.peak / 1e9:.1f} GB", f"{64 * 8192 / found.best.seconds / 8:,.0f}"
    assert layouts.rows[0] == ("the plan", str(found.best.layout), held, per_gpu, "")
    assert sum(fastest_layout.spent(found.best).values()) == pytest.approx(found.best.seconds)
    widget.controls["model"].value = "700B"
    assert "the plan       does not fit: " in (text := widget.picture(**widget.settings).pictures[0].text)
    assert "pipeline × DP  does not fit: " in text


def test_a_ratio_has_a_verdict():
    _, layouts = fastest_layout.picture(**fastest_layout.BEGIN).pictures
    said = {row[0]: row[-1] for row in layouts.rows}
    assert said["FSDP"] == "1.1 × as long: leans" and said["TP 8 × DP"] == "1.2 × as long: leans"


def test_the_short_search_finds_what_the_long_one_does():
    for name, gpus, batch in (("llama3-8b", 8, 16), ("llama3-8b", 16, 8), ("llama3-70b", 8, 8), ("0.4B", 8, 16)):
        setup = Setup(fastest_layout.MODELS[name], H100.of(gpus), batch)
        short, long = fastest_layout.searched(setup), plan.search(setup.config, setup.cluster, batch)
        for fields in ({}, {"tp": 1}, {"pp": 1}, {"zero": 0}, {"zero": 3}, {"staged": True}, {"batch": 1}):
            one, other = short.best_where(**fields), long.best_where(**fields)
            assert (one and one.seconds) == (other and other.seconds), (name, gpus, fields)
        assert (short.best and short.best.layout) == (long.best and long.best.layout)


def test_the_old_picture_goes_while_a_new_one_is_computed():
    widget = play.planner(model="0.4B", gpus=8, sequences=8)
    shown = []
    widget.stage.observe(lambda change: shown.append(change.new), "value")
    widget.controls["context"].value = 2048
    assert shown == ["computing …", widget.picture(**widget.settings).html]


def test_an_unknown_cluster_is_refused_in_a_sentence():
    assert "give a multiple of 16" in fastest_layout.picture("0.4B", "V100", 24, 8, 1024).text
