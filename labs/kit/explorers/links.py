"""The links explorer's picture: the seconds of one all-reduce on NVLink, Ethernet and other links, by its size.

    picture(**BEGIN)     a line for each link of labs.cost.LINKS, and a dot on it at the chosen size

`labs.kit.play.links` shows this picture below its controls.
"""

from collections.abc import Sequence
from functools import partial

from labs import cost
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.times_by_size import amount, by_size

# CONTROLS has the values of each control (slider), by its name; BEGIN has the control's first value.
CONTROLS: dict[str, Sequence] = {
    "size": [(amount(size := digit * 10.0**power), size) for power in range(3, 11) for digit in (1, 2, 5)],
    "ranks": (2, 4, 8, 16, 64, 256, 1024),
}
BEGIN = {"size": 1e9, "ranks": 8}


def picture(size: float, ranks: int) -> Drawing:
    """Draw an all-reduce's seconds by size for each link; a link that cannot join so many ranks has no line.

    size: bytes on each rank, at which each line has a dot.
    """
    lines = {name: partial(taken_on, link, ranks) if ranks <= link.reach else None for name, link in cost.LINKS.items()}
    title = f"One all-reduce of {amount(size)} on each of {ranks} ranks"
    return by_size(title, lines, size, none=f"joins {cost.NODE} ranks at most")


def taken_on(link: cost.LinkClass, ranks: int, size: float) -> float:
    return cost.all_reduce_seconds(int(size), ranks, link)
