"""Tests of scatter plots: words lie on their points.  The picture: test_gallery.py."""

import pytest

from labs.kit import draw
from tests.kit.drawing.gallery import POINTS


def test_words_lie_on_the_points():
    html = draw.scatter(POINTS, "measured", "planned").html
    assert 'coords="99,91,5" title="ten &amp; &lt;more&gt;"' in html and "max-width:none" in html


@pytest.mark.parametrize("points", [[], [draw.Point(0, 1, "", "")], [draw.Point(1, -1, "", "")]])
def test_values_off_a_logarithmic_axis_are_refused(points):
    with pytest.raises(ValueError, match="at least one point, and logarithmic axes need coordinates above 0"):
        draw.scatter(points, "x", "y")
