"""placements: are these the placements of DDP, ZeRO 1, 2, 3 and HSDP?  A job trains a few weights by them for one step.

The placements of P, G and S are all that makes a strategy:

    between     each rank holds its block of P and S
    forward     P goes to Replicate(), and once more for backward; nothing is sent if P is whole already
    backward    each rank's gradient is a summand of the mean, Partial(), and goes to G's placements
    step        G goes to S's placements; P's block there is updated, and goes back to P's placements

The job has 6 ranks, as ("dp",) of 6 or ("replicate", "shard") of 2 × 3.  The bytes held of each kind and the bytes sent
must be those of the strategy, by the formulas of labs.cost, and the new weights those of one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.dtensor import Partial, Placement, Replicate
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import redistribute
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_one_rank, wrong
from labs.exercises.engine.on_ranks import F64
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.mesh import Mesh

MESHES = {"dp": (6,), "hsdp": (2, 3)}
AXES = {"DDP": "dp", "ZeRO 1": "dp", "ZeRO 2": "dp", "ZeRO 3": "dp", "HSDP": "hsdp"}
SHAPES = ((18, 36), (7, 11))  # the ranks divide both dims of the first weight, whose bytes are compared
N, REPLICAS, SHARDS = 6, 2, 3
ALL_REDUCE, HALF = 2 * (N - 1) / N, (N - 1) / N
# {strategy: (P, G and S held, sent in a step)}, × the bytes of the model.  AdamW's S is twice as large as P.
EXPECTED = {
    "DDP": (1, 1, 2, ALL_REDUCE),
    "ZeRO 1": (1, 1, 2 / N, 2 * HALF),
    "ZeRO 2": (1, 1 / N, 2 / N, 2 * HALF),
    "ZeRO 3": (1 / N, 1 / N, 2 / N, 3 * HALF),
    "HSDP": (1 / SHARDS, 1 / SHARDS, 2 / SHARDS, 3 * (SHARDS - 1) / SHARDS + 2 * (REPLICAS - 1) / REPLICAS / SHARDS),
}


@dataclass(frozen=True)
class Obeyed(World):
    """A world with two weights: each strategy trains one in a step, the other in the next, and gathers both there."""

    steps: int = 2 * len(AXES)

    @property
    def strategy(self) -> str:
        return list(AXES)[self.step // 2]

    @property
    def gathers(self) -> bool:
        return self.step % 2 == 1

    @property
    def when(self) -> str:
        return f", {self.strategy}"

    def numbers(self, *place: int) -> list[Tensor]:
        generator = self.generator(*place)
        return [torch.randn(shape, generator=generator, dtype=self.dtype) for shape in SHAPES]

    def weights(self) -> list[Tensor]:
        return self.numbers()

    def gradients(self, rank: int) -> list[Tensor]:
        return self.numbers(rank, 1)

    def __str__(self) -> str:
        return self.who


def updated(world: Obeyed) -> list[dict[str, Tensor]]:
    """Return the weights after a step on one process, in the steps in which they are gathered."""
    gradients = zip(*(world.gradients(rank) for rank in range(N)), strict=True)
    pairs = zip(world.weights(), gradients, strict=True)
    new = {f"weight {i}": stepped(w, torch.stack(all_).mean(0)) for i, (w, all_) in enumerate(pairs)}
    return [new if world.gathers else {}] * N


def stepped(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a weight after AdamW's first step without decay, which is elementwise, as ZeRO needs it."""
    return weight - 0.1 * gradient / (gradient.abs() + 1e-8)


def obey_all(world: Obeyed, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Train one step with each row of the learner's table; yield the bytes held as facts, or the first mistake."""
    meshes = {axes: mesh_of(axes) for axes in MESHES}  # made before the first step, since ranks agree by messages
    table = None
    for strategy, axes in AXES.items():
        first, second = zip(world.weights(), world.gradients(world.index()), strict=True)
        yield None
        table, mesh = table or fn(), meshes[axes]
        facts = first_wrong(FORM, [("", Form(strategy, table))])
        if facts:
            yield Look({}, facts)
            break
        facts["held"], *block = obey(*first, mesh, table[strategy])
        facts["sharded"] = [[p.is_shard() for p in kind] for kind in table[strategy]]
        facts["G is whole"] = all(p.is_replicate() for p in table[strategy][1])
        yield Look({}, facts)
        yield None
        _, *other = obey(*second, mesh, table[strategy])
        yield Look({"weight 0": gathered(*block, mesh), "weight 1": gathered(*other, mesh)})
    while True:  # a table that cannot be obeyed is judged by the step before
        yield Look()


@cache
def mesh_of(axes: str) -> Mesh:
    return Mesh(MESHES[axes], ("dp",) if axes == "dp" else ("replicate", "shard"))


def gathered(block: Tensor, layout: Spec, mesh: Mesh) -> Tensor:
    return redistribute(block, layout, (Replicate(),) * mesh.ndim, mesh)


def obey(
    weight: Tensor, gradient: Tensor, mesh: Mesh, kinds: Sequence[Sequence[Placement]]
) -> tuple[list[int], Tensor, Spec]:
    """Train a weight for one step by these placements; return the bytes held of P, G and S, and its new block."""
    P, G, S = (tuple(kind) for kind in kinds)
    place, summand = mesh.get_coordinate(), (Partial(),) * mesh.ndim
    layout = Spec(tuple(weight.shape), mesh.shape, P)
    block = weight[layout.block(place).slices].clone()
    for _ in ("forward", "backward"):
        gathered(block, layout, mesh)
    # The last axis goes first: a cut along it makes the summands along the other axes smaller.
    last = (*summand[:-1], G[-1])
    mine = redistribute(gradient / N, layout.but(summand), last, mesh)
    mine = redistribute(mine, layout.but(last), G, mesh)
    held = [block.nbytes, mine.nbytes, 2 * prod(layout.but(S).block(place).shape) * 8]
    mine = redistribute(mine, layout.but(G), S, mesh)
    own = redistribute(block, layout, S, mesh)
    return held, redistribute(stepped(own, mine), layout.but(S), P, mesh), layout


@dataclass(frozen=True)
class Form:
    """The form of one strategy's entry in the learner's table."""

    strategy: str
    table: Any

    @property
    def kinds(self) -> Any:
        return self.table.get(self.strategy) if isinstance(self.table, dict) else None


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


AXES_OF = {"dp": 'one axis, ("dp",)', "hsdp": 'two axes, ("replicate", "shard")'}
# fmt: off
FORM = (
    Mistake("nothing is returned", "Where is the table?", lambda form: form.table is None),
    Mistake("not a table", "A row for each strategy: under which name?", lambda form: not isinstance(form.table, dict)),
    Mistake("a strategy is missing", "Which five strategies belong in it, and under which names?",
            lambda form: form.kinds is None and f"the table has {', '.join(map(str, form.table)) or 'no row'}"),
    Mistake("not three kinds", "P, G and S: which placements does each of them have?",
            lambda form: not (is_list(form.kinds) and len(form.kinds) == 3)),
    Mistake("not one placement for each axis", "How many axes does its mesh have?",
            lambda form: not all(is_list(kind) and len(kind) == len(MESHES[AXES[form.strategy]])
            for kind in form.kinds) and f"its mesh has {AXES_OF[AXES[form.strategy]]}; P, G, S are {form.kinds}"),
    Mistake("not placements", "Which three are there?",
            lambda form: not all(isinstance(p, Placement) for kind in form.kinds for p in kind) and f"{form.kinds}"),
    Mistake("a dim that the weight lacks", "How many dims has a matrix?",
            lambda form: any(p.is_shard() and p.dim not in (0, 1) for kind in form.kinds for p in kind)),
    Mistake("parameters or optimizer state as summands", "Can a rank compute with parameters of which it has a "
            "summand? Can AdamW step with a summand of its moments?",
            lambda form: any(p.is_partial() for kind in (form.kinds[0], form.kinds[2]) for p in kind)
            and f"P and S are {form.kinds[0]} and {form.kinds[2]}"),
    # The bytes do not show this mistake: a gradient that is made whole later costs the same.
    Mistake("the gradient stays a summand", "What does each rank find in .grad after the backward: the mean over all "
            "ranks, or its own part of the sum?",
            lambda form: form.strategy in ("DDP", "HSDP") and any(p.is_partial() for p in form.kinds[1])
            and f"G is {form.kinds[1]} when the backward is over",
            symptom="nobody has the gradient before the optimizer asks for it"),
)
# fmt: on


class Totals:
    """The bytes of P, G and S that a rank holds, and those that it sends: received and expected.

    sharded: for P, G and S, whether each axis cuts them.
    """

    def __init__(self, seen: StepOutcomes) -> None:
        self.strategy, facts = seen.world.strategy, seen.done[0].facts
        self.sharded, self.G_is_whole = facts["sharded"], facts["G is whole"]
        self.received = *facts["held"], max(seen.sent.values())
        self.expected = [times * prod(SHAPES[0]) * 8 for times in EXPECTED[self.strategy]]

    def off(self, index: int) -> float:
        """Return the measured bytes ÷ the strategy's bytes, exactly 1 if they agree."""
        ratio = self.received[index] / self.expected[index]
        return 1 if abs(ratio - 1) < 1e-9 else ratio

    def describe(self, index: int) -> str:
        """Return a sentence about the bytes held of a kind, or about those sent."""
        what = ("each rank holds {:,} bytes of P", "each rank holds {:,} bytes of G", "each rank holds {:,} bytes of S",
                "a rank sends {:,} bytes in a step")[index]  # fmt: skip
        clause, expected = what.format(self.received[index]), self.expected[index]
        return f"as the table says, {clause}; with {self.strategy} it is {expected:,.0f}"

    @property
    def wrong(self) -> int | None:
        return next((index for index in range(4) if self.off(index) != 1), None)


def totals(seen: StepOutcomes) -> Iterator[tuple[str, Totals]]:
    if not seen.world.gathers:
        yield "", Totals(seen)


def kind_is(index: int, more: bool) -> Callable[[Totals], str | bool]:
    return lambda seen: seen.wrong == index and (seen.off(index) > 1) == more and seen.describe(index)


OBEY = "Follow a gradient through the step: where does it become the mean, and along which axes?"
# fmt: off
OBEYED = (
    Mistake("sharded over the wrong axis",
            "Along which axis do the ranks hold the same, and along which do they share?",
            lambda seen: seen.strategy == "HSDP" and [True, False] in seen.sharded
            and seen.describe(seen.wrong),
            symptom="HSDP that gathers across nodes, where it should gather inside of them"),
    Mistake("sharded over both axes", "If nothing is there twice, what is the axis of replicas for?",
            lambda seen: [True, True] in seen.sharded
            and seen.describe(seen.wrong)),
    Mistake("P is sharded", "What does the next forward begin with, in this strategy?", kind_is(0, more=False)),
    Mistake("P is whole", "What does a rank of this strategy keep of the parameters between two uses?",
            kind_is(0, more=True)),
    Mistake("G is sharded", "What is in .grad when backward is over, in this strategy?", kind_is(1, more=False)),
    Mistake("G is whole", "When does each gradient go to its owner, in this strategy?", kind_is(1, more=True)),
    Mistake("S is sharded", "Which elements does each rank's optimizer update?", kind_is(2, more=False)),
    Mistake("S is whole", "Which elements does each rank's optimizer update?", kind_is(2, more=True)),
    Mistake("the gradient is reduced to everybody",
            "Each rank's optimizer uses a part of the mean gradient. Who needs the sum of all of it?",
            lambda seen: seen.G_is_whole and kind_is(3, more=True)(seen),
            symptom="ZeRO 1 that sends half as much again as DDP"),
    Mistake("more is sent than this strategy sends", OBEY, kind_is(3, more=True)),
    Mistake("the mean is never there", "When, and along which axes, are the summands added up?",
            kind_is(3, more=False)),
)
PLAY = Play(
    lambda draw: {N: [draw.world(Obeyed, N)]},
    obey_all,
    tables=(
        (on_one_rank, as_found(FORM)),
        (totals, OBEYED),
        (wrong(updated, {F64: 1e-12}), (Mistake("", OBEY, lambda one: True),)),
    ),
    question=OBEY,
)
# fmt: on


@answered
def placements(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn() -> {strategy: (P, G, S)}`: the placements of each kind, per strategy.

    The placements are along ("dp",), and those of HSDP along ("replicate", "shard").
    """
    checked(PLAY, (fn,), seed)
    return "five strategies, each obeyed by a job: it holds and sends what the strategy does"
