"""The challenge of 11: find the mesh that sends the fewest bytes between nodes.

Eight ranks on two or four nodes train for a step on the chosen mesh.  The loss must be one process's, and the recorded
messages say how many bytes leave a node, or come into it.

The bound: let each node hold a fraction f of the layers and read a fraction g of the sequences.  Together the n nodes
do all the work once, so f·g = 1/n.  1/g nodes add up their gradients of the same layers, and each of them sends
2 (1 - g) of these gradients.  At each end of its layers that is no end of the model, a node also sends the activations
of its sequences, or their gradients.  Splitting matrices between nodes would send more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from labs import pp, tp
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.launch import Results
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.parallel import AXES, Parallel

RANKS, ITEM = 8, 4  # bytes of a float32
TOLERANCE = 1e-4


class ModelOnNodes(NamedTuple):
    """A model and the nodes on which it is trained.

    batch: the number of sequences in a step.
    pieces: a rank may hold 1/pieces of P, G and S, and no more.
    """

    config: Config
    batch: int
    nodes: int
    pieces: int


SMALL = Config(vocab=64, dim=32, depth=4, heads=4, kv_heads=2, hidden=64, context=16)
LARGE = Config(vocab=64, dim=64, depth=4, heads=8, kv_heads=4, hidden=192, context=8)
CASES = {
    "few tokens": ModelOnNodes(LARGE, 16, 2, 8),
    "many tokens": ModelOnNodes(SMALL, 128, 2, 4),
    "four nodes": ModelOnNodes(SMALL, 128, 4, 4),
    "little room": ModelOnNodes(SMALL, 128, 4, 8),
}


def bound(case: ModelOnNodes) -> float:
    """Return the fewest bytes that leave the busiest node, or come into it."""
    with torch.device("meta"):
        gradients = ITEM * sum(p.numel() for p in GPT(case.config).parameters())
    cut = ITEM * case.batch * case.config.context * case.config.dim
    stages = [n for n in (1, 2, 4) if n <= case.nodes]
    return min(2 * (1 - n / case.nodes) * gradients / n + min(n - 1, 2) * cut * n / case.nodes for n in stages)


def on_a_rank(fn: Function, batches: list[Any], cases: Sequence[ModelOnNodes]) -> list[list[float]]:
    found = []
    for case, (x, y) in zip(cases, batches, strict=True):
        axes = fn(*case)
        require_mesh(axes, case)
        whole = dict.fromkeys(AXES, 1) | axes
        order = (*(axis for axis in AXES if axis not in axes), *axes)
        mesh, stages = Mesh(tuple(whole[axis] for axis in order), order), whole["pp"]
        lists = pp.one_f_one_b(stages, stages)
        parallel = Parallel(pp.cut(GPT(case.config), stages), lists, mesh, tp.gpt_plan(case.config))
        data = mesh["replicate", "shard"]._flatten()
        mark("step")
        losses = parallel.forward_backward(*(each.chunk(data.size())[data.get_local_rank()] for each in (x, y)))
        mark("end")
        found.append([loss.item() for loss in losses])
    return found


def require_mesh(axes: Any, case: ModelOnNodes) -> None:
    if not isinstance(axes, Mapping) or not {*axes} <= {*AXES} or not all(type(n) is int for n in axes.values()):
        raise ValueError(f"it returned {show(axes)}: a size for each of some axes is needed, of {', '.join(AXES)}")
    if prod(axes.values()) != RANKS:
        raise ValueError(f"{axes}: there are {RANKS} ranks, and these are {prod(axes.values())}")
    if (pieces := RANKS // axes.get("replicate", 1)) < case.pieces:
        raise ValueError(f"{axes}: a rank keeps 1/{pieces} of the state, and has room for 1/{case.pieces}")
    names = list(axes)
    if {"replicate", "shard"} <= {*names} and names.index("shard") < names.index("replicate"):
        raise ValueError(f"{axes}: replicate stands before shard")


def measured(name: str, axes: Mapping[str, int]) -> int:
    """Return the most bytes that leave one node, or come into it, in a step of one case on this mesh.

    Raises ValueError for a mesh that is not allowed.
    """
    require_mesh(axes, case := CASES[name])
    results = job(on_a_rank, lambda *case: axes, batches_of([case], chance()), [case], ranks=RANKS)
    return busiest(results, 0, RANKS // case.nodes)


def batches_of(cases: Iterable[ModelOnNodes], generator: torch.Generator) -> list[Any]:
    return [
        torch.randint(case.config.vocab, (2, case.batch, case.config.context), generator=generator) for case in cases
    ]


def judge(fn: Function) -> Judged:
    batches = batches_of(CASES.values(), chance())
    results, scores = job(on_a_rank, fn, batches, list(CASES.values()), ranks=RANKS), {}
    for number, (name, case) in enumerate(CASES.items()):
        losses = [loss for found in results for loss in found[number]]
        expected = GPT(case.config)(*batches[number]).item()
        if not abs(sum(losses) / len(losses) - expected) < TOLERANCE:
            raise Wrong(f"{name}: the loss is not one process's", "Which sequences are read twice, or not at all?")
        scores[name] = 100 * bound(case) / busiest(results, number, RANKS // case.nodes)
    return Judged.of(scores)


def busiest(results: Results, step: int, node: int) -> int:
    """Return the most bytes that leave one node, or come into it, in a step.

    Only float32 counts: what ranks tell each other before the first step has another dtype.
    """
    ways: Counter[tuple[str, int]] = Counter()
    for rank in range(RANKS):
        for event in results.recording.select(rank, step):
            for to, size in event.to.items() if event.dtype == "float32" else ():
                if rank // node != to // node:
                    ways["out", rank // node] += size
                    ways["in", to // node] += size
    return max(ways.values(), default=1)


best_mesh = Challenge(
    "best_mesh",
    "11",
    "Find the mesh that sends the fewest bytes between nodes",
    "Eight ranks on two or four nodes, and so much room on a rank. Choose the sizes of the axes and their order, for "
    "four models and batches; a step is run for real, and what leaves the busiest node is counted.",
    judge,
    floor=51.3,
    course=70.4,
    possible=100.0,
    cases=CASES,
    bound=bound,
    measured=measured,
)
