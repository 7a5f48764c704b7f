"""pipelined: a pipeline of stages as a function that each device runs on its own piece (jax.shard_map)."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.gspmd._by_shard_map import Arrays, Devices, OfAnotherKind, Run, checked, play

PIPELINES = ((4, 5), (3, 2))  # stages and micro-batches, of which there are more than stages, and fewer


def in_stages(fn: Callable[..., Any], seed: int, stages: int, microbatches: int) -> Run | str:
    """Run the pipeline and one device's model on a rank; return the run, or a description of another kind of result.

    The run has the last stage's output of each micro-batch, and the gradients of all stages' weights.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from labs.xla.annotations import mesh_of
    from labs.xla.hlo import collectives

    numbers = np.random.default_rng(seed)
    weights = numbers.normal(size=(stages, 6, 6)).astype("float32")
    x, asked = numbers.normal(size=(2, microbatches, 2, 6)).astype("float32")

    def stage(own: Any, x: Any) -> Any:
        return jnp.tanh(x @ own) + 0.5

    def mapped(own: Any, x: Any) -> Any:
        made = fn(stage, own[0], x)
        if getattr(made, "ndim", None) != x.ndim:
            raise OfAnotherKind(show(made))
        return made

    by_stage = PartitionSpec("pp")
    run = jax.shard_map(mapped, mesh=mesh_of({"pp": stages}), in_specs=(by_stage, PartitionSpec()), out_specs=by_stage)

    def last(weights: Any) -> Any:
        return of_the_last(run(weights, x))

    def of_the_last(made: Any) -> Any:
        return made[-(len(made) // stages) :]

    def in_turn(weights: Any) -> Any:
        made = x
        for own in weights:
            made = stage(own, made)
        return made

    def both(forward: Callable[..., Any], made: Any) -> Arrays:
        size = min(len(made), microbatches)
        back = jax.jit(jax.grad(lambda w: (forward(w)[:size] * asked[:size]).sum()))(weights)
        return {"what comes out": np.asarray(made), "the gradient of the weights": np.asarray(back)}

    try:
        lowered = jax.jit(run).lower(weights, x)
    except OfAnotherKind as kind:
        return str(kind)
    compiled, at_once = lowered.compile(), most_at_once(lowered.as_text()) // x[0].size
    made = np.asarray(compiled(*jax.device_put((weights, x), compiled.input_shardings[0])))
    fresh = [{"what comes out": np.asarray(one)} for one in stage(weights[-1], x)]
    found, expected, sent = (
        both(last, of_the_last(made)),
        both(in_turn, in_turn(weights)),
        collectives(compiled.as_text()),
    )
    return Run(found, expected, sent, fresh, 0, at_once, stages, microbatches, x[0].nbytes)


def most_at_once(text: str) -> int:
    """Return the most numbers that one tanh makes, or one message hands on, in a program before XLA changes it."""
    shapes = re.findall(r"stablehlo\.(?:tanh|collective_permute)\b.*tensor<([\dx]+)xf32>$", text, re.MULTILINE)
    return max((prod(map(int, shape.split("x"))) for shape in shapes), default=0)


def of_fresh_ones_alone(run: Run) -> str:
    """Return the error if the last stage has only made outputs of micro-batches that no other stage has had, or ""."""
    out, fresh = run.received["what comes out"], [own["what comes out"] for own in run.own]
    return (
        run.description
        if all(any(np.allclose(made, one, rtol=1e-4, atol=1e-5) for one in fresh) for made in out)
        else ""
    )


def comes_out(run: Run, expected: np.ndarray, at: int = 0) -> str:
    """Return the error if these values come out from this place on, or ""."""
    found = run.received["what comes out"][at : at + len(expected)]
    return (
        run.description
        if len(expected) and found.shape == expected.shape and np.allclose(found, expected, rtol=1e-4, atol=1e-5)
        else ""
    )


# fmt: off
PIPED = (
    Mistake("nobody hands anything on",
            "Where does the second stage get what the first one made, and which stage takes the fresh ones?",
            of_fresh_ones_alone),
    Mistake("more is gathered than a stage needs", "What stays where it is in a pipeline, and who needs what moves?",
            lambda run: run.bytes_of("all-gather") and
            f"a device sends {run.bytes_of('all-gather')} bytes to gather, where each stage has its own"),
    Mistake("the whole batch at once", "While the first stage computes all of it, what do the others do?",
            lambda run: run.at_once > 1 and f"a stage makes, or hands on, {run.at_once} micro-batches at a time"),
    Mistake("one micro-batch after the other", "What does the first stage do while the second one computes?",
            lambda run: run.bytes_of("collective-permute") > (run.microbatches + run.stages - 1) * run.each and
            f"a device hands on {run.bytes_of('collective-permute')} bytes, in micro-batches of {run.each}: more than "
            "M + N - 1 of them"),
    Mistake("the first ticks are taken for results", "In which tick does the first micro-batch leave the last stage?",
            lambda run: comes_out(run, run.expected["what comes out"][: len(run) - run.stages + 1], run.stages - 1)),
    Mistake("it ends too soon", "How many ticks does the last micro-batch need, after the first one has begun?",
            lambda run: len(run) < run.microbatches and run.description),
    Mistake("", "", lambda run: run.description),
)
# fmt: on


def worlds(draw: Draw) -> dict[int, list[Devices]]:
    words = "{1} micro-batches, {0} stages"
    return {
        sizes[0]: [draw.world(Devices, 1, devices=sizes[0], given=sizes, words=words.format(*sizes))]
        for sizes in PIPELINES
    }


PLAY = play(worlds, in_stages, PIPED, "Which micro-batch is at which stage in a tick?")


@answered
def pipelined(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(stage, own, x) -> y` on each device of the axis "pp", of which the last one's y counts.

    Returns the text of the ✓ line.
    """
    checked(PLAY, fn, seed)
    return "right on 4 stages, and on 3 with fewer micro-batches; so are the gradients that JAX derives"
