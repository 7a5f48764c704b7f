"""One sharded parameter: `shard`, a DTensor cut along its first dim, and `full`, the whole parameter.

The shard stands in the module.  `full` has memory only while its layer computes, and then a view of it stands there.

    MixedPrecisionPolicy    the dtypes in which parameters are gathered and gradients reduced
    OffloadPolicy           the memory that holds the shard
    ShardedParameter        the parameter
    Whole                   the autograd function between `full` and the tensor that its layer uses
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labs import agree
from labs.dropped import Moved, Versions
from labs.dtensor import DTensor, Replicate, Shard
from labs.group import free
from labs.mesh import Mesh
from labs.zero.layers import Home


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of gathered parameters, of reduced gradients, and of outputs; None leaves them as they are."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class OffloadPolicy:
    """A policy that keeps the shards on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """A policy that keeps shards and their gradients, and therefore the optimizer's state, in the CPU's memory.

    pin_memory: pin that memory, so that a GPU's copy engines can read it.
    """

    pin_memory: bool = True


class ShardedParameter:
    """One parameter: `shard` for the optimizer, `full` for its layer.

    whole: [ranks, n], the memory behind `full`, which is freed while the parameter is dropped; n elements make a
    padded piece of `rows` rows.
    """

    def __init__(self, homes: list[Home], p: nn.Parameter, mesh: Mesh, policy: MixedPrecisionPolicy, offload: Any):
        self.homes, self.name, self.shape = homes, homes[0].name, p.shape
        self.mesh, self.ranks, self.rank = mesh, mesh.size(-1), mesh.get_local_rank(-1)
        self.rows = max(1, -(-p.shape[0] // self.ranks))  # rows per piece; an empty parameter has one row of padding
        self.n = self.rows * p.shape[1:].numel()
        self.mine = slice(*(min(rank * self.rows, len(p)) for rank in (self.rank, self.rank + 1)))
        self.placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        to = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) and not p.is_meta else p.device
        own = p.detach()[self.mine].to(to, copy=True)
        if p.is_cuda and to.type == "cpu" and offload.pin_memory:
            own = own.pin_memory()
        self.shard = nn.Parameter(self.distributed(own), p.requires_grad)
        vars(self.shard).update(vars(p))  # keep the attributes that others have set
        self.hooks = p._backward_hooks  # hooks that get this rank's own gradient; the next line's get the mean
        self.shard._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
        self.use: Tensor | None = None  # the tensor that stands in the module while its layer computes
        self.device, self.dtype, self.at_rest = p.device, policy.param_dtype or p.dtype, p.dtype
        self.pending: Tensor | None = None  # the gradient of earlier micro-batches, in reduce_dtype
        for module, attribute, _ in homes:
            module.register_parameter(attribute, self.shard)
        if not p.is_meta:
            Moved.mark(p, self.name, "make the optimizer after fully_shard")

    def settle(self) -> None:
        """Create `full`, without memory, before the first forward.

        Raises RuntimeError if another parameter than the shard stands in the module.
        """
        module, attribute, _ = self.homes[0]
        if self.device.type == "meta":  # model.to_empty() has put another parameter there
            self.shard, self.device = module._parameters[attribute], module._parameters[attribute].device
        self.require_unchanged()
        self.whole = torch.empty(self.ranks, self.n, dtype=self.dtype, device=self.device)
        full = self.whole.view(self.ranks * self.rows, *self.shape[1:])[: self.shape[0]]
        self.full = nn.Parameter(full, requires_grad=False)
        self.full._backward_hooks = self.hooks
        self.versions, self.hook = Versions(self.full), None
        self.drop()

    def train(self, gradient_ready: Callable[..., None]) -> None:
        """Let `full` require a gradient if the shard does; call `gradient_ready` when that gradient is complete."""
        self.full.requires_grad_(self.shard.requires_grad)
        if self.full.requires_grad and not self.hook:
            self.hook = self.full.register_post_accumulate_grad_hook(gradient_ready)

    def require_unchanged(self) -> None:
        module, attribute, _ = self.homes[0]
        now = module._parameters.get(attribute)
        if now is not None and now is self.use:
            now = self.shard
        if now is not None and now.is_meta:
            raise RuntimeError(
                f"parameter {self.name!r} is on the meta device: model.to_empty(device=...) gives the shards memory, "
                "and then they need their numbers"
            )
        if now is None:
            raise RuntimeError(
                f"parameter {self.name!r} was taken out of its module after fully_shard: prune, parametrize or replace "
                "before it"
            )
        if now is not self.shard or now.dtype != self.at_rest:
            raise RuntimeError(
                f"parameter {self.name!r} was sharded as a DTensor of {self.at_rest}, and another one, a "
                f"{type(now).__name__} of {now.dtype}, stands there now: convert or replace parameters before "
                "fully_shard (or let mp_policy= say in which dtype to compute), and load without assign=True"
            )
        if now._backward_hooks:
            raise RuntimeError(
                f"parameter {self.name!r} has a hook that backward would not call, as it is a shard: register it "
                "before fully_shard, for the rank's own gradient, or with register_post_accumulate_grad_hook, for the "
                "shard of the mean"
            )

    def distributed(self, own: Tensor) -> DTensor:
        return DTensor.from_local(own, self.mesh, self.placements, shape=self.shape)

    @property
    def local(self) -> Tensor:
        """Return this rank's piece, without padding."""
        return self.shard.detach().to_local()

    @property
    def version(self) -> tuple[int, int]:
        """Return two counters, of which one changes when the shard or its local tensor is written to."""
        return self.shard._version, self.shard._local_tensor._version

    def show(self) -> None:
        """Put `use`, the full tensor, into the module; the gradients of all its uses are added up there."""
        # If `shard` were an input of Whole, autograd would call its post-accumulate hooks before it has a gradient.
        noticed = self.full.requires_grad and not self.shard._post_accumulate_grad_hooks
        with torch.enable_grad():  # a recomputation in backward needs the same graph as the forward
            self.use = Whole.apply(self.full, self.shard) if noticed else self.full.view_as(self.full)
        self.use._is_param = True  # isinstance(..., nn.Parameter) reads this attribute
        for module, attribute, _ in self.homes:
            module._parameters[attribute] = self.use

    def arrive(self, pieces: Tensor) -> None:
        """Copy the gathered pieces to `full`; pieces: [ranks, n], or fewer rows that hold several pieces each."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.view(pieces.shape).copy_(pieces)
        self.versions.allow()

    def drop(self) -> None:
        self.hide()
        self.versions.forbid()
        free(self.whole)

    def require_unwritten(self) -> None:
        module, attribute, _ = self.homes[0]
        now = module._parameters.get(attribute)
        replaced = self.use is not None and not (now is self.use and now.is_set_to(self.full))
        if replaced or self.full._version != self.versions.version:
            self.refuse_write()

    def is_current(self) -> bool:
        """Return whether this rank's piece in `full` still equals its shard: .data and NumPy change no version."""
        own = self.local.to(self.whole).flatten()
        gathered = self.whole[self.rank, : len(own)]
        return agree.alone or torch.equal(gathered.view(torch.uint8), own.view(torch.uint8))

    def refuse_write(self) -> None:
        raise RuntimeError(
            f"parameter {self.name!r} was written to in a forward, or between unshard() and reshard(), where "
            "fully_shard has gathered it, and drops it with what was written: change parameters between steps, "
            "under torch.no_grad(), where they are shards"
        )

    def hide(self) -> None:
        """Put the shard back into the module, unless the user has put another tensor there."""
        for module, attribute, _ in self.homes:
            if self.use is not None and module._parameters.get(attribute) is self.use:
                module._parameters[attribute] = self.shard
        self.use = None

    def pack(self, pieces: Tensor, divisor: int) -> None:
        """Copy the pending gradient, divided by `divisor`, to `pieces`, [ranks, n]; where none is pending, write -0.0.

        Adding -0.0 changes no number, and the sum is -0.0 only if all ranks sent that.  So a gradient of zeros must be
        sent as 0.0, in its padding, too.
        """
        if self.pending is None:
            pieces.fill_(-0.0)
            return
        gradient, complete = self.pending if divisor == 1 else self.pending / divisor, len(self.pending) // self.rows
        torch.add(gradient[: complete * self.rows].reshape(complete, self.n), 0.0, out=pieces[:complete])
        if complete < self.ranks:
            over = gradient[complete * self.rows :].flatten()
            torch.add(over, 0.0, out=pieces[complete, : len(over)])
            pieces[complete, len(over) :].zero_()
            pieces[complete + 1 :].zero_()

    def add(self, piece: Tensor) -> None:
        """Add this rank's piece of the mean gradient, [n] with padding, to the shard's gradient; call its hooks."""
        own = piece.view(self.rows, *self.shape[1:])[: self.mine.stop - self.mine.start].to(self.local)
        if self.shard.grad is None:
            self.shard.grad = self.distributed(own)
        else:
            self.shard.grad.to_local().add_(own)
        for hook in (self.shard._post_accumulate_grad_hooks or {}).values():
            hook(self.shard)


class Whole(torch.autograd.Function):
    """The identity on a full parameter, which refuses a backward that asks for the gradient of the shard.

    The shard is an input, so that backward(inputs=...) and autograd.grad of the shard run this function's backward.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, shard: DTensor) -> Tensor:
        return full.detach()  # a detached tensor can be written to, and shares its version; a view could not

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (full, _), _ = ctx.next_functions
        if not torch._C._will_engine_execute_node(full):
            raise RuntimeError(
                "backward(inputs=...) and autograd.grad do not bring a parameter of fully_shard its gradient: call "
                "loss.backward() without inputs, and read p.grad after it"
            )
        return gradient, None
