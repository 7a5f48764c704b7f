"""One operation on DTensors (labs.dtensor.dtensor calls `carry_out` for each operation):

    prepare       finds the inputs' new placements, and the layout of the result; the answer is cached
    carry_out     redistributes the inputs, and does the operation on the blocks
    written       does an operation whose result is written to `out`

`prepare` refuses an operation that cannot be done.  `prepare` needs only shapes and placements, so every rank raises
the same error, before anything is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from labs.dtensor.algebra import Doing, Rule, choose, ways
from labs.dtensor.copied import mark_copies, require_as_shared
from labs.dtensor.placement import Replicate, Spec
from labs.dtensor.redistribute import redistribute
from labs.dtensor.rules import RULES
from labs.mesh import Mesh

STANDS_FOR = {float: 1.0, torch.Generator: None}  # in the cache's key, since no shape depends on these values
Make = Callable[..., Tensor]  # makes a DTensor of (block, mesh, placements, like)


@dataclass(frozen=True)
class Input:
    """An input's properties, apart from its numbers, on which the preparation of an operation depends."""

    spec: Spec
    stride: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        return torch.empty_strided(self.spec.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Prepared:
    """An operation's preparation: the layouts that its inputs need and its outputs will have.

    inputs: the specs to which the inputs must be redistributed
    outputs: the specs that the outputs will have
    likes: for each output, a meta tensor with its shape and strides
    """

    inputs: list[Spec]
    outputs: list[Spec]
    likes: list[Tensor]


def carry_out(op: Any, args: Any, kwargs: Any, make: Make) -> Any:
    """Do an operation, and return its result, which may be several tensors, or the first input if it is in place."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = [leaves[place] for place in places]
    mesh = common_mesh(name_of(op), inputs)
    for x in inputs:
        if not is_plain(x):
            require_as_shared(x, name_of(op) if op._schema.is_mutable and x is args[0] else "")
    key = [STANDS_FOR.get(type(leaf), leaf) for leaf in leaves]
    for place, x in zip(places, inputs, strict=True):
        key[place] = Input(spec_on(mesh, x), x.stride(), x.dtype)
    prepared = prepare(op, tuple(key), tree)
    for place, x, target in zip(places, inputs, prepared.inputs, strict=True):
        leaves[place] = redistribute(local(x), key[place].spec, target.placements, mesh)
    instead = RULES[name_of(op)].local
    do = partial(instead, Doing(op, prepared.inputs, prepared.outputs, mesh)) if instead else op
    blocks, options = tree_unflatten(leaves, tree)
    result = do(*blocks, **options)
    result = args[0] if op._schema.is_mutable else laid_out(result, mesh, prepared, make)
    if op.is_view:
        mark_copies(inputs[0], tree_leaves(result))
    return result


def laid_out(result: Any, mesh: Mesh, prepared: Prepared, make: Make) -> Any:
    """Make DTensors of the result's blocks; a block that is None, such as a gradient that is not needed, stays None."""
    blocks, tree = tree_flatten(result)
    outputs = zip(prepared.outputs, prepared.likes, strict=True)
    for place, block in enumerate(blocks):
        if block is not None:
            spec, like = next(outputs)
            blocks[place] = make(block, mesh, spec.placements, like)
    return tree_unflatten(blocks, tree)


@lru_cache(maxsize=10_000)
def prepare(op: Any, key: tuple[Any, ...], tree: TreeSpec) -> Prepared:
    """Prepare an operation by its rule.  Raises an error for an operation that cannot be done on blocks.

    key: the arguments, flattened, with an Input in place of each tensor
    tree: the structure of the arguments
    """
    specs = [leaf.spec for leaf in key if isinstance(leaf, Input)]
    letters, linear, likes = written_out(op, key, tree)
    chosen = choose(ways(letters, linear), specs, fixed=op._schema.is_mutable)
    if chosen is None:
        first, whole = list(specs[0].placements), [Replicate()] * len(specs[0].mesh)
        raise RuntimeError(
            f"{name_of(op)}_, in place (by itself, or within another function, such as F.rms_norm), cannot write its "
            f"result to a tensor placed as {first} (all inputs: {layouts(specs)}): redistribute it, or what it was "
            f"computed from, to {whole} first"
        )
    inputs = [spec.but(way.inputs[i] for way in chosen) for i, spec in enumerate(specs)]
    outputs = [
        Spec(tuple(like.shape), specs[0].mesh, tuple(way.outputs[i] for way in chosen)) for i, like in enumerate(likes)
    ]
    return Prepared(inputs, outputs, likes)


def written_out(op: Any, key: tuple[Any, ...], tree: TreeSpec) -> tuple[str, str, list[Tensor]]:
    """Return the rule for these shapes: letters, the inputs in which it is linear, and a meta tensor per output."""
    specs = [leaf.spec for leaf in key if isinstance(leaf, Input)]
    rule = rule_of(op, specs)
    result = shape_of_result(op, key, tree)
    likes = [like for like in tree_leaves(result) if like is not None]
    shapes = [tuple(like.shape) for like in likes]
    args, _ = tree_unflatten([leaf.spec if isinstance(leaf, Input) else leaf for leaf in key], tree)
    out = shapes[0] if isinstance(result, Tensor) else shapes
    letters = rule.letters if isinstance(rule.letters, str) else rule.letters(out, *args)
    dtypes = {leaf.dtype for leaf in key if isinstance(leaf, Input)} | {like.dtype for like in likes}
    return letters, rule.linear if is_linear(rule, len(specs), dtypes) else "", likes


CLIP = "; to clip gradients, labs.clip.clip_gradients adds up the squares of all ranks' blocks"
WAYS_OUT = {
    "linalg_vector_norm": CLIP,
    "norm": CLIP,
    "_amp_foreach_non_finite_check_and_unscale": (
        "; in place of a GradScaler, labs.memory.precision.LossScale looks for an overflow over all ranks"
    ),
    "new_empty": "; to initialise from the whole, fill a plain tensor, and copy_(distribute_tensor(...)) it into this",
}


def rule_of(op: Any, specs: Sequence[Spec]) -> Rule:
    if name_of(op) not in RULES:
        raise NotImplementedError(
            f"{name_of(op)} has no rule (its inputs: {layouts(specs)}): do it on whole tensors, x.full_tensor(), or on "
            f"x.redistribute(placements=[Replicate(), ...]).to_local(){WAYS_OUT.get(name_of(op), '')}"
        )
    if torch.Tag.inplace_view in op.tags:
        raise NotImplementedError(
            f"{name_of(op)}_ changes a tensor's shape in place, and a DTensor keeps its shape: x = x.{name_of(op)}(...)"
        )
    return RULES[name_of(op)]


def layouts(specs: Sequence[Spec]) -> str:
    more = f" and {len(specs) - 4} more" if len(specs) > 4 else ""
    return ", ".join(str(list(spec.placements)) for spec in specs[:4]) + more


def is_linear(rule: Rule, tensors: int, dtypes: set[torch.dtype]) -> bool:
    """Return whether an operation is linear on these inputs, as its rule says.

    A sum with a number is not linear, since every rank would add the number; nor is a conversion to integers.
    """
    rounds = len({dtype.is_floating_point or dtype.is_complex for dtype in dtypes}) > 1
    return rule.linear != "together" or (rule.tensors in (None, tensors) and not rounds)


def shape_of_result(op: Any, key: tuple[Any, ...], tree: TreeSpec) -> Any:
    """Do the operation on the meta device, which also refuses inputs whose shapes do not fit."""
    args, kwargs = tree_unflatten([leaf.meta() if isinstance(leaf, Input) else leaf for leaf in key], tree)
    return op(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))


@cache
def name_of(op: Any) -> str:
    """Return an operation's name in the table of rules, without the "_" of an in-place operation.

    An overload that does more than the rule describes keeps its full name, such as "aten.add.out", and so has no rule.
    """
    name = op._schema.name.removeprefix("aten::")
    written_elsewhere = op._schema.is_mutable and not name.endswith("_")
    return str(op) if written_elsewhere or op._overloadname not in OVERLOADS else name.rstrip("_")


# A division that rounds, which is not linear, and a view as another dtype are not among these overloads.
OVERLOADS = {"default", "Tensor", "Scalar", "Tensor_Scalar", "int", "dim", "dims", "dim_IntList", "self", "float"}


def is_plain(x: Tensor) -> bool:
    return not hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    return x if is_plain(x) else x._local_tensor


def common_mesh(name: str, inputs: Sequence[Tensor]) -> Mesh:
    first, *others = (x.device_mesh for x in inputs if not is_plain(x))
    for other in others:
        if other != first:
            raise RuntimeError(f"{name}: its inputs are on different meshes, {first} and {other}: put them on one")
    for x in inputs:
        if is_plain(x) and x.ndim and not is_left_out(name, x):  # a single number is taken to be the same on every rank
            raise RuntimeError(
                f"{name} of a DTensor and a plain tensor of shape {tuple(x.shape)}: make a DTensor of that one, too, "
                "with distribute_tensor (it is the whole) or DTensor.from_local (it is this rank's block); after "
                "fully_shard, parameters() gives DTensors, but in a module's forward its attributes are whole"
            )
    return first


def spec_on(mesh: Mesh, x: Tensor) -> Spec:
    return Spec(tuple(x.shape), mesh.shape, (Replicate(),) * mesh.ndim) if is_plain(x) else x.spec


def is_left_out(name: str, x: Tensor) -> bool:
    """Return whether autograd made this tensor, the zero gradient of a part of a split that no result depends on."""
    return name == "cat" and torch._C._current_graph_task_id() != -1 and not x.any()


def written(op: Any, args: Any, out: Tensor, options: Any) -> Tensor:
    """Do an operation, and copy its result to `out`.

    Raises ValueError if `out` does not have the result's shape, since a block cannot change its shape.
    """
    result = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))(*args, **options)
    if result.shape != out.shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, and the result {tuple(result.shape)}: give an out of that shape"
        )
    return out.copy_(result)
