"""What a row of the table says about a strategy.

Its columns, which are the fields of a Strategy:

    name      what `--strategies` calls it; those      side      "ours" or "native"
              of PyTorch begin with "torch-"
    apply     (model, mesh) -> Training                axes      ranks asked for -> the sizes of its mesh, by axis
    predict   labs.cost.Job -> Prediction of a step    batch     along which of them the batch is cut: ranks that
    sent      (root, layers, ranks, rank) ->                     differ in another axis only, read the same part
              bytes, for any model by the shapes       bitwise   on how many ranks it equals the micro-batched
              of its layers; root: the other parts;              process bit for bit, in float32
              None where the tokens count, too         takes     the models that it can train: for a GPT it has a plan
    computes  in which dtype; at rest all is float32   note      where PyTorch's differs from its stage, or from ours
    dtypes    in which the model itself may be
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from labs import cost
from labs.kit.training import Training
from labs.mesh import Mesh

Layers = Sequence[cost.Layer]


@dataclass(frozen=True)
class Strategy:
    """A row, as the head of this file has it."""

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
        """How many it takes of those asked for."""
        return prod(self.axes(asked).values())

    def fits(self, asked: int) -> bool:
        """Whether `axes` has a mesh for this many; where not, it raises ValueError."""
        try:
            return bool(self.axes(asked))
        except ValueError:
            return False

    def parts(self, asked: int) -> int:
        """Into how many parts the batch is cut."""
        return prod(self.axes(asked)[axis] for axis in self.batch)

    def part(self, mesh: Mesh) -> int:
        """Which of them this rank reads."""
        number = 0
        for axis in self.batch:
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
        return number


def sizes_of(root: Layers, layers: Layers) -> list[int]:
    return [size for layer in (*root, *layers) for size in layer.sizes]
