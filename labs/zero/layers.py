"""From a model to its layers: the modules whose parameters come and go together, and where each parameter stands.

Home         the place of a parameter in a module
in_layers    a model's layers, each with the homes of its parameters
take_out     the parameters, out of their homes
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class Home(NamedTuple):
    """Where a parameter belongs; a tied one has several.  `name` is its first name in the model."""

    module: nn.Module
    attribute: str
    name: str


def in_layers(model: nn.Module, layers: Iterable[nn.Module] | None = None) -> dict[nn.Module, list[Home]]:
    """The homes of all parameters, by the layer that they are in; layers without any are left out.

    By default the layers are the children of the model, containers opened, and the model itself for what is left.
    Raises ValueError where the layers miss a parameter.
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
    """The children of a module; in place of containers, their children."""
    for child in model.children():
        if isinstance(child, CONTAINERS):
            yield from opened(child)
        elif not isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # which have no forward
            yield child


def parameters_of(layer: nn.Module, chosen: list[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of all that is in a layer and not in another one."""
    for attribute, p in layer._parameters.items():
        if p is not None:
            yield layer, attribute, p
    for child in layer.children():
        if child not in chosen:
            yield from parameters_of(child, chosen)


def take_out(homes: list[Home], but: Iterable[str]) -> list[dict[str, nn.Parameter]]:
    """The parameters at these homes, out of their modules: one dict for each dtype and `requires_grad`.

    but: names of parameters that were taken out before, at another place.
    """
    kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for module, attribute, name in homes:
        p = module._parameters.pop(attribute, None)
        if p is not None and name not in but:
            kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
    return list(kinds.values())
