"""Tests of figures of measurements: they show the numbers they were given, and their words are legible."""

import base64
import importlib
import itertools
import struct
import sys
import xml.etree.ElementTree as xml
from types import SimpleNamespace as Fake

import cloudpickle
import pytest
from matplotlib.colors import to_hex

from labs.kit import draw
from labs.kit.drawing import palette, timelines
from tests.kit.pictures import called, recording, words_of
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


def busy(ranks=2):
    """Return a recording of one step with overlapping collectives: two gathers, one of them long, and eight
    reductions.
    """
    spans, events = [], []
    for rank in range(ranks):
        for name, start, end in (("step", 0, 1), ("forward", 0, 0.3), ("backward", 0.3, 0.98), ("sync", 0.98, 1)):
            spans.append(Fake(rank=rank, name=name, start=start, end=end))
        calls = [("all_gather", 0.0, 0.2), ("all_gather", 0.05, 0.5), ("barrier", 0.6, 0.61)]
        calls += [("reduce_scatter", 0.3 + 0.01 * n, 0.9 + 0.01 * n) for n in range(rank * 7)]
        calls += [("recv", 0.92, 0.95), ("send", 0.93, 0.96)]
        events += [called(rank, op, 0, b, e, waited=0.01) for op, b, e in calls]
    return Fake(
        kind="communication",
        ranks=ranks,
        seen=range(ranks),
        spans=spans,
        events=events,
        memory=[],
        window=lambda rank, step: (0, 1),
    )


def less(ranks=1, share=0.5):
    """Return a recording of memory that holds `share` of what `recording` does."""
    whole = recording(ranks)
    whole.memory = [
        [(t, {kind: share * held for kind, held in now.items()}) for t, now in each] for each in whole.memory
    ]
    return whole


NAMED = {"step": 1, "ranks": [0], "names": ("one device", "stage 3")}
CROWDED = {
    "timeline": (draw.timeline, [busy()], {"step": 0}),
    "two timelines": (draw.timeline, [busy(), busy(1)], {"step": 0, "names": ("ours", "native")}),
    "memory": (draw.memory, [recording(4)], {"step": 1}),
    "all of it": (draw.memory, [recording(1)], {}),
    "much less": (draw.memory, [recording(), less()], NAMED),
    "a little less": (draw.memory, [recording(), less(share=0.97)], NAMED),
    "more": (draw.memory, [recording(), less(share=1.4)], NAMED),
    "bars": (draw.bars, [{n: {"P": 9e6, "G": 1e5, "S": 2e6, "comm": 8e5, "peak": 1e7} for n in ("one", "two")}], {}),
}


@pytest.mark.parametrize("name", CROWDED)
def test_words_of_a_figure_can_be_read(canvas, name):
    """Check that no word is cut off, overlaps another, or is under 9 px, in a small window with the sidebar open."""
    figure, given, options = CROWDED[name]
    drawn = canvas(figure, *given, **options)
    words = words_of(drawn)
    page, narrow = 96 * drawn.get_size_inches()[0], 572
    assert min(size for _, _, size in words) * narrow / page >= 9
    for word, box, _ in words:
        assert box.x0 >= 0 and box.y0 >= 0, f"{word!r} leaves the figure"
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, f"{word!r} leaves the figure"
    for (one, box, _), (other, place, _) in itertools.combinations(words, 2):
        assert not box.padded(-1).overlaps(place.padded(-1)), f"{one!r} runs into {other!r}"


def test_collectives_have_labels_and_lanes_of_their_own(canvas):
    drawn = canvas(draw.timeline, busy(1), step=0)
    words = {word: box for word, box, _ in words_of(drawn)}
    assert {"forward", "backward", "all-gather 1", "all-gather 2", "rank 0"} <= set(words)
    assert not {"all_gather", "sync"} & set(words), "words; and what has no room has no label"
    band, first, second = (words[word] for word in ("forward", "all-gather 1", "all-gather 2"))
    assert band.y0 > first.y1 > first.y0 > second.y1, "the band is above the lanes"
    assert "ag all-gather" in words and "rs reduce-scatter" not in words, "the legend tells kinds that are shown"


def test_collectives_of_a_step_are_counted_from_its_first(canvas):
    """Check with rank 0 still in a barrier after the step of another rank has begun."""
    seen = busy(1)
    seen.events.insert(0, called(0, "all_gather", None, -0.1, 0.3, waited=0.1))
    words = [word for word, _, _ in words_of(canvas(draw.timeline, seen, step=0))]
    assert "all-gather 2" in words and "all-gather 3" not in words


def test_kinds_of_collectives_are_reported_apart(canvas):
    fills = [
        palette.COLLECTIVES.get(op, palette.KINDS["comm"]) for op in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert len(set(fills)) == 3
    assert {to_hex(fill).upper() for fill in fills_of(canvas(draw.timeline, busy(2), step=0))} >= set(fills[1:])


def fills_of(canvas):
    return [colour for each in canvas.axes[0].collections for colour in each.get_facecolor()]


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


def test_two_timelines_have_one_axis():
    ours, native = recording(), recording(late=0.05)
    figure = draw.timeline(ours, native, step=1, names=("ours", "native"))
    assert figure.text == "Timeline(step 1, ours: 2 ranks, 2 events, native: 2 ranks, 2 events)"
    assert "ours: 2 ranks; rank 0 waited 0.0 ms, rank 1 waited 10.0 ms. native: " in figure.alt


def test_two_timelines_may_show_a_step_of_their_own_each():
    """Check that the text names no step: it may be another in the next run, as the quietest is."""
    ours, native = recording(), recording(late=0.05)
    figure = draw.timeline(ours, native, step=(1, 0), names=("ours", "native"))
    assert figure.text == "Timeline(ours: 2 ranks, 2 events, native: 2 ranks, 2 events)"
    alone = [draw.timeline(seen, step=step).alt.split("; ")[1] for seen, step in ((ours, 1), (native, 0))]
    assert all(waited in figure.alt for waited in alone)
    with pytest.raises(ValueError, match="step has 1 numbers for 2 recordings"):
        draw.timeline(ours, native, step=[1])


def test_memory_that_is_compared_has_one_scale_the_outline_and_the_saving(canvas):
    drawn = canvas(draw.memory, recording(), less(), **NAMED)
    words = [word for word, _, _ in words_of(drawn)]
    assert drawn.axes[0].get_ylim() == drawn.axes[1].get_ylim()
    titles = {"one device, rank 0", "stage 3, rank 0", "dashed: one device"}
    assert titles | {"peak 6.00 MiB", "peak 3.00 MiB (−3.00 MiB)"} <= set(words)
    assert [len(axes.get_lines()) for axes in drawn.axes] == [5, 6], "borders, edge, stem and head; the outline"


def test_phases_of_a_step_are_equally_wide(canvas):
    drawn = canvas(draw.memory, recording(), step=1, ranks=[0])
    assert drawn.axes[0].get_xlim() == (0, 3)
    assert list(drawn.axes[0].get_xticks()) == [0.5, 1.5, 2.5]


def test_every_panel_names_the_phases(canvas):
    drawn = canvas(draw.memory, *[recording()] * 3, step=1, ranks=[0])
    labels = [[label for label in panel.get_xticklabels() if label.get_visible()] for panel in drawn.axes[:3]]
    assert [len(shown) for shown in labels] == [3, 3, 3]


def test_marks_of_peaks_strike_no_label(canvas):
    drawn = canvas(*CROWDED["bars"][:1], *CROWDED["bars"][1])
    stems = [line.get_window_extent() for line in drawn.axes[0].get_lines()]
    for word, box, _ in words_of(drawn):
        assert not any(box.padded(-1).overlaps(stem) for stem in stems), word


def test_numbers_do_not_break_from_their_units():
    html = draw.ledger({"sent": (1_638_400, 1_638_500), "step": (None, 0.012, "s")}).html
    assert "1,638,400\N{NO-BREAK SPACE}B (1.56\N{NO-BREAK SPACE}MiB)" in html
    assert "within 0.1\N{NO-BREAK SPACE}%" in html and "measured 12.00\N{NO-BREAK SPACE}ms" in html
    assert "12.00" not in without_noise(html), "a time is noise with any space before its unit"


def test_alternative_text_says_the_numbers():
    assert "rank 0 waited 0.0 ms, rank 1 waited 20.0 ms" in draw.timeline(recording()).alt
    assert "rank 1 6.00 MiB" in draw.memory(recording()).alt
    assert "predicted: P 4 B" in draw.bars({"predicted": {"P": 4}}).alt
    assert "from 5.5000 to 4.0000" in draw.curves({"DDP": [5.5, 4.0]}).alt
    assert 'alt="' in draw.timeline(recording()).html


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
