"""A model cut into stages, by its layers.

    cut(model, 3), of 4 layers        stage 0   embed   layers.0   layers.1
                                      stage 1           layers.2
                                      stage 2           layers.3   norm   head

A stage is a module that takes and returns one tensor.  The stages that `cut` returns hold the model's own modules under
their names in the model, so that every parameter keeps its name.  No parameter is copied.  If the model is on the meta
device, a rank creates only the parameters of its own stages.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from labs.model import GPT, require_context

Initial = Callable[[str, torch.Size], Tensor]


class Stage(nn.Module):
    """A stage of a GPT: consecutive layers; the first stage has the embedding, too, and the last one norm and head."""

    def __init__(self, model: GPT, layers: Sequence[str]):
        super().__init__()
        names = list(model.layers)
        is_first, is_last = layers[0] == names[0], layers[-1] == names[-1]
        self.config = model.config
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleDict({name: model.layers[name] for name in layers})
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.loss = model.loss if is_last else None  # a pipeline calls it; labs.tp splits it with the stage
        vars(self)["origin"] = ref(model), {*map(id, model.modules())}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "origin"}  # a copy belongs to no model

    def require_current(self) -> None:
        """Raise RuntimeError if the model has replaced a module that this stage still holds."""
        model, known = vars(self).get("origin", (lambda: None, ()))
        for name, module in self.named_modules() if (whole := model()) is not None else ():
            if id(module) in known and module not in {*whole.modules()}:
                raise RuntimeError(
                    f"{name!r} of a stage is no longer in the model, which has replaced it since it was cut: the stage "
                    "would train the old one; change the model first, then call pp.cut"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Return x_BTD, or logits_BTV in the last stage; x: tokens_BT in the first stage, x_BTD in the others."""
        require_context(self.config, x.shape[1])
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def cut(model: GPT, stages: int | Sequence[int]) -> list[Stage]:
    """Cut a model into stages, and return them in order.

    stages: the number of stages, or a list with the number of layers in each stage.

    Raises ValueError if a stage would have no layer, if the numbers do not add up to the model's depth, or if the model
    computes a loss of its own.
    """
    if type(model).forward is not GPT.forward:
        raise ValueError(f"{type(model).__name__} has a forward of its own, which no stage would call: cut a GPT")
    names = list(model.layers)
    if isinstance(stages, int):
        if not 1 <= stages <= len(names):
            raise ValueError(
                f"{stages} stages of {len(names)} layers: a stage has 1 or more, so give 1 to {len(names)}"
            )
        sizes = [len(names) // stages + (stage < len(names) % stages) for stage in range(stages)]
    else:
        sizes = list(stages)
        if sum(sizes) != len(names) or min(sizes) < 1:
            raise ValueError(f"stages of {sizes} layers: give each 1 or more, and {len(names)} in all")
    return [Stage(model, names[first:end]) for first, end in pairwise([0, *accumulate(sizes)])]


def materialise(stages: Sequence[nn.Module], mine: Collection[nn.Module], initial: Initial | None) -> None:
    """Replace the parameters of `mine` that are on the meta device by parameters with numbers, `initial(name, shape)`.

    A parameter that several stages share has the name that it has in the first of these stages.

    Raises ValueError for a parameter without `initial`, and for a buffer on the meta device.
    """
    names: dict[nn.Parameter, str] = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            names.setdefault(p, name)
    for p in [p for stage in mine for p in stage.parameters() if p.is_meta]:
        if initial is None:
            raise ValueError(f"parameter {names[p]!r} is on the meta device: say with initial= what it starts from")
        if p.is_meta:  # a shared parameter is in this list twice
            numbers = initial(names[p], p.shape).to(torch.get_default_device(), p.dtype)
            # Swapping in place keeps it the same object in all modules.
            torch.utils.swap_tensors(p, nn.Parameter(numbers, p.requires_grad))
    for name, buffer in (pair for stage in mine for pair in stage.named_buffers()):
        if buffer.is_meta:
            raise ValueError(f"buffer {name!r} is on the meta device, and has no numbers to begin with: initialise it")
