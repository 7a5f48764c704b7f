"""Layers of a model: the modules whose parameters are gathered and dropped together.

Home         the place of a parameter in a module
in_layers    returns a model's layers, each with the homes of its parameters
take_out     removes the parameters from their homes
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class Home(NamedTuple):
    """A place of a parameter, a module's attribute, and the parameter's first name; a tied one has several homes."""

    module: nn.Module
    attribute: str
    name: str


def in_layers(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> dict[nn.Module, list[Home]]:
    """Return `{layer: homes of its parameters}`, without the layers that have no parameters.

    layers: modules of the model; by default its children, with containers opened, and the model itself for the rest.

    Raises ValueError if the layers miss a parameter, or if one of them is no module of the model.
    """
    chosen = list(dict.fromkeys([*opened(model), model] if layers is None else layers))
    own = set(model.modules())
    for layer in chosen:
        if layer not in own:
            raise ValueError(
                f"layers has {layer!r:.60}, which is not a module of the model: for a ModuleDict, give .values()"
            )
        if "flat0" in layer._parameters:
            raise ValueError(f"this {type(layer).__name__} lies in vectors already: shard a model once")
    names = {id(p): name for name, p in model.named_parameters()}
    homes = {
        layer: [Home(module, attribute, names[id(p)]) for module, attribute, p in parameters_of(layer, chosen)]
        for layer in chosen
    }
    covered = {place.name for within in homes.values() for place in within}
    if missing := [name for name in names.values() if name not in covered]:
        raise ValueError(
            f"layers miss {', '.join(map(repr, missing))}: "
            "add the modules that hold them, or the model itself, for all that no other layer has"
        )
    return {layer: within for layer, within in homes.items() if within}


def opened(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; in the place of a container among them, yield the container's children."""
    for child in model.children():
        if isinstance(child, CONTAINERS):
            yield from opened(child)
        elif not isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # parameter lists have no forward
            yield child


def parameters_of(layer: nn.Module, chosen: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (module, attribute, parameter) for all parameters in `layer` that are in no other chosen layer."""
    for attribute, p in layer._parameters.items():
        if p is not None:
            yield layer, attribute, p
    for child in layer.children():
        if child not in chosen:
            yield from parameters_of(child, chosen)


def take_out(homes: list[Home], but: Iterable[str]) -> list[dict[str, nn.Parameter]]:
    """Remove the parameters at these homes from their modules; return a dict for each dtype and `requires_grad`.

    but: names of parameters that have been taken out already, at another home.
    """
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for module, attribute, name in homes:
        p = module._parameters.pop(attribute, None)
        if p is not None and name not in but:
            kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
    return list(kinds.values())
