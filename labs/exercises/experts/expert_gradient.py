"""expert_gradient: gradients become their means over all ranks, those of experts along edp alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import OTHER_DTYPE, Sends
from labs.exercises.engine.on_axes import OnMesh, ring
from labs.exercises.engine.on_ranks import F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look
from labs.exercises.engine.value import One, as_if
from labs.mesh import Mesh

EDP, EP, ALL = "edp", "ep", "all"


@dataclass(frozen=True)
class Gradient(OnMesh):
    axes: tuple[str, ...] = (EDP, EP)
    is_expert: bool = True

    def made(self, axes: str, divisor: str) -> list[Tensor]:
        """Return the gradients if they are added up along some axes, "edp ep", and divided by the size of one."""
        found = self.combined(dict.fromkeys(axes.split(), "sum"))
        return [each / (self.sizes | {ALL: self.ranks, "": 1})[divisor] for each in found]

    def expected(self) -> list[Tensor]:
        return self.made(EDP if self.is_expert else f"{EDP} {EP}", ALL)

    @property
    def sent(self) -> float:
        return 2 * ring(self.nbytes, self.shape[0] if self.is_expert else self.ranks)

    def __str__(self) -> str:
        return f"{super().__str__()}, {'an expert' if self.is_expert else 'all else'}, shape {self.size}"


def worlds(draw: Draw) -> dict[int, list[Gradient]]:
    def both(*shape: int, size: tuple[int, ...] = (), **options: Any) -> list[Gradient]:
        size = size or (draw.random.randrange(5, 12),)
        return [
            draw.world(Gradient, prod(shape), shape=shape, size=size, is_expert=each, **options)
            for each in (True, False)
        ]

    return {
        6: [*both(2, 3), *both(3, 2, size=(3, 5))],
        4: [*both(2, 2), *both(1, 4), *both(4, 1), *both(2, 2, size=(60, 50), dtype=F32), *both(2, 2)],
    }


def script(world: Gradient, fn: Callable[..., Any]) -> Iterator[Look | None]:
    gradient = world.tensor(world.index())
    yield None
    returned = fn(gradient, world.is_expert, world.mesh)
    yield Look({"": gradient}, {"returned": returned is not None and returned is not gradient})


def instead(is_expert: bool, axes: tuple[str, ...], *divisors: str) -> Callable[[One], bool]:
    """Return a row's test: whether such a gradient was added up along one of these axes, and divided by one of these"""

    def others(world: Gradient) -> Iterator[list[Tensor]]:
        for along in axes if world.is_expert == is_expert else ():
            yield from (world.made(along, divisor) for divisor in divisors or ("", EDP, EP, ALL))

    return as_if(others)


# fmt: off
TOKENS = "Whose tokens are in an expert's gradient before anybody adds anything, and of how many ranks is the mean?"
BOTH = f"{EDP} {EP}"
EXERCISE = Exercise(
    worlds,
    Expected(Gradient.expected, summands=lambda world, i: [], tolerance={F64: 1e-10, F32: 1e-5}),
    question=TOKENS,
    script=script,
    sends=lambda world: Sends(least=0, enough=lambda rank: 1.02 * world.sent + 64),
    mistakes=Mistakes((
        Mistake("returned, and not in place", "Which tensor does the optimizer read?",
                lambda one: one.done.facts["returned"]),
        Mistake("an expert's gradient is ep times too large", TOKENS, instead(True, (EDP,), EDP),
                symptom="a norm that is too large, and clipping that shortens all gradients; the loss falls"),
        Mistake("an expert's gradient is not divided", "The loss is a mean over all ranks: where is the division?",
                instead(True, (EDP,), "")),
        Mistake("an expert's gradient has another divisor", TOKENS, instead(True, (EDP,), EP)),
        Mistake("different experts are mixed", "Which ranks have this expert, and which have others?",
                instead(True, (BOTH, EP)), symptom="experts that are all the same"),
        Mistake("an expert's copies are not added up", "Which other ranks have a copy of this expert?",
                instead(True, ("",))),
        Mistake("all else is added up along one axis alone", "Which ranks have a copy of the router?",
                instead(False, (EDP, EP, "")), symptom="copies of routers and attention that drift apart"),
        Mistake("all else has another divisor", "Of how many ranks' gradients is it the mean?",
                instead(False, (BOTH,))),
    ), sent=(
        OTHER_DTYPE,
        Mistake("several all-reduces", "Which ranks' gradients are added up, and which group are they?",
                lambda sent: sum(event.op == "all_reduce" for event in sent.events) > sent.world.n and sent.too_much),
    )),
    questions={
        "too many bytes": "Along which axis is there nothing to add up?",
        "an all-reduce where a part is enough": "Along which axis is there nothing to add up?",
        "read before it was there": "When may you read what an all-reduce has written?",
    },
)
# fmt: on


@answered
def expert_gradient(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(gradient, is_expert, mesh)`, which changes the gradient in place to its mean over all ranks.

    gradient: an expert's has the tokens of all ranks along ep already; any other has this rank's tokens alone
    mesh: a labs.mesh.Mesh with the axes edp and ep

    Returns the text of the ✓ line, with the bytes sent.
    """
    checked(EXERCISE, (fn,), seed)
    experts, others = (Gradient(0, 8, shape=(2, 4), size=(1000,), is_expert=each) for each in (True, False))
    told = f"{experts.sent / experts.nbytes:g} × the gradient of an expert, and {others.sent / others.nbytes:g} × "
    return f"on 2 × 4 ranks each sends {told}any other"


def as_expected(gradient: Tensor, is_expert: bool, mesh: Mesh) -> None:
    dist.all_reduce(gradient.div_(mesh.size()), group=mesh.get_group(EDP) if is_expert else None)


expert_gradient.expected = as_expected  # the notebook goes on with this function, if the learner's is not right yet
