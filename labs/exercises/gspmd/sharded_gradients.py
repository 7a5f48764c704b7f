"""sharded_gradients: ZeRO 3 as a function that each device runs on its own piece (jax.shard_map)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from labs.exercises.engine.answer import Mistake, answered, says, show
from labs.exercises.gspmd._by_shard_map import Arrays, Devices, N, OfAnotherKind, Run, checked, play


def in_shards(fn: Callable[..., Any], seed: int) -> Run | str:
    """Compute the gradients by shards, and on one device; return the Run, or words for a result of another kind."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from labs.xla.annotations import mesh_of
    from labs.xla.hlo import collectives

    def loss(weights: Any, x: Any, y: Any) -> Any:
        hidden = jnp.tanh(x @ weights["first"].T)
        return ((hidden @ weights["second"].T + weights["bias"] - y) ** 2).mean()

    numbers = np.random.default_rng(seed)
    weights = {
        name: numbers.normal(size=shape).astype("float32")
        for name, shape in (("first", (8, 6)), ("second", (4, 8)), ("bias", (4,)))
    }
    x, y = (numbers.normal(size=(2 * N, width)).astype("float32") for width in (6, 4))

    def mapped(shards: Any, x: Any, y: Any) -> Any:
        found = fn(loss, shards, x, y)
        if not isinstance(found, dict) or found.keys() != shards.keys():
            raise OfAnotherKind(show(found))
        return found

    cut = PartitionSpec("dp")
    step = jax.jit(jax.shard_map(mapped, mesh=mesh_of({"dp": N}), in_specs=(cut, cut, cut), out_specs=cut))
    try:
        compiled = step.lower(weights, x, y).compile()
    except OfAnotherKind as kind:
        return str(kind)
    gradient = jax.jit(jax.grad(loss))
    parts = np.split(x, N), np.split(y, N)
    own = [jax.tree.map(np.asarray, gradient(weights, *part)) for part in zip(*parts, strict=True)]
    expected = jax.tree.map(np.asarray, gradient(weights, x, y))
    found = jax.tree.map(np.asarray, dict(compiled(*jax.device_put((weights, x, y), compiled.input_shardings[0]))))
    return Run(found, expected, collectives(compiled.as_text()), own, sum(w.nbytes for w in weights.values()))


def pieces_of_own(run: Run) -> Arrays:
    """Return each device's shard of the gradient of its own part of the batch."""
    return {
        name: np.concatenate([np.split(own[name], N)[at] for at, own in enumerate(run.own)]) for name in run.expected
    }


def of_one_part(run: Run) -> str:
    """Return the error if each device has the gradient of its own part of the batch alone, or ""."""
    own = pieces_of_own(run)
    return run.description if any(run.is_like({name: w / by for name, w in own.items()}) for by in (1, N)) else ""


def whole(run: Run) -> str:
    """Return the error if each device has whole gradients, or ""."""
    rows = all(np.shape(run.received[name])[0] == N * len(expected) for name, expected in run.expected.items())
    return run.description if rows else ""


# fmt: off
SHAPES = (
    Mistake("loss is given a weight that is not whole, or has a dim more",
            "Print the shape of what you hand to loss: have you gathered it, and with tiled=True?",
            says("TypeError: (dot_general requires|add got incompatible shapes)")),
)
SHARDED = (
    Mistake("whole gradients, and no shards", "Which rows of the gradient does this device's optimizer need?", whole),
    Mistake("of its own part of the batch alone", "Who tells this device of what the others have read?", of_one_part,
            symptom="a loss curve that is nearly right, and gets noisier the more devices there are"),
    Mistake("summed, and not averaged", "loss is the mean of a part. Of how many parts is the sum?",
            lambda run: run.description if run.is_expected(N) else ""),
    Mistake("divided once too often", "Who has divided already?", lambda run: run.description
        if run.is_expected(1 / N) else ""),
    Mistake("", "", lambda run: run.description),
    Mistake("all-reduced, where a part is needed", "How much of the sum does each device keep, and how much arrives?",
            lambda run: run.bytes_of("all-reduce") > run.weights and
            f"a device sends {run.bytes_of('all-reduce')} bytes to all-reduce, for weights of {run.weights}"),
    Mistake("gathered too much", "Which bytes are missing here, and how often do you ask for them?",
            lambda run: run.bytes_of("all-gather") > run.weights * (N - 1) / N and
            f"a device sends {run.bytes_of('all-gather')} bytes to gather weights of {run.weights}"),
)
PLAY = play(lambda draw: {N: [draw.world(Devices, 1)]}, in_shards, SHARDED,
            "What is added up, over which devices, and divided by what?", raised=SHAPES)
# fmt: on


@answered
def sharded_gradients(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(loss, shards, x, y) -> shards of the gradients` on each device of the axis "dp".

    Returns the text of the ✓ line, with the bytes sent.
    """
    facts = checked(PLAY, fn, seed)
    return (
        f"right on {N} devices; each sends {facts['sent']} bytes for weights of {facts['weights']}: gathered once, "
        "reduce-scattered once"
    )
