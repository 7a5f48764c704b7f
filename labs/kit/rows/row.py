"""The class of a row of the table of strategies.

A row is one strategy, and its columns are the fields of a Strategy:

    name      the strategy's name for `--strategies`;  side      "ours" or "native"
              names of PyTorch's begin with "torch-"   axes      ranks asked for -> {axis: size} of the mesh
    apply     (model, mesh) -> Training                batch     the axes along which the batch is cut: ranks that
    predict   labs.cost.Job -> Prediction of a step              differ only in another axis read the same part
    sent      (root, layers, ranks, rank) ->           bitwise   the numbers of ranks on which training in float32
              bytes, for any model by the shapes                 equals one process with micro-batches bit for bit
              of its layers; root: the other parts;    takes     the class of models that the strategy can train: GPT
              None if the tokens count, too                      if it needs a plan
    computes  the dtype of the computation; P is       note      how a native strategy differs from the one of this
              float32 between steps                              course beside it
    dtypes    the dtypes that the model may have
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from labs import cost
from labs.kit.training.training_step import Training
from labs.mesh import Mesh

Layers = Sequence[cost.LayerShapes]


@dataclass(frozen=True)
class Strategy:
    """A row of the table of strategies; the head of this file describes its columns."""

    name: str
    side: str
    apply: Callable[[nn.Module, Mesh], Training]
    predict: Callable[[cost.Job], cost.Prediction]
    sent: Callable[..., int] | None
    axes: Callable[[int], Mapping[str, int]] = lambda asked: {"dp": asked}
    batch: tuple[str, ...] = ("dp",)
    bitwise: tuple[int, ...] = (2,)
    takes: type[nn.Module] = nn.Module
    computes: torch.dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    note: str = ""

    def ranks(self, asked: int) -> int:
        """Return how many ranks the strategy uses of the ranks asked for."""
        return prod(self.axes(asked).values())

    def fits(self, asked: int) -> bool:
        """Return whether the strategy has a mesh for this many ranks; `axes` raises ValueError if it has none."""
        try:
            return bool(self.axes(asked))
        except ValueError:
            return False

    def parts(self, asked: int) -> int:
        """Return the number of parts into which the strategy cuts a batch."""
        return prod(self.axes(asked)[axis] for axis in self.batch)

    def part(self, mesh: Mesh) -> int:
        """Return the number of the part of the batch that this rank reads."""
        number = 0
        for axis in self.batch:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        return number


def sizes_of(root: Layers, layers: Layers) -> list[int]:
    return [size for layer in (*root, *layers) for size in layer.sizes]
