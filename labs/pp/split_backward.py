"""Backward in two halves: first the gradient of a stage's input, later the gradients of its matrices.

    with Deferred() as later:               F
        y = stage(x)
    torch.autograd.backward(y, gradient)    I    x.grad, and on the way the gradient of each matrix product's input
    later.backward()                        W    the gradients of the matrices themselves

A product y = x Wᵀ has two gradients, which cost the same.  All layers before the product wait for the gradient of x; no
layer waits for the gradient of W.  So Deferred gives each product a small graph of its own, through which backward goes
twice, for one gradient each time.  The kernels are the same as in a backward that computes both gradients at once, so
the numbers are equal, bit by bit.

Parameters that are no matrices, such as those of norms and embeddings, get their gradients from I, which costs next to
nothing.  A matrix that was computed from parameters gets its gradient from I, too, so that backward goes on through the
matrix to those parameters.  From I to W, a product keeps x and the gradient of y; the stage's other activations are
freed by I.  If the stage itself computes a gradient, as for a force or a penalty, all of that gradient is computed at
once.

Source: Qi et al. 2023, arXiv 2401.10241, section 2.
"""

from collections.abc import Callable, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode


class Deferred(TorchFunctionMode):
    """A context: products that are computed within it leave the gradients of their matrices to `backward`.

    parameters: parameters whose gradients may wait; by default, all that are used as matrices.
    """

    def __init__(self, parameters: Set[Tensor] | None = None) -> None:
        super().__init__()
        self.parameters = parameters
        self.products: list[tuple[GradientEdge, Tensor, list[Tensor]]] = []  # y's edge and gradient, parameters
        self.stand_in = torch.empty(0, requires_grad=True)  # replaces the matrices in the graph of I

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and torch.is_grad_enabled():
            x, *matrix = operands(*args, **(kwargs or {}))
            # If x gets no gradient, backward would not call Product at all.
            if x.requires_grad and trained(matrix) and all(map(self.may_wait, trained(matrix))):
                return Product.apply(x, self.stand_in, matrix, self.products)
        return function(*args, **(kwargs or {}))

    def may_wait(self, p: Tensor) -> bool:
        return p.is_leaf if self.parameters is None else p in self.parameters

    def backward(self) -> None:
        """Add the gradients of the matrices to their `.grad`; those of a matrix used twice are summed first."""
        if self.products:
            edges, gradients, matrices = zip(*self.products, strict=True)
            torch.autograd.backward(edges, gradients, inputs=[*dict.fromkeys(p for matrix in matrices for p in matrix)])


class Product(torch.autograd.Function):
    """The autograd function of a product x Wᵀ + b that has a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stand_in: Tensor, matrix: list[Tensor | None], products: list) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            y = F.linear(ctx.x, *matrix)
        ctx.edge, ctx.trained, ctx.products = get_gradient_edge(y), trained(matrix), products
        ctx.stand_in = get_gradient_edge(stand_in).node
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient with a graph (create_graph=True) reaches the matrix through that graph, and does not wait.
        again = torch.is_grad_enabled()
        (of_x,) = torch.autograd.grad(ctx.edge, ctx.x, gradient, retain_graph=True, create_graph=again)
        # A torch.autograd.grad within the stage or its loss adds nothing to a `.grad`, and does not reach the stand-in.
        if torch._C._will_engine_execute_node(ctx.stand_in):
            ctx.products.append((ctx.edge, gradient.detach(), ctx.trained))
        return of_x, None, None, None


def operands(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def trained(matrix: list[Tensor | None]) -> list[Tensor]:
    return [p for p in matrix if p is not None and p.requires_grad]
