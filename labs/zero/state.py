"""In and out of `Zero`: a state without a trace of stage or ranks.

    {"model":      what `model.state_dict()` was before it was sharded
     "optimizer":  by parameter, its entries in the parameter's own shape
     "groups":     the optimizer's hyperparameters}

So what one stage on some ranks has saved, any stage on any number of ranks loads.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from labs.zero.flat import Unit

COUNTERS = {"step", "mu_product", "eta", "mu"}  # what torch's optimizers keep, but not by element


class Stateful:
    """keys: {each key of the model's state_dict: the name of the parameter or buffer}."""

    model: nn.Module
    optimizer: Any
    keys: dict[str, str]
    units: list[Unit]
    trained: list[Unit]

    def refresh(self, units: Iterable[Unit]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All of it on every rank, without a trace of stage or ranks: any stage on any number of ranks loads it.

        "model": what `model.state_dict()` was before it was sharded.  "optimizer": by parameter, its entries in the
        parameter's own shape.  "groups": the optimizer's hyperparameters.
        """
        whole, moments = dict(self.model.named_buffers(remove_duplicate=False)), {}
        inner = self.optimizer.state_dict()
        for unit in self.units:
            whole |= unit.whole(unit.shard.data)
        for index, entries in inner["state"].items():
            unit = self.trained[index]
            for key, value in entries.items():
                if value.shape == unit.shard.shape:
                    by_name = unit.whole(value)
                else:
                    by_name = dict.fromkeys(unit.layout.shapes, value)
                for name, tensor in by_name.items():
                    moments.setdefault(name, {})[key] = tensor
        groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
        model = {key: whole[name] for key, name in self.keys.items()}
        return {"model": model, "optimizer": moments, "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's shards of what `state_dict` returned.  Raises ValueError where names or shapes differ."""
        self.require_same(state["model"])
        for key, buffer in self.model.named_buffers(remove_duplicate=False):
            if key in self.keys:
                buffer.copy_(state["model"][key])
        moments, sharded = state["optimizer"], {}
        for unit in self.units:
            unit.shard.data.copy_(unit.part([state["model"][name] for name in unit.layout.shapes]))
        self.refresh(self.units)
        for index, unit in enumerate(self.trained):
            if not moments.keys() >= unit.layout.shapes.keys():
                continue  # a layer that has not taken a step yet
            first, *_ = of_each = [moments[name] for name in unit.layout.shapes]
            sharded[index] = {
                key: torch.as_tensor(value).clone()
                if key in COUNTERS
                else unit.part([entries[key] for entries in of_each])
                for key, value in first.items()
            }
        own = self.optimizer.state_dict()["param_groups"]
        groups = [group | saved for group, saved in zip(own, state["groups"], strict=True)]
        self.optimizer.load_state_dict({"state": sharded, "param_groups": groups})

    def before_load(self, model: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        if any(f"{prefix}{name}" in state for unit in self.units for name in unit.layout.shapes):
            raise RuntimeError(
                "load_state_dict() of a model whose parameters lie in vectors: load it before Zero shards it, or "
                "give zero.load_state_dict what zero.state_dict returned"
            )

    def require_same(self, state: dict[str, Tensor]) -> None:
        shapes = {name: shape for unit in self.units for name, shape in unit.layout.shapes.items()}
        shapes |= {key: buffer.shape for key, buffer in self.model.named_buffers() if key in self.keys}
        differ = [f"{key!r} is not in it" for key in self.keys if key not in state]
        differ += [f"{key!r} is not in the model" for key in state if key not in self.keys]
        differ += [
            f"{name!r} has shape {tuple(state[name].shape)} in it and {tuple(shape)} in the model"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ]
        if differ:
            raise ValueError(f"this state is of another model: {'; '.join(differ)}")


def keys(model: nn.Module) -> dict[str, str]:
    """{each key of `model.state_dict()`: the name of the parameter or buffer}; a tied parameter has several keys."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {key: first.get(id(value), key) for key, value in model.state_dict(keep_vars=True).items()}
