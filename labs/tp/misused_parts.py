"""Checks in the first step that no rank uses its part of a parameter as if it were the whole.

A rank's part of a parameter is an ordinary tensor, and does not know the whole parameter.  An operation that treats
each number of a part by itself is right.  These uses of a part are wrong, and are found:

    drawn      numbers drawn after parallelize(), from one seed on all ranks: the whole has the same rows several times
    used       a use outside of the split module: a norm or a mean in the loss is that of a part
    scaled     a gradient scaled between backward and the optimizer by another factor on each rank, as by its own norm

Other changes of parts between two steps are not noticed, such as exchanging rows, subtracting a mean from a gradient or
normalising weights.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from labs import agree
from labs.agree import everybodys, rounding
from labs.hooks import weakly
from labs.mesh import Mesh
from labs.tp.parameter_cuts import Cut

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
    """The checks of split parameters in the first step, with a method for each event.

    mesh: the ranks that the model is split over; cuts: the parts of each split parameter, by its name.

    The attribute `outside` of a parameter holds two sums, of all its gradients and of those that came through its
    module; the attribute is None if several pipeline stages share the parameter.
    """

    def __init__(self, mesh: Mesh, cuts: Mapping[str, Cut]):
        self.mesh, self.cuts = mesh, cuts
        self.versions: dict[str, int] = {}
        self.arrived: dict[str, Tensor] = {}

    def begin(self, model: nn.Module) -> None:
        self.versions = {name: p._version for name, p in self.own(model).items()}

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        if agree.alone:  # a dry run has no numbers
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
        """Register the hooks of split parameters, as the first forward with gradients begins."""
        for p in self.own(model).values():
            if p.requires_grad and hasattr(p, "outside"):
                p.outside = None
            elif p.requires_grad:
                p.outside = {}
                others = dict(p._backward_hooks or {})
                p.register_hook(weakly(self.arrives, p))
                for number, hook in others.items():  # hooks that change the gradient must run after this one
                    del p._backward_hooks[number]
                    p._backward_hooks[number] = hook

    @torch.compiler.disable
    def use(self, p: Tensor) -> Tensor:
        """Return a view of a parameter for its own module, to tell gradients of uses there from those of other uses."""
        if not isinstance(p, nn.Parameter) or not p.requires_grad:
            return p
        here = p.view_as(p)
        if here.requires_grad:  # the first run of a reentrant checkpoint has no graph
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
            # A parameter that its own module never used, but other code did, is not judged.
            if {1, -1} <= found.keys() and found["size"].numel():
                most = 4 * torch.finfo(p.dtype).eps * found["size"].max()
                wrong = wrong or (name if (found[1] - found[-1]).abs().max() > most else None)
        for name in everybodys(wrong, self.mesh.get_group()).values():
            if name:
                raise RuntimeError(USED.format(name=name))

    def before_optimizer(self, own: Mapping[str, nn.Parameter]) -> None:
        if not own:  # the optimizer of another model, or of masters; other ranks may not come here
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
                if abs(times - by) > most * max(abs(by), abs(times)):  # False if one of them is nan
                    raise RuntimeError(SCALED.format(name=name, first=first, its=by, other=other, others=times))


def add(p: nn.Parameter, sign: int, gradient: Tensor) -> None:
    if (found := getattr(p, "outside", None)) is not None:
        mine = numbers(gradient)
        found[sign] = found.get(sign, 0) + mine
        found["size"] = found.get("size", 0) + mine.abs()


def numbers(x: Tensor) -> Tensor:
    """Return about 64 numbers of x, evenly spaced, in float64."""
    x = x.detach().to_dense() if x.is_sparse else x.detach()
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    return flat[:: max(1, len(flat) // 64)].double()


def factor(now: Tensor, before: Tensor) -> float:
    """Return the factor by which all numbers were multiplied; nan if there is no such factor, or too few numbers."""
    if len(now) != len(before) or len(before.abs().unique()) < 3:
        return math.nan
    most = before.abs().argmax()
    by = now[most] / before[most]
    return by.item() if torch.allclose(now, by * before, rtol=1e-2, atol=1e-3 * now.abs().max().item()) else math.nan
