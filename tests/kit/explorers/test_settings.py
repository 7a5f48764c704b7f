"""Tests of what all explorers share: their controls, what a saved notebook keeps, and invalid settings."""

import re
from functools import partial

import pytest

from labs.kit import play
from tests.kit.test_play import saved

SCHEDULE = partial(play.schedule, schedule="zb1p")
OTHERS = {
    play.memory: {"model": "llama3-70b", "precision": "mixed, both gradients", "ranks": 8, "batch": 2, "context": 4096}
    | {"recompute": "full", "offload": "optimizer state", "card": 24},
    SCHEDULE: {"schedule": "1f1b", "ranks": 3, "microbatches": 12, "stages_per_rank": 2}
    | {"forward": 2, "backward": 3, "send": 0.5},
}


def pictured(widget):
    return widget.stage.value[widget.stage.value.index("<img") :]


@pytest.mark.parametrize("explorer", OTHERS)
def test_every_control_changes_the_picture(explorer):
    widget = explorer()
    assert set(OTHERS[explorer]) == set(widget.controls)
    for name, value in OTHERS[explorer].items():
        before, old = pictured(widget), widget.controls[name].value
        widget.controls[name].value = value
        assert pictured(widget) != before, name
        widget.controls[name].value = old
        assert pictured(widget) == before, name


@pytest.mark.parametrize("explorer", OTHERS)
def test_a_saved_notebook_keeps_the_first_picture(explorer):
    widget = explorer(ranks=2)
    before = saved(widget)
    assert before[0] == widget.still._repr_mimebundle_()
    assert before == saved(explorer(ranks=2)), "no widget ids in what is kept"
    widget.controls["ranks"].value = 4
    assert saved(widget) == before


@pytest.mark.parametrize(
    ("explorer", "begin", "message"),
    [
        (play.memory, {"ranks": 5}, "ranks=5: choose one of 1, 2, 4, 8"),
        (play.memory, {"model": "gpt-5"}, "model='gpt-5': choose one of tiny, small"),
        (play.memory, {"stage": 3}, "stage is not a control of the memory explorer: choose from model, precision"),
        (play.schedule, {"schedule": "2f2b"}, "schedule='2f2b': choose one of gpipe, 1f1b"),
        (play.schedule, {"ranks": 9}, "ranks=9: choose one of 1, 2, 3"),
        (play.schedule, {"stages": 2}, "stages is not a control of the schedule explorer: choose from schedule, ranks"),
        (play.placements, {"nodes": "2"}, "nodes is not a control of the placement explorer"),
        (play.placements, {"mesh": "3"}, "choose one of 2 × 2, 4"),
        (play.placements, {"to_a": "Partial()"}, "choose one of Shard(0), Shard(1), Replicate()"),
        (play.tensor_parallel, {"heads": 8}, "heads is not a control of the tensor-parallel explorer: choose from"),
        (play.tensor_parallel, {"ranks": 3}, "ranks=3: choose one of 1, 2, 4, 8"),
        (play.links, {"bytes": 3}, "bytes is not a control"),
    ],
)
def test_an_invalid_setting_is_refused(explorer, begin, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        explorer(**begin)
