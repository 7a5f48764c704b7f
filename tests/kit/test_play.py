"""Tests of widgets: they show the results of the given functions at their controls' settings, live and saved.

The reference is the same picture drawn without a widget.
"""

import re
import xml.etree.ElementTree as xml

import pytest

from labs import cost
from labs.kit import draw, play
from labs.kit.drawing import times_by_size as times
from labs.kit.explorers import all_reduce_algorithms
from tests.kit.pictures import RING, SVG, recording


def saved(widget):
    """Return what a committed notebook keeps: the bundle without the live view."""
    data, metadata = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    return {kind: value for kind, value in data.items() if not kind.endswith("widget-view+json")}, metadata


def bars(ranks, unit):
    return draw.chart({"ring": 2.0 * ranks}, unit, caption=f"{ranks} ranks")


def test_moving_the_slider_changes_the_picture():
    widget = play.explore(bars, ranks=[2, 4, 8], unit={"seconds": "s", "bytes": "B"})
    assert widget.stage.value == bars(2, "s").html
    widget.controls["ranks"].value = 8
    assert widget.stage.value == bars(8, "s").html
    widget.controls["unit"].label = "bytes"
    assert widget.stage.value == bars(8, "B").html


def test_saved_notebook_keeps_the_picture_and_stable_text():
    bundles = [saved(play.explore(bars, ranks=range(2, 9), unit=["s"])) for _ in range(2)]
    assert bundles[0] == bundles[1], "no widget ids in what is kept"
    assert bundles[0][0] == bars(2, "s")._repr_mimebundle_()


def test_saved_settings_stay_when_a_slider_has_moved():
    widget = play.explore(bars, ranks=[2, 4], unit=["s"])
    before = saved(widget)
    widget.controls["ranks"].value = 4
    assert saved(widget) == before


def with_formula(ranks, size):
    line = ["sent <each>: ", draw.term(f"2 ({ranks} − 1)/{ranks}", "ranks"), " × ", draw.term(f"{size} B", "size")]
    return draw.formula(bars(ranks, "s"), line, [draw.term("both", "ranks", "size")])


def test_the_terms_light_up_that_the_control_moved_last_has_changed():
    widget = play.explore(with_formula, ranks=[2, 4], size=[10, 20])
    assert lit(widget) == [] and "sent &lt;each&gt;: 2 (2 − 1)/2 × 10 B" in widget.stage.value
    widget.controls["ranks"].value = 4
    assert lit(widget) == ["2 (4 − 1)/4", "both"] and widget.stage.value.endswith(bars(4, "s").html)
    widget.controls["size"].value = 20
    assert lit(widget) == ["20 B", "both"], "the one that was moved before is not lit any more"


def lit(widget):
    return re.findall("<mark><u>(.*?)</u></mark>", widget.stage.value)


def test_a_saved_formula_is_plain():
    widget = play.explore(with_formula, ranks=[2, 4], size=[10])
    before = saved(widget)
    widget.controls["ranks"].value = 4
    assert saved(widget) == before and "<mark>" not in before[0]["text/html"]
    assert before[0]["text/plain"] == f"sent <each>: 2 (2 − 1)/2 × 10 B\nboth\n{bars(2, 's')!r}"


def test_a_widget_without_choices_is_refused():
    with pytest.raises(ValueError, match="unit has no values"):
        play.explore(bars, ranks=[2], unit=[])
    with pytest.raises(ValueError, match=r"there are no values to choose from: give some, such as ranks=\[2, 4\]"):
        play.explore(bars)


def test_collective_round_by_round():
    widget = play.collective(RING, 4)
    slider = widget.controls["frame"]
    assert (slider.min, slider.max) == (0, 6)
    for frame in range(7):
        slider.value = frame
        assert widget.stage.value == draw.step(RING, 4, frame).html
    assert saved(widget)[0] == draw.messages(RING, 4)._repr_mimebundle_(), "all rounds side by side"


def test_play_button_drives_the_slider():
    widget = play.collective(RING, 4)
    button, slider = widget.children[0].children
    assert (button.max, slider) == (6, widget.controls["frame"])
    assert widget.link.source == (button, "value") and widget.link.target == (slider, "value")


def test_collective_from_a_given_start():
    """Play a broadcast: rank 1 has nothing before it receives."""
    widget = play.collective([(0, 0, 1, 0)], 2, held=[{0: {0}}, {}])
    assert "Rank 1 holds nothing." in widget.stage.value
    widget.controls["frame"].value = 1
    assert "Rank 1 holds piece 0 of 0." in widget.stage.value


def test_replay_begins_and_is_saved_whole():
    """Check that the job cut off at any moment is shown as the picture of `draw.timeline`."""
    jobs, names = (recording(), recording(3)), ("two", "three")
    whole = draw.timeline(*jobs, names=names)
    widget = play.replay(*jobs, names=names, count=3)
    button, slider = widget.children[0].children
    assert widget.stage.value == whole.html and button.value == slider.value == 2
    assert not slider.readout  # a readout would count frames
    slider.value = 1
    assert widget.stage.value == draw.timeline(*jobs, names=names, until=0.1).html != whole.html
    assert saved(widget)[0] == whole._repr_mimebundle_()


def test_all_reduce_times_show_what_the_formulas_say():
    asked = []

    def ring(size, ranks, latency, bandwidth):
        asked.append((size, ranks, latency, bandwidth))
        return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)

    widget = play.all_reduce_times({"ring": ring, "mine": cost.doubling_seconds})
    widget.controls["megabytes"].value = 100
    given = (100_000_000, 8, pytest.approx(20e-6), 10e9)
    assert given in asked and f"ring: {1000 * ring(10**8, 8, 20e-6, 10e9):.3g} ms" in widget.stage.value
    assert "8 ranks, 100 MB, 20 µs per message, 10 GB/s per link" in widget.stage.value
    words = "ring: 2 (8 − 1) × 20 µs + 2 (8 − 1)/8 × 1 MB / 10 GB/s\n8 ranks, 1 MB"
    assert saved(widget)[0]["text/plain"].startswith(words), "what has no formula in words has no line of them"


def test_the_terms_of_an_all_reduce_light_up():
    ways = {"ring": cost.ring_seconds, "doubling": cost.doubling_seconds, "reduce, broadcast": cost.tree_seconds}
    widget = play.all_reduce_times(ways)
    widget.controls["ranks"].value = 16
    assert lit(widget) == ["2 (16 − 1)", "2 (16 − 1)/16", "log₂ 16", "2 log₂ 16"]
    widget.controls["bandwidth"].value = 0.1
    assert lit(widget) == ["100 MB/s"] * 3


@pytest.mark.parametrize("ranks", [2, 1024])
def test_a_dot_lies_on_every_line_at_any_setting(ranks):
    ways = {"ring": cost.ring_seconds, "doubling": cost.doubling_seconds, "reduce, broadcast": cost.tree_seconds}
    for size, latency, bandwidth in ((0.001, 1, 400), (1000, 100, 0.1)):
        root = xml.fromstring(all_reduce_algorithms.picture(ways, ranks, size, latency, bandwidth).picture.data)
        dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
        expected = [times.up(f(int(1e6 * size), ranks, 1e-6 * latency, 1e9 * bandwidth)) for f in ways.values()]
        assert [y for _, y in dots] == pytest.approx(expected, abs=0.06)
        assert all(x == pytest.approx(times.across(1e6 * size), abs=0.06) for x, _ in dots)
        assert all(times.TOP <= y <= times.TOP + times.HIGH for y in expected)


def test_pictures_are_drawn_once():
    calls = []

    def picture(ranks):
        calls.append(ranks)
        return bars(ranks, "s")

    widget = play.explore(picture, ranks=[2, 4])
    for value in (4, 2, 4):
        widget.controls["ranks"].value = value
    assert calls == [2, 4]


def test_prefetch_shows_the_timeline_and_the_memory_of_one_job():
    talk, held = ({0: recording(), 1: recording(3)} for _ in range(2))
    widget = play.prefetch(talk, held, {0: 1, 1: 0}, begin=1)
    timeline, memory = draw.timeline(talk[1], step=[0]), draw.memory(held[1], step=1, ranks=[0])
    assert widget.stage.value == f"{timeline.html}<br>{memory.html}"
    assert saved(widget)[0]["text/plain"] == f"{timeline!r}\n{memory!r}"
    widget.controls["ahead"].value = 0
    assert draw.timeline(talk[0], step=1).html in widget.stage.value
    with pytest.raises(ValueError, match=r"talk has \[0, 1\] prefetched layers, held has \[1\], and steps has \[0\]"):
        play.prefetch(talk, {1: recording()}, {0: 1})
