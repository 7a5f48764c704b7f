"""Tests of the map of a search: its front, its wall, and the text of each point."""

import re

import pytest

from labs import plan
from labs.kit import draw
from labs.kit.drawing import layout_map
from labs.model import PRESETS

H100 = plan.CLUSTERS["H100, InfiniBand"]


def test_the_map_shows_what_none_beats_and_what_the_card_cannot_hold():
    found = plan.search(PRESETS["llama3-8b"], H100.of(8), batch=16, context=4096)
    picture = draw.layouts(found)
    assert found.front[0] is found.feasible[0] and found.front[-1].peak == min(each.peak for each in found.feasible)
    for each in found.front:
        assert not any(other.seconds < each.seconds and other.peak < each.peak for other in found.feasible)
        assert sum(words.startswith(f"{each.layout}: ") for _, _, words in picture.areas) >= 1
    card = found.setup.cluster.card
    wall = float(re.search(r'd="M([\d.]+),84 L\1,444"[^>]*stroke-dasharray', picture.svg)[1])
    right = [words for x, _, words in picture.areas if round(x, 1) >= wall]
    assert right and all("more than the card has" in words for words in right)
    assert "nearly full: time × 2.5" in picture.svg and "the plan&#x27;s choice" in picture.svg
    assert all("a step, " in words for x, _, words in picture.areas if round(x, 1) < wall)
    assert layout_map.axis([card], 0, 1).marks == () and layout_map.axis([10, 100], 0, 1).marks == (
        10,
        15,
        20,
        30,
        40,
        60,
        80,
        100,
    )
    assert f"{len(found.impossible):,} cannot be run" in picture.text


def test_where_nothing_fits():
    nothing = plan.search(PRESETS["llama3-405b"], H100.of(8), batch=16, context=4096)
    with pytest.raises(ValueError, match="no layout fits into the GPU's memory, so there is none"):
        draw.layouts(nothing)
