"""One program, many layouts: each array says along which axis of the mesh each of its dims is cut.

    the weight of               [out,   in]            the reason
    q, k, v, gate, up, head     "tp",   "dp"           each has its own heads, or its own columns of the MLP
    o, down                     "dp",   "tp"           and takes up there what the others have left off
    embed                       "tp",   "dp"           a part of the vocabulary
    a norm                      "dp"
    tokens, targets, x_BTD      "dp" along B

That is all (`spec`), whatever the mesh: an axis that it does not have cuts nothing.

    {"dp": 8}                   FSDP             {"dp": 4, "tp": 2}     both: each matrix is tiled over both axes
    {"tp": 2}                   TP               {"dp": 4, "tp": 8}     the same on 32 devices

No line of labs.xla.pure speaks of this.  jax.jit takes the layouts of its arguments as they come, propagates them
through the program, and adds collectives where two do not meet (Xu et al. 2021, arXiv 2105.04663).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from labs.model import Config
from labs.xla.compiled import Trained
from labs.xla.pure import step

SECOND_OF_TWO = ("o", "down")


def spec(name: str, axes: Sequence[str]) -> PartitionSpec:
    """How the weight of this name is laid out on a mesh of these axes."""
    layer = name.split(".")[-2]
    if layer.endswith("norm"):
        dims: tuple[str, ...] = ("dp",)
    else:
        dims = ("dp", "tp") if layer in SECOND_OF_TWO else ("tp", "dp")
    return PartitionSpec(*(axis if axis in axes else None for axis in dims))


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    """A mesh of all devices, laid out by annotation: the compiler decides what is not said.

    Raises ValueError where there are more devices, or fewer, than the mesh has places.
    """
    devices = len(jax.devices())
    if prod(sizes.values()) != devices:
        raise ValueError(f"a mesh {dict(sizes)} has {prod(sizes.values())} places, and there are {devices} devices")
    # Without Auto, JAX refuses what is ambiguous and does not propagate: that is its explicit mode.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def laid_out(array: Any, mesh: Mesh, dims: PartitionSpec, name: str = "the batch") -> Array:
    """The array on the mesh.  Raises ValueError where a dim is not divisible by the devices that cut it."""
    for size, axis in zip(np.shape(array), dims, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{name} has a dim of {size}, which {mesh.shape[axis]} devices along {axis!r} cannot cut into equal "
                "parts: take another mesh, or another size"
            )
    return jax.device_put(array, NamedSharding(mesh, dims))


def train(
    config: Config,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    sizes: Mapping[str, int],
    settings: Mapping[str, Any],
) -> Trained:
    """Take a step of AdamW for each batch, on a mesh of these axes; to be called where there are as many devices.

    weights: from_torch(model).  batches: tokens and targets, [B, T] each, whole.  settings: AdamW's.
    """
    mesh, axes = mesh_of(sizes), tuple(sizes)
    rows = PartitionSpec("dp" if "dp" in axes else None)
    keep = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, rows))
    now = {name: laid_out(w, mesh, spec(name, axes), name) for name, w in weights.items()}
    moments = {name: (jnp.zeros_like(w), jnp.zeros_like(w)) for name, w in now.items()}
    as_before = jax.tree.map(lambda w: w.sharding, (now, moments))
    compiled, losses = None, []
    for number, batch in enumerate(batches, start=1):
        x_BT, y_BT = (laid_out(part, mesh, rows) for part in batch)
        arguments = now, moments, jnp.float32(number), x_BT, y_BT
        if compiled is None:
            program = partial(step, config=config, settings=settings, keep=keep)
            compiled = jax.jit(program, out_shardings=(*as_before, None)).lower(*arguments).compile()
        now, moments, loss = compiled(*arguments)
        losses.append(float(loss))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((now, moments)))
    return Trained(losses, {name: np.asarray(w) for name, w in now.items()}, compiled.as_text(), held)
