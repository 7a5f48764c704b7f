"""What a rank's part of a parameter is taken for: the whole.  Found in the first step, where it can be.

A part is an ordinary tensor, and does not know what it is a part of.  Whatever treats each number by itself is right.

    drawn      after parallelize(), from one seed on all ranks: the whole has the same rows several times
    used       outside of the module that was split with it: a norm or a mean in the loss is that of a part
    scaled     by another factor on each rank, between backward and the optimizer: a gradient clipped by its own norm

What else is done to parts between two steps cannot be seen: rows exchanged, a mean taken off a gradient, weights
normalised.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labs import agree
from labs.agree import everybodys, rounding
from labs.hooks import weakly
from labs.mesh import Mesh
from labs.tp.shares import Cut

DRAWN = (
    "{name!r} has the same numbers on ranks {first} and {other}, which have different parts of it: both drew it from "
    "one seed; give it its numbers before parallelize(), or each rank whole[labs.tp.slices(model)[name]]"
)
USED = (
    "{name!r} is split, and was used outside of its module, where each rank has only its part: a norm, a mean or a "
    "product of that is not the whole's; for weight decay give the optimizer weight_decay=, otherwise leave its module "
    "out of the plan"
)
SCALED = (
    "the gradient of {name!r} was scaled by {its:.4g} on rank {first} and by {others:.4g} on rank {other} between "
    "backward and the optimizer, and each has a part of one parameter: clip with labs.tp.clip_gradients, since a norm "
    "of a rank's own part is another on every rank"
)


class Parts:
    """A method for each event.

    On a parameter, `outside` has what its gradients and its modules' sum up to; none if stages have it in common.
    """

    def __init__(self, mesh: Mesh, cuts: Mapping[str, Cut]):
        self.mesh, self.cuts = mesh, cuts
        self.versions: dict[str, int] = {}
        self.arrived: dict[str, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        self.versions = {name: p._version for name, p in self.own(model).items()}

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        if agree.alone:  # there are no numbers to look at
            return {}
        return {name: p for name, p in model.named_parameters() if name in self.cuts and not hasattr(p, "to_local")}

    def before_forward(self, model: nn.Module) -> None:
        rank, found = self.mesh.get_local_rank(), {}
        for name, p in self.own(model).items():
            if p._version != self.versions[name]:
                found[name] = self.cuts[name].starts[rank], numbers(p).tolist()
        (first, its), *others = everybodys(found, self.mesh.get_group()).items()
        for name, (start, drawn) in its.items():
            for other, theirs in others:
                where, same = theirs.get(name, (start, None))
                if where != start and same == drawn and len({*drawn}) > 1:
                    raise RuntimeError(DRAWN.format(name=name, first=first, other=other))

    def watch(self, model: nn.Module) -> None:
        """As the first forward begins that will have a backward."""
        for p in self.own(model).values():
            if p.requires_grad and hasattr(p, "outside"):
                p.outside = None
            elif p.requires_grad:
                p.outside = {}
                others = dict(p._backward_hooks or {})
                p.register_hook(weakly(self.arrives, p))
                for number, hook in others.items():  # what changes the gradient comes behind
                    del p._backward_hooks[number]
                    p._backward_hooks[number] = hook

    @torch.compiler.disable
    def use(self, p: Tensor) -> Tensor:
        """The parameter for its module; what comes back to it there is not used outside."""
        if not isinstance(p, nn.Parameter) or not p.requires_grad:
            return p
        here = p.view_as(p)
        if here.requires_grad:  # not in the first run of a reentrant checkpoint
            here.register_hook(weakly(self.came_through, p))
        return here

    def arrives(self, p: nn.Parameter, gradient: Tensor) -> None:
        add(p, 1, gradient)

    def came_through(self, p: nn.Parameter, gradient: Tensor) -> None:
        add(p, -1, gradient)

    def after_backward(self, model: nn.Module, judge: bool) -> None:
        own = self.own(model)
        self.arrived = {name: numbers(p.grad) for name, p in own.items() if p.grad is not None}
        if not judge:
            return
        wrong = None
        for name, p in own.items():
            found = vars(p).pop("outside", None) or {}
            if {1, -1} <= found.keys() and found["size"].numel():  # what never goes through its module is used by hand
                most = 4 * torch.finfo(p.dtype).eps * found["size"].max()
                wrong = wrong or (name if (found[1] - found[-1]).abs().max() > most else None)
        for name in everybodys(wrong, self.mesh.get_group()).values():
            if name:
                raise RuntimeError(USED.format(name=name))

    def before_optimizer(self, own: Mapping[str, nn.Parameter]) -> None:
        if not own:  # another model's, whom not all ranks may still have; or masters, which stand for them
            self.arrived.clear()
        if agree.alone or not own:
            return
        mine = {
            name: (factor(numbers(p.grad), self.arrived.pop(name)), rounding(p.grad))
            for name, p in own.items()
            if name in self.arrived and p.grad is not None
        }
        (first, its), *others = everybodys(mine, self.mesh.get_group()).items()
        for name, (by, most) in its.items():
            for other, theirs in others:
                times, _ = theirs.get(name, (math.nan, most))
                if abs(times - by) > most * max(abs(by), abs(times)):  # never where one of them is nan
                    raise RuntimeError(SCALED.format(name=name, first=first, its=by, other=other, others=times))


def add(p: nn.Parameter, sign: int, gradient: Tensor) -> None:
    if (found := getattr(p, "outside", None)) is not None:
        mine = numbers(gradient)
        found[sign] = found.get(sign, 0) + mine
        found["size"] = found.get("size", 0) + mine.abs()


def numbers(x: Tensor) -> Tensor:
    """Some of them, in float64."""
    x = x.detach().to_dense() if x.is_sparse else x.detach()
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    return flat[:: max(1, len(flat) // 64)].double()


def factor(now: Tensor, before: Tensor) -> float:
    """By which all numbers were multiplied; nan if something else was done, or too few can say it."""
    if len(now) != len(before) or len(before.abs().unique()) < 3:
        return math.nan
    most = before.abs().argmax()
    by = now[most] / before[most]
    return by.item() if torch.allclose(now, by * before, rtol=1e-2, atol=1e-3 * now.abs().max().item()) else math.nan
