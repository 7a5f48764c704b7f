"""What stands where memory is gone, so that nobody reads it.

Versions           to autograd: memory that comes and goes, or has numbers of another step
Dropped, Moved     to everybody else: a parameter that is gone, or is no longer the model's
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves


class Versions:
    """The version counter of a tensor whose memory comes and goes.

    To autograd, a tensor of another version is not the one that it kept for backward: it raises "modified by an
    inplace operation", where it would otherwise read memory that is not there, or numbers of another step.
    """

    def __init__(self, x: Tensor):
        self.x, self.version = x, x._version

    def forbid(self) -> None:
        """The memory is gone."""
        if self.x._version == self.version:
            increment_version(self.x)

    def allow(self) -> None:
        """It is there again, with the same numbers."""
        torch._C._autograd._unsafe_set_version_counter((self.x,), (self.version,))

    def renew(self) -> None:
        """The numbers have changed for good."""
        increment_version(self.x)
        self.version = self.x._version


class Absent:
    """Not what it is taken for.  Whatever is done with it raises a RuntimeError that says why."""

    text: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(next(x.text for x in tree_leaves((args, kwargs)) if isinstance(x, cls)))


class Dropped(Absent):
    """Stands where a parameter was."""

    def __init__(self, name: str, why: str):
        vars(self)["text"] = f"parameter {name!r} is dropped: {why}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python and IPython ask for these of anything
            raise AttributeError(attribute)
        raise RuntimeError(self.text)

    def __setattr__(self, attribute: str, value: Any) -> None:
        raise RuntimeError(self.text)

    def refuse(self, *others: Any) -> Any:
        raise RuntimeError(self.text)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __len__ = __float__ = refuse


class Moved(Absent, nn.Parameter):
    """A parameter whose numbers have gone into a vector: whoever still holds it would never see them change."""

    @classmethod
    def mark(cls, p: nn.Parameter, name: str, instead: str) -> None:
        p.data = p.data.new_empty(0)
        p.text = f"parameter {name!r} was taken from the model before it was sharded, and is no longer part of it: "
        p.text += f"take it from its module, or {instead}"
        p.__class__ = cls
