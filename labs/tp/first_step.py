"""Comparisons between the ranks of a split model in its first step: a difference there would cause no error by itself.

    as the first forward begins    the model's inputs, and the state of random numbers
    during the forward             every x that must be whole as it goes into a split layer
    as the forward ends            the state of random numbers; the whole model's results (labs.tp.whole_model_check)
    in the first backward          every gradient that must be whole as it comes back to a split layer; shards of the
                                   sequence, which must differ
    as the backward ends           gradients of the parameters that are not split
    in an optimizer's first step   the same gradients again, since they may have been clipped

Inputs and random numbers are compared bit by bit; activations and gradients by some of their numbers, up to rounding.

labs.tp.misused_parts checks that a rank's part of a parameter is not used as the whole.  Clipping by a rank's own norm
is not noticed if no gradient is clipped in the first step.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from labs import agree
from labs.agree import Some, compare, everybodys, fingerprint, first_difference, rounding
from labs.hooks import at_the_very_end_of_backward, differentiable, tensors_in, weakly
from labs.mesh import Mesh
from labs.optimizer_probe import require_no_scaler
from labs.tp.misused_parts import Parts
from labs.tp.optimizers import require_elementwise
from labs.tp.parameter_cuts import Cut

INPUTS = (
    "{name} differs on ranks {first} and {other}: under tensor parallelism all ranks of a group read the same tokens, "
    "and draw the same random numbers (the batch is cut along another axis of the mesh)"
)
RANDOM_NUMBERS = (
    "{name} differs on ranks {first} and {other} after the first forward: a dropout inside a split layer has drawn for "
    "pieces of different sizes; give it SequenceParallel(), with which each rank draws its own"
)
X = (
    "the input of {name!r} differs on ranks {first} and {other}, and must be whole there: a shard of the sequence "
    "needs input_layouts=Shard(1), a piece of the features output_layouts=Replicate() where it comes from, and a piece "
    "of the logits LossParallel()"
)
SHARD = (
    "the shards that go into {name!r} are {its} on rank {first} and {others} on rank {other}: ranks share the sequence "
    "equally, so pad it to a multiple of their number"
)
LOSS = (
    "the loss differs on ranks {first} and {other}: each has computed it from its own piece of the logits, or its own "
    "tokens; make the logits whole (output_layouts=Replicate() of the head), or give the loss LossParallel()"
)
GRADIENT = (
    "the gradient of what {name!r} makes whole differs on ranks {first} and {other}: it was used inside a split layer "
    "that it did not enter through ColwiseParallel() or PrepareModuleInput(), and each rank has only its part of the "
    "gradient; give one of them to the module that uses it"
)
SHARDS = (
    "{name!r} is in a module with SequenceParallel(), but all {ranks} ranks have the same x there, so that the sum of "
    "their gradients would be {ranks} times too large: leave it out of the plan, or let shards come out of the module "
    "before it (output_layouts=Shard(1))"
)
PARAMETER = (
    "parameter {name!r} is not split, and its gradient differs on ranks {first} and {other}: it was used inside a "
    "split layer, or on shards, and each rank has only its part of the gradient; give its module SequenceParallel(), "
    "or split it"
)
CLIPPED = (
    "parameter {name!r} is not split, and its gradient differs on ranks {first} and {other} as the optimizer begins, "
    "though not as backward ended: clip with labs.tp.clip_gradients, since a norm of each rank's own parts "
    "(nn.utils.clip_grad_norm_) is another on every rank"
)
NO_GRADIENT = (
    "parameter {name!r} has a gradient on one of the ranks {first} and {other} as the optimizer begins, and none on "
    "the other: all ranks of a group take the same steps, so call zero_grad() on all of them or on none"
)


class FirstStep:
    """The comparisons of a split model's first step, with a method for each event.

    mesh: the ranks that the model is split over.
    shards: whether the model's input may be a shard of the sequence, which differs from rank to rank.
    cuts: the parts of each split parameter, by its name.

    inputs_compared, random_numbers_compared and gradients_compared tell which comparisons are done; none is repeated.
    """

    def __init__(self, mesh: Mesh, shards: bool, cuts: Mapping[str, Cut]):
        self.mesh, self.shards, self.parts = mesh, shards, Parts(mesh, cuts)
        self.compared_as_whole = mesh.size() == 1
        self.inputs_compared = self.random_numbers_compared = False
        self.awaits_gradients = self.gradients_compared = False
        self.seen: set[tuple[str, str]] = set()
        self.whole: list[str] = []
        self.arrived: dict[str, Some] = {}
        self.optimizers: WeakSet[Optimizer] = WeakSet()

    def watch(self, model: nn.Module, whole: list[str], as_whole: Callable, then: Callable[[nn.Module], None]) -> None:
        """Register the hooks for all events of the first step.

        whole: the names of the parameters that every rank has as a whole.
        as_whole: the function labs.tp.whole_model_check.compare.
        then: a function to call when the first backward is over.
        """
        self.whole, self.as_whole, self.then = whole, as_whole, then
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        model.register_forward_hook(self.after_forward, with_kwargs=True)
        finalize(model, register_optimizer_step_pre_hook(weakly(self.before_optimizer, model)).remove)

    @torch.compiler.disable
    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "torch.func.grad, vmap and the like cannot transform what a split model sends between ranks: take "
                "loss.backward() or torch.autograd.grad"
            )
        if torch.is_grad_enabled() and not self.compared_as_whole and not agree.alone:
            self.compared_as_whole = True  # register it after labs.fsdp's hooks, which then see an evaluation
            self.last = model.register_forward_hook(self.at_the_very_end_of_forward, with_kwargs=True)
        read = {f"input {i}": x for i, x in enumerate(tree_leaves((args, kwargs))) if isinstance(x, Tensor)}
        whole = {name: x for name, x in read.items() if not (self.shards and differentiable_type(x))}
        mine = {} if self.inputs_compared else {name: fingerprint(x) for name, x in whole.items()}
        self.require_alike(mine | self.random_numbers(model), INPUTS)
        if not self.inputs_compared:
            self.parts.before_forward(model)
        if not self.awaits_gradients and torch.is_grad_enabled():
            self.awaits_gradients = True
            self.parts.watch(model)
            for name, p in model.named_parameters():  # only now: labs.fsdp and labs.zero refuse hooks
                if name in self.whole and p.requires_grad and not hasattr(p, "to_local"):
                    p.register_hook(partial(self.gradient_ready, name))

    @torch.compiler.disable
    def after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inputs_compared = True
        if drawn := self.random_numbers(model):
            self.require_alike(drawn, RANDOM_NUMBERS)
            self.random_numbers_compared = True
        found = differentiable(output)
        if not self.gradients_compared:
            self.require_alike({str(i): Some.of(x) for i, x in enumerate(found) if x.ndim == 0}, LOSS)
        if not self.gradients_compared or not self.optimizers:
            for x in found:
                x.register_hook(lambda gradient: at_the_very_end_of_backward(partial(self.after_backward, model)))

    @torch.compiler.disable
    def at_the_very_end_of_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.last.remove()
        if not (self.shards and any(map(differentiable_type, tensors_in((args, kwargs), set())))):
            self.as_whole(model, self.mesh, args, kwargs, output)

    def takes_whole(self, name: str, x: Tensor) -> None:
        if not self.inputs_compared:
            self.compare(name, x, X)

    def takes_shard(self, name: str, x: Tensor) -> None:
        if not self.inputs_compared:
            self.require_alike({name: tuple(x.shape)}, SHARD)

    def gives_whole(self, name: str, x: Tensor) -> None:
        if not self.gradients_compared and x.requires_grad:
            x.register_hook(partial(self.compare, name, text=GRADIENT))

    def takes_shards(self, name: str, given: Any, p: Tensor) -> None:
        """Check in backward that the shards that a module is given differ between ranks.

        p: a copy of the module's parameter, which gets this rank's summand of the gradient.
        """
        if not self.gradients_compared and p.requires_grad:
            p.register_hook(partial(self.require_summands, name, some_tokens(given)))

    def gradient_ready(self, name: str, gradient: Tensor) -> None:
        if not self.gradients_compared:
            self.arrived[name] = Some.of(gradient)

    def after_backward(self, model: nn.Module) -> None:
        self.parts.after_backward(model, judge=not self.gradients_compared)
        # Compare the gradients that the hooks got: labs.ddp may be averaging those in .grad now.  labs.fsdp has put
        # shards in the parameters' places; their gradients are complete by now.
        now = {name: p.grad for name, p in model.named_parameters() if name in self.whole}
        mine = self.arrived | {name: Some.of(local(g)) for name, g in now.items() if hasattr(g, "to_local")}
        if mine and not self.gradients_compared:
            last_first = {name: mine[name] for name in reversed(self.whole) if name in mine}
            self.gradients_compared = self.require_alike(last_first, PARAMETER)
            self.seen, self.arrived = set(), {}
            if self.gradients_compared:
                self.then(model)

    @torch.compiler.disable
    def before_optimizer(self, model: nn.Module, optimizer: Optimizer, *others: Any) -> None:
        if optimizer in self.optimizers and not hasattr(optimizer, "found_inf"):
            return
        given = {p for group in optimizer.param_groups for p in group["params"]}
        own = {name: p for name, p in model.named_parameters() if p in given}
        if own and self.mesh.size() > 1:
            require_no_scaler(optimizer)
        require_elementwise(optimizer, own, split=[name for name in own if name not in self.whole])
        self.parts.before_optimizer(own)
        whole = {name: p.grad for name, p in own.items() if name in self.whole}
        gradients = {name: None if g is None else Some.of(local(g)) for name, g in whole.items()}
        if self.require_alike(gradients, CLIPPED):
            self.optimizers.add(optimizer)

    # ---- comparing ---------------------------------------------------------------------------------------

    @torch.compiler.disable
    def compare(self, name: str, x: Tensor, text: str) -> None:
        if (name, text) not in self.seen:
            self.seen.add((name, text))
            self.require_alike({name: Some.of(x)}, text)

    def require_summands(self, name: str, tokens: list[float] | None, gradient: Tensor) -> None:
        if (name, SHARDS) in self.seen or self.mesh.size() == 1:
            return
        self.seen.add((name, SHARDS))
        mine = None if tokens is None else (tokens, Some.of(gradient).numbers)
        first, *others = everybodys(mine, self.mesh.get_group()).values()
        if first and any(first[1]) and all(other == first for other in others):
            raise RuntimeError(SHARDS.format(name=name, ranks=self.mesh.size()))

    def require_alike(self, mine: dict[str, Any], text: str) -> bool:
        """Raise RuntimeError, on every rank, if `mine` differs between ranks; return whether it could be compared.

        Numbers that are inf or nan, as in the first steps of a loss scaler, cannot be compared.
        """
        if not mine or self.mesh.size() == 1:
            return True
        found = everybodys(mine, self.mesh.get_group())

        def sentence(rank: int, its: dict[str, Any], other: int, others: dict[str, Any]) -> str:
            name = first_difference(its, others)
            values = {"its": its.get(name), "others": others.get(name)}
            if text is CLIPPED and None in values.values():
                return NO_GRADIENT.format(name=name, first=rank, other=other)
            return text.format(name=name, first=rank, other=other, **values)

        compare(found, sentence, RuntimeError)
        return not any(isinstance(some, Some) and some.spoiled for each in found.values() for some in each.values())

    def random_numbers(self, model: nn.Module) -> dict[str, str]:
        draws = any(isinstance(each, _DropoutNd) and each.training and each.p > 0 for each in model.modules())
        if self.random_numbers_compared or not draws:
            return {}
        return {"the state of random numbers": " ".join(map(fingerprint, random_states()))}


def random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def differentiable_type(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


@torch.compiler.disable
def some_tokens(given: Any) -> list[float] | None:
    """Return some numbers of a module's input, or None if all tokens are equal, so that shards may be, too."""
    x = next((x for x in tree_leaves(given) if isinstance(x, Tensor)), None)
    if x is None:
        return []
    x = torch.view_as_real(x).flatten(-2) if x.is_complex() else x
    tokens = (x.detach() if x.is_floating_point() else x[..., None]).float()
    tokens = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
    norms = Some.of(torch.stack([(tokens - tokens[:1]).norm(), tokens.norm()])).numbers
    differ = not norms or norms[0] > rounding(x) * norms[1]  # a dry run has no numbers
    return Some.of(x).numbers if differ else None
