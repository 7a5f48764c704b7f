"""rules: are these the rows that five operations lack in the table of rules?  A job computes with them.

An operation is tried on every layout that its inputs can have along one axis of three ranks.  Its numbers must be those
of whole tensors, and a rank must send no more than with the course's own row, which allows every layout that is right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.dtensor import DTensor, Partial, Placement, Replicate, Shard
from labs.dtensor.algebra import Rule, Way, ways
from labs.dtensor.operation import prepare
from labs.dtensor.placement import Spec
from labs.dtensor.rules import RULES
from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_each_rank
from labs.exercises.engine.scripts import Look, World
from labs.exercises.engine.value import close
from labs.kit.watch.communication import CommunicationWatch
from labs.mesh import Mesh

RANKS = 3
LINEAR = ("", "each", "first", "together")


@dataclass(frozen=True)
class Operation:
    """A PyTorch operation that has no row in labs.dtensor's table of rules, with the row that the course would give it.

    shapes: the shapes of its inputs; each dim is long enough for a block on every rank.
    letters, linear: the two entries of the course's row in the table of rules.
    """

    do: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    letters: str
    linear: str

    @property
    def layouts(self) -> list[tuple[Placement, ...]]:
        """All layouts, each with one placement per input."""
        every = [[Replicate(), *map(Shard, range(len(shape))), Partial()] for shape in self.shapes]
        return list(product(*every))


OPERATIONS = {
    "cumsum": Operation(lambda x: x.cumsum(1), ((5, 7),), "a.->a.", "together"),
    "logsumexp": Operation(lambda x: x.logsumexp(1), ((5, 7),), "a.->a", ""),
    "trace": Operation(torch.trace, ((7, 7),), "..->", "together"),
    "linalg_cross": Operation(lambda x, y: torch.linalg.cross(x, y, dim=1), ((5, 3), (5, 3)), "a.,a.->a.", "each"),
    "convolution": Operation(nn.functional.conv1d, ((5, 5, 9), (7, 5, 3)), "nc.,oc.->no.", "each"),
}
TRIED = [(name, layout) for name, operation in OPERATIONS.items() for layout in operation.layouts]


@dataclass(frozen=True)
class Tables(World):
    """A world in which all five operations are computed with the rows of a learner's table."""

    def inputs(self, name: str) -> list[Tensor]:
        generator = self.generator()
        return [torch.randn(shape, generator=generator, dtype=self.dtype) for shape in OPERATIONS[name].shapes]

    def __str__(self) -> str:
        return self.who


# ---- on a rank -------------------------------------------------------------------------------------------


def compute_all(world: Tables, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Compute all operations with the learner's rows; the look's facts are this rank's first mistake."""
    yield None
    table = fn()
    facts = first_wrong(FORM, ((f"{name}: ", Form(name, table)) for name in OPERATIONS))
    if not facts:
        results, enough = list(by_rows(table, world)), sent_by_the_course(world)
        facts = first_wrong(ROWS, (("", Tried(world, name, table[name], results, enough)) for name in OPERATIONS))
    yield Look({}, facts)


@cache
def sent_by_the_course(world: Tables) -> list[int]:
    """Return the bytes that the course's rows send, which are the same for every table that is tried in a job."""
    course = {name: (each.letters, each.linear) for name, each in OPERATIONS.items()}
    return [sent for _, sent in by_rows(course, world)]


def by_rows(table: Mapping[str, Any], world: Tables) -> Iterator[tuple[Tensor | str, int]]:
    """Yield (the whole result, or a sentence on why there is none; the bytes sent) for each layout in TRIED."""
    mesh = Mesh((RANKS,), ("a",))
    RULES.update({name: Rule(*table[name], tensors=len(each.shapes)) for name, each in OPERATIONS.items()})
    prepare.cache_clear()  # it holds results of the rows before these
    for name, layout in TRIED:
        inputs = [laid_out(x, mesh, placement) for x, placement in zip(world.inputs(name), layout, strict=True)]
        with CommunicationWatch() as watch:
            try:
                y = OPERATIONS[name].do(*inputs)
                expected = y.spec.block(mesh.get_coordinate()).shape
                problem = (
                    "" if expected == tuple(y.to_local().shape) else f"{tuple(y.to_local().shape)}, and not {expected}"
                )
            except (RuntimeError, ValueError) as error:
                problem = str(error).splitlines()[0]
        matches = torch.tensor(not problem)
        dist.all_reduce(matches, op=dist.ReduceOp.MIN)
        found = y.full_tensor() if matches else f"the blocks do not make up the result ({problem or 'on another rank'})"
        yield found, sum(row["sent"] for row in watch.tape)


def laid_out(x: Tensor, mesh: Mesh, placement: Placement) -> DTensor:
    """Return a DTensor of this placement; of a sum, rank r has (r + 1) / 6 as its summand."""
    spec = Spec(tuple(x.shape), mesh.shape, (placement,))
    share = (mesh.rank + 1) / 6 if placement.is_partial() else 1
    block = share * x[spec.block(mesh.get_coordinate()).slices]
    return DTensor.from_local(block, mesh, [placement], shape=x.shape)


# ---- the judge -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """The form of a learner's row for one operation."""

    name: str
    table: Any

    @property
    def row(self) -> Any:
        return self.table.get(self.name) if isinstance(self.table, dict) else None

    @property
    def counts(self) -> list[list[int]]:
        """[dims of inputs and of the result as in the letters, the right ones]; [] if both are equal."""
        operation = OPERATIONS[self.name]
        written = [[len(dims) for dims in side.split(",")] for side in self.row[0].split("->")]
        expected = [[len(dims) for dims in side.split(",")] for side in operation.letters.split("->")]
        return [] if written == expected else [written, expected]


# fmt: off
FORM = (
    Mistake("nothing is returned", "Where is the table?", lambda form: form.table is None),
    Mistake("not a table", "A row for each operation: under which name?",
            lambda form: not isinstance(form.table, dict)),
    Mistake("an operation is missing", "Which five operations belong in it, and under which names?",
            lambda form: form.row is None and f"the table has {', '.join(map(str, form.table)) or 'no row'}"),
    Mistake("not letters and a word", "What does a row say of the dims, and what of being linear?",
            lambda form: (not (isinstance(form.row, tuple | list) and len(form.row) == 2
            and isinstance(form.row[0], str) and form.row[0].count("->") == 1 and form.row[1] in LINEAR))
            and f"the row is {show(form.row)}; a word is one of {', '.join(map(repr, LINEAR))}"),
    Mistake("not a letter for each dim", "How many dims has each input, and how many has the result?",
            lambda form: form.counts and f"{form.row[0]!r} has {form.counts[0][0]} dims in its inputs and "
            f"{form.counts[0][1]} in its result; there are {form.counts[1][0]} and {form.counts[1][1]}"),
)
# fmt: on


class Tried:
    """An operation whose row was tried on all layouts.

    wrong: a sentence about wrong numbers, or "".
    more: a sentence about bytes that need not be sent, or "".
    """

    def __init__(self, world: Tables, name: str, row: Any, results: Sequence[Any], enough: Sequence[int]) -> None:
        self.name, self.row, self.wrong, self.more = name, tuple(row), "", ""
        expected = OPERATIONS[name].do(*world.inputs(name))
        for (other, layout), (found, sent), due in zip(TRIED, results, enough, strict=True):
            words = f"{name} of {' and '.join(map(repr, layout))}: "
            if other == name and not self.wrong and (isinstance(found, str) or not close(found, expected, 1e-9)):
                self.wrong = words + (found if isinstance(found, str) else "the numbers are not those of whole tensors")
            if other == name and not self.more and sent > due:
                self.more = f"{words}a rank sent {sent:,} bytes; {due:,} are enough"

    def ways(self, more: bool) -> list[Way]:
        """Return the allowed layouts that the learner's row has too many, if `more`; otherwise those that it lacks."""
        own = OPERATIONS[self.name]
        mine, expected = ways(*self.row), ways(own.letters, own.linear)
        return [way for way in (mine if more else expected) if way not in (expected if more else mine)]

    def of_summands(self, more: bool) -> bool:
        return any(p.is_partial() for way in self.ways(more) for p in way.inputs)

    @property
    def elsewhere(self) -> bool:
        """Whether the learner's row allows this layout of the inputs, with a wrong layout of the result."""
        lacking = {way.inputs for way in self.ways(more=False)}
        return any(way.inputs in lacking for way in self.ways(more=True))


# fmt: off
ROWS = (
    Mistake("the result is laid out differently", "Which dim of the result comes from the dim that is cut, if any?",
            lambda seen: seen.elsewhere and (seen.wrong or seen.more)),
    Mistake("linear, where it is not", "Put in two summands, one after the other. Do the two results add up to the "
            "result of their sum?", lambda seen: seen.of_summands(True) and seen.wrong,
            symptom="right on one rank, and nobody is told otherwise on four"),
    Mistake("cut where a block is not enough", "What does a rank need for its part of the result, besides its block?",
            lambda seen: seen.wrong),
    Mistake("a dim stays whole that could be cut", "Along which dim does a rank need nothing of the others?",
            lambda seen: seen.more and not seen.of_summands(False) and seen.more,
            symptom="the right numbers, and a gather in every step that nobody asked for"),
    Mistake("not linear, where it is", "Which of its inputs could be a summand, if the others are whole?",
            lambda seen: seen.more),
)
PLAY = Play(
    lambda draw: {RANKS: [draw.world(Tables, RANKS)]},
    compute_all,
    tables=((on_each_rank, as_found((*FORM, *ROWS))),),
    question="What does each rank need of the others?",
)
# fmt: on


@answered
def rules(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn() -> {operation: (letters, linear)}`: rows for five operations that labs.dtensor refuses."""
    checked(PLAY, (fn,), seed)
    return (
        f"five rows, each on all layouts of its inputs, {len(TRIED)} in all: whole tensors' numbers, and no byte wasted"
    )
