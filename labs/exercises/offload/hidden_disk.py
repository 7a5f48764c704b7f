"""The challenge of 07b: read, update and write the states of two training steps, which are on a disk, in time.

The GPU computes the layers' forward and backward, the processor updates, and the disk reads or writes: three lanes,
each with one task at a time.  The learner gives the order of the last two; the GPU's is fixed.  A layer's update waits
for its backward, and its forward in the next step waits for the update (`measured`).

The bound is the larger of two times.  The GPU computes all layers; the first layer's gradient is the last one, so its
update follows each step, and its write the last one.  The disk reads and writes all states once, and the states that do
not fit into memory between the two steps once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job

STEPS = 2
Program = Sequence[tuple[str, int]]


class UpdateCosts(NamedTuple):
    """A model: for each layer, from the first on, the bytes of its state and the seconds of its forward and update."""

    nbytes: tuple[int, ...]
    forward: tuple[float, ...]
    update: tuple[float, ...]
    budget: int  # bytes in memory at a time
    latency: float  # s
    bandwidth: float  # bytes/s


def training(megabytes: Sequence[int], milliseconds: Sequence[float], budget: int, latency: float) -> UpdateCosts:
    """Return a training with a disk of 2 GB/s and a processor that updates 4 GB/s."""
    nbytes = tuple(1_000_000 * m for m in megabytes)
    forward = tuple(each / 1e3 for each in milliseconds)
    return UpdateCosts(nbytes, forward, tuple(n / 4e9 for n in nbytes), 1_000_000 * budget, latency, 2e9)


TRAININGS = {
    "even": training([24] * 8, [6] * 8, 96, 1e-3),
    "large ends": training([64, *[16] * 6, 64], [8, *[4] * 6, 12], 144, 1e-3),
    "a hill": training([8, 16, 32, 48, 48, 32, 16, 8], [4] * 8, 112, 2e-3),
    "much room": training([24] * 8, [3] * 8, 144, 1e-3),
    "ups and downs": training([40, 8] * 4, [3, 6] * 4, 96, 2e-3),
}


def measured(program: Program, given: UpdateCosts) -> tuple[float, int]:
    """Return the seconds from the start to the last write, and the most bytes held at once.

    Raises ValueError for a list of instructions that cannot be obeyed.
    """
    given = UpdateCosts(*given)
    layers, changes = range(len(given.nbytes)), []
    gpu = processor = disk = 0.0
    ready: dict[int, list[float]] = {layer: [] for layer in layers}  # the time of a layer's gradient in each step
    here: dict[int, float] = {}  # the time from which on a layer's state can be used; only states in memory
    updated: dict[int, list[float]] = {layer: [0.0] for layer in layers}

    def compute() -> None:
        nonlocal gpu
        step = len(ready[0])
        for layer in layers:
            gpu = max(gpu, updated[layer][step]) + given.forward[layer]
        for layer in reversed(layers):
            gpu += 2 * given.forward[layer]
            ready[layer].append(gpu)

    compute()
    for what, layer in program:
        require_possible(what, layer, layers, here, updated)
        took = given.latency + given.nbytes[layer] / given.bandwidth
        if what == "read":
            changes.append((disk, given.nbytes[layer]))
            here[layer] = disk = disk + took
        elif what == "update":
            begin = max(processor, here[layer], ready[layer][len(updated[layer]) - 1])
            here[layer] = processor = begin + given.update[layer]
            updated[layer].append(processor)
            if len(ready[0]) < STEPS and all(len(each) > len(ready[0]) for each in updated.values()):
                compute()
        else:
            disk = max(disk, here.pop(layer)) + took
            changes.append((disk, -given.nbytes[layer]))
    if here or any(len(each) <= STEPS for each in updated.values()):
        raise ValueError(f"each layer must be updated {STEPS} times, and each state that was read must be written back")
    return max(gpu, disk), max(sum(n for at, n in changes if at <= now) for now, _ in changes)


def require_possible(what: str, layer: int, layers: range, here: Any, updated: Any) -> None:
    if what not in ("read", "update", "write") or layer not in layers:
        raise ValueError(f"({what!r}, {layer!r}): there is no such instruction")
    if (what == "read") == (layer in here):
        place = "in memory already" if layer in here else "not in memory"
        raise ValueError(f"({what!r}, {layer!r}): the state is {place}")
    first = min(map(len, updated.values()))
    if what == "update" and len(updated[layer]) > min(first, STEPS):
        raise ValueError(f"({what!r}, {layer!r}): step {first - 1} comes first")


def bound(given: UpdateCosts) -> float:
    wire = [given.latency + n / given.bandwidth for n in given.nbytes]
    computed = STEPS * (3 * sum(given.forward) + given.update[0]) + wire[0]
    again = max(sum(given.nbytes) - given.budget, 0) / given.bandwidth
    return max(computed, 2 * sum(wire) + 2 * (STEPS - 1) * again)


def obeyed(program: Program, states: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Obey the list of instructions on real tensors; return the optimizer states that the disk holds in the end."""
    disk, here, steps = [state.clone() for state in states], {}, [0] * len(states)
    for what, layer in program:
        if what == "read":
            here[layer] = disk[layer].clone()
        elif what == "update":
            update(here[layer], gradients[steps[layer]][layer])
            steps[layer] += 1
        else:
            disk[layer] = here.pop(layer)
    return disk


def update(state: Tensor, gradient: Tensor) -> None:
    """Update a state in place; its rows are the values and the running mean of the gradients."""
    state[1].mul_(0.9).add_(gradient)
    state[0].sub_(0.1 * state[1])


def on_a_rank(fn: Function) -> list[Any]:
    generator, found = chance(), []
    for given in TRAININGS.values():
        program = fn(*(list(each) if isinstance(each, tuple) else each for each in given))
        if not isinstance(program, list) or not all(isinstance(each, tuple) and len(each) == 2 for each in program):
            raise ValueError(f"it returned {show(program)}: a list of instructions is needed, such as ('read', 0)")
        measured(program, given)
        draws = torch.randn(2 + STEPS, len(given.nbytes), 3, generator=generator, dtype=torch.float64)
        states, gradients = list(draws[:2].unbind(1)), draws[2:]
        found.append((program, states, gradients, obeyed(program, states, gradients)))
    return found


def judge(fn: Function) -> Judged:
    (found,) = job(on_a_rank, fn, ranks=1, record=None)
    scores = {}
    for (called, given), (program, states, gradients, left) in zip(TRAININGS.items(), found, strict=True):
        for layer, state in enumerate(states):
            for step in range(STEPS):
                update(state, gradients[step][layer])
            if not torch.equal(state, left[layer]):
                raise Wrong(
                    f"{called}: layer {layer} on the disk is not what the training leaves", "Who wrote it last?"
                )
        seconds, most = measured(program, given)
        if most > given.budget:
            raise Wrong(f"{called}: {most:,} bytes are held at once, and the budget is {given.budget:,}", "When?")
        scores[called] = 100 * bound(given) / seconds
    return Judged.of(scores)


hidden_disk = Challenge(
    "hidden_disk",
    "07b",
    "A step under which the disk disappears",
    "Say when the disk reads and writes each layer's state and when it is updated, in two steps of five models, beside "
    "a GPU that goes through its layers. What stays in memory need not be read again, and takes of the room.",
    judge,
    floor=51.6,
    course=67.0,
    possible=85.3,
    cases=TRAININGS,
    measured=measured,
)
