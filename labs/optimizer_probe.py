"""Checks of optimizers that get shards: the update of an element must not depend on shape, norm or other elements.

A strategy that shards a parameter gives its optimizer the shards.  SGD and Adam treat each element by itself, so they
update shards as they would update the whole parameter.  LARS, Adam-mini and Muon look at a whole matrix; they would
take a shard for the matrix, without an error.

    require_elementwise     refuses an optimizer whose step changes when its numbers are split into two parts
    require_no_scaler       refuses a GradScaler, which would skip a step because of one rank's overflows
    shapeless               makes an optimizer's factory fail if it reads the ndim of a shard
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from labs import agree


@torch.no_grad()
def require_elementwise(optimizer: torch.optim.Optimizer, instead: str, shape: tuple[int, ...] = (8,)) -> None:
    """Raise ValueError if a step of this optimizer depends on how its numbers are cut into parameters.

    The optimizer itself takes no step: a copy of it updates eight numbers, once as one parameter and once as two.

    instead: the sentence of the error that says what to do.
    shape: the shape of the eight numbers as one parameter; a matrix if the shards are vectors that were cut from
        matrices.
    """
    if agree.alone:  # a dry run has no numbers to compare
        return
    numbers, gradients = torch.linspace(-1, 2, 8), torch.linspace(3, -1, 8)
    for group in optimizer.param_groups:
        like = group["params"][0]
        parts = [(x.to(like), g.to(like)) for x, g in zip(numbers.split(4), gradients.split(4), strict=True)]
        whole = stepped(optimizer, group, [(numbers.to(like).view(shape), gradients.to(like).view(shape))])
        if not torch.allclose(whole, stepped(optimizer, group, parts), rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"{type(optimizer).__name__} looks at more than one element: given a shard in place of the whole "
                f"parameter, it takes another step. {instead}"
            )


def stepped(optimizer: torch.optim.Optimizer, group: dict, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the numbers after a first step with these gradients, flat; do not change the optimizer or its group."""
    parameters = [nn.Parameter(numbers.clone()) for numbers, _ in parts]
    for p, (_, gradient) in zip(parameters, parts, strict=True):
        p.grad = gradient.clone()
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), state=defaultdict(dict), param_groups=[group | {"params": parameters}])
    step = type(probe).step
    with torch.enable_grad():  # an optimizer's step disables gradients itself
        # PyTorch's wrapper around step would call the hooks that watch every optimizer.
        (step.__wrapped__ if hasattr(step, "hooked") else step)(probe)
    return torch.cat([p.detach().flatten() for p in parameters])


def require_no_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a GradScaler steps this optimizer; call this function before each step."""
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "a GradScaler looks for overflows in this rank's parts alone, and would skip a step that other ranks take: "
            "scale the loss with labs.memory.precision.LossScale"
        )
    optimizer._step_supports_amp_scaling = True  # a GradScaler then calls step() on every rank, and this check with it


@contextmanager
def shapeless(pieces: Sequence[nn.Parameter], instead: str) -> Iterator[None]:
    """Raise TypeError, within this context, if the ndim of a shard is read, for example to tell weights from biases.

    instead: the sentence of the error that says what to do.
    """

    def refuse(*_: Any) -> NoReturn:
        # tuple(shape) asks for the length as a hint, and goes on without it only after a TypeError
        raise TypeError(f"the optimizer's factory reads the ndim of a parameter, and is given flat shards: {instead}")

    class Shape(tuple):  # torch.Size cannot be subclassed
        __len__ = refuse

    class Piece(nn.Parameter):
        ndim = property(refuse)
        dim = ndimension = refuse
        shape = property(lambda piece: Shape(piece.detach().shape))

        def size(self, *dim: int) -> Any:
            return self.detach().size(*dim) if dim else self.shape

    real = [piece for piece in pieces if type(piece) is nn.Parameter]  # subclasses keep their own class
    for piece in real:
        piece.__class__ = Piece
    try:
        yield
    finally:
        for piece in real:
            piece.__class__ = nn.Parameter
