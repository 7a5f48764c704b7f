"""Tests of published runs beside forecasts: each point's place, group and words."""

from labs import plan
from labs.kit import draw
from labs.kit.drawing import runs_and_forecasts


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
