"""Tests of scatter plots: points lie where their numbers are, and words lie on their points."""

import re
import xml.etree.ElementTree as xml

import pytest

from labs.kit import draw
from labs.kit.drawing import scatters
from tests.kit.pictures import SVG

POINTS = [draw.Point(10, 1000, "one", "ten & <more>"), draw.Point(100, 100, "other", "a hundred")]


def test_points_lie_on_their_axes_and_words_on_the_points():
    picture = draw.scatter(POINTS, "measured", "planned", diagonal=True)
    circles = list(xml.fromstring(picture.svg).iter(f"{SVG}circle"))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in circles if c.get("r") == f"{scatters.RADIUS}"]
    left, right = scatters.LEFT, scatters.LEFT + scatters.LONG
    top, bottom = scatters.TOP, scatters.TOP + scatters.HIGH
    assert dots == [(left, top), (left + scatters.LONG / 2, (top + bottom) / 2)] and right > dots[1][0]
    assert [area[:2] for area in picture.areas] == dots
    assert 'coords="86,84,5" title="ten &amp; &lt;more&gt;"' in picture.html
    name = re.search('usemap="#(.*?)"', picture.html)[1]
    assert f'<map name="{name}">' in picture.html and "max-width:none" in picture.html
    assert picture.alt == "planned by measured. 2 points: 1 one; 1 other."
    assert repr(picture) == "planned by measured\n2 points: 1 one; 1 other."


@pytest.mark.parametrize("points", [[], [draw.Point(0, 1, "", "")], [draw.Point(1, -1, "", "")]])
def test_values_off_a_logarithmic_axis_are_refused(points):
    with pytest.raises(ValueError, match="at least one point, and logarithmic axes need coordinates above 0"):
        draw.scatter(points, "x", "y")
