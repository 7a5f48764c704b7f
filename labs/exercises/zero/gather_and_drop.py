"""gather_and_drop, stage 3: a layer's parameters are in memory, bit for bit, while it computes, and only then."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.by_script import Play, as_a_whole, budgeted, each_after, on_each_rank, wrong
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw
from labs.exercises.engine.scripts import Look
from labs.exercises.engine.value import as_if
from labs.exercises.fsdp import unshard_and_reshard as unshard
from labs.exercises.zero import _pieces as pieces
from labs.exercises.zero._flat_layers import SETTLED, Layers, draw_layers, thaw, wide


@dataclass(frozen=True)
class Gathered(Layers):
    """A world whose ranks hold shards of dtype `rest`."""

    rest: torch.dtype = F64

    @property
    def visits(self) -> list[tuple[int, bool]]:
        """The layers' uses in a step, forward and back, in order: (layer, whether the use is in forward)."""
        order = [*range(len(self.sizes)), *[0] * self.tied]
        return [(i, True) for i in order] + [(i, False) for i in reversed(order)]

    @property
    def gathered(self) -> int:
        """The bytes of all layers that are gathered in a step."""
        return sum(self.sizes[i] for i, _ in self.visits) * self.dtype.itemsize

    def shards(self, step: int, rank: int) -> list[Tensor]:
        return [whole.chunk(self.ranks)[rank] for whole in replace(self, dtype=self.rest).vectors(step)]


def worlds(draw: Draw) -> dict[int, list[Gathered]]:
    case = partial(draw_layers, draw, Gathered)
    return {
        3: [case(3), case(3, tied=True, frozen=True)],
        2: [case(2, rest=F32, dtype=F32), case(2, rest=F32, dtype=BF16)],
        4: [case(4, tied=True), case(4, rest=F32, dtype=BF16, frozen=True)],
    }


def come_and_go(world: Gathered, gather: Callable[..., Any], drop: Callable[..., Any]) -> Iterator[Look | None]:
    """Use the layers, forward and back: gather, note the state, use, drop, note the state; yield a look per step."""
    fulls, rank = world.parameters(), dist.get_rank()
    shards = nn.ParameterList(map(nn.Parameter, world.shards(0, rank)))
    vectors = [Vector(f"layer {i}", full, i in world.trained) for i, full in enumerate(fulls)]
    for step in range(world.steps):
        for shard, value in zip(shards, world.shards(step, rank), strict=True):
            shard.data.copy_(value)
        before = [] if world.held else [shard.detach().clone() for shard in shards]
        values, facts = {}, {"gather": [], "drop": []}
        yield None
        for number, (i, forward) in enumerate(world.visits):
            vector = vectors[i]
            with torch.set_grad_enabled(forward):
                gather(vector.full, shards[i])
                facts["gather"].append(vector.state(whole=True))
                if unshard.there(vector.view):
                    values |= {} if world.held else {f"{vector.name} (gather {number})": vector.view.clone()}
                    vector.use(leave_gradient=not forward and not world.held)
                drop(vector.full)
                facts["drop"].append(vector.state(whole=False))
            if world.held:
                time.sleep(SETTLED)
        pairs = zip(shards, before, strict=False)
        facts["changed"] = any(now.dtype != then.dtype or not torch.equal(now, then) for now, then in pairs)
        yield Look(values, facts)


class Vector:
    """A layer's vector; the layer computes with `view`, even if the learner's function replaces full.data."""

    def __init__(self, name: str, full: nn.Parameter, trained: bool) -> None:
        self.name, self.full, self.view, self.trained, self.version = name, full, full.data, trained, full._version
        self.view.untyped_storage().resize_(0)

    def use(self, leave_gradient: bool) -> None:
        self.view.fill_(float("nan"))  # otherwise the same memory might come back with the right numbers
        if leave_gradient and self.trained:
            self.full.grad = torch.zeros_like(self.view)  # the state between backward and the reduce-scatter

    def state(self, whole: bool) -> dict[str, Any]:
        """Return the state in which a call has left a layer's vector, and repair the vector for the next call."""
        full, found = self.full, unshard.state(self.full, self.view, show(self.view), self.name, whole)
        found |= {"of_dtype": full.dtype == self.view.dtype, "written": full._version != self.version}
        found["thawed"] = thaw(full, self.trained)
        if not (found["same"] and found["of_dtype"]):
            full.data = self.view
        full.grad, self.version = None, full._version
        return found


def expected(world: Gathered, step: int | None = None) -> list[dict[str, Tensor]]:
    step, ranks = world.step if step is None else step, range(world.n)
    wholes = [torch.cat(pieces).to(world.dtype) for pieces in zip(*(world.shards(step, r) for r in ranks), strict=True)]
    return [{f"layer {i} (gather {number})": wholes[i] for number, (i, _) in enumerate(world.visits)}] * world.n


def own_everywhere(world: Gathered) -> list[dict[str, Tensor]]:
    """Return the values of a rank that fills all pieces of a layer with its own shard."""
    return [
        {name: x.chunk(world.n)[r].repeat(world.n) for name, x in expected(world)[r].items()} for r in world.members
    ]


# fmt: off
STATE = (
    Mistake("the compute dtype is ignored", "In which dtype was full, before it was dropped?",
            lambda full: not full.of_dtype and f"it is {full.now}; the layer computes in {full.given}"),
    unshard.OTHER_MEMORY,
    unshard.OF_ANOTHER_SIZE,
    pieces.THAWED,
    Mistake("autograd sees the change", "Which attribute of full has the same numbers, unseen by autograd?",
            lambda full: full.written and "autograd has seen a write: backward will refuse what forward has kept"),
)
NOT_FREED = replace(unshard.NOT_FREED, symptom="",
                    matches=lambda full: unshard.OTHER_MEMORY.matches(full) or unshard.NOT_FREED.matches(full))
PLAY = Play(
    worlds,
    come_and_go,
    tables=(
        (each_after("gather"), STATE),
        (on_each_rank, (unshard.SHARD_CHANGED,)),
        (as_a_whole, rows.LUCK),
        (wrong(expected, {}), (
            Mistake("the parameters of the step before",
                    "What has the optimizer changed since, and who has told the others?",
                    as_if(lambda world: (expected(world, step) for step in range(world.step)))),
            Mistake("one's own shard everywhere", "Whose shard belongs where?", as_if(own_everywhere)),
            replace(pieces.ROTATED, question="Whose shard belongs where?"),
            *rows.VALUES,
        )),
        (each_after("drop"), (NOT_FREED, *STATE)),
        # The least is one gather of each layer: a function that sends less than all visits need holds more instead.
        (budgeted(lambda world: pieces.travel(world, world.gathered, sum(world.sizes) * world.dtype.itemsize)), (
            Mistake("the compute dtype is ignored",
                    "In which dtype does the layer compute, and what do the extra digits cost on the way?",
                    lambda sent: sent.world.rest != sent.world.dtype and rows.in_another_dtype(sent)),
            *rows.SENT,
        )),
    ),
    question="What does each rank bring, and where does it go?",
    questions=pieces.QUESTIONS | {"rounded on the way": "In which dtype do the numbers travel?"},
    memory=rows.Memory(
        wide(Gathered, dtype=BF16, rest=F32, steps=3),
        during=pieces.BUFFERS,
        after=pieces.SLACK,
        mistakes=pieces.held(
            ("copies of full parameters are kept", "Which of your variables still refers to what was gathered?"),
            ("more than a layer at a time", "How many copies of the layer are there while you gather it?"),
        ),
    ),
)
# fmt: on


@answered
def gather_and_drop(gather: Callable[..., Any], drop: Callable[..., Any], seed: int) -> str:
    """Check `gather(full, shard)` and `drop(full)`.

    gather fills the storage of `full` with the shards of all ranks, in the dtype of `full`; drop empties the storage.
    full [n], shard [n / N]: nn.Parameters; between a drop and the next gather, the storage of `full` has 0 bytes.
    """
    passed = pieces.checked(PLAY, (gather, drop), seed)
    last = passed.seen[-1]
    return (
        f"you held {passed.peaks['P']:.2f} × a layer besides the shards, and sent "
        f"{last.sent[0] / last.world.gathered:.2f} × a layer for each gather; the least possible is 1.00 × and 0.75 ×"
    )
