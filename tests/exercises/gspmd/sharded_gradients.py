"""Answers to sharded_gradients (13): ZeRO 3 within shard_map, a device's shards of the gradients."""

from tests.answers import Exercise, from_notebook
from tests.extras import need_jax

# fmt: off
answers = Exercise("sharded_gradients", needs=need_jax)

LINE = "right on 4 devices; each sends 504 bytes for weights of 336"
gathered_within = answers.right(from_notebook("sharded_gradients"), line=LINE)


@answers.right
def both_by_hand(loss, shards, x, y):
    import jax
    from jax import lax

    whole = {name: lax.all_gather(w, "dp", tiled=True) for name, w in shards.items()}
    gradients = jax.grad(loss)(whole, x, y)
    scattered = {name: lax.psum_scatter(g, "dp", tiled=True) for name, g in gradients.items()}
    return {name: g / lax.axis_size("dp") for name, g in scattered.items()}


answers.spoil(gathered_within, "summed, and not averaged", {' / lax.axis_size("dp")': ""})
answers.spoil(both_by_hand, "divided once too often", {"g / lax": "g / 4 / lax"})
answers.spoil(both_by_hand, "whole gradients, and no shards", {'psum_scatter(g, "dp", tiled=True)': 'psum(g, "dp")'})
answers.spoil(gathered_within, "loss is given a weight that is not whole, or has a dim more", {", tiled=True)": ")"})


@answers.wrong("of its own part of the batch alone")
def nobody_is_asked(loss, shards, x, y):
    import jax
    from jax import lax

    whole = {name: lax.all_gather(w, "dp", tiled=True) for name, w in shards.items()}
    gradients = jax.grad(loss)(whole, x, y)
    size, me = {name: len(w) for name, w in shards.items()}, lax.axis_index("dp")
    return {name: lax.dynamic_slice_in_dim(g, me * size[name], size[name]) for name, g in gradients.items()}


answers.spoil(nobody_is_asked, "all-reduced, where a part is needed",
    {"jax.grad(loss)(whole, x, y)": 'lax.pmean(jax.grad(loss)(whole, x, y), "dp")'})


@answers.wrong("gathered too much")
def the_batch_travels_too(loss, shards, x, y):
    import jax
    from jax import lax

    def of_all(shards):
        whole, batch = jax.tree.map(lambda w: lax.all_gather(w, "dp", tiled=True), (shards, (x, y)))
        return loss(whole, *batch) / lax.axis_size("dp")

    return jax.grad(of_all)(shards)
