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
from labs.kit.drawing import cards
from labs.kit.drawing.palette import KINDS
from labs.kit.explorers import stages_of_zero as explorer
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT, PRESETS
from labs.zero import Zero
from tests.kit.pictures import SVG, require_legible, texts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module

GB = 10**9
HELD = {
    "DDP": {"P": 16 * GB, "G": 16 * GB, "S": 96 * GB, "A": 30 * GB, "comm": 0, "temporary": 2 * GB, "peak": 150 * GB},
    "stage 3": {"P": GB, "G": GB, "S": 6 * GB, "A": 30 * GB, "comm": GB, "temporary": 2 * GB, "peak": 41 * GB},
}
FITS = {"DDP": dict.fromkeys(cards.CARDS), "stage 3": {24: None, 40: 64, 80: 8, 141: 2}}


SHORT = {"stage 3": HELD["stage 3"]}


def drawn(held=HELD, fits=FITS, **more):
    return cards.cards(held, fits, "a model", **more)


def bars(drawing, high=24):
    """Return [(kind, x, width)] by row, from the top."""
    kind_of = {colour: kind for kind, colour in KINDS.items()}
    rows = {}
    for rect in xml.fromstring(drawing.svg).iter(f"{SVG}rect"):
        if rect.get("fill") in kind_of and float(rect.get("height")) == high:
            row = rows.setdefault(float(rect.get("y")), [])
            row.append((kind_of[rect.get("fill")], float(rect.get("x")), float(rect.get("width"))))
    return [rows[y] for y in sorted(rows)]


def lines(drawing, width, dash=None):
    """Return the x of the upright lines with that stroke width, in the order of drawing."""
    paths = [path.get("d")[1:].split(" L") for path in strokes(drawing, width, dash)]
    ends = [[float(end.split(",")[0]) for end in path] for path in paths]
    return [xs[0] for xs in ends if len(set(xs)) == 1]


def strokes(drawing, width, dash):
    paths = xml.fromstring(drawing.svg).iter(f"{SVG}path")
    return [path for path in paths if (path.get("stroke-width"), path.get("stroke-dasharray")) == (width, dash)]


# ---- the picture -----------------------------------------------------------------------------------------


def test_bars_cards_and_marks_are_on_one_scale():
    drawing = drawn(card=80)
    stage_3 = bars(drawing)[1]
    assert [kind for kind, _, _ in stage_3] == ["P", "G", "S", "A", "comm", "temporary"]
    left = stage_3[0][1]
    scale = stage_3[3][2] / 30  # pixels per GB, by the activations
    assert [width for _, _, width in stage_3] == pytest.approx([scale * n for n in (1, 1, 6, 30, 1, 2)], abs=0.11)
    assert lines(drawing, "1", "4 3") == pytest.approx([left + scale * card for card in (24, 40, 141)], abs=1)
    assert lines(drawing, "1.6") == pytest.approx([left + scale * 80], abs=1), "the card that stands out"
    assert lines(drawing, "3") == pytest.approx([left + scale * 150, left + scale * 41], abs=1)


def test_the_longest_bar_has_all_its_kinds_and_the_scale():
    ddp = bars(drawn(HELD | {"DDP": HELD["DDP"] | {"S": 900 * GB, "peak": 950 * GB}}))[0]
    assert [kind for kind, _, _ in ddp] == ["P", "G", "S", "A", "temporary"]
    assert ddp[2][2] == pytest.approx(900 / 16 * ddp[0][2], rel=0.02), "nothing is cut off"
    assert ddp[-1][1] + ddp[-1][2] - ddp[0][1] == pytest.approx(cards.LONG / 1.05, abs=1)


def test_where_cards_are_narrow_only_the_one_that_is_asked_for_has_its_line():
    drawing = drawn(HELD | LONG, card=80)
    longest, stage_3 = bars(drawing)
    left, scale = longest[0][1], stage_3[3][2] / 30
    assert lines(drawing, "1", "4 3") == [] and lines(drawing, "1.6") == pytest.approx([left + scale * 80], abs=1)
    assert texts(drawing).count("41 GB") == texts(drawing).count("40 GB") == 1, "once, and in the table"


def test_a_short_bar_still_shows_the_card_that_is_asked_for():
    drawing = drawn({"one": {"P": 3 * GB, "peak": 3 * GB}}, {}, card=80)
    ((_, left, width),) = bars(drawing)[0]
    assert lines(drawing, "1.6") == pytest.approx([left + width / 3 * 80], abs=3)


def test_small_models_have_a_scale_of_their_own_without_cards():
    drawing = drawn({"one": {"P": 1000, "A": 3000, "peak": 3500}}, {"one": dict.fromkeys(cards.CARDS, 1)})
    assert lines(drawing, "1", "4 3") == lines(drawing, "1.6") == []
    (row,) = bars(drawing)
    assert row[1][2] == pytest.approx(3 * row[0][2], abs=0.3)
    assert row[1][1] + row[1][2] - row[0][1] > 0.9 * cards.LONG
    assert "3.5 kB" in texts(drawing) and "80 GB" not in texts(drawing)


def test_what_was_measured_is_thin_and_below_the_formula_of_its_name():
    measured = {"stage 3": HELD["stage 3"] | {"A": 40 * GB, "peak": 52 * GB}, "mine": {"P": 5 * GB, "peak": 6 * GB}}
    drawing = drawn(measured=measured)
    assert len(bars(drawing)) == 2
    stage_3, mine = bars(drawing, high=cards.THIN)
    assert stage_3[:3] == bars(drawing)[1][:3], "the same kinds on the same scale"
    assert stage_3[3][2] == pytest.approx(4 / 3 * bars(drawing)[1][3][2], abs=0.2)
    assert [kind for kind, _, _ in mine] == ["P"]
    assert drawing.text.splitlines()[-2:] == ["stage 3, measured: 52 GB", "mine: 6 GB"]
    assert cards.STAY in texts(drawing) and cards.STAY not in texts(drawn())


def test_ranks_stand_below_their_card():
    drawing = drawn(card=141)
    root = xml.fromstring(drawing.svg)
    places = {text.text: (float(text.get("x")), text.get("y")) for text in root.iter(f"{SVG}text")}
    for card, ranks in {40: "64", 80: "8", 141: "2"}.items():
        assert places[ranks][0] == places[f"{card} GB"][0]
    assert texts(drawing).count("none") == 5
    assert "stage 3: 41 GB, fits 24 GB on no number of ranks, 40 GB on 64 ranks" in drawing.text


def test_it_is_no_wider_than_beside_an_open_sidebar():
    assert all(drawn(held).width <= 720 for held in (HELD, LONG, SHORT))


LONG = {"DDP": HELD["DDP"] | {"S": 5e12, "peak": 5e12}}
THREE = HELD | {"stage 3, as it was measured": HELD["stage 3"]}
CASES = {"two": (HELD, {}), "three": (THREE, {}), "long": (HELD | LONG, {}), "short": (SHORT, {})}
CASES |= {"measured": (HELD, HELD), "long, measured": (HELD | LONG, HELD | LONG)}


@pytest.mark.parametrize("name", CASES)
def test_words_fit_and_do_not_overlap(name):
    held, measured = CASES[name]
    require_legible(drawn(held, measured=measured))


# ---- the widget ------------------------------------------------------------------------------------------


def test_it_shows_what_cost_predicts():
    widget = play.memory(model="llama3-70b", ranks=512, batch=2, context=4096, recompute="full")
    job = cost.Job(PRESETS["llama3-70b"], 2, ranks=512, context=4096, precision="mixed", recompute="full")
    for name, stage in explorer.STAGES.items():
        peak = cards.size(cost.per_rank(job, stage).peak)
        ranks = cost.smallest_ranks(job, stage, card_bytes=80 * GB) or "no number of"
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
    assert bars(widget.still.picture, high=cards.THIN) == [stage_3]


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
