"""Tests of lines that cross, and of who sends how much on two nodes (snapshots: test_gallery)."""

from types import SimpleNamespace as Fake

import pytest

from labs.kit import draw
from labs.kit.drawing.crossing_lines import crossing, ticks
from labs.kit.drawing.lines_on_scales import crossing as on_logarithmic_axes
from labs.kit.drawing.wire_between_nodes import pairs_of
from tests.kit.drawing.gallery import LINES, ON_TWO_NODES


def test_the_crossing_is_on_the_line_between_two_points():
    assert crossing(LINES["flat"], LINES["rising"]) == pytest.approx(1 + 2.5 / 1.5)
    assert crossing(LINES["rising"], [(1, 0.0), (6, 8.9)]) is None
    assert draw.crossings({"a": [(1, 2.0), (2, 2.0)], "b": [(1, 0.5), (2, 1.0)]}, {"a": "G", "b": "A"}, "x", "y").alt


def test_on_logarithmic_axes_lines_cross_where_powers_do():
    tokens = (8, 64, 512)
    rising, flat = [(t, 3.0 * t) for t in tokens], [(t, 300.0) for t in tokens]
    assert on_logarithmic_axes(rising, flat) == pytest.approx((100, 300))
    assert on_logarithmic_axes(rising, [(t, 4.0 * t) for t in tokens]) is None


@pytest.mark.parametrize("highest, expected", [(9.0, (2.0, 5)), (7.8, (2.0, 4)), (0.3, (0.1, 3)), (4.0, (1.0, 4))])
def test_marks_are_round_numbers(highest, expected):
    assert ticks(highest) == pytest.approx(expected)


def test_each_pair_has_the_bytes_of_its_axis():
    assert pairs_of(ON_TWO_NODES, 0) == {
        **dict.fromkeys([(0, 1), (2, 3)], ("tp", 4_000_000)),
        **dict.fromkeys([(0, 2), (1, 3)], ("dp", 900_000)),
    }
    picture = draw.wire(ON_TWO_NODES, {"dp × tp": 0, "tp × dp": 1}, {"dp": "P", "tp": "A"})
    assert "dp × tp: 1.8 MB leave each node; tp × dp: 8.0 MB leave each node" in picture.alt


def test_another_job_is_refused():
    with pytest.raises(ValueError, match="give a job of 4 ranks with a Link of 2 nodes"):
        pairs_of(Fake(ranks=4, link=None), 0)
