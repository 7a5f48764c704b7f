"""A tensor that knows its layout on a mesh, and computes as if it were whole.

    DTensor            a tensor with the whole's shape, of which this rank holds a block: `to_local()`
    from_local         makes a DTensor of each rank's block (labs.dtensor.distribute makes one of the whole tensor)
    redistribute       changes the placements (labs.dtensor.redistribute has the moves)
    full_tensor        returns the whole tensor, on every rank

    mesh = Mesh((4,), ("tp",))
    w = distribute_tensor(w, mesh, [Shard(0)])
    x = distribute_tensor(x, mesh, [Replicate()])
    y = x @ w.t()                              # y.placements: (Shard(1),); nothing was sent
    y.sum().backward()                         # w.grad.placements: (Shard(0),)

Every operation arrives at `__torch_dispatch__`, below autograd: the inputs are redistributed as its rule requires, the
operation is carried out on the blocks, and the result knows its layout (labs.dtensor.operation; for an optimizer's
operations, labs.dtensor.pointwise).  Backward consists of operations on DTensors, too.  Only redistribution,
`from_local` and `to_local` have backwards of their own:

    forward                        backward
    from_local                     redistribute to the forward's placements, and take the block
    to_local                       from_local, in the forward's placements
    redistribute                   redistribute to the placements before

A gradient that would become Partial() stays, or becomes, Replicate() instead: each summand of a sum needs the whole
gradient.  The methods of a DTensor have the names and results of torch.distributed.tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from labs.agree import fingerprint, require_same
from labs.dtensor.copied import require_as_shared, require_no_part_of_parameter
from labs.dtensor.operation import carry_out, written
from labs.dtensor.placement import Placement, Replicate, Spec, normalised, whole_shape
from labs.dtensor.pointwise import fused, on_blocks, on_lists
from labs.dtensor.redistribute import redistribute
from labs.dtensor.rules import IN_TERMS_OF
from labs.mesh import Mesh


class DTensor(Tensor):
    """A tensor with the `shape` and `dtype` of the whole tensor, of which this rank holds a block.

    `DTensor.from_local` and `distribute_tensor` make a DTensor.
    """

    _local_tensor: Tensor
    device_mesh: Mesh
    placements: tuple[Placement, ...]
    spec: Spec
    copied: Callable[[], Any] = staticmethod(lambda: None)  # on a copied part: see labs.dtensor.copied
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, local: Tensor, mesh: Mesh, placements: Sequence[Placement], like: Tensor, requires_grad: bool = False
    ) -> "DTensor":
        """Make a DTensor.

        like: any tensor with the shape and strides of the whole tensor, such as a meta tensor
        """
        whole = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        whole._local_tensor, whole.device_mesh, whole.placements = local, mesh, tuple(placements)
        whole.spec = Spec(tuple(like.shape), mesh.shape, whole.placements)
        return whole

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: Mesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> "DTensor":
        """Make a DTensor of each rank's block.

        run_check: whether to compare the ranks' blocks, which costs messages
        shape: the whole tensor's shape, which must be given if the blocks are uneven
        stride: the whole tensor's strides; by default, its dims have the same order in memory as the block's

        Raises ValueError if this rank's block does not have the shape that follows from `shape` and placements, and
        with `run_check` if the ranks' shapes or dtypes differ, or numbers that several ranks hold.
        """
        placements = normalised(placements, local_tensor.ndim, device_mesh.ndim)
        shape = tuple(whole_shape(local_tensor.shape, device_mesh.shape, placements) if shape is None else shape)
        block = Spec(shape, device_mesh.shape, placements).block(device_mesh.get_coordinate())
        if block.shape != tuple(local_tensor.shape):
            raise ValueError(
                f"rank {device_mesh.rank} gave a block of shape {tuple(local_tensor.shape)}, but its block of a tensor "
                f"of shape {shape} in {list(placements)} has shape {block.shape}: give that block, or another shape="
            )
        if run_check:
            require_one_whole(shape, local_tensor, device_mesh, placements)
        order = sorted(range(len(shape)), key=lambda dim: -local_tensor.stride(dim))
        like = torch.empty_permuted(shape, order, device="meta")
        like = like if stride is None else torch.empty_strided(shape, stride, device="meta")
        return FromLocal.apply(local_tensor, device_mesh, placements, like)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's block of the tensor.

        grad_placements: placements of the block's gradient; by default those of the block
        """
        if grad_placements is not None:
            grad_placements = normalised(grad_placements, self.ndim, self.device_mesh.ndim)
        require_as_shared(self)
        require_no_part_of_parameter(self)
        return ToLocal.apply(self, grad_placements) if torch.is_grad_enabled() else self._local_tensor

    def redistribute(
        self, device_mesh: Mesh | None = None, placements: Sequence[Placement] | None = None, *, async_op: bool = False
    ) -> "DTensor":
        """Change the placements.  Raises RuntimeError for another mesh, for a new Partial(), and for async_op=True."""
        if async_op:
            raise RuntimeError(
                "redistribute(async_op=True): a redistribution waits for what it sends; leave async_op out"
            )
        if device_mesh not in (None, self.device_mesh):
            raise RuntimeError(
                f"redistribute() from {self.device_mesh} to {device_mesh}: redistribution stays on its mesh, so leave "
                "device_mesh out"
            )
        if placements is None:
            raise RuntimeError("redistribute to what? give placements=, one for each axis of the mesh")
        placements = normalised(placements, self.ndim, self.device_mesh.ndim)
        for source, target in zip(self.placements, placements, strict=True):
            if target.is_partial() and source != target:
                raise RuntimeError(
                    f"redistribute() from {source!r} to {target!r}: only operations make summands, so give Replicate() "
                    "or Shard(dim)"
                )
        return Redistribute.apply(self, placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Gather the whole tensor, and return it on every rank."""
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def moved(self, placements: Sequence[Placement]) -> Tensor:
        """Return this rank's block of the tensor in other placements, without autograd."""
        require_as_shared(self)
        return redistribute(self._local_tensor, self.spec, placements, self.device_mesh)

    @property
    def data(self) -> "DTensor":
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:  # Tensor's own setter would change the wrapper, and not the block
        if not isinstance(other, DTensor) or (other.spec, other.dtype) != (self.spec, self.dtype):
            raise RuntimeError(
                f".data of a DTensor ({self.dtype}, {tuple(self.shape)} as {list(self.placements)}) takes a DTensor of "
                "the same dtype, shape and placements: make it with distribute_tensor, or copy_() its numbers under "
                "torch.no_grad()"
            )
        self._local_tensor = other._local_tensor
        increment_version(self)

    # With these two methods, Module.to() replaces a parameter as a whole; without them, it would change only the
    # wrapper's dtype.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local_tensor"], (self.device_mesh, self.placements)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> "DTensor":
        like = torch.empty_strided(shape, stride, device="meta")
        return DTensor(parts["_local_tensor"], *context, like)

    def share_memory_(self) -> "DTensor":
        raise RuntimeError("share_memory_() of a DTensor: its block alone has memory, so x.to_local().share_memory_()")

    def __repr__(self, **options: Any) -> str:
        return (
            f"DTensor({tuple(self.shape)} as {list(self.placements)} on {self.device_mesh}, here {self._local_tensor})"
        )

    # ---- operations --------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, op._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            return on_lists(op, args, kwargs, DTensor)
        if name.startswith("_fused_") and op._schema.is_mutable:
            return fused(op, args, kwargs)
        if "out" in kwargs:
            return written(op, args, kwargs.pop("out"), kwargs)
        if name == "detach" and not args[0].copied():  # the same block, whose version shows later writes
            return DTensor(args[0]._local_tensor, args[0].device_mesh, args[0].placements, args[0])
        if name in IN_TERMS_OF:
            return IN_TERMS_OF[name](*args, **kwargs)
        if simple := on_blocks(op, args, kwargs):
            block, like = simple
            return args[0] if op._schema.is_mutable else DTensor(block, like.device_mesh, like.placements, like)
        return carry_out(op, args, kwargs, DTensor)


def meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def require_one_whole(shape: tuple[int, ...], block: Tensor, mesh: Mesh, placements: Sequence[Placement]) -> None:
    for group, placement in zip(mesh.get_all_groups(), placements, strict=True):
        numbers = f", {fingerprint(block)}, as {placement}" if placement.is_replicate() else ""
        require_same(
            f"{shape}, {block.dtype}{numbers}",
            group,
            lambda rank, its, other, others: (
                f"the blocks are of different tensors: rank {rank}'s of {its}, rank {other}'s of {others}; where "
                "blocks are uneven, give shape=; where numbers differ, distribute_tensor takes the first rank's"
            ),
        )


# ---- gradients of conversions and redistribution ---------------------------------------------------------

# A missing gradient stays None (set_materialize_grads): autograd would make zeros without a layout.


class FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Mesh, placements: tuple[Placement, ...], like: Tensor) -> DTensor:
        ctx.placements = placements
        ctx.set_materialize_grads(False)
        return DTensor(local.view_as(local), mesh, placements, like)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        return Redistribute.apply(gradient, without_partial(ctx.placements)).to_local(), None, None, None


class ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, grad_placements: tuple[Placement, ...] | None) -> Tensor:
        ctx.mesh, ctx.placements, ctx.like = x.device_mesh, grad_placements or without_partial(x.placements), meta(x)
        ctx.set_materialize_grads(False)
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return None, None
        return FromLocal.apply(gradient, ctx.mesh, ctx.placements, ctx.like), None


class Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        ctx.placements = x.placements
        ctx.set_materialize_grads(False)
        return DTensor(x.moved(placements), x.device_mesh, placements, meta(x))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[DTensor | None, ...]:
        if gradient is None:
            return None, None
        back = [
            Replicate() if before.is_partial() and not now.is_partial() else before
            for now, before in zip(gradient.placements, ctx.placements, strict=True)
        ]
        return Redistribute.apply(gradient, tuple(back)), None


def without_partial(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)
