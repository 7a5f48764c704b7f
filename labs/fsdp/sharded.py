"""One parameter, sharded: a DTensor, cut along its first dim, that stands in the module; and `full`, all of it, which
has memory only while its layer computes, and then stands there instead.

    MixedPrecisionPolicy    in which dtypes it is gathered, and its gradient reduced
    OffloadPolicy           where its shard lies
    ShardedParameter        the parameter
    Whole                   what its layer finds: `full`, to autograd
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
    """Shards lie on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients, and so the optimizer, stay in the CPU's memory, pinned for the GPU's copy engines."""

    pin_memory: bool = True


class ShardedParameter:
    """One parameter: `shard` for the optimizer, `full` for its layer.

    whole: [ranks, elements of a piece], the memory behind `full`; none while the parameter is dropped.
    """

    def __init__(self, homes: list[Home], p: nn.Parameter, mesh: Mesh, policy: MixedPrecisionPolicy, offload: Any):
        self.homes, self.name, self.shape = homes, homes[0].name, p.shape
        self.mesh, self.ranks, self.rank = mesh, mesh.size(-1), mesh.get_local_rank(-1)
        self.rows = max(1, -(-p.shape[0] // self.ranks))  # of a piece: one of padding, where there is nothing at all
        self.n = self.rows * p.shape[1:].numel()
        self.mine = slice(*(min(rank * self.rows, len(p)) for rank in (self.rank, self.rank + 1)))
        self.placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        to = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) and not p.is_meta else p.device
        own = p.detach()[self.mine].to(to, copy=True)
        if p.is_cuda and to.type == "cpu" and offload.pin_memory:
            own = own.pin_memory()
        self.shard = nn.Parameter(self.distributed(own), p.requires_grad)
        vars(self.shard).update(vars(p))  # what others have noted on it
        self.hooks = p._backward_hooks  # of a rank's own gradient; these are of the mean:
        self.shard._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks
        self.use: Tensor | None = None  # what stands in the module while its layer computes
        self.device, self.dtype, self.at_rest = p.device, policy.param_dtype or p.dtype, p.dtype
        self.pending: Tensor | None = None  # a gradient of earlier micro-batches, in reduce_dtype
        for module, attribute, _ in homes:
            module.register_parameter(attribute, self.shard)
        if not p.is_meta:
            Moved.mark(p, self.name, "make the optimizer after fully_shard")

    def settle(self) -> None:
        """Before the first forward: take the shard that stands in the module now, and make room for all of it."""
        module, attribute, _ = self.homes[0]
        if self.device.type == "meta":  # model.to_empty() has put others in their places
            self.shard, self.device = module._parameters[attribute], module._parameters[attribute].device
        self.require_unchanged()
        self.whole = torch.empty(self.ranks, self.n, dtype=self.dtype, device=self.device)
        full = self.whole.view(self.ranks * self.rows, *self.shape[1:])[: self.shape[0]]
        self.full = nn.Parameter(full, requires_grad=False)
        self.full._backward_hooks = self.hooks
        self.versions, self.hook = Versions(self.full), None
        self.drop()

    def train(self, gradient_ready: Callable[..., None]) -> None:
        """Train it, or not, as its shard says; the hook is called when all of its gradient is there."""
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
        """This rank's piece, without padding."""
        return self.shard.detach().to_local()

    @property
    def version(self) -> tuple[int, int]:
        """What changes where the shard is written to, or its block by itself, as checkpoints and averages do."""
        return self.shard._version, self.shard._local_tensor._version

    def show(self) -> None:
        """Let the layer find all of it in `use`, where its gradient comes together."""
        # Autograd would call the shard's hooks before there is a gradient.
        noticed = self.full.requires_grad and not self.shard._post_accumulate_grad_hooks
        with torch.enable_grad():  # in backward, too: a recomputation needs what the forward had
            self.use = Whole.apply(self.full, self.shard) if noticed else self.full.view_as(self.full)
        self.use._is_param = True  # for isinstance(..., nn.Parameter)
        for module, attribute, _ in self.homes:
            module._parameters[attribute] = self.use

    def arrive(self, pieces: Tensor) -> None:
        """From a table of fewer ranks, several of the pieces stand in each of its rows."""
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
        """Whether what was gathered has this rank's numbers still, of which .data and NumPy change no version."""
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
        """Let the layer find the shard again, unless somebody has put another one there."""
        for module, attribute, _ in self.homes:
            if self.use is not None and module._parameters.get(attribute) is self.use:
                module._parameters[attribute] = self.shard
        self.use = None

    def pack(self, pieces: Tensor, divisor: int) -> None:
        """Lay the gradient that waits, divided, into pieces, [ranks, n]; where none does, what changes no sum: -0.0.

        What is added to -0.0 stays as it is, and only where all ranks bring that is it the sum.  So a gradient of zeros
        must bring 0.0, in its padding, too.
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
        """This rank's piece of the mean gradient, padded."""
        own = piece.view(self.rows, *self.shape[1:])[: self.mine.stop - self.mine.start].to(self.local)
        if self.shard.grad is None:
            self.shard.grad = self.distributed(own)
        else:
            self.shard.grad.to_local().add_(own)
        for hook in (self.shard._post_accumulate_grad_hooks or {}).values():
            hook(self.shard)


class Whole(torch.autograd.Function):
    """All of a parameter, as its layer finds it.

    The shard is an input so that whoever asks for its gradient, as by backward(inputs=...), comes by here.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, shard: DTensor) -> Tensor:
        return full.detach()  # has its version, and is no view, which a custom function may not be written to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (full, _), _ = ctx.next_functions
        if not torch._C._will_engine_execute_node(full):
            raise RuntimeError(
                "backward(inputs=...) and autograd.grad do not bring a parameter of fully_shard its gradient: call "
                "loss.backward() without inputs, and read p.grad after it"
            )
        return gradient, None
