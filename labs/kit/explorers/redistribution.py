"""The placement explorer's picture: a tensor on a mesh before and after a redistribution, and the steps in between.

    picture(**BEGIN)      the blocks that ranks hold before and after; each step of the redistribution, its collective,
                          and the bytes that a rank sends for it

`labs.kit.play.placements` shows this picture below its controls.  The steps are those that labs.dtensor.redistribute
would take, and the bytes are for float32.
"""

from collections.abc import Mapping
from itertools import product

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import walk
from labs.kit.drawing.dtensor_blocks import change
from labs.kit.drawing.picture import Drawing

NAMES = ("a", "b")
SIZE = 4  # bytes per element
WANTED: dict[str, Placement] = {repr(p): p for p in (Shard(0), Shard(1), Replicate())}
GIVEN = WANTED | {repr(Partial()): Partial()}  # only operations make summands, redistributions do not

# CONTROLS has the values of each control (menu), by its name; BEGIN has the control's first value.
CONTROLS: dict[str, Mapping] = {
    "tensor": {" × ".join(map(str, shape)): shape for shape in ((8, 6), (7, 5), (3, 4), (12,), (5,))},
    "mesh": {" × ".join(map(str, mesh)): mesh for mesh in ((2, 2), (4,), (2, 3), (3, 2))},
    "from a": GIVEN,
    "from b": GIVEN,
    "to a": WANTED,
    "to b": WANTED,
}
BEGIN = {"tensor": "8 × 6", "mesh": "2 × 2"}
BEGIN |= {"from a": "Partial()", "from b": "Replicate()", "to a": "Replicate()", "to b": "Shard(0)"}


def picture(tensor: tuple[int, ...], mesh: tuple[int, ...], **placed: Placement) -> Drawing:
    """Draw the blocks of a tensor before and after a redistribution, at these values of CONTROLS.

    placed: the placements "from a", "from b", "to a" and "to b"; a mesh of one axis ignores the placements on axis b.
    """
    axes = NAMES[: len(mesh)]
    source, target = (tuple(placed[f"{side} {axis}"] for axis in axes) for side in ("from", "to"))
    before = Spec(tensor, mesh, tuple(fitting(p, tensor) for p in source))
    after = before.but(fitting(p, tensor) for p in target)
    return change(before, after, axes, steps(before, after, axes))


def fitting(placement: Placement, shape: tuple[int, ...]) -> Placement:
    """Return a placement that the tensor can have: Shard(1) becomes Shard(0) if the tensor has only one dim."""
    return Shard(min(placement.dim, len(shape) - 1)) if isinstance(placement, Shard) else placement


def steps(before: Spec, after: Spec, axes: tuple[str, ...]) -> list[str]:
    """Return a line of text for each step of a redistribution, and one for the sum of their bytes."""
    walks = [walk(before, after.placements, place) for place in product(*map(range, before.mesh))]
    lines, total = [], 0
    for ranks in zip(*walks, strict=True):
        step = ranks[0][0]
        most = SIZE * max(step.move.sent(line, step.source, step.target) for step, line in ranks)
        does = step.move.collective or ("each cuts its piece out" if step.target.is_shard() else "nothing is sent")
        lines.append(f"along {axes[step.axis]}: {step.source!r} → {step.target!r}: {does}, {most:,} bytes")
        total += most
    return [*lines, f"a rank sends {total:,} bytes at most"] if lines else ["nothing to do: 0 bytes"]
