"""Tests of labs.xla.shard_map against labs.model, torch's AdamW on one process and labs.xla.gpt_in_jax.

The collectives are counted by hand.
"""

from functools import partial

import numpy as np
import pytest
import torch

from labs.kit.extras.jax_devices import on_devices
from labs.kit.launch import run
from labs.kit.training import strategies
from labs.kit.training.training_step import ADAMW
from labs.model import GPT, Config
from labs.xla.hlo import counted
from tests.extras import need_jax

RANKS, STEPS, MICROBATCHES = 4, 3, 3
CONFIG = Config(vocab=32, dim=16, depth=4, heads=4, kv_heads=4, hidden=24, context=8)
SHALLOW = Config(vocab=32, dim=16, depth=1, heads=4, kv_heads=4, hidden=24, context=8)
TOKENS = torch.randint(32, (STEPS, 2, 8, 8), generator=torch.Generator().manual_seed(0))


def as_arrays(config):
    return {name: p.detach().numpy() for name, p in GPT(config).named_parameters()}


def in_shards(batches):
    """Return losses, weights and collectives of ZeRO 3."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from labs.xla.annotations import mesh_of
    from labs.xla.hlo import collectives
    from labs.xla.shard_map import zero_3

    mesh = mesh_of({"dp": RANKS})
    now = jax.device_put(as_arrays(SHALLOW), NamedSharding(mesh, PartitionSpec("dp")))
    moments = jax.tree.map(lambda w: (0 * w, 0 * w), now)
    step, losses = jax.jit(zero_3(mesh, "dp", SHALLOW, ADAMW)), []
    found = collectives(step.lower(now, moments, 1.0, *batches[0]).compile().as_text())
    for number, (x, y) in enumerate(batches, start=1):
        now, moments, loss = step(now, moments, float(number), x, y)
        losses.append(float(loss))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((now, moments)))
    return losses, {name: np.asarray(w) for name, w in now.items()}, found, held


def test_zero_3_is_one_device_and_sends_what_is_written_and_its_transpose():
    need_jax()
    losses, weights, found, held = on_devices(in_shards, TOKENS.numpy(), devices=RANKS)
    arguments = strategies.ONE_DEVICE, partial(GPT, SHALLOW), [list(TOKENS)], 1, STEPS
    [(expected, after)] = run(strategies.train, *arguments, ranks=1, device="cpu")
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    for name, p in after.items():
        np.testing.assert_allclose(weights[name], p, atol=1e-4, err_msg=name)
    everything = 4 * sum(p.numel() for p in after.values())
    by_kind = {kind: sum(one.sent for one in found if one.kind == kind) for kind in counted(found)}
    assert by_kind == {"all-gather": everything * 3 // 4, "reduce-scatter": everything * 3 // 4, "all-reduce": 6}
    assert held == 3 * everything // RANKS


def through_stages(x):
    """Return (y, gradients) of the pipeline and of the layers one after the other, and the collectives of both ways."""
    import jax
    import jax.numpy as jnp

    from labs.xla.annotations import mesh_of
    from labs.xla.gpt_in_jax import layer
    from labs.xla.hlo import collectives
    from labs.xla.shard_map import pipeline, stacked

    weights, piped = stacked(as_arrays(CONFIG), CONFIG), pipeline(mesh_of({"pp": RANKS // 2}), "pp", CONFIG)

    def one_by_one(weights, x):
        for number in range(CONFIG.depth):
            x = jax.vmap(lambda x, number=number: layer({n: w[number] for n, w in weights.items()}, x, CONFIG))(x)
        return x

    def scored(forward):
        return jax.jit(jax.value_and_grad(lambda weights, x: jnp.sin(3 * forward(weights, x)).sum(), argnums=(0, 1)))

    both = scored(piped)(weights, x), scored(one_by_one)(weights, x)
    found = collectives(scored(piped).lower(weights, x).compile().as_text())
    return jax.tree.map(np.asarray, both), found


def test_a_pipeline_forward_and_the_backward_that_follows():
    need_jax()
    x = torch.randn(MICROBATCHES, 2, 8, 16, generator=torch.Generator().manual_seed(0)).numpy()
    ((value, (gradients, of_x)), (expected, (expected_gradients, expected_of_x))), found = on_devices(
        through_stages, x, devices=RANKS // 2
    )
    assert value == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(of_x, expected_of_x, atol=1e-3)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], rtol=1e-3, atol=1e-3, err_msg=name)
    permutations = [one.groups for one in found if one.kind == "collective-permute"]
    assert sorted(permutations) == [((0, 1),), ((1, 0),)]
