"""A model cut into stages, by its layers.

    cut(model, 3), of 4 layers        stage 0   embed   layers.0   layers.1
                                      stage 1           layers.2
                                      stage 2           layers.3   norm   head

A stage is a module that makes one tensor from one tensor.  These have the model's own modules under their names in the
model, so that every parameter keeps its name.  Nothing is copied; and where the model is on the meta device, a rank
makes only the parameters of its own stages.
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
    """These layers of a GPT, which follow one another; with its embedding before the first, its norm and head behind
    the last one."""

    def __init__(self, model: GPT, layers: Sequence[str]):
        super().__init__()
        names = list(model.layers)
        is_first, is_last = layers[0] == names[0], layers[-1] == names[-1]
        self.config = model.config
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleDict({name: model.layers[name] for name in layers})
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.loss = model.loss if is_last else None  # which a pipeline calls: here for whoever splits the stage
        vars(self)["origin"] = ref(model), {*map(id, model.modules())}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "origin"}  # a copy has another model

    def require_current(self) -> None:
        """Raise RuntimeError where the model has replaced a module that this stage still has."""
        model, known = vars(self).get("origin", (lambda: None, ()))
        for name, module in self.named_modules() if (whole := model()) is not None else ():
            if id(module) in known and module not in {*whole.modules()}:
                raise RuntimeError(
                    f"{name!r} of a stage is no longer in the model, which has replaced it since it was cut: the stage "
                    "would train the old one; change the model first, then call pp.cut"
                )

    def forward(self, x: Tensor) -> Tensor:
        """tokens_BT, or x_BTD behind the stage before; makes x_BTD, or logits_BTV."""
        require_context(self.config, x.shape[1])
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def cut(model: GPT, stages: int | Sequence[int]) -> list[Stage]:
    """stages: how many, or how many layers each has.  Raises ValueError for what does not fit the model's layers."""
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
            raise ValueError(f"stages of {sizes} layers: each has 1 or more, and together they have {len(names)}")
    return [Stage(model, names[first:end]) for first, end in pairwise([0, *accumulate(sizes)])]


def materialise(stages: Sequence[nn.Module], mine: Collection[nn.Module], initial: Initial | None) -> None:
    """Give those parameters of some of the stages that are on the meta device their numbers, `initial(name, shape)`.

    A parameter that several stages share goes by the name that it has in the first of them.  Buffers must be there.
    """
    names: dict[nn.Parameter, str] = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            names.setdefault(p, name)
    for p in [p for stage in mine for p in stage.parameters() if p.is_meta]:
        if initial is None:
            raise ValueError(f"parameter {names[p]!r} is on the meta device: say with initial= what it starts from")
        if p.is_meta:  # it may be there twice
            numbers = initial(names[p], p.shape).to(torch.get_default_device(), p.dtype)
            # In place, so that it is the same parameter wherever it stands.
            torch.utils.swap_tensors(p, nn.Parameter(numbers, p.requires_grad))
    for name, buffer in (pair for stage in mine for pair in stage.named_buffers()):
        if buffer.is_meta:
            raise ValueError(f"buffer {name!r} is on the meta device, and has no numbers to begin with: give it some")
