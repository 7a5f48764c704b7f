"""Tests of the palette: contrast by WCAG 2.2, and colours as colour-blind readers see them.

Source: Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision
Deficiency".
"""

import itertools
import sys

import cloudpickle
import pytest

from labs.kit.drawing import palette

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module

VISION = {  # severity 1.0, linear RGB: Machado et al. (2009), table 1
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


def lab(colour, matrix):
    """Return CIE L*a*b* (D65) of "#RRGGBB" as seen through a colour vision matrix."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(1, max(0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (v / white for v, white in zip(xyz, (0.9505, 1, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "colours", [palette.KINDS, palette.TIMELINE, palette.INSTRUCTIONS, dict(enumerate(palette.EXPERTS))]
)
def test_colours_can_be_told_apart(vision, colours):
    seen = {name: lab(colour, VISION[vision]) for name, colour in colours.items()}
    for one, other in itertools.combinations(seen, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 15, f"{one} and {other} look alike to {vision} readers"  # 2.3 is just noticeable


def test_one_colour_each():
    assert set(palette.KINDS) == {"P", "G", "S", "A", "comm", "temporary"} == set(palette.NAMES)
    assert len(set(palette.KINDS.values())) == 6
    assert palette.TIMELINE["communication"] == palette.KINDS["comm"]


def test_words_stand_out_from_what_they_lie_on():
    fills = [
        *palette.KINDS.values(),
        *palette.TIMELINE.values(),
        *palette.COLLECTIVES.values(),
        *palette.RANKS,
        *palette.INSTRUCTIONS.values(),
        *palette.EXPERTS,
        palette.PAPER,
        palette.SOFT,
    ]
    assert min(palette.contrast(palette.ink(fill), fill) for fill in fills) >= 4.5
    assert min(palette.contrast(palette.INK, tint) for tint in palette.RANKS) >= 4.5
    assert min(palette.contrast(words, palette.PAPER) for words in (palette.MUTED, palette.WRONG)) >= 4.5
    assert min(palette.contrast(colour, palette.PAPER) for colour in palette.SERIES[1:]) >= 3
