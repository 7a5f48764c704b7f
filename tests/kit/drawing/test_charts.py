"""Tests of figures of measurements: words are legible, and the text beside a figure is stable (data: test_gallery)."""

import base64
import importlib
import itertools
import struct
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace as Fake

import cloudpickle
import pytest

from labs.kit import draw
from labs.kit.drawing import timelines
from tests.kit.drawing import gallery
from tests.kit.pictures import busy, called, drawn, recording, words_of
from tools.notebooks import without_noise

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module

FIGURES = {
    "timeline": (lambda late: draw.timeline(recording(late=late)), "Timeline(2 ranks, 4 events)"),
    "one step": (lambda late: draw.timeline(recording(late=late), step=1), "Timeline(step 1, 2 ranks, 2 events)"),
    "memory": (lambda late: draw.memory(recording(late=late)), "Memory(2 ranks, by P G S A comm temporary)"),
    "bars": (
        lambda late: draw.bars({"predicted": {"P": 4, "peak": 9}, "measured": {"P": 4, "A": 5 + late, "peak": 9}}),
        "Bars(predicted, measured; by P A)",
    ),
    "curves": (
        lambda late: draw.curves({"one process": [5.5, 4.0], "DDP": [5.5, 4.0 + late]}, marks={"entropy": 3.1}),
        "Curves(one process, DDP; 2 steps)",
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_beside_a_measured_figure_is_stable(name):
    figure, text = FIGURES[name]
    bundles = [figure(late)._repr_mimebundle_() for late in (0.0, 0.0123)]
    for data in bundles:
        assert set(data) == {"text/html", "text/plain"}
        assert data["text/plain"] == text
        image = xml.fromstring(data["text/html"].replace('">', '"/>'))
        assert image.get("alt") and image.get("style") == "max-width:100%;height:auto"
        width, height = struct.unpack(">II", base64.b64decode(image.get("src").split(",")[1])[16:24])
        shown = float(image.get("width")), float(image.get("height"))
        assert abs(width / 1.5 - shown[0]) <= 1 and abs(height / 1.5 - shown[1]) <= 1
    assert bundles[0] != bundles[1], "the numbers are in the picture"
    assert without_noise(bundles[0]) == without_noise(bundles[1]), "a notebook test compares no measured figure"
    assert figure(0.0)._repr_mimebundle_() == bundles[0]


@pytest.mark.parametrize("name", gallery.FIGURES)
def test_words_of_a_figure_can_be_read(name):
    """Check that no word is cut off, overlaps another, or is under 9 px, in a small window with the sidebar open."""
    figure, given, options = gallery.FIGURES[name]
    canvas, _ = drawn(figure, *given, **options)
    words = words_of(canvas)
    page, narrow = 96 * canvas.get_size_inches()[0], 572
    assert min(size for _, _, size in words) * narrow / page >= 9
    for word, box, _ in words:
        assert box.x0 >= 0 and box.y0 >= 0, f"{word!r} leaves the figure"
        assert box.x1 <= canvas.bbox.x1 and box.y1 <= canvas.bbox.y1, f"{word!r} leaves the figure"
    for (one, box, _), (other, place, _) in itertools.combinations(words, 2):
        assert not box.padded(-1).overlaps(place.padded(-1)), f"{one!r} runs into {other!r}"


def test_collectives_of_a_step_are_counted_from_its_first():
    """Check with rank 0 still in a barrier after the step of another rank has begun."""
    seen = busy(1)
    seen.events.insert(0, called(0, "all_gather", None, -0.1, 0.3, waited=0.1))
    words = [word for word, _, _ in words_of(drawn(draw.timeline, seen, step=0)[0])]
    assert "all-gather 2" in words and "all-gather 3" not in words


def test_what_is_waited_for_in_another_step_is_not_drawn():
    """Compare a shorter step with a longer one: what came after its end has no place."""
    whole = recording(steps=2)
    bars = timelines.doing(whole, 1, *whole.window(1, 0))
    assert [bar.start for bar in bars if bar.hatch] == [pytest.approx(0.065)]


def test_a_wait_is_drawn_where_it_was():
    """Check a busy machine: the rank begins to wait, twice, when the collective is over."""
    seen = recording(steps=1)
    seen.events[1].waits = ((0.08, 0.085), (0.09, 0.095))
    bars = timelines.doing(seen, 1, *seen.window(1, 0))
    assert [(bar.start, bar.end) for bar in bars if bar.hatch] == [(0.08, 0.085), (0.09, 0.095)]


def test_two_timelines_may_show_a_step_of_their_own_each():
    """Check that the text names no step: it may be another in the next run, as the quietest is."""
    ours, native = recording(), recording(late=0.05)
    figure = draw.timeline(ours, native, step=(1, 0), names=("ours", "native"))
    assert figure.text == "Timeline(ours: 2 ranks, 2 events, native: 2 ranks, 2 events)"
    alone = [draw.timeline(seen, step=step).alt.split("; ")[1] for seen, step in ((ours, 1), (native, 0))]
    assert all(waited in figure.alt for waited in alone)
    with pytest.raises(ValueError, match="step has 1 numbers for 2 recordings"):
        draw.timeline(ours, native, step=[1])


def test_marks_of_peaks_strike_no_label():
    figure, given, _ = gallery.FIGURES["bars"]
    canvas, _ = drawn(figure, *given)
    stems = [line.get_window_extent() for line in canvas.axes[0].get_lines()]
    for word, box, _ in words_of(canvas):
        assert not any(box.padded(-1).overlaps(stem) for stem in stems), word


def test_numbers_do_not_break_from_their_units():
    html = draw.ledger({"sent": (1_638_400, 1_638_500), "step": (None, 0.012, "s")}).html
    assert "1,638,400\N{NO-BREAK SPACE}B (1.56\N{NO-BREAK SPACE}MiB)" in html
    assert "within 0.1\N{NO-BREAK SPACE}%" in html and "measured 12.00\N{NO-BREAK SPACE}ms" in html
    assert "12.00" not in without_noise(html), "a time is noise with any space before its unit"


def test_an_empty_recording_draws():
    nothing = Fake(kind="communication", ranks=1, seen=(0,), steps=0, spans=[], events=[], memory=[])
    assert repr(draw.timeline(nothing)) == "Timeline(1 ranks, 0 events)"


def test_figures_save(tmp_path):
    draw.timeline(recording()).save(tmp_path / "a.png")
    draw.mesh({"data": 2}).save(tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg")


def test_pyplot_stays_out():
    source = importlib.import_module("labs.kit.drawing.figures").__file__
    with open(source, encoding="utf-8") as file:
        assert "import matplotlib.pyplot" not in file.read(), "its backend belongs to the reader's notebook"
