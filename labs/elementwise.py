"""What an optimizer may not ask of a shard: its shape, its norm, its neighbours.

A strategy that cuts a parameter gives its optimizer the pieces.  SGD and Adam treat each element by itself and do not
notice.  LARS, Adam-mini and Muon look at a whole matrix, and would take a piece for it, without an error.

    require_elementwise     step the optimizer on eight numbers, and on the same numbers as two parts: are they equal?
    require_no_scaler       a GradScaler, which skips a step by the overflows of one rank's pieces
    shapeless               pieces whose ndim a factory cannot read, as it would to tell weights from biases
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

    instead: what the caller can do about it.  shape: that of the whole, a matrix's where its parts are vectors.  The
    optimizer itself takes no step.
    """
    if agree.alone:  # a device that only pretends has no numbers to compare
        return
    numbers, gradients = torch.linspace(-1, 2, 8), torch.linspace(3, -1, 8)
    for group in optimizer.param_groups:
        like = group["params"][0]
        parts = [(x.to(like), g.to(like)) for x, g in zip(numbers.split(4), gradients.split(4), strict=True)]
        whole = stepped(optimizer, group, [(numbers.to(like).view(shape), gradients.to(like).view(shape))])
        if not torch.allclose(whole, stepped(optimizer, group, parts), rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"{type(optimizer).__name__} looks at more than one element: of a parameter that is cut, it sees a "
                f"part, and steps otherwise than with the whole. {instead}"
            )


def stepped(optimizer: torch.optim.Optimizer, group: dict, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return what a first step makes of these numbers and gradients; neither group nor optimizer change."""
    parameters = [nn.Parameter(numbers.clone()) for numbers, _ in parts]
    for p, (_, gradient) in zip(parameters, parts, strict=True):
        p.grad = gradient.clone()
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), state=defaultdict(dict), param_groups=[group | {"params": parameters}])
    step = type(probe).step
    with torch.enable_grad():  # an optimizer turns it off for itself
        # Without PyTorch's wrapper, which tells those who watch every optimizer.
        (step.__wrapped__ if hasattr(step, "hooked") else step)(probe)
    return torch.cat([p.detach().flatten() for p in parameters])


def require_no_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError where a GradScaler steps this optimizer: call it before each step."""
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "a GradScaler looks for overflows in this rank's parts alone, and would skip a step that other ranks take: "
            "scale the loss with labs.memory.precision.LossScale"
        )
    optimizer._step_supports_amp_scaling = True  # so that a GradScaler comes here, on every rank


@contextmanager
def shapeless(pieces: Sequence[nn.Parameter], instead: str) -> Iterator[None]:
    """Let whoever asks one of these how many dims it has, as for weights and biases, be told that it is a piece."""

    def refuse(*_: Any) -> NoReturn:
        raise ValueError(f"the optimizer is made by the ndim of a parameter, and is given pieces: {instead}")

    class Shape(tuple):  # of torch.Size there are no subclasses
        __len__ = refuse

    class Piece(nn.Parameter):
        ndim = property(refuse)
        dim = ndimension = refuse
        shape = property(lambda piece: Shape(piece.detach().shape))

        def size(self, *dim: int) -> Any:
            return self.detach().size(*dim) if dim else self.shape

    real = [piece for piece in pieces if type(piece) is nn.Parameter]  # others only pretend to be there
    for piece in real:
        piece.__class__ = Piece
    try:
        yield
    finally:
        for piece in real:
            piece.__class__ = nn.Parameter
