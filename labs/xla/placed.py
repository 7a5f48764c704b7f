"""Communication that XLA adds to a function, given labs.dtensor placements of its arguments and results.

    communication(product, {"tp": 4}, [((32, 64), [Shard(1)]), ((64, 128), [Shard(0)])], [[Replicate()]])
                                                                            # one all-reduce, of (32, 128)

`communication` compiles the function and reads the compiled text; the function does not run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from labs.dtensor.placement import Placement
from labs.xla.annotations import mesh_of, partition_spec
from labs.xla.hlo import Collective, collectives


def communication(
    fn: Callable[..., Any],
    sizes: Mapping[str, int],
    arguments: Sequence[tuple[Sequence[int], Sequence[Placement]]],
    results: Sequence[Sequence[Placement]],
) -> list[Collective]:
    """Return the collectives that XLA adds to `fn`.

    sizes: the size of each mesh axis
    arguments: (shape, placements) of each argument
    results: placements of each array that `fn` returns
    """
    mesh, axes = mesh_of(sizes), tuple(sizes)

    def on_mesh(placements: Sequence[Placement]) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(placements, axes))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on_mesh(p)) for shape, p in arguments]
    outputs = tuple(map(on_mesh, results))
    return collectives(jax.jit(lambda *x: tuple(fn(*x)), out_shardings=outputs).lower(*arrays).compile().as_text())
