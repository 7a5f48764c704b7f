"""What the checks of tensor parallelism are tried on: what each rank brings, and what one process makes of all of it.

Border    the conjugate pair            Loss     a loss over a split vocabulary
Row       a row-parallel linear         Block    a layer of the course's GPT, by the learner's plan
Deal      query heads, heads of keys and values, ranks: numbers alone
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.answer import show
from labs.mesh import Mesh, smaller_group
from labs.model import Config, Layer, initialise
from labs.placement import piece
from labs.shares import fits
from labs.styles import Style
from labs.tp import Plan, cuts_of, gpt_plan, parallelize

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Brought = dict[str, Any]
Functions = Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Split(shared.Case):
    """A call on every rank, forward and backward."""

    paired: bool = False  # in two groups at the same time, of the even and of the odd ranks
    graded: bool = True  # else under no_grad
    incoming: str = ""  # the gradient of the result: "expanded" or "transposed"

    alike: ClassVar[tuple[str, ...]] = ()  # what all ranks bring alike: it has one gradient
    own_gradients: ClassVar[bool] = False  # each rank's result goes on by itself: another gradient comes back to each
    result: ClassVar[str] = "y"
    refusals: ClassVar[tuple[type[Exception], ...]] = ()  # what a call may raise, on all ranks alike

    def members(self, rank: int) -> tuple[int, ...]:
        """The global ranks of this one's group."""
        return tuple(range(rank % 2, self.ranks, 2)) if self.paired else tuple(range(self.ranks))

    def brings(self, rank: int) -> Brought:
        raise NotImplementedError

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        """One process's result, of what all ranks bring."""
        raise NotImplementedError

    def setting(self) -> dict[str, Any]:
        """What a call is given besides."""
        return {"group": groups_of_two()[dist.get_rank() % 2]} if self.paired else {}

    def prepare(self, functions: Functions, brought: Brought, **setting: Any) -> Functions:
        """What is called; what is sent meanwhile is not counted."""
        return functions

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        return functions[0](*brought.values(), **group)

    def due_numbers(self) -> tuple[float, float]:
        """Elements that are all-reduced forward, and backward."""
        raise NotImplementedError

    def numbers(self, shape: Sequence[int], rank: int, what: int = 0) -> Tensor:
        """Others for each thing that a rank brings; in bfloat16 such as it adds up exactly."""
        generator = self.generator(rank, what)
        if self.dtype is BF16:
            return torch.randint(1, 8, tuple(shape), generator=generator).to(BF16)
        return torch.randn(tuple(shape), generator=generator, dtype=FP64).to(self.dtype)

    def comes_back(self, rank: int) -> Tensor:
        """The gradient of the result.  Behind an expanded one lies memory that is nobody else's."""
        shape, who = self.shape_of_result(rank), rank if self.own_gradients else self.members(rank)[0] + 32
        if self.incoming == "expanded":
            return self.numbers([prod(shape) + 64], who, 7)[: shape[-1]].expand(shape)
        return self.numbers(shape[::-1], who, 7).t() if self.incoming else self.numbers(shape, who, 7)

    def shape_of_result(self, rank: int) -> torch.Size:
        with torch.no_grad():
            return self.whole([self.brings(member) for member in self.members(rank)]).shape

    def due(self, rank: int, members: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """The result and each gradient on this rank; members: made of what these bring alone."""
        members = members or self.members(rank)
        brought = [{name: leaf(value) for name, value in self.brings(member).items()} for member in members]
        for each in brought:
            each |= {name: brought[0][name] for name in self.alike}
        result = self.whole(brought)
        coming = [self.comes_back(member).double() for member in members]
        result.backward(torch.stack(coming).sum(0) if self.own_gradients else coming[0])
        mine = brought[members.index(rank)]
        return {self.result: result.detach()} | {name: x.grad for name, x in mine.items() if floating(x)}

    def __str__(self) -> str:
        """What is not as in other cases."""
        given = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seed", "ranks", "dtype", "only")
        }
        usual = {f.name: f.default for f in fields(self)}
        told = [f"{name} {value}" for name, value in given.items() if value != usual[name]]
        return ", ".join([self.who, self.dtype_name, *told])


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
    """kind: "copy"; "reduce"; or "both", twice: reduce(w · copy(x)), w another on each rank."""

    kind: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def alike(self) -> tuple[str, ...]:
        return () if self.kind == "reduce" else ("x",)

    @property
    def own_gradients(self) -> bool:
        return self.kind == "copy"

    def brings(self, rank: int) -> Brought:
        x = self.numbers(self.shape, rank if self.kind == "reduce" else self.members(rank)[0] + 32)
        return {"x": x} | ({"w": self.numbers(self.shape, rank, 1)} if self.kind == "both" else {})

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        if self.kind == "both":
            return sum(each["w"] for each in brought) ** 2 * brought[0]["x"]
        return brought[0]["x"] * 1 if self.kind == "copy" else sum(each["x"] for each in brought)

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        copy, reduce = functions
        if self.kind != "both":
            return (copy if self.kind == "copy" else reduce)(brought["x"], **group)
        once = reduce(brought["w"] * copy(brought["x"], **group), **group)
        return reduce(brought["w"] * copy(once, **group), **group)

    def due_numbers(self) -> tuple[float, float]:
        forward, backward = {"copy": (0, 1), "reduce": (1, 0), "both": (2, 2)}[self.kind]
        return forward * prod(self.shape), backward * self.graded * prod(self.shape)


@dataclass(frozen=True)
class Row(Split):
    """inputs: of each rank; outer: the dims of x before them."""

    outer: tuple[int, ...] = (6,)
    inputs: tuple[int, ...] = ()
    outputs: int = 0
    biased: bool = True

    alike = ("bias",)

    def brings(self, rank: int) -> Brought:
        mine, bias = self.inputs[self.members(rank).index(rank)], self.numbers([self.outputs], 63, 2)
        x, weight = self.numbers([*self.outer, mine], rank), self.numbers([self.outputs, mine], rank, 1)
        return {"x": x, "weight": weight, "bias": bias if self.biased else None}

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        y = sum(F.linear(each["x"], each["weight"]) for each in brought)
        return y + brought[0]["bias"] if self.biased else y

    def due_numbers(self) -> tuple[float, float]:
        return prod(self.outer) * self.outputs, 0


@dataclass(frozen=True)
class Loss(Split):
    tokens: int = 9
    vocabulary: int = 0
    highest: float = 1  # logits of ± this are among them

    result = "loss"

    def brings(self, rank: int) -> Brought:
        members = self.members(rank)
        first, size = piece(self.vocabulary, len(members), members.index(rank))
        signs = torch.randint(-1, 2, (self.tokens, size), generator=self.generator(rank, 1))
        targets = torch.randint(self.vocabulary, (self.tokens,), generator=self.generator(63, 2))
        logits = 3 * self.numbers([self.tokens, size], rank) + self.highest * signs
        return {"logits": logits, "targets": targets, "first": first}

    def whole(self, brought: Sequence[Brought]) -> Tensor:
        return F.cross_entropy(torch.cat([each["logits"] for each in brought], 1), brought[0]["targets"])

    def due_numbers(self) -> tuple[float, float]:
        return 3 * self.tokens, 0


@dataclass(frozen=True)
class Block(Split):
    """x: [2, 12, dim], whole, or with sequence_parallel a shard of the 12."""

    heads: int = 0
    kv_heads: int = 0
    hidden: int = 0
    sequence_parallel: bool = False

    refusals = (ValueError, RuntimeError)

    @property
    def config(self) -> Config:
        return Config(16, 24, 1, self.heads, self.kv_heads, self.hidden, context=12)

    def layer(self) -> Layer:
        with torch.device("meta"):  # which draws no random numbers
            layer = Layer(self.config).double()
        layer.to_empty(device="cpu")
        initialise(layer, self.seed)
        return layer

    def part(self, x: Tensor, rank: int) -> Tensor:
        return x.chunk(self.ranks, 1)[rank].contiguous() if self.sequence_parallel else x

    def brings(self, rank: int) -> Brought:
        return {"x": self.part(self.numbers((2, 12, 24), 63), rank)}

    def comes_back(self, rank: int) -> Tensor:
        return self.part(self.numbers((2, 12, 24), 62), rank)

    def shape_of_result(self, rank: int) -> torch.Size:
        return self.comes_back(rank).shape

    def setting(self) -> dict[str, Any]:
        return {"mesh": mesh_of(self.ranks, max(1, self.ranks // self.kv_heads))}

    def prepare(self, functions: Functions, brought: Brought, **setting: Any) -> Functions:
        """A layer, split by the plan; its parameters are brought, too."""
        plan = functions[0](self.config, self.sequence_parallel)
        require_styles(plan)
        layer = parallelize(self.layer(), setting["mesh"], plan)
        # It is for the check to compare gradients; and x differs where it is a shard.
        layer.tensor_parallel.inputs_compared = layer.tensor_parallel.gradients_compared = True
        brought |= layer.named_parameters()
        return (layer,)

    def call(self, functions: Functions, brought: Brought, **setting: Any) -> Any:
        return functions[0](brought["x"])

    def due(self, rank: int, members: tuple[int, ...] = ()) -> dict[str, Tensor]:
        """Of what the course's own plan splits, this rank's part."""
        layer, x = self.layer(), self.numbers((2, 12, 24), 63).requires_grad_()
        y = layer(x)
        y.backward(self.numbers((2, 12, 24), 62))
        ours = {name.removeprefix("layers.*."): style for name, style in gpt_plan(self.config).items()}
        rows = Plan({name: ours[name] for name in ours if name.startswith(("attention", "mlp"))}).rows(layer)
        cuts = {name: cut for name, (_, cut) in cuts_of(layer, rows, self.ranks).items()}
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        parts = {name: cuts[name].part(g, rank) if name in cuts else g for name, g in gradients.items()}
        return {"y": self.part(y.detach(), rank), "x": self.part(x.grad, rank)} | parts

    def due_numbers(self) -> tuple[float, float]:
        """Twice x; backward, keys and values that some ranks share, too, and norms that have seen shards."""
        sharers = max(1, self.ranks // self.kv_heads)
        shared = 2 * self.config.head_size * 24 * (sharers - 1) / sharers * self.ranks / (self.ranks - 1)
        return 2 * 2 * 12 * 24, 2 * 2 * 12 * 24 + shared + 2 * 24 * self.sequence_parallel


def require_styles(plan: Any) -> None:
    if not isinstance(plan, dict):
        raise ValueError(f"the plan is {show(plan)}, and not a table from names to styles")
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, Style):
            raise ValueError(f"the plan has {show(style)} for {name!r}, which is no style of labs.tp")


class Deal(NamedTuple):
    heads: int
    kv_heads: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.heads} query heads over {self.kv_heads} of keys and values, {self.ranks} ranks"


# ---- by chance: by number of ranks; the first are those whose bytes stand in the line of success -----------

GROUP, SHAPES, RANKS = (
    f"right only {where}" for where in ("on the group of all ranks", "for some shapes", "on 4 ranks")
)
DTYPES, GRADED, ALONE = "right only in some dtypes", "right only with gradients", "right alone, wrong in a larger graph"
UNEVEN, DIVIDES = "right only where pieces are equal", "right only for a vocabulary that divides"


class Draw:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.a, self.b, self.many = (
            self.random.randrange(4, 8),
            self.random.randrange(5, 9),
            self.random.randrange(5, 9),
        )

    @property
    def seed(self) -> int:
        return self.random.randrange(2**40)

    def borders(self) -> dict[int, list[Border]]:
        a, b = self.a, self.b

        def pair(ranks: int, shape: tuple[int, ...], only: str = "", **options: Any) -> list[Border]:
            return [Border(self.seed, ranks, kind=k, shape=shape, only=only, **options) for k in ("copy", "reduce")]

        four = [
            *pair(4, (64, 96), dtype=FP32),
            *pair(4, (a, b)),
            Border(self.seed, 4, kind="both", shape=(b,), only=ALONE),
        ]
        four += pair(4, (a, b), GRADED, graded=False) + pair(4, (a, b), DTYPES, dtype=BF16)
        for shape in ((), (0, 3), (2, a, b), (1,)):
            four += pair(4, shape, SHAPES)
        four += pair(4, (a, b), incoming="expanded") + pair(4, (a, b), incoming="transposed")
        four += pair(4, (a, b), GROUP, paired=True)
        return {4: four, 3: pair(3, (a, b), RANKS), self.many: pair(self.many, (a,), RANKS), 1: pair(1, (a,), RANKS)}

    def rows(self) -> dict[int, list[Row]]:
        a = self.a

        def row(ranks: int, only: str = "", inputs: tuple[int, ...] = (), **options: Any) -> Row:
            return Row(self.seed, ranks, only=only, inputs=inputs or (5,) * ranks, outputs=self.b, **options)

        four = [Row(self.seed, 4, dtype=FP32, outer=(32,), inputs=(16,) * 4, outputs=24), row(4)]
        four += [
            row(4, "right only with a bias", biased=False),
            row(4, UNEVEN, (a, a, a, 1)),
            row(4, DTYPES, dtype=BF16),
        ]
        four += [row(4, SHAPES, outer=outer) for outer in ((), (2, 3), (0,), (2, 1, 3))]
        four += [row(4, incoming=incoming) for incoming in ("expanded", "transposed")]
        four += [row(4, GROUP, (a, 2), paired=True)]
        return {4: four, 3: [row(3, RANKS, (a, 3, 2))], self.many: [row(self.many, RANKS)], 1: [row(1, RANKS)]}

    def losses(self) -> dict[int, list[Loss]]:
        a = self.a

        def loss(ranks: int, vocabulary: int, only: str = "", **options: Any) -> Loss:
            return Loss(self.seed, ranks, vocabulary=vocabulary, tokens=self.b, only=only, **options)

        four = [Loss(self.seed, 4, dtype=FP32, tokens=64, vocabulary=96), loss(4, 4 * a), loss(4, 4 * a, highest=1e4)]
        four += [loss(4, size, DIVIDES) for size in (4 * a + self.random.randrange(1, 4), 9, 5, 3)]
        four += [
            loss(4, 9, DIVIDES, highest=1e4),
            loss(4, 4 * a, GRADED, graded=False),
            loss(4, 12, GROUP, paired=True),
        ]
        others = {ranks: [loss(ranks, ranks * a + ranks // 2, RANKS)] for ranks in (3, self.many, 1)}
        return {4: four, **others}

    def blocks(self) -> dict[int, list[Block]]:
        def both(ranks: int, *sizes: int) -> list[Block]:
            names = dict(zip(("heads", "kv_heads", "hidden"), sizes, strict=True))
            return [Block(self.seed, ranks, sequence_parallel=shards, **names) for shards in (False, True)]

        return {4: both(4, 4, 4, 40) + both(4, 4, self.random.choice((1, 2)), 41), 2: both(2, 6, 3, 43)}

    def deals(self) -> list[Deal]:
        always = [(8, 4, 2), (8, 2, 4), (6, 3, 2), (8, 8, 3), (8, 1, 4), (24, 2, 8), (4, 4, 4), (16, 2, 16), (6, 3, 1)]
        possible = [(k * m, k, n) for k in range(1, 9) for m in range(1, 7) for n in range(1, 13) if fits(k * m, k, n)]
        return [Deal(*each) for each in always + self.random.sample(possible, 12)]


def wide(kind: str, seed: int) -> Split:
    """The case whose bytes held are measured."""
    if kind == "row":
        return Row(seed, 4, dtype=FP32, outer=(256,), inputs=(64,) * 4, outputs=128)
    if kind == "loss":
        return Loss(seed, 4, dtype=FP32, tokens=256, vocabulary=512)
    return Border(seed, 4, dtype=FP32, kind=kind, shape=(128, 256))
