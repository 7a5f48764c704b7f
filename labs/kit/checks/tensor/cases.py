"""What the checks of tensor parallelism are tried on: what each rank brings, and what one process makes of all of it.

Border    the conjugate pair            Loss     a loss over a split vocabulary
Row       a row-parallel linear         Block    a layer of the course's GPT, by the learner's plan
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labs.dtensor.placement import piece
from labs.kit.checks import case as shared
from labs.mesh import Mesh, smaller_group
from labs.model import Config, Layer
from labs.tp import Plan, gpt_plan, parallelize
from labs.tp.tp import cuts_of

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
X = (2, 12, 24)  # the shape of what goes through a Block
Brought = dict[str, Any]
Functions = Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Split(shared.Case):
    """A call on every rank, forward and backward.

    Each kind has brings(rank); whole(brought), one process's result of what all ranks bring; the `shape` of a result;
    and, forward and backward, `calls` and due_numbers(): so many all-reduces, and of so many elements in all.
    """

    paired: bool = False  # in two groups at the same time, of the even and of the odd ranks
    graded: bool = True  # else under no_grad
    laid_out: str = ""  # "transposed": all that odd ranks are given; "expanded": the gradient of the result

    alike: ClassVar[tuple[str, ...]] = ()  # what all ranks bring alike: it has one gradient
    own_gradients: ClassVar[bool] = False  # each rank's result goes on by itself: another gradient comes back to each
    result: ClassVar[str] = "y"
    calls: ClassVar[tuple[int, int]] = (1, 0)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [(0, 2), (1, 3)] if self.paired else [tuple(range(self.ranks))]

    def members(self, rank: int) -> tuple[int, ...]:
        return next(members for members in self.groups if rank in members)

    def setting(self) -> dict[str, Any]:
        """What a call is given besides."""
        return {"group": groups_of_two()[dist.get_rank() % 2]} if self.paired else {}

    def prepare(self, functions: Functions, brought: Brought, **setting: Any) -> Functions:
        """What is called; what is sent meanwhile is not counted."""
        return functions

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        return functions[0](*brought.values(), **group)

    def numbers(self, shape: Sequence[int], rank: int, what: int = 0) -> Tensor:
        """Different ones for each thing that a rank brings; in bfloat16, numbers that it adds up exactly."""
        generator = self.generator(rank, what)
        if self.dtype is BF16:
            return torch.randint(1, 8, tuple(shape), generator=generator).to(BF16)
        return torch.randn(tuple(shape), generator=generator, dtype=FP64).to(self.dtype)

    def laid(self, x: Any, rank: int) -> Any:
        """The same, as it lies in this rank's memory."""
        turned = self.laid_out == "transposed" and rank % 2 and isinstance(x, Tensor) and x.ndim > 1
        return x.transpose(0, -1).contiguous().transpose(0, -1) if turned else x

    def comes_back(self, rank: int) -> Tensor:
        """The gradient of the result.  Behind an expanded one lies memory that is nobody else's."""
        who = rank if self.own_gradients else self.members(rank)[0] + 32
        if self.laid_out == "expanded":
            return self.numbers([prod(self.shape) + 64], who, 7)[: self.shape[-1]].expand(self.shape)
        return self.laid(self.numbers(self.shape, who, 7), rank)

    def due_numbers(self) -> tuple[float, float]:
        return self.calls[0] * prod(self.shape), self.calls[1] * prod(self.shape)

    def due(self, members: tuple[int, ...]) -> list[dict[str, Tensor]]:
        """For each of these ranks the result and all gradients, if no others bring anything."""
        brought = [{name: leaf(value) for name, value in self.brings(member).items()} for member in members]
        for each in brought:
            each |= {name: brought[0][name] for name in self.alike}
        result = self.whole(brought)
        coming = [self.comes_back(member).double() for member in members]
        result.backward(torch.stack(coming).sum(0) if self.own_gradients else coming[0])
        gradients = [{name: x.grad for name, x in each.items() if floating(x)} for each in brought]
        return [{self.result: result.detach()} | of_rank for of_rank in gradients]

    @property
    def unusual(self) -> dict[str, Any]:
        """What is not as in most cases."""
        usual = {f.name: f.default for f in fields(self) if f.name not in ("seed", "only")} | {"ranks": 4}
        return {name: value for name, default in usual.items() if (value := getattr(self, name)) != default}

    @property
    def peculiar(self) -> str:
        """The name of what is right everywhere but here."""
        return self.only or next((told for name, told in PECULIAR.items() if name in self.unusual), "")

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in self.unusual.items() if name not in ("ranks", "dtype")]
        return ", ".join([self.who, self.dtype_name, *told, *(["again"] if self.only else [])])


PECULIAR = {
    "ranks": "right only on some numbers of ranks",
    "paired": "right only on the group of all ranks",
    "graded": "right only with gradients",
    "biased": "right only with a bias",
    "inputs": "right only where pieces are equal",
    "outer": "right only for some shapes",
    "shape": "right only for some shapes",
    "vocabulary": "right only where the ranks divide the vocabulary",
    "laid_out": "right only for contiguous tensors",
    "dtype": "right only in some dtypes",
}


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaf(value: Any) -> Any:
    return value.detach().double().requires_grad_() if floating(value) else value


@cache
def groups_of_two() -> list[dist.ProcessGroup]:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])]


@cache
def mesh_of(ranks: int, sharers: int) -> Mesh:
    """With the groups of those that share keys and values."""
    mesh = Mesh((ranks,), ("tp",))
    smaller_group(mesh, sharers)
    return mesh


@dataclass(frozen=True)
class Border(Split):
    """kind: "copy"; "reduce"; or "both": two layers x + reduce(w · copy(x)), w another on each rank, and 0 on one."""

    kind: str = ""
    shape: tuple[int, ...] = (5, 7)

    @property
    def alike(self) -> tuple[str, ...]:
        return () if self.kind == "reduce" else ("x",)

    @property
    def own_gradients(self) -> bool:
        return self.kind == "copy"

    def brings(self, rank: int) -> Brought:
        x = self.numbers(self.shape, rank if self.kind == "reduce" else self.members(rank)[0] + 32)
        return {"x": x} | ({"w": self.numbers(self.shape, rank, 1) * (rank != 1)} if self.kind == "both" else {})

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        if self.kind == "both":
            return (1 + sum(each["w"] for each in brought)) ** 2 * brought[0]["x"]
        return brought[0]["x"] * 1 if self.kind == "copy" else sum(each["x"] for each in brought)

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        (copy, reduce), x = functions, brought["x"]
        if self.kind == "reduce":
            return reduce(x, **group)
        if self.kind == "copy":
            y = copy(x, **group)
            copy(x.detach())  # in another group, and before the gradient comes
            return y
        first = reduce(brought["w"] * copy(x, **group), **group)
        return x + first + reduce(brought["w"] * copy(x + first, **group), **group)

    @property
    def calls(self) -> tuple[int, int]:
        forward, backward = {"copy": (0, 1), "reduce": (1, 0), "both": (2, 2)}[self.kind]
        return forward, backward * self.graded


@dataclass(frozen=True)
class Row(Split):
    """inputs: of each rank, 5 if they are left out; outer: the dims of x before them."""

    outer: tuple[int, ...] = (6,)
    inputs: tuple[int, ...] = ()
    outputs: int = 7
    biased: bool = True

    alike = ("bias",)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.outer, self.outputs)

    def brings(self, rank: int) -> Brought:
        mine = self.inputs[self.members(rank).index(rank)] if self.inputs else 5
        x, weight = self.numbers([*self.outer, mine], rank), self.numbers([self.outputs, mine], rank, 1)
        return {"x": x, "weight": weight, "bias": self.numbers([self.outputs], 63, 2) if self.biased else None}

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        y = sum(F.linear(each["x"], each["weight"]) for each in brought)
        return y + brought[0]["bias"] if self.biased else y


@dataclass(frozen=True)
class Loss(Split):
    """highest: logits of ± this are among them: all low ones of token 0, and a high one of each on one rank alone."""

    tokens: int = 9
    vocabulary: int = 20
    turned: int = 0  # the first rank that has a part of the vocabulary's beginning, and the last ones before it
    highest: float = 1

    result = "loss"
    shape = ()
    calls = (12, 0)  # the tokens may go in a few parts, but not each by itself

    def brings(self, rank: int) -> Brought:
        members = self.members(rank)
        me, n = members.index(rank), len(members)
        sizes = [piece(self.vocabulary, n, (each - self.turned) % n)[1] for each in range(n)]
        first, size = sum(sizes[:me]), sizes[me]
        signs = torch.randint(-1, 1, (self.tokens, size), generator=self.generator(rank, 1))
        signs[me::n, :1], signs[0] = 1, -1
        targets = torch.randint(self.vocabulary, (self.tokens,), generator=self.generator(63, 2))
        logits = 3 * self.numbers([self.tokens, size], rank) + self.highest * signs
        return {"logits": logits, "targets": targets, "first": first}

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        return F.cross_entropy(torch.cat([each["logits"] for each in brought], 1), brought[0]["targets"])

    def due_numbers(self) -> tuple[float, float]:
        return 3 * self.tokens, 0


@dataclass(frozen=True)
class Block(Split):
    """x is whole, or with sequence_parallel a shard of its 12 positions."""

    heads: int = 4
    kv_heads: int = 4
    hidden: int = 40
    sequence_parallel: bool = False

    @property
    def config(self) -> Config:
        return Config(16, X[2], 1, self.heads, self.kv_heads, self.hidden, context=X[1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (X[0], X[1] // self.ranks if self.sequence_parallel else X[1], X[2])

    @property
    def sharers(self) -> int:
        """So many ranks have the same keys and values."""
        return max(1, self.ranks // self.kv_heads)

    def layer(self) -> Layer:
        with torch.device("meta"):  # which draws no random numbers
            layer = Layer(self.config).double()
        layer.to_empty(device="cpu")
        for place, p in enumerate(layer.parameters()):
            p.data = self.numbers(p.shape, 61, place) / 4
        return layer

    def part(self, x: Tensor, rank: int) -> Tensor:
        return x.chunk(self.ranks, 1)[rank].contiguous() if self.sequence_parallel else x

    def brings(self, rank: int) -> Brought:
        return {"x": self.part(self.numbers(X, 63), rank)}

    def comes_back(self, rank: int) -> Tensor:
        return self.part(self.numbers(X, 62), rank)

    def setting(self) -> dict[str, Any]:
        return {"mesh": mesh_of(self.ranks, self.sharers)}

    def prepare(self, functions: Functions, brought: Brought, **setting: Any) -> Functions:
        """A layer, split by the plan; its parameters are brought, too."""
        layer = parallelize(self.layer(), setting["mesh"], functions[0](self.config, self.sequence_parallel))
        # It is for the check to compare gradients; and x differs where it is a shard.
        layer.tensor_parallel.inputs_compared = layer.tensor_parallel.gradients_compared = True
        brought |= layer.named_parameters()
        return (layer,)

    def call(self, functions: Functions, brought: Brought, **setting: Any) -> Any:
        return functions[0](brought["x"])

    def due(self, members: tuple[int, ...]) -> list[dict[str, Tensor]]:
        """Of what the course's own plan splits, each rank's part."""
        layer, x = self.layer(), self.numbers(X, 63).requires_grad_()
        y = layer(x)
        y.backward(self.numbers(X, 62))
        ours = [(name.split(".*."), style) for name, style in gpt_plan(self.config).items()]
        rows = Plan({name[1]: style for name, style in ours if name[0] == "layers"}).rows(layer)
        cuts = {name: cut for name, (_, cut) in cuts_of(layer, rows, self.ranks).items()}
        gradients = {name: p.grad for name, p in layer.named_parameters()}

        def of(rank: int) -> dict[str, Tensor]:
            parts = {name: cuts[name].part(g, rank) if name in cuts else g for name, g in gradients.items()}
            return {"y": self.part(y.detach(), rank), "x": self.part(x.grad, rank)} | parts

        return [of(rank) for rank in members]

    @property
    def calls(self) -> tuple[int, int]:
        return 2, 2 + 2 * (self.sharers > 1) + 2 * self.sequence_parallel

    def due_numbers(self) -> tuple[float, float]:
        """Twice x; backward, keys and values that some ranks share, too, and norms that have seen shards."""
        keys, norms = 2 * self.config.head_size * X[2], 2 * X[2] * self.sequence_parallel
        shared = keys * (self.sharers - 1) / self.sharers * self.ranks / (self.ranks - 1)
        return 2 * prod(X), 2 * prod(X) + shared + norms


# ---- by chance -------------------------------------------------------------------------------------------

AGAIN = {"only": "right only the first time"}
UNUSUAL = ({"graded": False}, {"paired": True}, {"laid_out": "expanded"}, {"laid_out": "transposed"}, {"dtype": BF16})


class Draw:
    """Of each exercise's cases the first is a plain one, and those of the line of success come second."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.a, self.b = self.random.randrange(4, 8), self.random.randrange(5, 9)
        self.others = (self.random.choice((3, 5, 6, 7, 8)), 1)  # numbers of ranks

    def cases(self, kind: type[Split], options: Sequence[dict[str, Any]]) -> list[Any]:
        return [kind(self.random.randrange(2**40), **{"ranks": 4} | each) for each in options]

    def borders(self) -> list[Border]:
        shapes = ((2, self.a, self.b), (self.a,), (1,), (0, 3), ())
        options = [{}, {"dtype": FP32, "shape": (64, 96)}, AGAIN, *UNUSUAL]
        options += [{"shape": shape} for shape in shapes] + [{"ranks": ranks} for ranks in self.others]
        both = [each | {"kind": kind} for each in options for kind in ("copy", "reduce")]
        return self.cases(Border, [*both, {"kind": "both"}])

    def rows(self) -> list[Row]:
        options = [{}, {"dtype": FP32, "outer": (32,), "outputs": 24}, AGAIN, {"biased": False}, *UNUSUAL]
        options += [{"outer": outer} for outer in ((), (2, 3), (0,), (2, 1, self.a))]
        options += [{"inputs": inputs} for inputs in ((0, self.a, 0, 1), (self.a, 0, self.b, 0))]
        options += [{"ranks": ranks} for ranks in self.others]
        return self.cases(Row, options)

    def losses(self) -> list[Loss]:
        high, odd = {"highest": 1e4}, 4 * self.a + self.random.randrange(1, 4)
        options = [{}, {"dtype": FP32, "tokens": 64, "vocabulary": 96}, AGAIN, high, UNUSUAL[0], UNUSUAL[1]]
        options += [{"vocabulary": odd}, {"vocabulary": 9}, {"vocabulary": 5, "turned": 1}]  # a rank has nothing
        options += [{"vocabulary": 3, "turned": 2}, {"vocabulary": 9, "turned": 3} | high]
        others = (self.random.choice((6, 7, 8)), 1)  # on six, a gather of one number is more than three all-reduces
        options += [{"ranks": ranks, "vocabulary": ranks * self.b + ranks // 2} for ranks in others]
        return self.cases(Loss, options)

    def blocks(self) -> list[Block]:
        sizes = [{}, {"kv_heads": self.random.choice((1, 2)), "hidden": 41}]
        sizes.append({"ranks": 2, "heads": 6, "kv_heads": 3, "hidden": 43})
        return self.cases(Block, [each | {"sequence_parallel": shards} for each in sizes for shards in (False, True)])


WIDE = {  # those whose bytes held are measured
    Border: [Border(0, 4, dtype=FP32, kind=kind, shape=(128, 256)) for kind in ("copy", "reduce")],
    Row: [Row(0, 4, dtype=FP32, outer=(256,), inputs=(64,) * 4, outputs=128)],
    Loss: [Loss(0, 4, dtype=FP32, tokens=256, vocabulary=512)],
    Block: [],  # a plan holds nothing
}
