"""Which optimizers can step a split model, and what is refused.

An optimizer has a rank's part of a matrix before it, so only one that works element by element is right (SGD, Adam and
their kin).  Those that are known to look at a whole matrix, or at a norm, are refused in their first step, and so are
others that step otherwise with eight numbers than with two parts of them.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from labs import elementwise

LOOK_AT_MORE = {"Adafactor", "Muon", "LBFGS", "Shampoo", "DistributedShampoo", "SOAP"}
LOOK_AT_MORE |= {"LAMB", "Lamb", "FusedLAMB", "NVLamb", "LARS", "LARC"}


def require_elementwise(optimizer: Optimizer, own: Mapping[str, nn.Parameter], split: Sequence[str]) -> None:
    """own: of its parameters, those of the model, by name.  split: the names of those that are split."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in LOOK_AT_MORE]
    if kinds and split:
        raise TypeError(
            f"{kinds[0]} looks at a whole matrix or at norms, and this rank has only its part of {split[0]!r}: under "
            "tensor parallelism take an optimizer that works element by element, such as AdamW or SGD"
        )
    if split and all(group["params"] for group in optimizer.param_groups) and not any(map(is_sharded, own.values())):
        elementwise.require_elementwise(optimizer, "Under tensor parallelism take one such as AdamW or SGD")
    for name, p in own.items():
        state = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        if any(x.ndim and x.shape != p.shape for x in state):
            raise ValueError(
                f"the optimizer has state of {name!r} from before parallelize(), for all of it, and this rank has a "
                "part: make the optimizer anew"
            )


def is_sharded(p: Tensor) -> bool:
    """By labs.fsdp, whose DTensors know the whole."""
    return hasattr(p, "to_local")
