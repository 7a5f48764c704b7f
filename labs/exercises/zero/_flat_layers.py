"""Layers as flat vectors, for the stages of ZeRO: weight, bias and padding of a layer lie in one vector, `full`.

The layer computes with views of this vector.  The vector has N equal pieces, and rank r owns piece r.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labs.exercises.engine.on_ranks import F32, F64, Draw
from labs.exercises.engine.scripts import World

LAYERS, WIDE = 10, 64  # layers, and dimensions of each, of the model whose bytes held are measured
SETTLED = 0.002  # s after which a backend's thread has released the tensors that it sent
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Layers(World):
    """A world with a model of layers; layer i maps dims[i] numbers to dims[i + 1]."""

    dims: tuple[int, ...] = ()
    micro_batches: int = 1
    steps: int = 2
    tied: bool = False  # the first layer is used once more after the last one
    frozen: bool = False  # the second layer is frozen
    idle: bool = False  # the last rank has no rows, so its gradients are zeros

    whole: ClassVar[str] = "a layer"

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each layer's vector, a multiple of the number of ranks."""
        return [-(-out * (inside + 1) // self.ranks) * self.ranks for inside, out in pairwise(self.dims)]

    @property
    def trained(self) -> list[int]:
        """The numbers of the layers that are trained."""
        return [i for i in range(len(self.sizes)) if not (self.frozen and i == 1)]

    @property
    def nbytes(self) -> int:
        """The bytes of the first layer's vector, the unit in which bytes held are counted."""
        return self.sizes[0] * self.dtype.itemsize

    @property
    def gradients(self) -> int:
        """The bytes of the gradients of all trained layers."""
        return sum(self.sizes[i] for i in self.trained) * self.dtype.itemsize

    def vectors(self, step: int = 0) -> list[Tensor]:
        """Return the parameters of each layer in this step, the same on every rank."""
        generator = self.generator(63, step)
        numbers = (torch.randn(size, generator=generator, dtype=F64) for size in self.sizes)
        return [(x * inside**-0.5).to(self.dtype) for x, inside in zip(numbers, self.dims, strict=False)]

    def parameters(self) -> nn.ParameterList:
        vectors = enumerate(self.vectors())
        return nn.ParameterList(nn.Parameter(x, requires_grad=i in self.trained) for i, x in vectors)

    def named(self, fulls: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {name: vector} for the layers that are trained."""
        return {f"layer {i}": fulls[i] for i in self.trained}

    def batch(self, rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return a rank's micro-batches, each of one or two rows: (inputs, targets)."""
        generator = self.generator(rank, step)
        rows = (self.micro_batches, 0 if self.idle and rank == self.ranks - 1 else 1 if self.held else 2)
        x, y = (
            torch.randn(*rows, self.dims[i], generator=generator, dtype=F64).to(self.dtype)
            for i in (0, 1 if self.tied else -1)
        )
        return list(zip(x, y, strict=True))

    def losses(self, fulls: Sequence[Tensor], rank: int, step: int) -> Iterator[Tensor]:
        """Yield the mean squared error of a stack of tanh layers on each micro-batch, or 0 if that has no rows."""
        layers = list(zip(fulls, pairwise(self.dims), strict=True))
        for x, y in self.batch(rank, step):
            for full, (inside, out) in layers + (layers[:1] if self.tied else []):
                weight, bias, _ = full.split([out * inside, out, len(full) - out * (inside + 1)])
                x = torch.tanh(nn.functional.linear(x, weight.view(out, inside), bias))
            yield ((x - y) ** 2).sum() / max(1, y.numel())

    def backwards(self, fulls: Sequence[Tensor], rank: int, step: int) -> None:
        """Run the backward of each of a rank's micro-batches, with the loss divided by their number."""
        for loss in self.losses(fulls, rank, step):
            (loss / self.micro_batches).backward()

    def plain(self, fulls: Sequence[Tensor], step: int) -> list[list[Tensor]]:
        """Return [micro-batches of all ranks][trained layers]: the gradients of each micro-batch alone."""
        copies = [full.detach().clone().requires_grad_(i in self.trained) for i, full in enumerate(fulls)]
        trained = [copies[i] for i in self.trained]
        losses = (loss for rank in self.members for loss in self.losses(copies, rank, step))
        return [list(torch.autograd.grad(loss, trained)) for loss in losses]

    def __str__(self) -> str:
        words = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        words += [f"no rows on rank {self.ranks - 1}"] * self.idle
        return ", ".join([self.who, f"{len(self.sizes)} layers", *words, self.dtype_name])


def draw_layers(draw: Draw, kind: type[Layers], ranks: int, alike: bool = False, **options: Any) -> Any:
    """Return a world with three layers of odd sizes.

    alike: whether all layers have the same size.
    """
    first, *others = (draw.random.choice(sizes) for sizes in ((5, 7), (8, 9, 11), (6, 10, 13)))
    return draw.world(kind, ranks, dims=(first,) * 4 if alike else (first, *others, first), **options)


def wide(kind: type[Layers], **options: Any) -> Callable[[Draw], Layers]:
    """Return the function that draws the world whose bytes are measured, always of the same sizes, as in the ✓ line."""
    return lambda draw: draw.world(kind, 4, dims=(WIDE,) * (LAYERS + 1), **{"dtype": F32} | options)


def thaw(full: nn.Parameter, trained: bool = True) -> bool:
    """Return whether a parameter's requires_grad differs from `trained`, and set it to `trained`."""
    changed = full.requires_grad != trained
    full.requires_grad_(trained)
    return changed


def means(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the mean gradient of each layer, over all micro-batches."""
    return [torch.stack(layer).double().mean(0).to(layer[0].dtype) for layer in zip(*gradients, strict=True)]
