"""Placeholders for tensors whose memory is freed, so that reading one raises an error.

Versions    lets autograd raise an error if a tensor that it saved was freed, or has numbers of another step
Dropped     stands for a parameter whose memory is freed
Moved       marks a parameter that is no longer part of its model
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves


class Versions:
    """The version counter of a tensor whose memory is freed and allocated again.

    Autograd saves the version of a tensor that it keeps for backward.  If the version has changed when backward needs
    the tensor, autograd raises "modified by an inplace operation".  Without a change of the version, backward would
    read freed memory, or numbers of another step.
    """

    def __init__(self, x: Tensor):
        self.x, self.version = x, x._version

    def forbid(self) -> None:
        """Make autograd refuse the tensor: its memory is freed."""
        if self.x._version == self.version:
            increment_version(self.x)

    def allow(self) -> None:
        """Make autograd accept the tensor: its memory is back, with the same numbers."""
        torch._C._autograd._unsafe_set_version_counter((self.x,), (self.version,))

    def renew(self) -> None:
        """Make autograd refuse the tensor in backwards of earlier forwards: its numbers have changed for good."""
        increment_version(self.x)
        self.version = self.x._version


class Absent:
    """A placeholder that raises a RuntimeError with its `text` if it is used in any operation."""

    text: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(next(x.text for x in tree_leaves((args, kwargs)) if isinstance(x, cls)))


class Dropped(Absent):
    """A placeholder for a parameter whose memory is freed."""

    def __init__(self, name: str, why: str):
        vars(self)["text"] = f"parameter {name!r} is dropped: {why}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # Python and IPython look for these in any object
            raise AttributeError(attribute)
        raise RuntimeError(self.text)

    def __setattr__(self, attribute: str, value: Any) -> None:
        raise RuntimeError(self.text)

    def refuse(self, *others: Any) -> Any:
        raise RuntimeError(self.text)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = __len__ = __float__ = refuse


class Moved(Absent, nn.Parameter):
    """A parameter whose numbers were moved into another tensor, and which would never see an optimizer change them."""

    @classmethod
    def mark(cls, p: nn.Parameter, name: str, instead: str) -> None:
        p.data = p.data.new_empty(0)
        p.text = f"parameter {name!r} was taken from the model before it was sharded, and is no longer part of it: "
        p.text += f"take it from its module, or {instead}"
        p.__class__ = cls
