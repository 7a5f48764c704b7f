"""Tests of the links explorer: it draws labs.cost's times at the slider's size, as the picture of a cluster does.

The reference is the formula of Hockney's model, by hand.
"""

import itertools
import xml.etree.ElementTree as xml

import pytest

from labs import cost
from labs.kit import play
from labs.kit.drawing import times_by_size as times
from labs.kit.explorers import links
from tests.kit.pictures import SVG, require_legible
from tests.kit.test_play import saved
from tools import images


def test_long_messages_cost_their_bytes_and_short_ones_their_messages():
    link = cost.LINKS["InfiniBand, 400 Gb/s"]
    assert cost.all_reduce_seconds(10**11, 8, link) == pytest.approx(2 * 7 / 8 * 10**11 / 50e9, rel=1e-3)
    assert cost.all_reduce_seconds(0, 8, link) == pytest.approx(6.6e-6 + 3 * 2.7e-6)


def test_it_says_what_the_formula_says():
    text = play.links(size=1e9, ranks=8).still.text.splitlines()
    assert text[0] == "One all-reduce of 1 GB on each of 8 ranks"
    assert text[1] == "NVLink 4: 3.9 ms" and text[-1] == "Ethernet, 10 Gb/s: 1.4 s"


def test_nvlink_ends_at_the_border_of_the_node():
    drawing = play.links(size=1e6, ranks=64).still
    assert "NVLink 4: joins 8 ranks at most" in drawing.text and "Ethernet, 10 Gb/s: 2.84 ms" in drawing.text
    assert len(list(xml.fromstring(drawing.svg).iter(f"{SVG}circle"))) == 2, "a dot for each link that there is"


def test_dots_lie_on_their_lines_at_the_slider():
    for size, ranks in itertools.product((1e3, 2e6, 5e10), (2, 8, 1024)):
        root = xml.fromstring(links.picture(size, ranks).svg)
        dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter(f"{SVG}circle")]
        seconds = [links.taken_on(link, ranks, size) for link in cost.LINKS.values() if ranks <= link.reach]
        assert [x for x, _ in dots] == pytest.approx([times.across(size)] * len(seconds), abs=0.06)
        assert [y for _, y in dots] == pytest.approx([times.up(each) for each in seconds], abs=0.06)
        assert all(times.TOP <= y <= times.TOP + times.HIGH for _, y in dots)


@pytest.mark.parametrize(("size", "ranks"), [(1e3, 2), (1e9, 8), (5e10, 1024)])
def test_words_do_not_overlap(size, ranks):
    require_legible(links.picture(size, ranks))


def test_moving_the_slider_and_what_is_kept():
    widget = play.links()
    before = saved(widget)
    widget.controls["ranks"].value = 1024
    assert "joins 8 ranks" in widget.stage.value and saved(widget) == before


def test_the_picture_of_a_cluster_has_these_numbers():
    words = images.cluster().text
    for link in cost.LINKS.values():
        assert f"{times.rate(link.bandwidth)} each way, {times.span(link.latency)}" in words
