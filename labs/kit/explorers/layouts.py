"""The placement explorer's picture: a tensor on a mesh before and after a redistribution, and the steps in between.

    picture(**BEGIN)      blocks before and after, drawn like those of a real DTensor; each step of the plan, its
                          collective, and the bytes that a rank sends for it

`labs.kit.play.placements` puts controls above it.  The plan and the bytes are those of labs.dtensor.redistribute,
float32.
"""

from collections.abc import Mapping
from itertools import product

from labs.dtensor import Partial, Placement, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import walk
from labs.kit.drawing.blocks import change
from labs.kit.drawing.picture import Drawing

NAMES = ("a", "b")
SIZE = 4  # bytes per element
WANTED: dict[str, Placement] = {repr(p): p for p in (Shard(0), Shard(1), Replicate())}
GIVEN = WANTED | {repr(Partial()): Partial()}  # only a source: operations make summands, redistributions do not

# The controls and their values, and where each begins.
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
    """Draw the tensor at these settings, the values of CONTROLS; a mesh of one axis ignores those for b."""
    axes = NAMES[: len(mesh)]
    source, target = (tuple(placed[f"{side} {axis}"] for axis in axes) for side in ("from", "to"))
    before = Spec(tensor, mesh, tuple(fitting(p, tensor) for p in source))
    after = before.but(fitting(p, tensor) for p in target)
    return change(before, after, axes, steps(before, after, axes))


def fitting(placement: Placement, shape: tuple[int, ...]) -> Placement:
    """Return the placement, with dim 0 in place of dim 1 if the tensor has only one dim."""
    return Shard(min(placement.dim, len(shape) - 1)) if isinstance(placement, Shard) else placement


def steps(before: Spec, after: Spec, axes: tuple[str, ...]) -> list[str]:
    """Return a line for each step, and one for their sum."""
    walks = [walk(before, after.placements, place) for place in product(*map(range, before.mesh))]
    lines, total = [], 0
    for ranks in zip(*walks, strict=True):
        step = ranks[0][0]
        most = SIZE * max(step.move.sent(line, step.source, step.target) for step, line in ranks)
        does = step.move.collective or ("each cuts its piece out" if step.target.is_shard() else "nothing is sent")
        lines.append(f"along {axes[step.axis]}: {step.source!r} → {step.target!r}: {does}, {most:,} bytes")
        total += most
    return [*lines, f"a rank sends {total:,} bytes at most"] if lines else ["nothing to do: 0 bytes"]
