"""Functions on ranks that are differentiated: an exercise of `ranks`, whose calls go forward and backward.

    EXERCISE = both_ways(
        lambda draw: drawn(draw, Row, [*usual(outer=(32,)), {"biased": False}, …]),
        question="Which summand of y does this rank make, and who adds what to it?",
        mistakes=(summands("What does each rank have of y?"), Mistake("the bias is left out", "…?", as_if(…)), …),
    )

Each way is a step: its values are the result, or the gradients, and it may send what all-reduces of them send.  On 1 to
8 ranks and in two groups at the same time, some calls twice: pieces that differ, and empty ones, no dimension, no
element, three dtypes, transposed, gradients that are expanded, under no_grad; once with the bytes held.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake
from labs.exercises.engine.launching import noted
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw, Exercise
from labs.exercises.engine.scripts import Functions, Look, Seen, World, group_of
from labs.exercises.engine.value import as_if
from labs.kit.record import Recording

TOLERANCE = {F64: 1e-10, F32: 1e-5, BF16: 3e-2}
UNSEEN = "an autograd kernel was not registered"  # what torch says where a backward passes a collective by
Brought = dict[str, Any]
Numbers = list[dict[str, Tensor]]  # by rank and name

# ---- what it is tried on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split(World):
    """A call on every rank, forward and backward, a step each.

    Each kind has brings(rank); on_one(brought), one process's result of what all ranks bring; the `shape` of a result;
    and, forward and backward, so many `calls` of all-reduces.
    """

    steps: int = 2
    paired: bool = False  # in two groups at the same time, of the even and of the odd ranks
    graded: bool = True  # else under no_grad
    again: bool = False  # the same as in the first one
    laid_out: str = ""  # "transposed": all that odd ranks are given; "expanded": the gradient of the result

    alike: ClassVar[tuple[str, ...]] = ()  # what all ranks bring alike: it has one gradient
    own_gradients: ClassVar[bool] = False  # each rank's result goes on by itself: another gradient comes back to each
    result: ClassVar[str] = "y"
    calls: ClassVar[tuple[int, int]] = (1, 0)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [(0, 2), (1, 3)] if self.paired else [self.members]

    @property
    def width(self) -> int:
        """Ranks in a group."""
        return len(self.groups[0])

    def fellows(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)

    def process_group(self) -> dict[str, dist.ProcessGroup]:
        if not self.paired:
            return {}
        return {"group": [group_of(group) for group in self.groups][dist.get_rank() % 2]}

    def prepare(self, functions: Functions, brought: Brought) -> Functions:
        """What is called; what is sent meanwhile is not counted."""
        return functions

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        return functions[0](*brought.values(), **group)

    def numbers(self, shape: Sequence[int], rank: int, what: int = 0) -> Tensor:
        """Different ones for each thing that a rank brings; in bfloat16, numbers that it adds up exactly."""
        generator = self.generator(rank, what)
        if self.dtype is BF16:
            return torch.randint(1, 8, tuple(shape), generator=generator).to(BF16)
        return torch.randn(tuple(shape), generator=generator, dtype=F64).to(self.dtype)

    def laid(self, x: Any, rank: int) -> Any:
        """The same, as it lies in this rank's memory."""
        turned = self.laid_out == "transposed" and rank % 2 and isinstance(x, Tensor) and x.ndim > 1
        return x.transpose(0, -1).contiguous().transpose(0, -1) if turned else x

    def comes_back(self, rank: int) -> Tensor:
        """The gradient of the result.  Behind an expanded one lies memory that is nobody else's."""
        who = rank if self.own_gradients else self.fellows(rank)[0] + 32
        if self.laid_out == "expanded":
            return self.numbers([prod(self.shape) + 64], who, 7)[: self.shape[-1]].expand(self.shape)
        return self.laid(self.numbers(self.shape, who, 7), rank)

    @property
    def nbytes(self) -> int:
        """The unit of bytes held."""
        return self.dtype.itemsize * prod(self.shape)

    @property
    def when(self) -> str:
        return (", forward", ", backward")[self.step]

    def __str__(self) -> str:
        own = {f.name: f.default for f in fields(self) if f.name not in World.__dataclass_fields__}
        told = [f"{name} {value}" for name, default in own.items() if (value := getattr(self, name)) != default]
        return ", ".join([self.who, self.dtype_name, *told])

    # ---- what is due -------------------------------------------------------------------------------------

    def on_ranks(self, group: Sequence[int]) -> Numbers:
        """For each of these ranks the result and all gradients, if no others bring anything."""
        brought = [{name: leaf(value) for name, value in self.brings(rank).items()} for rank in group]
        for each in brought:
            each |= {name: brought[0][name] for name in self.alike}
        result = self.on_one(brought)
        coming = [self.comes_back(rank).double() for rank in group]
        result.backward(torch.stack(coming).sum(0) if self.own_gradients else coming[0])
        gradients = [{of(name): x.grad for name, x in each.items() if floating(x)} for each in brought]
        return [{self.result: result.detach()} | of_rank for of_rank in gradients]

    def is_seen(self, name: str) -> bool:
        """In this step."""
        return self.step == 0 if name == self.result else self.step == 1 and self.graded

    def by_rank(self, make: Callable[[tuple[int, ...]], Numbers]) -> Numbers:
        """What is made of each group, as far as it is seen in this step."""
        made = {rank: each for group in self.groups for rank, each in zip(group, make(group), strict=True)}
        return [{name: x.to(self.dtype) for name, x in made[r].items() if self.is_seen(name)} for r in self.members]

    def expected(self) -> Numbers:
        return self.by_rank(self.on_ranks)

    def times(self, factor: float) -> Numbers:
        return [{name: factor * x for name, x in of_rank.items()} for of_rank in self.expected()]

    def alone(self) -> Numbers:
        """What each rank makes of it by itself."""
        return self.by_rank(lambda group: [self.on_ranks([rank])[0] for rank in group])

    def summed(self) -> Numbers:
        """Sums of what all ranks should have."""
        return self.by_rank(lambda group: [added(self.on_ranks(group))] * len(group))

    def all_reduces(self) -> tuple[int, float]:
        """In this step: so many, and of so many numbers in all."""
        calls = self.calls[self.step] if self.graded or self.step == 0 else 0
        return calls, calls * prod(self.shape)

    def sends(self) -> rows.Sends:
        n, size = self.width, self.all_reduces()[1] * self.dtype.itemsize
        odd = 2 * n * self.dtype.itemsize * bool(size)  # what pieces add that are not equal
        return rows.Sends(0.999 * 2 * (n - 1) / n * self.ranks * size, lambda rank: 2 * (n - 1) / n * size + odd)


ONLY = {
    "again": "right only the first time",
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
UNUSUAL = ({"graded": False}, {"paired": True}, {"laid_out": "expanded"}, {"laid_out": "transposed"}, {"dtype": BF16})


def usual(**sizes: Any) -> list[dict[str, Any]]:
    """A plain one, one of these sizes, of which the line of success tells, and a plain one again."""
    return [{}, {"dtype": F32, "only": ""} | sizes, {"again": True}]


def drawn(draw: Draw, kind: type[Split], options: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
    """By ranks.  What is not as in most has a name from there."""
    by_ranks: dict[int, list[Any]] = {}
    for each in options:
        only = next((told for name, told in ONLY.items() if name in each), "")
        world = kind(draw.random.randrange(2**40), **{"ranks": 4, "only": only} | each)
        by_ranks.setdefault(world.ranks, []).append(world)
    return by_ranks


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaf(value: Any) -> Any:
    return value.detach().double().requires_grad_() if floating(value) else value


def of(name: str) -> str:
    return f"the gradient of {name!r}"


def added(expected_by_name: Numbers) -> dict[str, Tensor]:
    """Those that are of one shape."""
    return {
        name: sum(expected[name] for expected in expected_by_name)
        for name, x in expected_by_name[0].items()
        if all(expected[name].shape == x.shape for expected in expected_by_name)
    }


# ---- on a rank -------------------------------------------------------------------------------------------


def there_and_back(world: Split, *functions: Callable[..., Any]) -> Iterator[Look | None]:
    rank, group = world.index(), world.process_group()
    brought = {name: world.laid(x, rank) for name, x in world.brings(rank).items()}
    leaves = {name: x.clone().requires_grad_(world.graded) for name, x in brought.items() if floating(x)}
    given = deepcopy(brought) | {name: x * 1 for name, x in leaves.items()}  # to a leaf nobody can write

    def changed() -> str:
        tensors = ((name, x) for name, x in brought.items() if isinstance(x, Tensor))
        return next((f"{name!r}, which it was given" for name, x in tensors if not torch.equal(given[name], x)), "")

    with torch.set_grad_enabled(world.graded), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        called = noted(world, world.prepare, functions, given)
        yield None
        result = world.call(called, given, **group)
        yield Look({world.result: result}, {"changed": changed()})
        gradient = world.comes_back(rank)
        memory = torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # behind an expanded one
        before = memory.clone()
        yield None
        if isinstance(result, Tensor) and result.requires_grad and result.shape == world.shape:
            torch.autograd.backward([result], [gradient.to(result.dtype)])
        found = {of(name): leaves.get(name, x) for name, x in given.items() if floating(x)}
        yield Look(
            {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in found.items()},
            {
                "changed": changed() if torch.equal(memory, before) else "the gradient that came in",
                "unseen": any(UNSEEN in str(each.message) for each in told),
                "without": [name for name, x in found.items() if x.grad is None],
            },
        )


def two_calls(world: Split, *functions: Callable[..., Any]) -> Iterator[Look | None]:
    """Of each: a step forward, a step backward, and one in which nothing happens."""
    gradient = world.comes_back(world.index())
    leaves = {name: x.requires_grad_() if floating(x) else x for name, x in world.brings(world.index()).items()}
    for _ in range(2):
        yield None
        given = {name: x * 1 if floating(x) else x for name, x in leaves.items()}
        end = (world.call(functions, given) * gradient).sum()  # which does not need the result again
        del given
        yield Look()
        yield None
        end.backward()
        del end
        for x in filter(floating, leaves.values()):
            x.grad = None
        gc.collect()  # a class that is made in each call goes only then
        yield Look()
        yield None
        yield Look()


# ---- mistakes that are the same both ways ----------------------------------------------------------------


def summed_as_well(world: Split) -> Iterator[Numbers]:
    if world.step:
        yield world.times(world.width)
        yield world.summed()


def counted(sent: rows.Sent) -> str | None:
    """Where somebody calls too many: an all-reduce may be made of two collectives, or of a ring of messages."""
    parts = {"all_reduce": 1, "barrier": 1, "send": 0.5 / max(1, sent.world.width - 1), "recv": 0}
    expected = sent.world.all_reduces()[0]
    for rank in sent.world.members:
        if sum(parts.get(event.op, 0.5) for event in sent.seen.of(rank)) > expected + 0.01:
            calls = len(sent.seen.of(rank))
            return f"rank {rank} makes {calls} calls; {expected} all-reduce{'s' * (expected != 1)} are enough"
    return None


def strangers(sent: rows.Sent) -> str | None:
    for event in sent.events:
        if others := set(event.ranks) - set(sent.world.fellows(event.rank)):
            return f"ranks {sorted(others)} take part, but are not in the group of rank {event.rank}"
    return None


def ops(sent: rows.Sent | Seen) -> set[str]:
    """Of calls that carry what is due, and not counts or places."""
    return {event.op for event in sent.events if event.dtype == sent.world.dtype_name}


def gathered(sent: rows.Sent | Seen) -> bool:
    return bool(ops(sent) & {"all_gather", "gather", "broadcast"})


def summands(question: str) -> Mistake:
    return Mistake(
        "the summands are never added up", question, lambda one: not one.world.step and as_if(Split.alone)(one)
    )


# fmt: off
NO_GRADIENT = Mistake(
    "no gradient", "Which of your lines does autograd not see: one under no_grad, on .data, or on a detached tensor?",
    lambda one: one.name in one.done.facts.get("without", ()),
    symptom="the loss stands still: nothing in front of a split layer is trained")
NOT_FINITE = Mistake(
    "not finite", "What is exp of 10,000, by what may all of the exponentials be divided, and what is 0 × ∞ or ∞ − ∞?",
    lambda one: not one.received.isfinite().all(), symptom="a loss of inf or nan, late in a training")
SUMMED_TOO = Mistake("the gradient is summed as well",
                     "Is the gradient that comes back a summand, or is it whole, and the same on every rank?",
                     as_if(summed_as_well), symptom="gradients N times too large before a layer, and not after it")
VALUES = (
    Mistake("N times too large", "How many ranks add the same to it?", as_if(lambda w: w.times(w.width))),
    Mistake("averaged instead of summed", "What do the summands make: a sum, or a mean?",
            as_if(lambda w: w.times(1 / w.width))),
)
AFTER = (
    Mistake("a collective that autograd does not see",
            "What is the backward of this collective, and who has told autograd?",
            lambda one: one.done.facts.get("unseen")
            and "torch warns: backward skips a collective, as if it were not there",
            symptom="a warning from torch, and gradients that are right by luck"),
)
NOT_DUE = Mistake("something is sent where nothing is due",
                  "What do the other ranks have already, and so need not be sent?",
                  lambda sent: not sent.world.all_reduces()[0] and counted(sent))
TOO_MANY = Mistake("too many collectives", "What does each of them cost, however little it sends?", counted,
                   symptom="the right numbers and bytes, and a job that waits for the network")
STRANGERS = Mistake("a collective over the wrong ranks", "Who has called it, in that group?", strangers)
SENT = (
    Mistake("one rank adds up for all",
            "How much does that rank send, and how much does each rank send in an all-reduce?",
            lambda sent: ops(sent) >= {"reduce", "broadcast"} and sent.too_much),
    Mistake("gathered, where a sum belongs",
            "What does each rank have: a piece of the result, or a summand? What does splitting gain, if you gather?",
            lambda sent: gathered(sent) and sent.too_much,
            symptom="right, but each rank receives what the others hold: weights, or activations"),
    rows.OTHER_DTYPE,
    Mistake("too many bytes", "How often does each number travel, and who needs it?", lambda sent: sent.too_much),
    TOO_MANY,
)
# fmt: on

ASKS = {
    "another shape": "What is its shape on one process?",
    "the dtype changed": "What is its dtype on one process?",
    "something is kept from every call": "Which of your variables still refers to it when backward is over?",
    "full copies are kept": "How many tensors of this size are there at the worst moment?",
}

# ---- an exercise -----------------------------------------------------------------------------------------


def both_ways(
    worlds: Callable[[Draw], dict[int, list[Any]]],
    question: str,
    mistakes: Sequence[Mistake],
    sending: Sequence[Mistake] = (),
    **others: Any,
) -> Exercise:
    """kept: in `others`, × the unit, between forward and backward, when the result is gone."""
    return Exercise(
        worlds,
        expected=lambda world: world.expected(),
        question=question,
        script=there_and_back,
        sends=lambda world: world.sends(),
        tolerance=TOLERANCE,
        mistakes=(NO_GRADIENT, *mistakes, *VALUES),
        after=AFTER,
        sending=(NOT_DUE, STRANGERS, *sending, *SENT),
        questions=ASKS,
        twice=two_calls,
        **others,
    )


def describe(recording: Recording, whole: str, size: int, step: int) -> str:
    """What was sent in a step forward and the one backward, × the bytes of `whole`."""
    forward, backward = (recording.sent(0, step + way) / size for way in range(2))
    return f"{forward:.2f} × {whole} forward and {backward:.2f} × backward".replace("  ", " ")
