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
from labs.model import Config
from labs.xla.annotations import mesh_of, partition_spec
from labs.xla.gpt_in_jax import layer
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


def forward_and_backward(config: Config, names: Sequence[str]) -> Callable[..., Any]:
    """Return what labs.gspmd.forward_and_backward returns for a layer of the GPT, as a function of JAX arrays.

    names: the names of the layer's weights, in the order in which the function takes them
    """

    def both_ways(x: Any, gradient: Any, *weights: Any) -> Any:
        y, back = jax.vjp(lambda x, *own: layer(dict(zip(names, own, strict=True)), x, config), x, *weights)
        return y, *back(gradient)

    return both_ways
