"""unshard_and_reshard: one all-gather fills a group of parameters, bit for bit; later their memory is freed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.by_script import Play, as_a_whole, budgeted, checked, each_after, on_each_rank, wrong
from labs.exercises.engine.common_mistakes import SENT, VALUES, Memory, Sends, Sent, in_another_dtype
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw
from labs.exercises.engine.scripts import Look, World
from labs.exercises.engine.value import One, as_if


@dataclass(frozen=True)
class Group(World):
    """A world with a group of parameters.

    Let R = ceil(rows / N).  Rank r holds rows r·R to (r + 1)·R of each parameter, and the last ranks hold fewer.
    The layer computes in `dtype`; the shards are of dtype `rest`.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    rest: torch.dtype = F64

    whole: ClassVar[str] = "the group"

    def wholes(self, step: int) -> list[Tensor]:
        """Return all parameters, whole, as they are in this step."""
        generator = self.generator(step=step)
        return [torch.randn(shape, generator=generator, dtype=F64).to(self.rest) for shape in self.shapes]

    def shards(self, step: int, rank: int) -> list[Tensor]:
        """Return the rows of each parameter that a rank holds."""
        return [
            whole[rank * rows : (rank + 1) * rows].clone()
            for whole in self.wholes(step)
            for rows in [-(-len(whole) // self.ranks)]
        ]

    @property
    def nbytes(self) -> int:
        return sum(map(prod, self.shapes)) * self.dtype.itemsize

    @property
    def brought(self) -> int:
        """The bytes of a rank's shards in the compute dtype, with padding."""
        return sum(-(-rows // self.ranks) * prod(row) for rows, *row in self.shapes) * self.dtype.itemsize

    def __str__(self) -> str:
        shapes = [str(list(shape)) for shape in self.shapes]
        return f"{self.who}, {self.dtype_name}, parameters {', '.join(shapes[:4])}{', …' * (len(shapes) > 4)}"


def worlds(draw: Draw) -> dict[int, list[Group]]:
    pick = draw.random.choice
    low = {"dtype": BF16, "rest": F32}

    def group(ranks: int, *rows: int, steps: int = 2, **options: Any) -> Group:
        shapes = tuple((n, *pick(((2,), (3,), (2, 3), ()))) for n in rows)
        return draw.world(Group, ranks, shapes=shapes, steps=steps, **options)

    return {
        3: [group(3, 7, 4, 3), group(3, 1, pick((5, 8)), 2)],
        2: [group(2, pick((3, 5)), 1, **low), group(2, 4, 2, dtype=F32, rest=F32, steps=1)],
        4: [
            group(4, 5, 6, 1, 2, steps=3),  # the last rank holds no rows
            group(4, 80, pick((90, 110)), **low),
            group(4, 8, 4, steps=1),  # needs no padding: the line of success is about it
        ],
    }


def wide(draw: Draw) -> Group:
    shapes = (*((64, 32),) * 16, (64,))  # many parameters, so that a copy of one is little beside the group
    return draw.world(Group, 4, shapes=shapes, dtype=BF16, rest=F32, steps=4)


def come_and_go(world: Group, unshard: Callable[..., Any], reshard: Callable[..., Any]) -> Iterator[Look | None]:
    """Unshard and reshard the group: yield before each step, and then a look with the states after both calls."""
    fulls = [torch.empty(shape, dtype=world.dtype) for shape in world.shapes]
    names = [f"parameter {number}" for number in range(len(fulls))]
    views = [full.view(full.shape) for full in fulls]  # the layer computes with these, even if fulls are replaced
    for view in views:
        view.untyped_storage().resize_(0)
    for step in range(world.steps):
        shards, given, values = world.shards(step, world.index()), list(map(show, fulls)), {}
        before = [] if world.held else [shard.clone() for shard in shards]
        yield None
        unshard(shards, fulls)
        gathered = [state(*one, whole=True) for one in zip(fulls, views, given, names, strict=True)]
        for name, view in zip(names, () if world.held else views, strict=False):
            if there(view):
                values[name] = view.clone()
                view.fill_(float("nan"))  # otherwise the same memory might come back with the right numbers
        reshard(fulls)
        dropped = [state(*one, whole=False) for one in zip(fulls, views, given, names, strict=True)]
        changed = not all(there(x) and torch.equal(x, y) for x, y in zip(shards, before, strict=False))
        yield Look(values, {"unshard": gathered, "reshard": dropped, "changed": changed})


def there(x: Tensor) -> bool:
    """Return whether the storage holds all elements; to read others would end the process."""
    return x.untyped_storage().nbytes() >= x.nbytes


def state(full: Tensor, view: Tensor, given: str, of: str, whole: bool) -> dict[str, Any]:
    """Return the state in which a call has left a parameter.

    given: the words for the parameter before the call.
    of: the parameter's name.
    whole: whether the parameter's storage should be full, or else empty.
    """
    storage = full.untyped_storage()
    same = storage._cdata == view.untyped_storage()._cdata
    sizes = {"nbytes": storage.nbytes(), "expected": whole * view.nbytes}
    return {"of": of, "given": given, "now": show(full), "same": same} | sizes


def by_name(world: Group, parameters: list[Tensor]) -> dict[str, Tensor]:
    return {f"parameter {number}": x.to(world.dtype) for number, x in enumerate(parameters)}


def expected(world: Group, step: int | None = None) -> list[dict[str, Tensor]]:
    return [by_name(world, world.wholes(world.step if step is None else step))] * world.n


def among(one: One, numbers: Tensor) -> Tensor:
    """Return for each wrong element of a parameter whether it is one of these numbers."""
    return torch.isin(one.received[one.received != one.expected], numbers)


def own(one: One) -> Tensor:
    """Return the rows of the parameter that the rank's own shard holds."""
    return by_name(one.world, one.world.shards(one.world.step, one.rank))[one.name]


def others(one: One) -> Tensor:
    """Return the elements of all other parameters of the group."""
    return torch.cat(
        [one.expected.flatten()[:0], *(x.flatten() for n, x in one.expected_by_name[0].items() if n != one.name)]
    )


def collectives(sent: Sent) -> int:
    """Return the largest number of collectives that a rank has called in the step."""
    apart = ("send", "recv", "barrier")
    return max(sum(event.op not in apart for event in sent.seen.of(rank)) for rank in sent.world.members)


def too_many(sent: Sent) -> str | bool:
    calls, parameters = collectives(sent), len(sent.world.shapes)
    return calls > 1 and f"{calls} collectives for one group of {parameters} parameters"


# fmt: off
SAME = "How can a storage change its size, and stay the same storage?"
WHOSE = "Whose rows belong where?"
OTHER_MEMORY = Mistake("full has other memory", SAME, lambda one: not one.same
                       and "it has different memory than before, and the layer still looks at the old memory")
ANOTHER = Mistake("the parameter is a different one", "What were its shape and dtype before it was filled?",
                  lambda one: one.same and one.now != one.given and f"it was {one.given}, and is {one.now}")
OF_ANOTHER_SIZE = Mistake("storage of another size", "What does resize_ take: elements, or bytes?",
                          lambda one: one.nbytes != one.expected
                          and f"its storage has {one.nbytes} bytes; {one.expected} are due")
NOT_FREED = Mistake("full parameters are never freed",
                    "What holds the memory: the tensor, or the storage that it shares with all of its views?",
                    OF_ANOTHER_SIZE.matches, symptom="right, but a rank's memory grows up to the whole model")
SHARD_CHANGED = Mistake("the shard has changed", "What will the optimizer update in the next step?",
                        lambda done: done.facts["changed"] and "the shards are not what they were")
PLAY = Play(
    worlds,
    come_and_go,
    tables=(
        (each_after("unshard"), (ANOTHER, OTHER_MEMORY, OF_ANOTHER_SIZE)),
        (wrong(expected, {}), (
            Mistake("the parameters of the step before", "What has the optimizer changed since, and who has told the "
                    "others?", as_if(lambda world: (expected(world, step) for step in range(world.step))),
                    symptom="the loss stands still, or a rank trains with what it had at first"),
            Mistake("one's own shard everywhere", WHOSE,
                    lambda one: own(one).numel() and among(one, own(one)).all() and "All of it is the rank's own."),
            Mistake("the pieces of several parameters are mixed up",
                    "A row of the table has a piece of each parameter. Where do the pieces of one parameter stand?",
                    lambda one: bool(among(one, others(one)).any())),
            Mistake("rows in the wrong order", WHOSE, lambda one: bool(among(one, one.expected).any())),
            Mistake("padding among the numbers",
                    "Shards of unequal length cannot meet in one all-gather. What makes them equal, and who takes it "
                    "off again?", lambda one: bool((one.received == 0).any())
                    and f"{int((one.received == 0).sum())} of its numbers are 0."),
            *VALUES,
        )),
        (each_after("reshard"), (NOT_FREED, OTHER_MEMORY, ANOTHER)),
        (on_each_rank, (SHARD_CHANGED,)),
        (budgeted(lambda world: Sends(
            # Each rank's rows leave it at least once: other ranks may pass them on.
            least=world.nbytes, enough=lambda rank: 1.02 * (world.n - 1) * world.brought + 64,
            messages=lambda rank: world.n - 1,
        )), (
            Mistake("gathered in the wrong dtype",
                    "In which dtype does the layer compute, and what do the extra digits cost on the way?",
                    in_another_dtype, symptom="twice the bytes of the formula, with a param_dtype"),
            Mistake("a collective for each parameter",
                    "What does a message cost, however short? How many would a layer of nine parameters send?",
                    lambda sent: collectives(sent) == len(sent.world.shapes) and too_many(sent),
                    symptom="many short all-gathers in a layer's timeline, and more time than bytes / bandwidth"),
            Mistake("more messages than needed", "Which pieces could travel together?", too_many),
            *SENT,
        )),
        (as_a_whole, (
            Mistake("a barrier",
                    "The gather is over when all rows are here. What do the ranks wait for after it, or before it?",
                    lambda seen: any(event.op == "barrier" for event in seen.events),
                    symptom="right, but every layer waits for the slowest rank once more"),
        )),
    ),
    question="What does each rank bring, and where does it go?",
    questions={
        "read before it was there": "Who has the other rows, and how do they get here?",
        "rounded on the way": "In which dtype do the numbers travel?",
        "more messages than needed": "Which pieces could travel together?",
        "an all-reduce where a part is enough": "An all-reduce adds. Who has anything to add to another's rows?",
        "too many bytes": "Who has which rows already?",
        "less than the least possible": "How else did the rows get there?",
        "something is kept from the call": "Which of your variables still refers to what was gathered?",
        "full copies are kept": "One copy travels, and the layer computes with another: what is the third?",
    },
    memory=Memory(wide, during=2.75),  # two copies of the group, and some pieces; a third copy would make 3
)
# fmt: on


@answered
def unshard_and_reshard(unshard: Callable[..., Any], reshard: Callable[..., Any], seed: int) -> str:
    """Check `unshard(shards, fulls)` and `reshard(fulls)`.

    unshard fills the storage of each full from the shards of all ranks; reshard empties it.
    shards: this rank's rows of each parameter; there may be none, and their dtype may be another.
    fulls: the parameters, [rows, ...], with empty storages.
    """
    passed = checked(PLAY, (unshard, reshard), seed)
    last = passed.seen[-1]
    messages = sum(event.op in ("send", "recv") for event in last.of(0))
    return (
        f"you sent {last.sent[0] / last.world.nbytes:.2f} × the group in "
        f"{f'{messages} messages' if messages else '1 collective'}; the least possible is 0.75 × in 1. You held "
        f"{passed.most:.2f} × it meanwhile, where the table and the full tensors make 2.00 ×, and {passed.rest:.2f} × "
        "afterwards"
    )
