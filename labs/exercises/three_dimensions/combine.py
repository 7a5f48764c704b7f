"""combine: gradients on a mesh of pp, dp and tp, which are summed, averaged or left alone along each axis."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Sends
from labs.exercises.engine.on_axes import OnMesh, ring
from labs.exercises.engine.on_ranks import F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look
from labs.exercises.engine.value import One, as_if

AXES = "pp", "dp", "tp"
KINDS = {  # what is needed besides the mean along dp; the axes along which ranks have the same gradient
    "split": ({}, ()),
    "whole": ({}, ("tp",)),
    "summand": ({"tp": "sum"}, ()),
    "tied": ({"pp": "sum"}, ()),
}


@dataclass(frozen=True)
class Gradient(OnMesh):
    axes: tuple[str, ...] = AXES
    what: str = "split"

    @property
    def expected(self) -> dict[str, str]:
        return {"dp": "mean"} | KINDS[self.what][0]

    @property
    def sent(self) -> float:
        return sum(2 * ring(self.nbytes, self.sizes[axis]) for axis in self.expected)

    def tensor(self, rank: int) -> Tensor:
        return super().tensor(rank).t().contiguous().t()  # a matrix is stored column by column

    def __str__(self) -> str:
        odd = ", not contiguous" * self.refusable
        return f"{super().__str__()}, {self.what!r}, {prod(self.size)} elements{odd}"


def worlds(draw: Draw) -> dict[int, list[Gradient]]:
    def each(*shape: int, **options: Any) -> list[Gradient]:
        ranks, size = shape[0] * shape[1] * shape[2], (draw.random.randrange(5, 12),)
        options = {"shape": shape, "size": size} | options
        return [draw.world(Gradient, ranks, what=kind, alike=KINDS[kind][1], **options) for kind in KINDS]

    odd = {"size": (3, 5), "refusable": True, "only": "right only for contiguous tensors"}
    return {4: [*each(1, 2, 2), *each(2, 2, 1), *each(1, 2, 2, dtype=F32, size=(4000,)), each(1, 2, 2, **odd)[0]]}


def script(world: Gradient, fn: Callable[..., Any]) -> Iterator[Look | None]:
    gradient = world.tensor(world.index())
    yield None
    returned = fn(gradient, world.what, world.mesh)
    yield Look({"": gradient}, {"returned": returned is not None})


def instead(*kinds: str, **how: str) -> Callable[[One], bool]:
    """Return a row's test: whether a gradient was combined in another way along some axes.

    kinds: the kinds of gradients that are looked at; without any, all of them
    how: what was done along an axis: "sum", "mean", or "" for nothing
    """

    def matches(one: One) -> bool:
        did = {axis: by for axis, by in (one.world.expected | how).items() if by}
        return one.world.what in (kinds or KINDS) and as_if(lambda world: world.combined(did))(one)

    return matches


# fmt: off
WHO = "What does each rank along this axis have: the same, another part of the parameter, or a summand?"
EXERCISE = Exercise(
    worlds,
    Expected(
        lambda world: world.combined(world.expected),
        summands=lambda world, i: [],
        tolerance={F64: 1e-10, F32: 1e-5},
    ),
    question=WHO,
    script=script,
    sends=lambda world: Sends(least=0, enough=lambda rank: 1.02 * world.sent + 64),
    mistakes=Mistakes((
        Mistake("returned, and not in place", "Which tensor does the optimizer read?",
                lambda one: one.done.facts["returned"]),
        Mistake("the summands of tp are not added up",
                "Each rank along tp had a part of the sequence: what does its gradient of the norm know of the others?",
                instead("summand", tp=""), symptom="norms that differ from rank to rank, though each should be whole"),
        Mistake("summands are averaged along tp", "Is half of a sequence's gradient a sum, or a mean?",
                instead("summand", tp="mean")),
        Mistake("added up along tp, where all have the same", "Each rank along tp has the whole gradient: what is "
                "the sum of copies?", instead("whole", tp="sum"),
                symptom="norms that learn t times as fast, and a norm of the gradients that is too large"),
        *(Mistake("parts of a matrix are mixed along tp", "Are these two gradients of the same weights?",
                  instead("split", "tied", tp=by),
                  symptom="a loss that hardly goes down: an all-reduce over all ranks mixes gradients of other weights")
          for by in ("mean", "sum")),
        Mistake("the other end's part is missing", "Where is the tied weight used, and on which ranks?",
                instead("tied", pp=""), symptom="an embedding and a head that are tied, and differ"),
        Mistake("the two ends are averaged", "In one process, is the gradient of a weight that is used twice a mean?",
                instead("tied", pp="mean")),
        *(Mistake("gradients of different stages are mixed", "Is it the same parameter on the next stage?",
                  instead("split", "whole", "summand", pp=by)) for by in ("mean", "sum")),
        Mistake("not averaged along dp", "Whose data has this gradient seen?", instead(dp=""),
                symptom="replicas that drift apart"),
        Mistake("added up along dp, and not divided in place",
                "Is the sum divided, and does that change the tensor that was given, or make another one?",
                instead(dp="sum")),
    )),
    questions={
        "too many bytes": "Along which axis is there nothing to add up?",
        "an all-reduce where a part is enough": "Along which axis is there nothing to add up?",
        "read before it was there": "When may you read what an all-reduce has written?",
    },
)
# fmt: on


@answered
def combine(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(gradient, kind, mesh)`: it changes the gradient in place to what this rank's optimizer needs.

    kind: one of KINDS
    mesh: a labs.mesh.Mesh with the axes pp, dp and tp

    Returns the text of the ✓ line, with the bytes sent for each kind.
    """
    checked(EXERCISE, (fn,), seed)
    most = {kind: Gradient(0, 8, shape=(2, 2, 2), size=(1000,), what=kind) for kind in KINDS}
    sent = ", ".join(f"{kind} {world.sent / world.nbytes:.0f}" for kind, world in most.items())
    return f"on 2 × 2 × 2 ranks each sends, × the gradient: {sent}"
