"""A row of the table of strategies.

The columns are the fields of a Strategy:

    name      its name for `--strategies`; PyTorch's   side      "ours" or "native"
              begin with "torch-"
    apply     (model, mesh) -> Training                axes      ranks asked for -> {axis: size} of its mesh
    predict   labs.cost.Job -> Prediction of a step    batch     the axes along which the batch is cut: ranks that
    sent      (root, layers, ranks, rank) ->                     differ only in another axis read the same part
              bytes, for any model by the shapes       bitwise   the numbers of ranks on which it equals one process
              of its layers; root: the other parts;              with micro-batches bit for bit, in float32
              None if the tokens count, too            takes     the class of models that it can train: a GPT, if it
    computes  the dtype of its computation; P is                 needs a plan
              float32 between steps                    note      how PyTorch's way differs from its stage, or from
    dtypes    the dtypes that the model may have                 ours
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

Layers = Sequence[cost.Layer]


@dataclass(frozen=True)
class Strategy:
    """A row of the table; the head of this file describes its columns."""

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
        """Return how many of the ranks asked for the strategy uses."""
        return prod(self.axes(asked).values())

    def fits(self, asked: int) -> bool:
        """Return whether `axes` has a mesh for this many ranks; `axes` raises ValueError if it has none."""
        try:
            return bool(self.axes(asked))
        except ValueError:
            return False

    def parts(self, asked: int) -> int:
        """Return the number of parts into which the batch is cut."""
        return prod(self.axes(asked)[axis] for axis in self.batch)

    def part(self, mesh: Mesh) -> int:
        """Return the number of the part that this rank reads."""
        number = 0
        for axis in self.batch:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        return number


def sizes_of(root: Layers, layers: Layers) -> list[int]:
    return [size for layer in (*root, *layers) for size in layer.sizes]
