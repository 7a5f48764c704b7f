"""partition_optimizer, stage 1: each rank updates 1/N of a layer's vector, and after a step all ranks have it whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.by_script import Play, as_a_whole, budgeted, each_after, on_each_rank, wrong
from labs.exercises.engine.on_ranks import F32, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes
from labs.exercises.engine.value import One, as_if
from labs.exercises.zero import _pieces as pieces
from labs.exercises.zero._flat_layers import LAYERS, TOLERANCE, Layers, draw_layers, means, thaw, wide

LEARNING_RATE = 0.1
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=LEARNING_RATE),
    "SGD with momentum": partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1),
}


@dataclass(frozen=True)
class Trained(Layers):
    """A world in which the layers are trained by an optimizer; step 0 builds the optimizers."""

    steps: int = 3
    optimizer: str = "SGD"

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.optimizer}"


def worlds(draw: Draw) -> dict[int, list[Trained]]:
    case = partial(draw_layers, draw, Trained)
    return {
        3: [case(3), case(3, optimizer="AdamW", micro_batches=2, tied=True, steps=4)],
        2: [case(2, micro_batches=2), case(2, optimizer="AdamW", frozen=True)],
        4: [
            case(4, optimizer="SGD with momentum", dtype=F32, steps=4),
            case(4, optimizer="AdamW"),
            case(4, tied=True, idle=True, alike=True),
        ],
    }


def train(world: Trained, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Build the optimizers, and train: yield before each step, and then a look with the vectors."""
    rank, fulls, elements, first = dist.get_rank(), world.parameters(), [], 0
    trained = world.named(fulls)

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[world.optimizer](list(params))
        elements.append(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))
        return optimizer

    yield None
    steps = [fn(full, make) for full in trained.values()]
    given = [show(step) for step in steps if not callable(step)]
    yield Look(facts={"given": given, "first": 0, "elements": [], "own": 0})
    for number in range(world.steps - 1):
        places = {name: place_of(full) for name, full in trained.items()}
        for full in trained.values():
            full.grad = None
        yield None
        world.backwards(fulls, rank, number)
        for step in filter(callable, steps):
            step()
        first = first or len(elements)
        facts = {"first": first, "elements": list(elements), "own": sum(map(len, trained.values())) // world.n}
        facts["step"] = [
            {"of": name, "same": place_of(full) == places[name], "thawed": thaw(full)} for name, full in trained.items()
        ]
        yield Look(trained, facts)


def place_of(full: Tensor) -> int:
    return full.untyped_storage()._cdata


@lru_cache(maxsize=8)
def states(world: Trained, adding: bool = False) -> list[list[Tensor]]:
    """Return the vectors of all layers that one process computes, before the first step and after each step.

    adding: whether no gradient is ever cleared.
    """
    fulls = [nn.Parameter(x) for x in world.vectors()]
    trained = [fulls[i] for i in world.trained]
    optimizer, found = OPTIMIZERS[world.optimizer](trained), []
    for step in range(world.steps):
        found.append([full.detach().clone() for full in fulls])
        for p, mean in zip(trained, means(world.plain(fulls, step)), strict=True):
            p.grad = mean + p.grad if adding and step else mean
        optimizer.step()
    return found


def after(world: Trained, step: int, adding: bool = False) -> list[dict[str, Tensor]]:
    """Return for each rank the expected vectors of the trained layers after a step."""
    return [world.named(states(world.at(0), adding)[step])] * world.n


def expected(world: Trained) -> list[dict[str, Tensor]]:
    return after(world, world.step) if world.step else [{}] * world.n


def own_piece_only(world: Trained) -> list[dict[str, Tensor]]:
    """Return the layers' vectors of ranks that update their own piece and never gather the other pieces."""
    old, new = after(world, world.step - 1)[0], expected(world)[0]
    whose = {name: torch.arange(len(x)) // (len(x) // world.n) for name, x in old.items()}
    return [{name: torch.where(whose[name] == r, new[name], x) for name, x in old.items()} for r in world.members]


def first_wrong(one: One) -> int:
    """Return the index of the first wrong piece of a rank's vectors."""
    pairs = zip(one.received.chunk(one.n), one.expected.chunk(one.n), strict=True)
    return next((c for c, pair in enumerate(pairs) if not one.near(*pair)), 0)


def followed(seen: StepOutcomes) -> Iterator[tuple[str, pieces.Followed]]:
    """Yield, for each wrong vector, the gradient that plain SGD has used, from the difference of two steps."""
    world, step = seen.world, seen.world.step - 1
    for where, one in wrong(expected, TOLERANCE)(seen):
        went = [(x - one.done.values[name]) / LEARNING_RATE for name, x in after(world, step)[0].items()]
        index, gradients = first_wrong(one), world.plain(states(world.at(0))[step], step)
        yield where, pieces.Followed(world, index, pieces.side_by_side(went, world.n, index), gradients)


def optimizers(seen: StepOutcomes) -> Iterator[tuple[str, SimpleNamespace]]:
    """Yield the facts about the optimizers of each rank, and whether they are replicated and not sharded."""
    alike = {event.op for event in seen.events} <= {"all_reduce"}
    for where, done in on_each_rank(seen):
        whole = sum(done.facts["elements"]) == seen.world.n * done.facts["own"] > 0
        yield where, SimpleNamespace(**done.facts, replicated=alike and whole)


def elements(its: SimpleNamespace) -> str:
    return f"the optimizers have {sum(its.elements)} elements; {its.own} are its own"


# fmt: off
WHICH = "Which rank needs the state of which elements, if each updates only its own?"
COPIES = "full copies are kept", "What do you keep from one step to the next, and how large is it?"
PLAY = Play(
    worlds,
    train,
    tables=(
        (on_each_rank, (
            Mistake("no step is returned", "What will the training loop call after backward?",
                    lambda done: done.facts.get("given")
                    and f"partition_optimizer returned {done.facts['given'][0]}, and not a function"),
        )),
        (each_after("step"), (
            pieces.THAWED,
            Mistake("not in place", "The layer computes with views of full. Of which memory are they views?",
                    lambda full: not full.same and "it has different memory than before"),
        )),
        (as_a_whole, rows.LUCK),
        (wrong(expected, TOLERANCE), (
            Mistake("nothing is updated", "What does the optimizer update?",
                    as_if(lambda world: after(world, world.step - 1))),
            Mistake("nobody gathers the parameters", "How do the other ranks learn the piece that you have updated?",
                    lambda one: as_if(own_piece_only)(one) and "It has updated its own piece, and nothing else."),
            pieces.ROTATED,
            Mistake("the gradient of the step before is added again",
                    "What is in the shard's .grad when the step begins?",
                    as_if(lambda world: after(world, world.step, adding=True))),
            Mistake("", "Which gradient does your optimizer see?", lambda one: one.world.optimizer != "SGD"
                    and f"Piece {first_wrong(one)} is the first that is wrong."),
        )),
        (followed, pieces.GRADIENT),
        (as_a_whole, (
            Mistake("not the same bits on every rank", "Where does each rank get the other pieces from?",
                    lambda seen: any(not torch.equal(x, seen.done[0].values[name])
                                     for done in seen.done for name, x in done.values.items())
                    and "the parameters differ between the ranks in their last bits"),
        )),
        (optimizers, (
            Mistake("a new optimizer in every step", "Where are the moments of earlier steps?",
                    lambda its: len(its.elements) > its.first
                    and f"there are {its.first} optimizers after the first step, and {len(its.elements)} now"),
            Mistake("nothing is sharded", WHICH, lambda its: its.replicated and elements(its)),
            Mistake("the whole optimizer state is kept", WHICH,
                    lambda its: sum(its.elements) > its.own and elements(its)),
        )),
        (budgeted(lambda world: pieces.travel(world, 2 * world.gradients, 2 * world.gradients * (world.step > 0))), (
            *rows.SENT,
        )),
    ),
    question="Which gradients went into this one, and how often?",
    questions=pieces.QUESTIONS,
    # The gradients, which are whole in stage 1; and the shard's two moments, its gradient, and perhaps a copy of it.
    memory=rows.Memory(
        wide(Trained, optimizer="AdamW", steps=4),
        during=2 * LAYERS + pieces.BUFFERS,
        after=2 * LAYERS + pieces.SLACK,
        mistakes=pieces.held(COPIES, COPIES),
    ),
)
# fmt: on


@answered
def partition_optimizer(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(full, make) -> step`: `step()` updates `full`, and each rank has 1/N of the optimizer's state.

    `make([params])` returns an optimizer.  `full` [n], an nn.Parameter, is the same on all ranks.  step() is called
    after backward, on every rank.
    """
    passed = pieces.checked(PLAY, (fn,), seed)
    last, state = passed.seen[-1], passed.peaks["S"] / (2 * LAYERS)
    copy = " (a copy of the shard included)" if state > 0.3 else ""
    return (
        f"you hold {state:.2f} × the optimizer's state per rank{copy}, and sent "
        f"{last.sent[0] / last.world.gradients:.2f} × the vector per step; the least possible is 0.25 × and 1.50 ×"
    )
