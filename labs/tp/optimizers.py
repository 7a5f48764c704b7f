"""Checks of the optimizer of a split model.

An optimizer sees only a rank's part of a matrix, so its update must work element by element, as in SGD and Adam.  An
optimizer that is known to look at a whole matrix or at a norm is refused in its first step.  Any other optimizer is
refused if its step of eight numbers differs from its step of the same numbers in two parts.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from labs import optimizer_probe

LOOK_AT_MORE = {"Adafactor", "Muon", "LBFGS", "Shampoo", "DistributedShampoo", "SOAP"}
LOOK_AT_MORE |= {"LAMB", "Lamb", "FusedLAMB", "NVLamb", "LARS", "LARC"}


def require_elementwise(optimizer: Optimizer, own: Mapping[str, nn.Parameter], split: Sequence[str]) -> None:
    """Raise TypeError or ValueError if the optimizer cannot update parts of parameters.

    own: those parameters of the model that the optimizer has, by name.
    split: the names of those parameters that are split.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in LOOK_AT_MORE]
    if kinds and split:
        raise TypeError(
            f"{kinds[0]} looks at a whole matrix or at norms, and this rank has only its part of {split[0]!r}: under "
            "tensor parallelism take an optimizer that works element by element, such as AdamW or SGD"
        )
    if split and all(group["params"] for group in optimizer.param_groups) and not any(map(is_sharded, own.values())):
        optimizer_probe.require_elementwise(optimizer, "Under tensor parallelism take one such as AdamW or SGD")
    for name, p in own.items():
        state = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        if any(x.ndim and x.shape != p.shape for x in state):
            raise ValueError(
                f"the optimizer has state of {name!r} from before parallelize(), for all of it, and this rank has a "
                "part: make the optimizer anew"
            )


def is_sharded(p: Tensor) -> bool:
    """Return whether labs.fsdp has sharded `p`, and so made a DTensor of it, which knows the whole parameter."""
    return hasattr(p, "to_local")
