"""A drawing of one weight that tensor parallelism cuts, then a pipeline leaves to a stage, then FSDP shards.

weight_cut({"pp": 2, "shard": 2, "tp": 2}, rank=5)
"""

from collections.abc import Mapping
from math import prod

from labs.kit.drawing.palette import KINDS, MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas
from labs.mesh import Mesh

SIDE, LEFT, TOP, APART, SHIFT = 120, 24, 78, 56, 26


def weight_cut(axes: Mapping[str, int], rank: int) -> Drawing:
    """Draw the same matrix of every stage, cut along tp, pp and shard in this order, down to the piece of a rank.

    axes: the sizes of "pp", "shard" and "tp".
    rank: the rank whose piece is filled in.
    """
    mesh = Mesh(tuple(axes.values()), tuple(axes))
    at = {axis: next(g.index(rank) for g in mesh.groups_of(axis) if rank in g) for axis in axes}
    steps = (
        ("a matrix of each layer", ()),
        ("tp cuts its columns", ("tp",)),
        ("pp leaves a stage", ("tp", "pp")),
        ("shard cuts the rows", ("tp", "pp", "shard")),
    )
    words = " ".join(f"{name}: rank {rank} has 1/{prod(axes[a] for a in cut)}." for name, cut in steps)
    stages = axes["pp"]
    width = SIDE + SHIFT * (stages - 1) + APART
    canvas = Canvas(
        2 * LEFT + len(steps) * width - APART, TOP + SIDE + SHIFT * stages + 36, f"A weight on rank {rank}", words
    )
    for number, (name, cut) in enumerate(steps):
        x0 = LEFT + number * width
        canvas.text(x0, 22, name, 13, "start", "bold")
        part = prod(axes[axis] for axis in cut)
        canvas.text(x0, 42, "the whole model" if part == 1 else f"1/{part} of it", 12, "start", fill=MUTED)
        if number:
            canvas.arrow((x0 - APART + 10, TOP + SIDE / 2 + 10), (x0 - 12, TOP + SIDE / 2 + 10), stroke=MUTED)
        for stage in reversed(range(stages)):
            layer(canvas, x0 + SHIFT * stage, TOP + SHIFT * (stages - 1 - stage), axes, at, cut, stage)
    foot = ", ".join(f"{axis} {at[axis]}" for axis in axes)
    canvas.rect(LEFT, canvas.height - 30, 16, 16, fill=KINDS["P"])
    canvas.text(LEFT + 24, canvas.height - 22, f"rank {rank}: {foot}", 12.5, "start")
    canvas.rect(LEFT + 220, canvas.height - 30, 16, 16, fill=RANKS[7])
    canvas.text(LEFT + 244, canvas.height - 22, "other ranks", 12.5, "start")
    return canvas.drawing()


def layer(
    canvas: Canvas, x0: float, y0: float, axes: Mapping[str, int], at: Mapping[str, int], cut, stage: int
) -> None:
    columns = axes["tp"] if "tp" in cut else 1
    rows = axes["shard"] if "shard" in cut else 1
    wide, tall = SIDE / columns, SIDE / rows
    for column in range(columns):
        for row in range(rows):
            own = ("tp" not in cut or column == at["tp"]) and ("shard" not in cut or row == at["shard"])
            own = own and ("pp" not in cut or stage == at["pp"])
            fill = KINDS["P"] if own else RANKS[7]
            canvas.rect(x0 + column * wide, y0 + row * tall, wide, tall, fill=fill, radius=0)
    canvas.text(x0 + SIDE - 6, y0 - 9 if stage else y0 + SIDE + 11, f"layer {stage}", 11, "end", fill=MUTED)
