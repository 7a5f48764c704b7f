"""Mixed precision: compute with numbers of two bytes, update numbers of four bytes.

The model holds its parameters in bfloat16, and so its activations and gradients are in bfloat16, too: half the memory,
half the bytes to send, and arithmetic that is many times as fast.  But bfloat16 has 8 significant bits: in bfloat16 1.0
+ 0.01 is more than 1.0, but 1.0 + 0.001 is 1.0.  The update of a parameter in one step is often that small, and would
be rounded away.  So the optimizer works on a float32 copy of every parameter, its master, in which small updates add up
until they are visible in bfloat16.

    P    parameters         the model                  bfloat16    2
    G    gradients          the model                  bfloat16    2
    S    master             `Masters`                  float32     4
         momentum           the optimizer inside it    float32     4
         variance           the optimizer inside it    float32     4
                                                                  16 bytes per parameter, 2 + 2 + 12

                           the model (2 bytes)        Masters (12 bytes)
    forward, backward      p, p.grad                  -
    step(), for each p     p.grad  ---- exact ---->   master.grad
                                                      the optimizer updates the master
                           p  <------ rounded -----   master

(Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, sections 3.1 and 3.2; the sum is K = 12 of
Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1.)  Some authors count 20 bytes, with a float32 copy of
every gradient.  `Masters` updates the parameters one after the other, so there is only one float32 gradient at a time.

    optimizer = Masters(model.bfloat16().parameters(), partial(torch.optim.AdamW, lr=1e-3))

`Masters` can be used wherever an optimizer can: with a model of `labs.ddp`, or in `labs.zero`, where each rank holds
the masters of its own shards.

float16 has 11 significant bits, but its largest number is 65504, and its smallest 6e-8; many gradients are smaller.
`LossScale` multiplies the loss, which shifts the gradients into this range:

    scale = LossScale()
    optimizer = Masters(model.half().parameters(), partial(torch.optim.AdamW, lr=1e-3), scale)
    scale(model(x, y)).backward()       # gradients are scale.value times as large ...
    optimizer.step()                    # ... until they are float32; if one overflowed, no rank takes the step
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class LossScale:
    """A factor for a float16 loss, as large as the range of float16 gradients allows, which is found by trial.

    value: the first factor
    interval: number of steps without an overflow after which the factor is doubled; each overflow halves it
    groups: process groups over which the gradients are sharded, whose ranks must all scale alike; None is all ranks
    """

    def __init__(self, value: float = 2.0**16, interval: int = 2000, groups: Sequence[ProcessGroup | None] = (None,)):
        if not LEAST <= value < float("inf"):
            raise ValueError(f"value is {value}: begin with a factor above {LEAST}, such as 2.0**16")
        if interval < 1:
            raise ValueError(f"interval is {interval}: the factor can grow after 1 step at the soonest")
        self.value, self.interval, self.groups = value, interval, groups
        self.good_steps = 0  # since the last overflow, or since the value last grew

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the loss (0-dim) times the factor, in float32, since in float16 the product itself would overflow."""
        return loss.float() * self.value

    def update(self, params: Iterable[Tensor]) -> bool:
        """Grow the factor or halve it, and return whether the gradients may be used.

        Gradients may not be used if one of them is inf or nan on any rank; the ranks all-reduce one number, so that all
        of them decide alike.  Raises FloatingPointError if the gradients overflow with the smallest factor.
        """
        gradients = [p.grad for p in params if p.grad is not None]
        bad = torch.zeros(1, device=gradients[0].device if gradients else None)
        for gradient in gradients:
            bad += gradient.isfinite().all().logical_not()
        for group in self.groups:
            dist.all_reduce(bad, group=group)
        self.back_off() if bad else self.grow()
        return not bad

    def back_off(self) -> None:
        self.value, self.good_steps = self.value / 2, 0
        if self.value < LEAST:
            raise FloatingPointError(
                f"gradients overflow although the loss is scaled by {self.value}: this is not a matter of range; "
                "look for inf or nan in the loss itself"
            )

    def grow(self) -> None:
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]


LEAST = 2.0**-16


class Masters:
    """An optimizer for parameters in low precision: it holds float32 masters of them, which `optimizer` updates.

    params: the parameters to train, of any shape.  A parameter in float32 or float64 is its own master, at no cost; a
        frozen parameter is left as it is, and has no master
    optimizer: function that makes a torch optimizer of a list of masters, such as `partial(torch.optim.AdamW,
        lr=1e-3)`.  The optimizer must treat each parameter by itself, and skip parameters without a gradient, as all of
        `torch.optim` except LBFGS do
    loss_scale: the scale of a float16 loss, if any

    To change the learning rate, write to `param_groups`, or give `inner` to a scheduler of torch.
    """

    def __init__(self, params: Iterable[nn.Parameter], optimizer: Callable, loss_scale: LossScale | None = None):
        given, self.loss_scale = list(params), loss_scale
        for p in given:
            if not (isinstance(p, Tensor) and p.is_floating_point()):
                what = p.dtype if isinstance(p, Tensor) else type(p).__name__
                raise TypeError(f"Masters takes a list of floating-point parameters; one of these is {what}")
        self.params, self.frozen = trained_and_frozen(given)
        self.masters = [nn.Parameter(p.detach().to(at_least_float32(p.dtype))) for p in self.params]
        self.inner = optimizer(self.masters)

    @property
    def param_groups(self) -> list[dict]:
        """Return the inner optimizer's groups: its options, and the masters as "params"."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Convert the gradient to float32, update the master and round it, for one parameter after the other."""
        require_frozen(self.frozen)
        self.inner.zero_grad()  # a step that failed half way may have left a gradient
        scale = 1.0
        if self.loss_scale:
            scale = self.loss_scale.value
            if not self.loss_scale.update(self.params):
                return
        for p, master in zip(self.params, self.masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.to(master.dtype, copy=True).div_(scale)
                self.inner.step()  # skips all other masters, which have no gradient
                master.grad = None
                p.copy_(master)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict:
        """Return the state in the form of torch's optimizers, with each parameter's master among its state."""
        inner = self.inner.state_dict()
        state = {i: {"master": master.detach(), **inner["state"].get(i, {})} for i, master in enumerate(self.masters)}
        return inner | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Load masters, the inner optimizer's state and options, and round the masters to the parameters.

        Raises ValueError if a master is missing, or has another shape.
        """
        state = state_dict["state"]
        for i, master in enumerate(self.masters):
            saved = state.get(i, {}).get("master")
            if saved is None or saved.shape != master.shape:
                found = "is missing" if saved is None else f"has the shape {tuple(saved.shape)}"
                raise ValueError(
                    f"the master of parameter {i}, of shape {tuple(master.shape)}, {found}: "
                    "load what Masters.state_dict() gave for the same parameters"
                )
        inner = {i: {name: value for name, value in state[i].items() if name != "master"} for i in state}
        self.inner.load_state_dict(state_dict | {"state": {i: values for i, values in inner.items() if values}})
        for i, (p, master) in enumerate(zip(self.params, self.masters, strict=True)):
            master.copy_(state[i]["master"])
            p.copy_(master)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def trained_and_frozen(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(parameters)
    return [p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]


def require_frozen(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        if p.requires_grad:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} was unfrozen after its optimizer was made, which has no master "
                "of it: make the optimizer anew"
            )
