"""The memory explorer shows what it is told, to scale, and tells what labs.cost predicts.

The reference: the numbers handed in, and for the widget labs.cost asked by hand.
"""

import xml.etree.ElementTree as xml

import pytest
from test_draw import boxes
from test_play import saved

from labs import cost
from labs.kit import play
from labs.kit.drawing.palette import KINDS
from labs.kit.explorers import memory as explorer
from labs.model import PRESETS

SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9
HELD = {
    "DDP": {"P": 16 * GB, "G": 16 * GB, "S": 96 * GB, "A": 30 * GB, "comm": 0, "temporary": 2 * GB, "peak": 150 * GB},
    "stage 3": {"P": GB, "G": GB, "S": 6 * GB, "A": 30 * GB, "comm": GB, "temporary": 2 * GB, "peak": 41 * GB},
}
FITS = {"DDP": dict.fromkeys(explorer.CARDS), "stage 3": {24: None, 40: 64, 80: 8, 141: 2}}


def drawn(held=HELD, fits=FITS):
    return explorer.cards(held, fits, "a model")


def bars(drawing):
    """[(kind, x, width)] by row, from the top."""
    kind_of = {colour: kind for kind, colour in KINDS.items()}
    rows = {}
    for rect in xml.fromstring(drawing.svg).iter(f"{SVG}rect"):
        if rect.get("fill") in kind_of and float(rect.get("height")) == 24:
            row = rows.setdefault(float(rect.get("y")), [])
            row.append((kind_of[rect.get("fill")], float(rect.get("x")), float(rect.get("width"))))
    return [rows[y] for y in sorted(rows)]


def lines(drawing, width):
    """x of the upright lines of that stroke width."""
    paths = [path for path in xml.fromstring(drawing.svg).iter(f"{SVG}path")]
    return [float(path.get("d")[1:].split(",")[0]) for path in paths if path.get("stroke-width") == width]


def texts(drawing):
    return [text.text for text in xml.fromstring(drawing.svg).iter(f"{SVG}text")]


# ---- the picture -----------------------------------------------------------------------------------------


def test_bars_cards_and_marks_are_on_one_scale():
    drawing = drawn()
    stage_3 = bars(drawing)[1]
    assert [kind for kind, _, _ in stage_3] == ["P", "G", "S", "A", "comm", "temporary"]
    left = stage_3[0][1]
    scale = stage_3[3][2] / 30  # pixels a GB, by the activations
    assert [width for _, _, width in stage_3] == pytest.approx([scale * n for n in (1, 1, 6, 30, 1, 2)], abs=0.11)
    assert lines(drawing, "1") == pytest.approx([left + scale * card for card in (24, 40, 80, 141)], abs=1)
    assert lines(drawing, "3") == pytest.approx([left + scale * 150, left + scale * 41], abs=1)


def test_what_is_longer_than_the_scale_shows_all_its_kinds_and_says_so():
    held = HELD | {"DDP": HELD["DDP"] | {"S": 900 * GB, "peak": 950 * GB}}
    drawing = drawn(held)
    assert bars(drawing)[1] == bars(drawn())[1], "the scale does not change"
    assert [kind for kind, _, _ in bars(drawing)[0]] == ["P", "G", "S", "A", "temporary"]
    _, x, width = bars(drawing)[0][-1]
    assert x + width == pytest.approx(bars(drawing)[1][0][1] + explorer.LONG, abs=0.1)
    assert len(lines(drawing, "3")) == 1
    assert "»" in texts(drawing) and "950 GB" in texts(drawing)


def test_small_models_have_a_scale_of_their_own_without_cards():
    drawing = drawn({"one": {"P": 1000, "A": 3000, "peak": 3500}}, {})
    assert lines(drawing, "1") == []
    (row,) = bars(drawing)
    assert row[1][2] == pytest.approx(3 * row[0][2], abs=0.3)
    assert row[1][1] + row[1][2] - row[0][1] > 0.9 * explorer.LONG
    assert "3.5 kB" in texts(drawing)


def test_ranks_stand_below_their_card():
    drawing = drawn()
    root = xml.fromstring(drawing.svg)
    places = {text.text: (text.get("x"), text.get("y")) for text in root.iter(f"{SVG}text")}
    for card, ranks in {40: "64", 80: "8", 141: "2"}.items():
        assert places[ranks][0] == places[f"{card} GB"][0]
    assert texts(drawing).count("none") == 5
    assert "stage 3: 41 GB, fits 24 GB on no number of ranks, 40 GB on 64 ranks" in drawing.text


LONG = {"DDP": HELD["DDP"] | {"S": 5e12, "peak": 5e12}}
THREE = HELD | {"stage 3, as it was measured": HELD["stage 3"]}


@pytest.mark.parametrize("held", [HELD, THREE, LONG])
def test_words_fit_and_do_not_overlap(held):
    root = xml.fromstring(drawn(held).svg)
    placed = list(boxes(root))
    width, height = float(root.get("width")), float(root.get("height"))
    for number, (left, top, right, bottom, words) in enumerate(placed):
        assert left >= 4 and top >= 2 and right <= width - 4 and bottom <= height - 2, f"{words!r} leaves the card"
        for l2, t2, r2, b2, other in placed[:number]:
            assert min(right, r2) <= max(left, l2) or min(bottom, b2) <= max(top, t2), f"{words!r} runs into {other!r}"


# ---- the widget ------------------------------------------------------------------------------------------


def test_it_tells_what_cost_predicts():
    widget = play.memory(model="llama3-70b", ranks=512, batch=2, context=4096, recompute="full")
    job = cost.Job(PRESETS["llama3-70b"], 2, ranks=512, context=4096, precision="mixed", recompute="full")
    for name, stage in explorer.STAGES.items():
        peak = explorer.size(cost.per_rank(job, stage).peak)
        ranks = cost.smallest_ranks(job, stage, card_bytes=80 * GB) or "no number of"
        assert f"{name}: {peak}, fits" in widget.still.text
        line = next(line for line in widget.still.text.splitlines() if line.startswith(name))
        assert f"80 GB on {ranks} ranks" in line


def test_every_control_changes_the_picture():
    widget = play.memory()
    others = {"model": "llama3-70b", "precision": "mixed, both gradients", "ranks": 8, "batch": 2}
    others |= {"context": 4096, "recompute": "full", "offload": "optimizer state"}
    assert set(others) == set(widget.controls)
    for name, value in others.items():
        before, old = widget.stage.value, widget.controls[name].value
        widget.controls[name].value = value
        assert widget.stage.value != before, name
        widget.controls[name].value = old
        assert widget.stage.value == before, name


def test_what_was_measured_stays_beside_it():
    measured = {"measured": {"P": 123e6, "peak": 123e6}}
    widget = play.memory(measured, model="tiny", ranks=4, batch=3, context=64)
    assert "measured: 123 MB" in widget.still.text
    widget.controls["ranks"].value = 8
    assert "123 MB" in widget.stage.value


def test_a_saved_notebook_keeps_the_first_picture():
    widget = play.memory(ranks=16)
    before = saved(widget)
    assert before[0] == widget.still._repr_mimebundle_()
    assert before == saved(play.memory(ranks=16)), "no widget ids in what is kept"
    widget.controls["ranks"].value = 64
    assert saved(widget) == before


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        ({"ranks": 5}, "ranks=5: choose one of 1, 2, 4, 8"),
        ({"model": "gpt-5"}, "model='gpt-5': choose one of tiny, small"),
        ({"stage": 3}, "stage is no control of the memory explorer: there are model, precision, ranks"),
    ],
)
def test_a_setting_that_is_none_is_told(begin, message):
    with pytest.raises(ValueError, match=message):
        play.memory(**begin)
