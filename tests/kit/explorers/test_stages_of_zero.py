"""Tests of the memory explorer: it shows the numbers it is given, to scale, and what labs.cost predicts.

The reference is the numbers handed in, and for the widget labs.cost called by hand.
"""

import sys
import xml.etree.ElementTree as xml
from dataclasses import replace

import cloudpickle
import pytest
import torch

from labs import cost
from labs.kit import play
from labs.kit.drawing import gpu_memory_bars
from labs.kit.drawing.palette import KINDS
from labs.kit.explorers import stages_of_zero as explorer
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT, PRESETS
from labs.zero import Zero
from tests.kit.drawing import gallery
from tests.kit.pictures import SVG

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module


def bars(drawing, high=24):
    """Return [(kind, x, width)] by row, from the top."""
    kind_of = {colour: kind for kind, colour in KINDS.items()}
    rows = {}
    for rect in xml.fromstring(drawing.svg).iter(f"{SVG}rect"):
        if rect.get("fill") in kind_of and float(rect.get("height")) == high:
            row = rows.setdefault(float(rect.get("y")), [])
            row.append((kind_of[rect.get("fill")], float(rect.get("x")), float(rect.get("width"))))
    return [rows[y] for y in sorted(rows)]


# ---- the picture (others: test_gallery.py) -----------------------------------------------------------------


def test_bars_are_on_one_scale():
    ddp, stage_3 = bars(gallery.DRAWINGS["cards, one asked for"]())
    scale = stage_3[3][2] / 30  # pixels per GB, by the activations
    assert [width for _, _, width in stage_3] == pytest.approx([scale * n for n in (1, 1, 6, 30, 1, 2)], abs=0.11)
    assert [width for _, _, width in ddp] == pytest.approx([scale * n for n in (16, 16, 96, 30, 2)], abs=0.6)


def test_it_is_no_wider_than_beside_an_open_sidebar():
    assert all(gallery.DRAWINGS[f"cards{more}"]().width <= 720 for more in ("", ", a long bar", ", one stage"))


# ---- the widget ------------------------------------------------------------------------------------------


def test_it_shows_what_cost_predicts():
    widget = play.memory(model="llama3-70b", ranks=512, batch=2, context=4096, recompute="full")
    job = cost.Job(PRESETS["llama3-70b"], 2, ranks=512, context=4096, precision="mixed", recompute="full")
    for name, stage in explorer.STAGES.items():
        peak = gpu_memory_bars.size(cost.per_rank(job, stage).peak)
        ranks = cost.smallest_ranks(job, stage, card_bytes=80 * gallery.GB) or "no number of"
        assert f"{name}: {peak}, fits" in repr(widget.still)
        line = next(line for line in widget.still.picture.text.splitlines() if line.startswith(name))
        assert f"80 GB on {ranks} ranks" in line


def test_what_was_measured_stays_beside_it():
    measured = {"measured": {"P": 123e6, "peak": 123e6}}
    widget = play.memory(measured, model="tiny", ranks=4, batch=3, context=64)
    assert "measured: 123 MB" in widget.still.picture.text
    widget.controls["ranks"].value = 8
    assert "123 MB" in widget.stage.value


def two_layers(steps=3):
    zero = Zero(model := GPT(CONFIG), 3, torch.optim.AdamW)
    x, y = torch.arange(16).view(1, 16), torch.arange(1, 17).view(1, 16)
    for _ in range(steps):
        mark("step")
        model(x, y).backward()
        zero.step()
    mark("end")


CONFIG = replace(PRESETS["tiny"], depth=2, context=16)


def test_a_recording_lies_on_the_bar_that_the_formula_has_for_it():
    """Compare with the formula on a CPU, where norms are not one kernel."""
    measured = run(two_layers, ranks=2, device="cpu", record="memory").recording
    widget = play.memory({"stage 3": measured}, CONFIG, precision="float32", ranks=2, context=16)
    assert widget.settings["model"] == explorer.YOURS
    assert measured.steady(0)["A"] == cost.zero(cost.Job(CONFIG, 1, 2), 3).held.A
    *_, stage_3 = bars(widget.still.picture)
    assert bars(widget.still.picture, high=gpu_memory_bars.THIN) == [stage_3]


def test_the_formula_lights_up_under_its_control():
    widget = play.memory(model="llama3-70b", ranks=64, context=1024)
    text = repr(widget.still)
    assert "stage 1: P + G + S = 70.6 billion × (2 + 2 + 12/64) bytes = 295 GB" in text
    assert "stage 3: P + G + S = 70.6 billion × (2 + 2 + 12)/64 bytes = 17.6 GB" in text
    widget.controls["ranks"].value = 128
    assert widget.stage.value.count("<mark><u>/128</u></mark>") == widget.stage.value.count("<mark>") == 3
    widget.controls["offload"].value = "optimizer state"
    assert widget.stage.value.count("<mark><u>0</u></mark>") == widget.stage.value.count("<mark>") == 4
    widget.controls["context"].value = 2048
    assert widget.stage.value.count("<mark>") == 1 and "<mark><u>1 × 2,048 tokens</u></mark>" in widget.stage.value
