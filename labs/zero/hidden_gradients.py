"""Vectors as `model.parameters()` shows them: their numbers can be read, and their gradients cannot.

Under stage 1 a vector's gradient is this rank's own until sync().  Under stages 2 and 3 the gradient has been reduced,
and its mean is in `zero.shards`.  A norm or a step that used the vector's own gradient would differ from rank to rank.
Therefore computing with `.grad` raises an error that names the right place, and setting `.grad` to None, as
`model.zero_grad()` does, drops the gradient of the whole vector, reduced or not.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from labs.dropped import Absent

ELSEWHERE = (
    "the gradient of {name!r} is not in model.parameters(), where it would differ from rank to rank: after zero.sync() "
    "its mean is in zero.shards, and labs.clip.clip_gradients(zero.shards, max_norm, groups=(None,)) clips"
)


class Elsewhere(Absent, Tensor):
    """A placeholder for a vector's gradient, which raises an error that says where the gradient is."""

    @classmethod
    def of(cls, name: str) -> "Elsewhere":
        stand_in = torch.empty(0).as_subclass(cls)
        stand_in.text = ELSEWHERE.format(name=name)
        return stand_in


class AtRest(nn.Parameter):
    """A vector, or under stage 3 this rank's shard of it, as `model.parameters()` shows it."""

    @classmethod
    def of(cls, p: nn.Parameter, unit: Any) -> "AtRest":
        """Turn the parameter `p` into an AtRest; unit: the `labs.zero.flat.Unit` that holds its gradient."""
        p.unit, p.in_zero = ref(unit), True  # in_zero tells labs.checkpoint that this is no parameter of the model
        if type(p) is nn.Parameter:  # a subclass keeps its own class
            p.__class__ = cls
        return p

    @property
    def grad(self) -> Elsewhere | None:
        unit = self.unit()
        return Elsewhere.of(unit.name) if unit and unit.has_gradient() else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        unit = self.unit()
        if value is not None:
            raise RuntimeError(f"a gradient cannot be set here: {ELSEWHERE.format(name=unit.name)}")
        unit.forget()

    def share_memory_(self) -> None:
        raise RuntimeError(
            f"share_memory_() of the vector of {self.unit().name!r}, whose memory is given back and taken anew: share "
            "the model's memory before Zero shards it, or what zero.full_state_dict() returns"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"the layer of {self.unit().name!r} lies in a vector of Zero's and cannot be copied or pickled: "
            "zero.full_state_dict() has its parameters, and labs.checkpoint saves them"
        )


def own_gradient(p: nn.Parameter) -> Tensor | None:
    """Return the gradient that autograd computed for `p`, which `p.grad` of an AtRest hides."""
    return torch.Tensor.grad.__get__(p)


def forget_gradient(p: nn.Parameter) -> None:
    torch.Tensor.grad.__set__(p, None)
