"""block_plan: a plan, which is a table of styles, for a block that the course has nowhere else; a job obeys it."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labs.exercises.engine import differentiated as ways
from labs.exercises.engine.answer import Mistake, answered, says
from labs.exercises.engine.common_mistakes import returned
from labs.exercises.engine.on_ranks import Draw, Mistakes, checked
from labs.exercises.engine.scripts import Functions
from labs.exercises.engine.value import One
from labs.mesh import Mesh, smaller_group
from labs.model import Config
from labs.tp import ColwiseParallel, Plan, RowwiseParallel, parallelize
from labs.tp.parameter_cuts import Keys, Queries
from labs.tp.tp import cuts_of

X = (2, 12, 24)  # the shape of the block's input


class Mixer(nn.Module):
    """Causal attention; for each token, a gate decides how much of a head goes on."""

    def __init__(self, config: Config):
        super().__init__()
        self.size = config.head_size
        self.query = nn.Linear(config.dim, config.heads * self.size, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.gates = nn.Linear(config.dim, config.heads)
        self.out = nn.Linear(config.heads * self.size, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)) for each in (self.query, self.key, self.value))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.out((y * self.gates(x).sigmoid()[..., None]).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Stranger(nn.Module):
    """A block of another model."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm_1, self.mixer = nn.RMSNorm(config.dim), Mixer(config)
        self.norm_2, self.ffn = nn.RMSNorm(config.dim), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


def cut_alike(config: Config) -> Plan:
    """Return a plan that cuts the matrices of a Stranger's mixer at the same heads."""
    queries, keys = Queries(config.heads, config.kv_heads), Keys(config.heads, config.kv_heads)
    return Plan(
        {
            "mixer.[qg]*": ColwiseParallel(heads=queries),
            "mixer.[kv]*": ColwiseParallel(heads=keys),
            "mixer.out": RowwiseParallel(heads=queries),
            "ffn.w[13]": ColwiseParallel(),
            "ffn.w2": RowwiseParallel(),
        }
    )


@cache
def mesh_of(ranks: int, sharers: int) -> Mesh:
    """Return a mesh that has the groups of the ranks that share keys and values."""
    mesh = Mesh((ranks,), ("tp",))
    smaller_group(mesh, sharers)
    return mesh


@dataclass(frozen=True)
class SplitStranger(ways.Split):
    """A Stranger, split by the learner's plan.

    sequence_parallel: whether x is a shard of its 12 positions, and not whole.
    """

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
        """Return the number of ranks that have the same keys and values."""
        return max(1, self.ranks // self.kv_heads)

    def layer(self) -> Stranger:
        with torch.device("meta"):  # no random numbers are drawn there
            layer = Stranger(self.config).double()
        layer.to_empty(device="cpu")
        for place, p in enumerate(layer.parameters()):
            p.data = self.numbers(p.shape, 61, place) / 4
        return layer

    def part(self, x: Tensor, rank: int) -> Tensor:
        return x.chunk(self.ranks, 1)[rank].contiguous() if self.sequence_parallel else x

    def brings(self, rank: int) -> ways.Brought:
        return {"x": self.part(self.numbers(X, 63), rank)}

    def comes_back(self, rank: int) -> Tensor:
        return self.part(self.numbers(X, 62), rank)

    def process_group(self) -> dict[str, Any]:
        mesh_of(self.ranks, self.sharers)  # called before the step begins, since it makes groups
        return {}

    def prepare(self, functions: Functions, brought: ways.Brought) -> Functions:
        """Return a layer that is split by the plan; its parameters are added to what the rank brings."""
        mesh, plan = mesh_of(self.ranks, self.sharers), functions[0](self.config, self.sequence_parallel)
        layer = parallelize(self.layer(), mesh, plan)
        # The check itself compares the gradients; and x differs between ranks where it is a shard.
        first_step = layer.tensor_parallel
        first_step.inputs_compared = first_step.gradients_compared = first_step.compared_as_whole = True
        brought |= layer.named_parameters()
        return (layer,)

    def call(self, functions: Functions, brought: ways.Brought, **group: Any) -> Any:
        return functions[0](brought["x"])

    def on_ranks(self, group: Sequence[int]) -> ways.Numbers:
        """Return each rank's output and gradients; of a split tensor they are the rank's part."""
        layer, x = self.layer(), self.numbers(X, 63).requires_grad_()
        y = layer(x)
        y.backward(self.numbers(X, 62))
        rows = cut_alike(self.config).rows(layer)
        cuts = {name: cut for name, (_, cut) in cuts_of(layer, rows, self.ranks).items()}

        def part(name: str, gradient: Tensor, rank: int) -> Tensor:
            return cuts[name].part(gradient, rank) if name in cuts else gradient

        def on(rank: int) -> dict[str, Tensor]:
            gradients = {ways.of(name): part(name, p.grad, rank) for name, p in layer.named_parameters()}
            return {"y": self.part(y.detach(), rank), ways.of("x"): self.part(x.grad, rank)} | gradients

        return [on(rank) for rank in group]

    def all_reduces(self) -> tuple[int, float]:
        """Return the number of all-reduces in this step, and the number of elements in all of them.

        Two are of x.  In backward there are also those of keys and values that some ranks share, and of norms that have
        seen shards.
        """
        if self.step == 0:
            return 2, 2 * prod(X)
        calls = 2 + 2 * (self.sharers > 1) + 2 * self.sequence_parallel
        keys, norms = 2 * self.config.head_size * X[2], 2 * X[2] * self.sequence_parallel
        shared = keys * (self.sharers - 1) / self.sharers * self.ranks / (self.ranks - 1)
        return calls, 2 * prod(X) + shared + norms


def worlds(draw: Draw) -> dict[int, list[SplitStranger]]:
    sizes = [{}, {"kv_heads": draw.random.choice((1, 2)), "hidden": 41}]
    sizes.append({"ranks": 2, "heads": 6, "kv_heads": 3, "hidden": 43})
    options = [each | {"sequence_parallel": shards} for each in sizes for shards in (False, True)]
    return ways.draw_worlds(draw, SplitStranger, options)


def adds_up(one: One) -> bool:
    """Return whether the ranks have summands of the expected value."""
    return torch.allclose(sum(done.values[one.name] for done in one.seen.done), one.expected)


def two_pieces(told: str) -> bool:
    """Return whether two tensors meet of which neither has all heads, nor all of another dimension."""
    meet = re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\).* dimension 2", told)
    sizes = {"heads": str(SplitStranger.heads), "hidden": str(SplitStranger.hidden)} | dict(
        re.findall(r"\b(heads|hidden) (\d+)", told)
    )
    return bool(meet) and not {*meet.groups()} & {*sizes.values(), str(X[2])}


STYLE = "What does each module split, what comes in and what goes out? labs/tp/tp.py has the table of styles."
# fmt: off
PLANS = (  # the errors of a rank that obeys the plan
    Mistake("not a plan", STYLE, says("is no plan|is no style")),
    Mistake("two pieces that are not cut alike",
            "Two pieces meet in this line. Which matrices make them, and must those be cut at the same heads?",
            two_pieces),
    Mistake("what is whole meets a piece",
            "Two tensors meet in this line, or before it. Which part of each does this rank have, by your plan?",
            says(r"The size of tensor.* dimension 2|of its (\d+) features, \d+, and got \1\b")),
    Mistake("the sum comes whole, and x is a shard",
            "A residual adds what comes out to x: which part of x's sequence does this rank have?",
            says("The size of tensor")),
    Mistake("query, key and value are not split alike",
            "By your plan, how many heads of the queries, keys and values does this rank have?",
            says("Number of heads in key")),
    Mistake("a cut goes through a head",
            "Which matrices of the mixer must be cut at the same heads, and how do they learn where?",
            says(r"failed: \w+: .*(unflatten|heads|query\b(?!'))")),
    Mistake("it cannot be obeyed", STYLE, says("failed: (Value|Runtime)Error")),
)
EXERCISE = ways.both_ways(
    worlds,
    question=STYLE,
    mistakes=Mistakes((
        Mistake("a shard is taken for the whole",
                "Which tokens does this rank have when attention begins, and which does it have to see?",
                lambda one: one.world.step == 0 and one.world.sequence_parallel and not ways.gathered(one.seen),
                symptom="each rank attends to its own part of the sequence"),
        Mistake("the norms' gradients are not summed",
                "Under sequence parallelism a norm sees only its own rank's tokens. What does it know of its gradient?",
                lambda one: "norm" in one.name and adds_up(one),
                symptom="with sequence parallelism, norms that drift apart"),
        ways.SUMMED_TOO,
    ), form=(
        Mistake("a matrix is not split", "Which part of it does this rank compute with?",
                returned(lambda found, expected: found.numel() > expected.numel()),
                symptom="right, but each rank holds and multiplies a whole matrix"),
        Mistake("columns where rows belong, or rows where columns do",
                "Which matrix comes first, and leaves pieces behind, and which one takes them as they are?",
                returned(lambda found, expected: found.shape != expected.shape),
                symptom="a plan of columns alone: right, but with a gather after each matrix"),
    ), sent=(
        Mistake("x crosses the border once for each matrix",
                "Several matrices read the same x. How often must it, or its gradient, travel?",
                lambda sent: sent.too_much,
                symptom="the right numbers, and more than twice the bytes"),
    ), raised=PLANS),
)
# fmt: on


@answered
def block_plan(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(config, sequence_parallel) -> plan`: from "mixer", "mixer.query", ..., "ffn.w2" to styles of labs.tp.

    The plan is for a Stranger.  x comes in and goes out whole, or as a shard of the sequence, dim 1.

    Returns the text of the ✓ line, with the bytes sent.
    """
    recording = checked(EXERCISE, (fn,), seed).recording
    return (
        f"a rank holds its part of every matrix, and sent {ways.describe(recording, 'x', 8 * prod(X), 0)}; "
        "the least possible is 3.00 ×, as two all-reduces each way"
    )


block_plan.source = "\n\n".join(map(inspect.getsource, (Mixer, FeedForward, Stranger)))  # for the notebook
