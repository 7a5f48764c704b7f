"""Annotations: one program with many layouts, in which each array says along which mesh axis each dim is cut.

The table of layouts is that of labs.gspmd.annotated_layer: "tp" cuts the output dim of q, k, v, gate and up, and the
input dim of o and down; "dp" cuts the other dim of each, and the batch.  Only the mesh changes:

    {"dp": 8}      FSDP            {"dp": 4, "tp": 2}     both: each matrix is tiled over both axes
    {"tp": 2}      TP              {"dp": 4, "tp": 8}     the same on 32 devices

No line of labs.xla.gpt_in_jax mentions layouts.  jax.jit takes the layouts of its arguments as they are, propagates
them through the program, and adds collectives where two layouts do not fit (Xu et al. 2021, arXiv 2105.04663).
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from labs.dtensor.placement import Placement, Shard, Spec
from labs.gspmd.annotated_layer import layout_of, rows
from labs.model import IGNORED, Config
from labs.xla.gpt_in_jax import step
from labs.xla.training_result import Trained


def partition_spec(placements: Sequence[Placement], axes: Sequence[str]) -> PartitionSpec:
    """Translate placements, which have a dim for each axis, into a PartitionSpec, which has the axes for each dim.

    Raises ValueError for summands (Partial), which no annotation can express.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{list(placements)}: JAX has no annotation for summands: give Shard(dim) or Replicate()")
    dims = range(1 + max((p.dim for p in placements if isinstance(p, Shard)), default=-1))
    cut = [tuple(axis for axis, p in zip(axes, placements, strict=True) if p.is_shard(dim)) for dim in dims]
    return PartitionSpec(*(by or None for by in cut))


def mesh_of(sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of all devices, on which the compiler decides every layout that is not annotated.

    Raises ValueError if the mesh has more or fewer places than there are devices.
    """
    devices = len(jax.devices())
    if prod(sizes.values()) != devices:
        raise ValueError(
            f"a mesh {dict(sizes)} has {prod(sizes.values())} places, and there are {devices} devices: change a size"
        )
    # Without Auto, JAX is in its explicit mode: it refuses ambiguous layouts, and does not propagate.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def laid_out(array: Any, mesh: Mesh, placements: Sequence[Placement], name: str = "the batch") -> Array:
    """Put an array on the mesh, in these placements.  Raises ValueError if a dim cannot be cut into equal pieces."""
    spec = Spec(np.shape(array), tuple(mesh.shape.values()), tuple(placements))
    for dim, size in enumerate(spec.shape):
        if size % spec.pieces(dim):
            raise ValueError(
                f"{name} has a dim of {size}, which is to be cut into {spec.pieces(dim)} equal parts and cannot be: "
                "take another mesh, or another size"
            )
    return jax.device_put(array, NamedSharding(mesh, partition_spec(placements, mesh.axis_names)))


def train(
    config: Config,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    sizes: Mapping[str, int],
    settings: Mapping[str, Any],
    kept_after: int | None = None,
) -> Trained:
    """Train in JAX, with a step of AdamW for each batch, on a mesh with these axes.

    weights: the initial weights, as from_torch(model) returns them
    batches: tokens and targets, whole, of shape [B, T] each
    sizes: the size of each mesh axis; their product is the number of devices
    settings: AdamW's settings, by the names that torch.optim.AdamW gives them
    kept_after: the step after which the weights are returned; by default the last one

    Raises ValueError for targets of -100.
    """
    if any((y_BT == IGNORED).any() for _, y_BT in batches):
        raise ValueError(f"a target is {IGNORED}, to be ignored, but this loss counts all: take labs.fsdp or labs.tp")
    mesh, axes = mesh_of(sizes), tuple(sizes)
    keep = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, partition_spec(rows(axes), axes)))
    now = {name: laid_out(w, mesh, layout_of(name, axes), name) for name, w in weights.items()}
    moments = {name: (jnp.zeros_like(w), jnp.zeros_like(w)) for name, w in now.items()}
    as_before = jax.tree.map(lambda w: w.sharding, (now, moments))
    compiled, losses, seconds, kept = None, [], [], {}
    for number, batch in enumerate(batches, start=1):
        x_BT, y_BT = (laid_out(part, mesh, rows(axes)) for part in batch)
        arguments = now, moments, jnp.float32(number), x_BT, y_BT
        if compiled is None:
            program = partial(step, config=config, settings=settings, keep=keep)
            jitted = jax.jit(program, out_shardings=(*as_before, None), donate_argnums=(0, 1))
            compiled = jitted.lower(*arguments).compile()
        began = time.perf_counter()
        now, moments, loss = compiled(*arguments)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        if number == (kept_after or len(batches)):
            kept = {name: np.array(process_allgather(w, tiled=True)) for name, w in now.items()}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((now, moments)))
    said = compiled.memory_analysis()
    temporary = said.temp_size_in_bytes
    peak = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + temporary
    return Trained(losses, kept, compiled.as_text(), held, seconds, temporary, peak)
