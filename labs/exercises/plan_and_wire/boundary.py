"""The challenge of 09b: one block on four ranks in two nodes, and the time of its messages between the nodes.

Each rank has a quarter of the tokens, and the part of `up` and `down` that belongs to a quarter of the features.  A
message to the other node takes latency + bytes / bandwidth, and a node sends one at a time.  Messages inside a node are
free.

The bound, for T tokens of D numbers and H features:  For its own tokens a node needs the other node's part of y and of
the gradient of x, TD numbers, or else the other node's weights, DH numbers.  The gradients of its weights need as much:
DH numbers, or TD numbers of the other node's tokens.  So at least 2 D min(T, H) numbers leave a node, in at least one
message in forward and one in backward.  No way takes less: because of silu, none of these numbers can be computed from
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import Recording, mark
from labs.mesh import Mesh

NODES, GPUS = 2, 2
RANKS = NODES * GPUS
LATENCY, BANDWIDTH, ITEM = 0.5e-3, 8e6, 8  # s, bytes/s, bytes per number: a latency is as long as 500 numbers take
DIMS = {"the gradient of x": 0, "the gradient of up": 1, "the gradient of down": 0, "y": 0}  # the dim that is sharded
Tensors = list[Tensor]


class BoundaryBlock(NamedTuple):
    tokens: int
    width: int
    features: int


class Measured(NamedTuple):
    """The messages that leave the busier node, the numbers in them, and the seconds for which they use its link."""

    messages: int
    numbers: int
    seconds: float


BLOCKS = {
    "few tokens": BoundaryBlock(16, 32, 128),
    "many tokens": BoundaryBlock(256, 32, 64),
    "nearly as many": BoundaryBlock(64, 32, 80),
    "wide": BoundaryBlock(64, 64, 256),
    "narrow": BoundaryBlock(128, 64, 16),
}


def bound(block: BoundaryBlock) -> float:
    numbers = 2 * block.width * min(block.tokens, block.features)
    return 2 * LATENCY + ITEM * numbers / BANDWIDTH


def one_block(fn: Function, block: BoundaryBlock, generator: torch.Generator, mesh: Mesh) -> tuple[Tensors, Tensors]:
    """Run the learner's block on a rank; return its inputs x, up, down and y's gradient, and its results as in DIMS."""
    t, D, h = block.tokens // RANKS, block.width, block.features // RANKS
    shapes = (t, D), (D, h), (h, D), (t, D)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for shape in shapes]
    *leaves, back = (each.clone() for each in inputs)
    y = fn(*(leaf.requires_grad_() for leaf in leaves), mesh)
    if not isinstance(y, Tensor) or y.shape != back.shape:
        raise ValueError(f"it returned {show(y)}: y for this rank's tokens is needed, {tuple(back.shape)}")
    output = y.detach().clone()  # a copy, since backward might change y
    y.backward(back)
    return inputs, [*(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves), output]


def on_a_rank(fn: Function, blocks: Sequence[BoundaryBlock]) -> list[tuple[Tensors, Tensors]]:
    """Run some blocks on a rank; return the inputs and results of each."""
    generator, mesh, found = chance(), Mesh((NODES, GPUS), ("nodes", "gpus")), []
    for block in blocks:
        mark("step")
        found.append(one_block(fn, block, generator, mesh))
        mark("end")
    return found


def judge(fn: Function) -> Judged:
    results, scores = job(on_a_rank, fn, [*BLOCKS.values()], ranks=RANKS), {}
    for number, (called, block) in enumerate(BLOCKS.items()):
        for name, right in compared([of_rank[number] for of_rank in results]).items():
            if not right.all():
                raise Wrong(f"{called}: {name} is wrong in {int((~right).sum())} places", "Whose tokens are in it?")
        scores[called] = 100 * bound(block) / busier(results.recording, number).seconds
    return Judged.of(scores)


def measured(called: str, fn: Function) -> Measured:
    """Run a function on one of the blocks, and return what leaves the busier node; the results are not compared."""
    return busier(job(on_a_rank, fn, [BLOCKS[called]], ranks=RANKS).recording, 0)


def compared(found: Sequence[tuple[Tensors, Tensors]]) -> dict[str, Tensor]:
    """Return {name: the places in which the ranks' result is the one that one process computes from all inputs}."""
    inputs, results = map(whole, zip(*found, strict=True))
    *leaves, back = inputs
    x, up, down = (leaf.requires_grad_() for leaf in leaves)
    y = F.silu(x @ up) @ down
    y.backward(back)
    expected = x.grad, up.grad, down.grad, y.detach()
    return {name: (a - b).abs() <= 1e-12 * (1 + b.abs()) for name, a, b in zip(DIMS, results, expected, strict=True)}


def whole(parts: Sequence[Tensors]) -> Tensors:
    return [torch.cat(each, dim) for dim, *each in zip(DIMS.values(), *parts, strict=True)]


def busier(recording: Recording, step: int) -> Measured:
    """Return what leaves the node whose wire is busy for longer."""
    return max((leaving(recording, step, node) for node in range(NODES)), key=lambda each: each.seconds)


def leaving(recording: Recording, step: int, node: int) -> Measured:
    ranks = range(node * GPUS, (node + 1) * GPUS)
    sent = [event.to for rank in ranks for event in recording.select(rank, step)]
    leave = [size for to in sent for other, size in to.items() if other not in ranks and size]
    return Measured(len(leave), sum(leave) // ITEM, len(leave) * LATENCY + sum(leave) / BANDWIDTH)


boundary = Challenge(
    "boundary",
    "09b",
    "One block over a node boundary",
    "Four ranks in two nodes have a quarter of the tokens each, and a quarter of the features. Compute y and all "
    "gradients, so that the wire between the nodes is busy for the least time. Five blocks differ in their sizes.",
    judge,
    floor=28.7,
    course=58.4,
    possible=93.2,
    cases=BLOCKS,
    bound=bound,
    measured=measured,
)
