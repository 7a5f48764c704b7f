"""Collectives written by hand in JAX, in a function that each device runs on its own shard (shard_map).

    zero_3       a step in which weights, gradients and moments are sharded: all-gather, compute, reduce-scatter
    pipeline     layers divided along a mesh axis; ppermute sends micro-batches from stage to stage

Neither function has a backward of its own.  JAX derives the backward, and the transpose of a collective is a
collective:

    forward        all_gather        psum_scatter     psum           ppermute to the next
    backward       psum_scatter      all_gather       a copy         ppermute to the one before

So zero_3 contains only all-gathers, and JAX derives the reduce-scatters of ZeRO 3; pipeline contains only the forward,
and JAX derives the backward.  Unlike with annotations, the compiler adds no collective and leaves none out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from labs.model import Config
from labs.xla.annotations import mesh_of
from labs.xla.gpt_in_jax import Weights, adamw, layer, loss, part
from labs.xla.hlo import Collective, collectives

EVERYWHERE = PartitionSpec()


def zero_3(
    mesh: Mesh, axis: str, config: Config, settings: Mapping[str, Any]
) -> Callable[..., tuple[Weights, Weights, Array]]:
    """Return a step like labs.xla.gpt_in_jax.step: (weights, moments, count, tokens_BT, targets_BT) -> (.., .., loss).

    Every array is cut along its first dim by this mesh axis, whose size must divide the dim.
    """
    sharded = PartitionSpec(axis)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(sharded, sharded, EVERYWHERE, sharded, sharded),
        out_specs=(sharded, sharded, EVERYWHERE),
    )
    def step(shards: Weights, moments: Weights, count: Array, tokens_BT: Array, targets_BT: Array) -> Any:
        def share(shards: Weights) -> Array:
            whole = {name: lax.all_gather(w, axis, tiled=True) for name, w in shards.items()}
            return loss(whole, tokens_BT, targets_BT, config) / lax.axis_size(axis)

        value, gradients = jax.value_and_grad(share)(shards)
        new = {name: adamw(w, gradients[name], moments[name], count, **settings) for name, w in shards.items()}
        return {n: w for n, (w, _) in new.items()}, {n: m for n, (_, m) in new.items()}, lax.psum(value, axis)

    return step


def zero_3_collectives(
    config: Config, settings: Mapping[str, Any], weights: Weights, tokens_BT: Any, targets_BT: Any
) -> list[Collective]:
    """Compile a step of zero_3 on all devices, and return its collectives."""
    mesh = mesh_of({"dp": len(jax.devices())})
    shards = jax.device_put(weights, jax.NamedSharding(mesh, PartitionSpec("dp")))
    moments = jax.tree.map(lambda w: (0 * w, 0 * w), shards)
    step = jax.jit(zero_3(mesh, "dp", config, settings))
    return collectives(step.lower(shards, moments, 1.0, tokens_BT, targets_BT).compile().as_text())


def stacked(weights: Weights, config: Config) -> Weights:
    """Stack the weights of all layers into one array per name, [depth, ...]; a cut along depth gives stages."""
    layers = [part(weights, f"layers.{number}") for number in range(config.depth)]
    return {name: jnp.stack([weights[name] for weights in layers]) for name in layers[0]}


def pipeline(mesh: Mesh, axis: str, config: Config) -> Callable[[Weights, Array], Array]:
    """Return all layers of the model as a pipeline: (stacked weights, x_MBTD) -> y_MBTD, for M micro-batches.

    There is a stage for each device of the axis, the number of stages must divide the depth, and every device gets y.
    A step with M micro-batches and N stages has M + N - 1 ticks.  Every stage computes in every tick, also in the first
    and last ones, in which its input is meaningless: that is the bubble.  The stages of labs.pp wait in the bubble; the
    stages of this program compute in vain.
    """

    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(axis), EVERYWHERE), out_specs=EVERYWHERE)
    def run(own: Weights, x_MBTD: Array) -> Array:
        stage, stages, microbatches = lax.axis_index(axis), lax.axis_size(axis), len(x_MBTD)
        layers = len(next(iter(own.values())))

        def tick(arrived_BTD: Array, number: Array) -> tuple[Array, Array]:
            fresh_BTD = x_MBTD[jnp.minimum(number, microbatches - 1)]
            x_BTD = jnp.where(stage == 0, fresh_BTD, arrived_BTD)
            for place in range(layers):
                x_BTD = layer({name: w[place] for name, w in own.items()}, x_BTD, config)
            onward = [(one, one + 1) for one in range(stages - 1)]
            return lax.ppermute(x_BTD, axis, onward), x_BTD

        nothing_yet = lax.pcast(jnp.zeros_like(x_MBTD[0]), axis, to="varying")
        _, done_BTD = lax.scan(tick, nothing_yet, jnp.arange(microbatches + stages - 1))
        last = jnp.where(stage == stages - 1, done_BTD[stages - 1 :], 0)
        return lax.psum(last, axis)

    return run
