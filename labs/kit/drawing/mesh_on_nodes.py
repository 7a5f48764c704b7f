"""A drawing of a mesh on its cluster: all ranks in a row, grouped by node, and the process groups of each axis.

nodes({"pp": 2, "shard": 2, "tp": 2}, node=4)
nodes({"pp": 2, "shard": 2, "tp": 2}, node=4, rank=5)
"""

from collections.abc import Mapping
from math import prod

from labs.kit.drawing.palette import KINDS, MUTED, PAPER, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas
from labs.mesh import Mesh

LEFT, TALL, APART = 150, 40, 12
MOST, ROOM = 64, 840  # the largest number of ranks that are drawn, and the pixels that all ranks together may take


def nodes(axes: Mapping[str, int], node: int, rank: int | None = None) -> Drawing:
    """Draw a line of ranks for each mesh axis of more than one rank, with the process groups along that axis.

    Ranks with the same tint and letter are one process group.

    axes: {name of an axis: its number of ranks}.
    node: the number of ranks per node.
    rank: the rank whose process groups are filled in; all groups are when left out.
    Raises ValueError if `node` does not divide the number of ranks, or if there are too many ranks to read.
    """
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    ranks, lines = prod(axes.values()), [axis for axis, size in axes.items() if size > 1]
    if ranks % node:
        raise ValueError(f"{ranks} ranks do not fill nodes of {node}: give a `node` that divides {ranks}")
    if ranks > MOST:
        raise ValueError(f"{ranks} ranks do not fit side by side: give a mesh of at most {MOST} ranks")
    wide = min(56, ROOM / ranks)
    size = 12 if wide > 20 else 10
    across = [LEFT + number * wide + number // node * APART for number in range(ranks)]
    title = f"{' × '.join(f'{axis} {size}' for axis, size in axes.items())} on {ranks // node} nodes of {node}"
    words = " ".join(sentence(mesh, axis, node, rank) for axis in lines)
    canvas = Canvas(across[-1] + wide + 20, 66 + TALL * len(lines), title, words)
    for first in range(0, ranks, node):
        x, width = across[first] - 4, node * wide + 8
        canvas.rect(x, 24, width, 34 + TALL * len(lines), fill="none", stroke=MUTED, radius=6)
        canvas.text(x + width / 2, 12, f"node {first // node}", size=13, weight="bold")
    for number, x in enumerate(across):
        canvas.text(x + wide / 2, 40, number, size=size, weight="bold" if number == rank else "normal")
    for line, axis in enumerate(lines):
        y = 54 + TALL * line
        leaves = any(len({each // node for each in group}) > 1 for group in mesh.groups_of(axis))
        canvas.text(12, y + 11, f"{axis} {axes[axis]}", size=13, anchor="start", weight="bold")
        colour = "#A84800" if leaves else MUTED  # KINDS["comm"], but darker, so that words in this colour can be read
        canvas.text(12, y + 26, "between nodes" if leaves else "inside a node", size=12, anchor="start", fill=colour)
        for letter, group in enumerate(mesh.groups_of(axis)):
            lit = rank is None or rank in group
            for each in group:
                stroke = {"stroke": KINDS["comm"], "line": 2.5} if lit and rank is not None else {}
                fill = RANKS[letter % len(RANKS)] if lit else PAPER
                canvas.rect(across[each] + 1, y, wide - 2, 30, fill=fill, **stroke)
                if lit:
                    canvas.text(across[each] + wide / 2, y + 15, chr(ord("a") + letter % 26), size=size)
    return canvas.drawing()


def sentence(mesh: Mesh, axis: str, node: int, rank: int | None) -> str:
    groups = [group for group in mesh.groups_of(axis) if rank is None or rank in group]
    leaving = sum(len({each // node for each in group}) > 1 for group in groups)
    listed = "; ".join(", ".join(map(str, group)) for group in groups[:8]) + "; …" * (len(groups) > 8)
    return f"Along {axis}: {listed}; {leaving or 'none'} of them between nodes."
