"""Tests of published runs beside forecasts: each point's place, group and words."""

import pytest

from labs import plan
from labs.kit import check, draw
from labs.kit.drawing import runs_and_forecasts
from labs.model import PRESETS


def test_a_run_is_coloured_by_its_parallelism_and_its_words_name_it():
    runs = [(64, plan.Layout(tp=16, replicas=4, accumulation=3, batch=2), 100, 200), (8, plan.Layout(pp=8), 500, 400)]
    picture = draw.speeds(runs, "planned", "title")
    assert "2 points: 1 a pipeline; 1 tp beyond a node." in picture.alt
    words = {words for *_, words in picture.areas}
    assert "64 GPUs, dp 4 × tp 16, 3 micro-batches of 2: 100, planned 200" in words
    assert "planned = measured" in picture.svg
    assert [draw.parallelism(*each) for each in ((1, 2), (16, 1), (8, 1))] == [
        "a pipeline",
        "tp beyond a node",
        "neither",
    ]


def test_models_stand_side_by_side_at_their_number_of_stages():
    picture = draw.lost([("1B", 2, 0.6), ("80B", 2, 0.6), ("8B", 32, 1.2)])
    (first, *_), (last, *_), _ = sorted(picture.areas)
    assert last - first < 60 and "1 1B; 1 8B; 1 80B" in picture.alt
    assert all(f">{stages}</text>" in picture.svg for stages in runs_and_forecasts.STAGES)


def test_a_table_says_how_much_slower_than_forecast_the_runs_of_each_kind_were():
    runs = [each for each in check.forecast.published(seen=True) if each.run.pp > 1]
    seconds = {each.run: each.run.tokens_per_gpu / each.measured for each in runs}
    text = str(draw.by_kind({"1B": runs}, lambda run: seconds[run] / 3))
    assert f"{len(runs)}" in text and "3.00 ×" in text


def test_a_table_says_how_well_forecasts_agree_with_runs():
    runs = check.forecast.published(seen=False)
    seconds = {each.run: each.run.tokens_per_gpu / each.measured for each in runs}
    text = str(
        draw.agreement(
            runs, {"right": seconds.get, "twice": lambda run: 2 * seconds[run], "course": check.forecast.expected}
        )
    )
    assert [line.split()[-2:] for line in text.splitlines()[-3:]] == [["1.00", "0%"], ["1.00", "50%"], ["0.59", "13%"]]


def test_bars_of_the_readers_bytes_add_up_to_what_the_reader_says():
    setup = plan.search(PRESETS["llama3-8b"], plan.CLUSTERS["H100, InfiniBand"].of(8), batch=8).setup
    planned = plan.plan(setup, plan.Layout(shards=8, zero=3))
    bars = draw.yours_and_plan(lambda parameters, activations: parameters + activations, (60, 7), planned)
    yours, theirs = bars.values()
    assert sum(yours.values()) == pytest.approx(67) and yours["A"] == 7
    assert sum(theirs.values()) == planned.peak
