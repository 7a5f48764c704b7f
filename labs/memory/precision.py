"""Mixed precision: compute in two bytes, remember in four.

The model holds its parameters in bfloat16, and so are its activations and gradients: half the memory, half the
traffic, and arithmetic that is many times as fast.  But bfloat16 keeps 8 bits of a number: to 1.0 it can add 0.01, but
not 0.001.  A step of training is often smaller than that, and would round to nothing.  So the optimizer works on a
float32 copy of every parameter, its master, in which small steps add up until they show.

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
Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1.)  Some count 20, with a float32 copy of every
gradient.  Here the parameters take their steps one after the other: there is one such copy at a time.

    optimizer = Masters(model.bfloat16().parameters(), partial(torch.optim.AdamW, lr=1e-3))

It can be used wherever an optimizer can: beside a model of `labs.ddp`, or in `labs.zero`, where each rank keeps the
masters of its own shards.

float16 has 11 bits, but its range ends at 65504 above, and at 6e-8 below, where many gradients are.  `LossScale` shifts
them:

    scale = LossScale()
    optimizer = Masters(model.half().parameters(), partial(torch.optim.AdamW, lr=1e-3), scale)
    scale(model(x, y)).backward()       # gradients are scale.value times as large ...
    optimizer.step()                    # ... until they are float32; where one overflowed, no rank takes the step
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class LossScale:
    """The factor for a float16 loss: as large as the gradients allow, found by trial.

    value: the first factor.  It is doubled after `interval` steps without an overflow, and halved at each one.
    groups: over which the gradients are sharded, and so must be asked; None is all ranks.
    """

    def __init__(self, value: float = 2.0**16, interval: int = 2000, groups: Sequence[ProcessGroup | None] = (None,)):
        if not LEAST <= value < float("inf"):
            raise ValueError(f"value is {value}: begin with a factor above {LEAST}, such as 2.0**16")
        if interval < 1:
            raise ValueError(f"interval is {interval}: the factor can grow after 1 step at the soonest")
        self.value, self.interval, self.groups = value, interval, groups
        self.good_steps = 0  # since the last overflow, or since the value last grew

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss (0-dim) times the factor, in float32, since in float16 the product itself would overflow."""
        return loss.float() * self.value

    def update(self, params: Iterable[Tensor]) -> bool:
        """Grow or back off, by what became of the gradients; whether they may be used.

        They may not where one of them is inf or nan on any rank: one number travels, so that all ranks decide alike.
        Raises FloatingPointError where no scale is small enough.
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
    """An optimizer for parameters in low precision: it keeps float32 masters of them, which `optimizer` updates.

    params: what it trains, of any shape.  What is in float32 or float64 already is its own master, at no cost; what is
    frozen stays, and has none.
    optimizer: makes a torch optimizer of a list of masters, such as `partial(torch.optim.AdamW, lr=1e-3)`.  It must
    treat each parameter by itself, and pass over those without a gradient, as those of `torch.optim` but LBFGS do.

    A learning rate is changed in `param_groups`; a scheduler of torch takes `inner`.
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
        """The inner optimizer's: its options, and the masters as "params"."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Gradients up to float32, a step of the masters, parameters down again: one after the other."""
        require_frozen(self.frozen)
        self.inner.zero_grad()  # of a step that failed half way
        scale = 1.0
        if self.loss_scale:
            scale = self.loss_scale.value
            if not self.loss_scale.update(self.params):
                return
        for p, master in zip(self.params, self.masters, strict=True):
            if p.grad is not None:
                master.grad = p.grad.to(master.dtype, copy=True).div_(scale)
                self.inner.step()  # passes over all but this one, as they have no gradient
                master.grad = None
                p.copy_(master)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict:
        """As torch's optimizers have it, by number of the parameter, with its master (its shape) among the state."""
        inner = self.inner.state_dict()
        state = {i: {"master": master.detach(), **inner["state"].get(i, {})} for i, master in enumerate(self.masters)}
        return inner | {"state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Masters, the inner state and options; the parameters become the masters, rounded.

        Raises ValueError where a master is missing or has another shape.
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
