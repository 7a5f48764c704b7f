"""A function's operations as a list, in the order in which they run, with those of backward if the function calls it.

    value        a tensor that is an argument, an output of an operation, or a constant; it has a number, from 0
    operation    the op, its input and output values, its letters, and the inputs in which it is linear (labs.dtensor)

Two tensors with the same memory and the same strides are one value: so detach() makes no new value, and a matrix that
is transposed twice is itself again.  A product of transposed matrices is recorded as one operation on the matrices
themselves, "ik,jk->ij", so that labs.gspmd.lowering can decide where the matrices are gathered.

A tensor that depends on no argument (the angles of rotary positions) is computed during the trace, and is a constant in
the graph.  labs.gspmd.traceable refuses what a graph cannot express.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labs.dtensor.algebra import Rule
from labs.dtensor.operation import is_linear, name_of
from labs.dtensor.placement import Spec
from labs.dtensor.rules import RULES
from labs.gspmd.traceable import LIFT, NoNumbers, require_sayable


@dataclass(frozen=True)
class Value:
    number: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Operation:
    """One operation of the graph.

    of: the operation's full name, which can be sent to other ranks
    args: the operation's arguments, with a Value for each tensor
    rule: the operation's rule in labs.dtensor, by which it is computed on blocks
    """

    of: str
    name: str
    args: Any
    options: dict[str, Any]
    outputs: tuple[Value, ...]
    letters: str
    linear: str
    rule: Rule

    @property
    def op(self) -> Callable[..., Any]:
        return torch.einsum if self.of == "einsum" else attrgetter(self.of)(torch.ops)

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(x for x in tree_leaves(self.args) if isinstance(x, Value))

    @property
    def values(self) -> tuple[Value, ...]:
        """Return the operation's inputs, then its outputs, in the order of its letters."""
        return (*self.inputs, *self.outputs)

    @property
    def dims(self) -> list[str]:
        """Return the letters of each of the operation's values."""
        return self.letters.replace("->", ",").split(",")


@dataclass(frozen=True)
class Graph:
    arguments: tuple[Value, ...]
    operations: tuple[Operation, ...]
    results: tuple[Value, ...]
    constants: dict[Value, Tensor]


# Attention of whole sequences, on the CPU: equal parts of the queries' heads and of the keys' heads belong together.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": Rule("bh..,bh..,bh..->bh..,bh."),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Rule("bh..,bh..,bh..,bh..,bh..,bh.->bh..,bh..,bh.."),
}


def trace(fn: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Graph:
    """Call fn, which returns tensors, on copies of the given tensors, and record its operations.

    Raises NotImplementedError for what a graph cannot express, and for an operation that has no rule.
    """
    tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors)
    with torch.enable_grad(), Tracing(tensors) as tracing, NoNumbers(tracing.follows):
        results = tuple(tracing.value_of(x) for x in fn(*tensors))
    arguments = tuple(tracing.value_of(x) for x in tensors)
    needed, operations = set(results), []
    for operation in reversed(tracing.operations):
        if needed.intersection(operation.outputs):
            operations.insert(0, operation)
            needed.update(operation.inputs)
    constants = {value: x for value, x in tracing.constants.items() if value in needed}
    return Graph(arguments, tuple(operations), results, constants)


class Tracing(TorchDispatchMode):
    """A mode that sees each operation below autograd, on real tensors."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.values: dict[Any, Value] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that no other tensor takes the memory of a freed one
        self.operations: list[Operation] = []
        self.constants: dict[Value, Tensor] = {}
        self.made: set[int] = set()  # addresses of memory that the function has allocated
        for x in arguments:
            self.new_value(x)

    def new_value(self, x: Tensor) -> Value:
        self.alive.append(x)
        value = Value(len(self.alive) - 1, tuple(x.shape), x.itemsize)
        self.values[place_of(x)] = value
        return value

    def value_of(self, x: Tensor) -> Value:
        """Return the value of a tensor; a tensor that no operation has made becomes a new constant."""
        if place_of(x) not in self.values:
            self.constants[self.new_value(x)] = x
        return self.values[place_of(x)]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        follows = any(map(self.follows, tensors))
        require_sayable(op, args, kwargs, follows, self)
        before = tree_map_only(Tensor, self.value_of, args) if follows else None
        result = op(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.made |= {place_of(x)[0] for x in outputs} - {place_of(x)[0] for x in tensors if op is not LIFT}
        if follows and (op._schema.is_mutable or any(place_of(x) not in self.values for x in outputs)):
            self.note(op, before, kwargs, tensors, outputs)
        return result

    def follows(self, x: Tensor) -> bool:
        """Return whether a tensor depends on an argument of the traced function."""
        return self.values.get(place_of(x)) not in (None, *self.constants)

    def is_own(self, x: Tensor, follows: bool) -> bool:
        """Return whether a write to a tensor would change no other value of the graph."""
        there = [place for place in self.values if place[0] == place_of(x)[0]]
        return place_of(x)[0] in self.made and (there == [place_of(x)] and self.follows(x) if follows else not there)

    def note(self, op: Any, args: Any, options: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        name = name_of(op)
        rule = ATTENTION.get(name) or RULES.get(name)
        if rule is None:
            raise NotImplementedError(
                f"{name} has no rule: leave it out of the function, or add it to labs.dtensor.rules"
            )
        shapes = [tuple(x.shape) for x in outputs]
        specs = tree_map_only(Value, lambda value: Spec(value.shape, (), ()), args)
        letters = rule.letters
        if callable(letters):  # a capital marks a cut that must be even, as every cut is in this chapter
            letters = letters(shapes[0] if len(shapes) == 1 else shapes, *specs).lower()
        linear = rule.linear if is_linear(rule, len(tensors), {x.dtype for x in (*tensors, *outputs)}) else ""
        values = tuple(map(self.new_value, outputs))
        noted = Operation(str(op), name, args, options, values, letters, linear, rule)
        self.operations.append(self.of_untransposed(noted) if name == "mm" else noted)

    def of_untransposed(self, product: Operation) -> Operation:
        made = {operation.outputs: operation for operation in self.operations if operation.name == "t"}
        sides = []
        for value, letters in zip(product.args, ("ik", "kj"), strict=True):
            turned = made.get((value,))
            sides.append((turned.inputs[0], letters[::-1]) if turned else (value, letters))
        (a, of_a), (b, of_b) = sides
        letters = f"{of_a},{of_b}->ij"
        return replace(product, of="einsum", args=(letters, a, b), letters=letters)


def place_of(x: Tensor) -> Any:
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
