"""A function that each device runs on its own piece (jax.shard_map): ZeRO 3's gradients, and a pipeline of stages.

It runs on virtual devices.  What it gives is compared with one device's, and what it sends is read from what XLA has
compiled: missing numbers, and needless bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from labs.kit import virtual
from labs.kit.checks.answer import Mistake, Wrong, answered, refuse, says, show
from labs.kit.checks.launching import job
from labs.xla.hlo import Collective

N = 4
PIPELINES = ((4, 5), (3, 2))  # stages and micro-batches: more of the one, and of the other
COMPILING = 60.0  # s of the processor: three programs in a job
Arrays = dict[str, np.ndarray]


@dataclass
class Run:
    """By name: found, what it gave; due; own: what would be due of each part alone.

    sent: the collectives of the compiled program; weights: bytes; at_once: micro-batches in one call of a stage;
    stages, microbatches: of a pipeline; each: bytes of a micro-batch.
    """

    found: Any
    due: Arrays
    sent: Sequence[Collective]
    own: Sequence[Arrays] = ()
    weights: int = 0
    at_once: int = 1
    stages: int = N
    microbatches: int = 0
    each: int = 0

    def __len__(self) -> int:
        """What comes out of a pipeline, in micro-batches."""
        return len(self.found["what comes out"])

    def is_due(self, times: float = 1.0) -> bool:
        return self.is_like({name: times * value for name, value in self.due.items()})

    def is_like(self, other: Arrays) -> bool:
        return all(
            np.shape(self.found[name]) == value.shape and np.allclose(self.found[name], value, rtol=1e-4, atol=1e-5)
            for name, value in other.items()
        )

    def bytes_of(self, kind: str) -> int:
        return sum(one.sent for one in self.sent if one.kind == kind)

    @property
    def told(self) -> str:
        """The first that is not as it should be, and where."""
        for name, due in self.due.items():
            if (shape := np.shape(self.found[name])) != due.shape:
                return f"{name!r} is {shape} on all devices together, and not {due.shape}"
            if not np.allclose(self.found[name], due, rtol=1e-4, atol=1e-5):
                at = tuple(map(int, np.argwhere(~np.isclose(self.found[name], due, rtol=1e-4, atol=1e-5))[0]))
                return f"{name!r} at {list(at)} is {self.found[name][at]:.4g}, and not {due[at]:.4g}"
        return ""


def on_virtual_devices(script: Callable[..., Run | str], fn: Callable[..., Any], *given: int, devices: int = N) -> Run:
    if told := virtual.missing():
        raise Wrong(told, "Has it been added to the course's own Python?")
    run = job(virtual.with_devices, devices, script, (fn, *given), {}, ranks=1, seconds=COMPILING)[0]
    if isinstance(run, str):
        mistake = "nothing is returned" if run == "None" else "a different kind of answer"
        raise Wrong(f"it returns {run}", "What does the docstring say is returned?", mistake)
    return run


class OfAnotherKind(Exception):
    """What was returned cannot be looked at; it says what it is."""


# ---- ZeRO 3 ----------------------------------------------------------------------------------------------


def in_shards(fn: Callable[..., Any], seed: int) -> Run | str:
    """On a rank."""
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
    due = jax.tree.map(np.asarray, gradient(weights, x, y))
    found = jax.tree.map(np.asarray, dict(compiled(*jax.device_put((weights, x, y), compiled.input_shardings[0]))))
    return Run(found, due, collectives(compiled.as_text()), own, sum(w.nbytes for w in weights.values()))


def pieces_of_own(run: Run) -> Arrays:
    """Each device's shard of the gradient of its own part of the batch."""
    return {name: np.concatenate([np.split(own[name], N)[at] for at, own in enumerate(run.own)]) for name in run.due}


def of_one_part(run: Run) -> str:
    own = pieces_of_own(run)
    return run.told if any(run.is_like({name: w / by for name, w in own.items()}) for by in (1, N)) else ""


def whole(run: Run) -> str:
    rows = all(np.shape(run.found[name])[0] == N * len(due) for name, due in run.due.items())
    return run.told if rows else ""


# fmt: off
SHAPES = (
    Mistake("loss is given a weight that is not whole, or has a dim more",
            "Print the shape of what you hand to loss: have you gathered it, and with tiled=True?",
            says("TypeError: (dot_general requires|add got incompatible shapes)")),
)
SHARDED = (
    Mistake("whole gradients, and no shards", "Which rows of the gradient does this device's optimizer need?", whole),
    Mistake("of its own part of the batch alone", "Who tells this device of what the others have read?", of_one_part,
            shows="a loss curve that is nearly right, and gets noisier the more devices there are"),
    Mistake("summed, and not averaged", "loss is the mean of a part. Of how many parts is the sum?",
            lambda run: run.told if run.is_due(N) else ""),
    Mistake("divided once too often", "Who has divided already?", lambda run: run.told if run.is_due(1 / N) else ""),
    Mistake("", "", lambda run: run.told),
    Mistake("all-reduced, where a part is needed", "How much of the sum does each device keep, and how much arrives?",
            lambda run: run.bytes_of("all-reduce") > run.weights and
            f"a device sends {run.bytes_of('all-reduce')} bytes to all-reduce, for weights of {run.weights}"),
    Mistake("gathered too much", "Which bytes are missing here, and how often do you ask for them?",
            lambda run: run.bytes_of("all-gather") > run.weights * (N - 1) / N and
            f"a device sends {run.bytes_of('all-gather')} bytes to gather weights of {run.weights}"),
)
# fmt: on


@answered
def sharded_gradients(fn: Callable[..., Any], seed: int) -> str:
    """`fn(loss, shards, x, y) -> shards of the gradients`, on each device of the axis "dp"."""
    try:
        run = on_virtual_devices(in_shards, fn, seed)
    except Wrong as wrong:
        raise wrong.told_by(SHAPES) from None
    refuse(SHARDED, run, f"on {N} devices ", "What is added up, over which devices, and divided by what?")
    sent, n = sum(one.sent for one in run.sent), run.weights
    return f"right on {N} devices; each sends {sent} bytes for weights of {n}: gathered once, reduce-scattered once"


# ---- a pipeline ------------------------------------------------------------------------------------------


def in_stages(fn: Callable[..., Any], seed: int, stages: int, microbatches: int) -> Run | str:
    """On a rank: what the last stage made of each micro-batch, and the gradients of all stages' weights."""
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
    found, due, sent = both(last, of_the_last(made)), both(in_turn, in_turn(weights)), collectives(compiled.as_text())
    return Run(found, due, sent, fresh, 0, at_once, stages, microbatches, x[0].nbytes)


def most_at_once(text: str) -> int:
    """The most numbers that a stage makes, by its tanh, or hands on in one operation of a program before XLA has it."""
    shapes = re.findall(r"stablehlo\.(?:tanh|collective_permute)\b.*tensor<([\dx]+)xf32>$", text, re.MULTILINE)
    return max((prod(map(int, shape.split("x"))) for shape in shapes), default=0)


def of_fresh_ones_alone(run: Run) -> str:
    """What the last stage makes of micro-batches that no other stage has had."""
    out, fresh = run.found["what comes out"], [own["what comes out"] for own in run.own]
    return run.told if all(any(np.allclose(made, one, rtol=1e-4, atol=1e-5) for one in fresh) for made in out) else ""


def comes_out(run: Run, due: np.ndarray, at: int = 0) -> str:
    found = run.found["what comes out"][at : at + len(due)]
    return run.told if len(due) and found.shape == due.shape and np.allclose(found, due, rtol=1e-4, atol=1e-5) else ""


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
            lambda run: comes_out(run, run.due["what comes out"][: len(run) - run.stages + 1], run.stages - 1)),
    Mistake("it ends too soon", "How many ticks does the last micro-batch need, after the first one has begun?",
            lambda run: len(run) < run.microbatches and run.told),
    Mistake("", "", lambda run: run.told),
)
# fmt: on


@answered
def pipelined(fn: Callable[..., Any], seed: int) -> str:
    """`fn(stage, own, x) -> y`, on each device of the axis "pp"; y of the last one counts."""
    for stages, microbatches in PIPELINES:
        run = on_virtual_devices(in_stages, fn, seed, stages, microbatches, devices=stages)
        where = f"{microbatches} micro-batches, {stages} stages: "
        refuse(PIPED, run, where, "Which micro-batch is at which stage in a tick?")
    return "right on 4 stages, and on 3 with fewer micro-batches; so is the way back, which JAX has made of it"
