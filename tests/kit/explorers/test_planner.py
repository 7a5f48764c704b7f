"""Tests of the planner explorer: it says what the plan says."""

import pytest

from labs import plan
from labs.kit import play
from labs.kit.explorers import planner

H100 = plan.CLUSTERS["H100, InfiniBand"]


def test_it_says_what_the_plan_says():
    widget = play.planner(model="llama3-8b", gpus=8, sequences=64)
    found = plan.search(planner.MODELS["llama3-8b"], H100.of(8), 64)
    bars, layouts = widget.still.pictures
    assert f"the plan       {found.best.seconds:.3g} s" in bars.text and "plain DP" not in bars.text
    held, per_gpu = f"{found.best.peak / 1e9:.1f} GB", f"{64 * 8192 / found.best.seconds / 8:,.0f}"
    assert layouts.rows[0] == ("the plan", str(found.best.layout), held, per_gpu)
    assert sum(planner.spent(found.best).values()) == pytest.approx(found.best.seconds)
    widget.controls["model"].value = "700B"
    assert "No layout fits" in widget.picture(**widget.settings).text


def test_an_unknown_cluster_is_refused_in_a_sentence():
    assert "give a multiple of 16" in planner.picture("0.4B", "V100", 24, 8).text
