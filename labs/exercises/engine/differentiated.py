"""Functions on ranks that are differentiated: an Exercise whose calls go forward and backward.

    EXERCISE = both_ways(
        lambda draw: draw_worlds(draw, Row, [*usual(outer=(32,)), {"biased": False}, …]),
        question="Which summand of y does this rank make, and who adds what to it?",
        mistakes=Mistakes((summands("What does each rank have of y?"), Mistake("the bias is left out", "…?", …), …)),
    )

Forward and backward are a step each.  Their values are the result and the gradients.  A step may send as many
bytes as a given number of all-reduces of the result.  The function is tried on 1 to 8 ranks and in two groups at the
same time, with some calls repeated.  Its inputs include pieces of different lengths and empty ones, tensors without a
dimension or an element, three dtypes, transposed tensors, expanded gradients, and calls under no_grad; one world
measures the bytes held.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake
from labs.exercises.engine.learner_job import noted
from labs.exercises.engine.on_ranks import BF16, F32, F64, Draw, Exercise, Expected, Mistakes
from labs.exercises.engine.scripts import Functions, Look, StepOutcomes, World, group_of
from labs.exercises.engine.value import as_if
from labs.kit.record import Recording

TOLERANCE = {F64: 1e-10, F32: 1e-5, BF16: 3e-2}
UNSEEN = "an autograd kernel was not registered"  # torch's warning if a backward skips a collective
Brought = dict[str, Any]
Numbers = list[dict[str, Tensor]]  # {name: tensor}, for each rank

# ---- worlds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split(World):
    """A world in which every rank calls the function, forward and backward, in a step each.

    A subclass has brings(rank), the inputs of a rank; on_one(brought), one process's result for the inputs of all
    ranks; `shape`, the shape of a result; and `calls`, the numbers of all-reduces in forward and in backward.
    """

    steps: int = 2
    paired: bool = False  # the even and the odd ranks are two groups, at the same time
    graded: bool = True  # False: the call is under no_grad
    again: bool = False  # repeats the first call
    laid_out: str = ""  # "transposed": all inputs of odd ranks are; "expanded": the gradient of the result is

    alike: ClassVar[tuple[str, ...]] = ()  # the inputs that are the same on all ranks, like their gradients
    own_gradients: ClassVar[bool] = False  # True: a different gradient comes back to each rank's result
    result: ClassVar[str] = "y"
    calls: ClassVar[tuple[int, int]] = (1, 0)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        return [(0, 2), (1, 3)] if self.paired else [self.members]

    @property
    def width(self) -> int:
        """The number of ranks in a group."""
        return len(self.groups[0])

    def fellows(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        return next(group for group in self.groups if rank in group)

    def process_group(self) -> dict[str, dist.ProcessGroup]:
        if not self.paired:
            return {}
        return {"group": [group_of(group) for group in self.groups][dist.get_rank() % 2]}

    def prepare(self, functions: Functions, brought: Brought) -> Functions:
        """Return the functions to call; messages sent meanwhile are not counted."""
        return functions

    def call(self, functions: Functions, brought: Brought, **group: Any) -> Any:
        """Return what the learner's function returns for a rank's inputs."""
        return functions[0](*brought.values(), **group)

    def numbers(self, shape: Sequence[int], rank: int, what: int = 0) -> Tensor:
        """Return random numbers, different for each `what`; in bfloat16, numbers that it adds up exactly."""
        generator = self.generator(rank, what)
        if self.dtype is BF16:
            return torch.randint(1, 8, tuple(shape), generator=generator).to(BF16)
        return torch.randn(tuple(shape), generator=generator, dtype=F64).to(self.dtype)

    def laid(self, x: Any, rank: int) -> Any:
        """Return an input, transposed in memory if this rank's inputs are in this world."""
        turned = self.laid_out == "transposed" and rank % 2 and isinstance(x, Tensor) and x.ndim > 1
        return x.transpose(0, -1).contiguous().transpose(0, -1) if turned else x

    def comes_back(self, rank: int) -> Tensor:
        """Return the gradient of a rank's result; an expanded one is a view of more memory, which must not change."""
        who = rank if self.own_gradients else self.fellows(rank)[0] + 32
        if self.laid_out == "expanded":
            return self.numbers([prod(self.shape) + 64], who, 7)[: self.shape[-1]].expand(self.shape)
        return self.laid(self.numbers(self.shape, who, 7), rank)

    @property
    def nbytes(self) -> int:
        """The bytes of a result, the unit of bytes held."""
        return self.dtype.itemsize * prod(self.shape)

    @property
    def when(self) -> str:
        return (", forward", ", backward")[self.step]

    def __str__(self) -> str:
        own = {f.name: f.default for f in fields(self) if f.name not in World.__dataclass_fields__}
        options = [f"{name} {value}" for name, default in own.items() if (value := getattr(self, name)) != default]
        return ", ".join([self.who, self.dtype_name, *options])

    # ---- expected values ---------------------------------------------------------------------------------

    def on_ranks(self, group: Sequence[int]) -> Numbers:
        """Return the result and the gradients of each rank in the group, computed from the group's inputs alone."""
        brought = [{name: leaf(value) for name, value in self.brings(rank).items()} for rank in group]
        for each in brought:
            each |= {name: brought[0][name] for name in self.alike}
        result = self.on_one(brought)
        coming = [self.comes_back(rank).double() for rank in group]
        result.backward(torch.stack(coming).sum(0) if self.own_gradients else coming[0])
        gradients = [{of(name): x.grad for name, x in each.items() if floating(x)} for each in brought]
        return [{self.result: result.detach()} | of_rank for of_rank in gradients]

    def is_seen(self, name: str) -> bool:
        """Return whether the value of this name is one of this step's: a result in forward, a gradient in backward."""
        return self.step == 0 if name == self.result else self.step == 1 and self.graded

    def by_rank(self, make: Callable[[tuple[int, ...]], Numbers]) -> Numbers:
        """Return the values of this step on each rank, as `make(group)` computes them for the ranks of a group."""
        values = {rank: each for group in self.groups for rank, each in zip(group, make(group), strict=True)}
        return [{name: x.to(self.dtype) for name, x in values[r].items() if self.is_seen(name)} for r in self.members]

    def expected(self) -> Numbers:
        return self.by_rank(self.on_ranks)

    def times(self, factor: float) -> Numbers:
        """Return each rank's expected values, multiplied by `factor`."""
        return [{name: factor * x for name, x in of_rank.items()} for of_rank in self.expected()]

    def alone(self) -> Numbers:
        """Return the values that each rank computes from its own inputs alone."""
        return self.by_rank(lambda group: [self.on_ranks([rank])[0] for rank in group])

    def summed(self) -> Numbers:
        """Return on each rank the sums, over its group, of the values expected on the ranks."""
        return self.by_rank(lambda group: [added(self.on_ranks(group))] * len(group))

    def all_reduces(self) -> tuple[int, float]:
        """Return the number of all-reduces in this step, and of the elements in all of them."""
        calls = self.calls[self.step] if self.graded or self.step == 0 else 0
        return calls, calls * prod(self.shape)

    def sends(self) -> rows.Sends:
        n, size = self.width, self.all_reduces()[1] * self.dtype.itemsize
        odd = 2 * n * self.dtype.itemsize * bool(size)  # the largest share that pieces of unequal length may add
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
    """Return the options of three worlds: a plain one, one of these sizes for the ✓ line, and the first again."""
    return [{}, {"dtype": F32, "only": ""} | sizes, {"again": True}]


def draw_worlds(draw: Draw, kind: type[Split], options: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
    """Return a world for each set of options, by number of ranks; an unusual option names a mistake made only there."""
    by_ranks: dict[int, list[Any]] = {}
    for each in options:
        only = next((mistake for name, mistake in ONLY.items() if name in each), "")
        world = kind(draw.random.randrange(2**40), **{"ranks": 4, "only": only} | each)
        by_ranks.setdefault(world.ranks, []).append(world)
    return by_ranks


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaf(value: Any) -> Any:
    """Return a float64 leaf with the numbers of a floating-point tensor; anything else as it is."""
    return value.detach().double().requires_grad_() if floating(value) else value


def of(name: str) -> str:
    """Return the name of an input's gradient."""
    return f"the gradient of {name!r}"


def added(expected_by_name: Numbers) -> dict[str, Tensor]:
    """Return the sums over the ranks of the values that have the same shape on all of them."""
    return {
        name: sum(expected[name] for expected in expected_by_name)
        for name, x in expected_by_name[0].items()
        if all(expected[name].shape == x.shape for expected in expected_by_name)
    }


# ---- on a rank -------------------------------------------------------------------------------------------


def there_and_back(world: Split, *functions: Callable[..., Any]) -> Iterator[Look | None]:
    """Play a forward and a backward: yield before each, and then a look."""
    rank, group = world.index(), world.process_group()
    brought = {name: world.laid(x, rank) for name, x in world.brings(rank).items()}
    leaves = {name: x.clone().requires_grad_(world.graded) for name, x in brought.items() if floating(x)}
    given = deepcopy(brought) | {name: x * 1 for name, x in leaves.items()}  # not leaves, which cannot be written to

    def changed() -> str:
        tensors = ((name, x) for name, x in brought.items() if isinstance(x, Tensor))
        return next((f"{name!r}, which it was given" for name, x in tensors if not torch.equal(given[name], x)), "")

    with torch.set_grad_enabled(world.graded), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called = noted(world, world.prepare, functions, given)
        yield None
        result = world.call(called, given, **group)
        yield Look({world.result: result}, {"changed": changed()})
        gradient = world.comes_back(rank)
        memory = torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # all memory of an expanded one
        before = memory.clone()
        yield None
        if isinstance(result, Tensor) and result.requires_grad and result.shape == world.shape:
            torch.autograd.backward([result], [gradient.to(result.dtype)])
        found = {of(name): leaves.get(name, x) for name, x in given.items() if floating(x)}
        yield Look(
            {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in found.items()},
            {
                "changed": changed() if torch.equal(memory, before) else "the gradient that came in",
                "unseen": any(UNSEEN in str(each.message) for each in caught),
                "without": [name for name, x in found.items() if x.grad is None],
            },
        )


def two_calls(world: Split, *functions: Callable[..., Any]) -> Iterator[Look | None]:
    """Play two calls: for each, a step forward, a step backward, and a step in which nothing happens."""
    gradient = world.comes_back(world.index())
    leaves = {name: x.requires_grad_() if floating(x) else x for name, x in world.brings(world.index()).items()}
    for _ in range(2):
        yield None
        given = {name: x * 1 if floating(x) else x for name, x in leaves.items()}
        end = (world.call(functions, given) * gradient).sum()  # its backward does not need the result again
        del given
        yield Look()
        yield None
        end.backward()
        del end
        for x in filter(floating, leaves.values()):
            x.grad = None
        gc.collect()  # frees a class that was made in the call
        yield Look()
        yield None
        yield Look()


# ---- mistakes that are the same both ways ----------------------------------------------------------------


def summed_as_well(world: Split) -> Iterator[Numbers]:
    if world.step:
        yield world.times(world.width)
        yield world.summed()


def counted(sent: rows.Sent) -> str | None:
    """Return a sentence about a rank that calls too many collectives, or None.

    An all-reduce may be made of two collectives, or of a ring of messages.
    """
    parts = {"all_reduce": 1, "barrier": 1, "send": 0.5 / max(1, sent.world.width - 1), "recv": 0}
    expected = sent.world.all_reduces()[0]
    for rank in sent.world.members:
        if sum(parts.get(event.op, 0.5) for event in sent.seen.of(rank)) > expected + 0.01:
            calls = len(sent.seen.of(rank))
            return f"rank {rank} makes {calls} calls; {expected} all-reduce{'s' * (expected != 1)} are enough"
    return None


def strangers(sent: rows.Sent) -> str | None:
    """Return a sentence about a collective over ranks of another group, or None."""
    for event in sent.events:
        if others := set(event.ranks) - set(sent.world.fellows(event.rank)):
            return f"ranks {sorted(others)} take part, but are not in the group of rank {event.rank}"
    return None


def ops(sent: rows.Sent | StepOutcomes) -> set[str]:
    """Return the collectives that carry values, and not counts or places."""
    return {event.op for event in sent.events if event.dtype == sent.world.dtype_name}


def gathered(sent: rows.Sent | StepOutcomes) -> bool:
    return bool(ops(sent) & {"all_gather", "gather", "broadcast"})


def summands(question: str) -> Mistake:
    """Return the row of the mistake that each rank keeps its own summand of the result."""
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
NOT_NEEDED = Mistake("something is sent where nothing is due",
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

QUESTIONS = {
    "another shape": "What is its shape on one process?",
    "the dtype changed": "What is its dtype on one process?",
    "something is kept from every call": "Which of your variables still refers to it when backward is over?",
    "full copies are kept": "How many tensors of this size are there at the worst moment?",
}

# ---- an exercise -----------------------------------------------------------------------------------------


def both_ways(
    worlds: Callable[[Draw], dict[int, list[Any]]],
    question: str,
    mistakes: Mistakes,
    memory: rows.Memory | None = None,
) -> Exercise:
    """Return an exercise for functions with a forward and a backward; its own rows stand among those that all share."""
    return Exercise(
        worlds,
        Expected(lambda world: world.expected(), tolerance=TOLERANCE),
        question,
        script=there_and_back,
        sends=lambda world: world.sends(),
        memory=memory and replace(memory, script=two_calls),
        mistakes=replace(
            mistakes,
            values=(NO_GRADIENT, *mistakes.values, *VALUES),
            after=AFTER,
            sent=(NOT_NEEDED, STRANGERS, *mistakes.sent, *SENT),
        ),
        questions=QUESTIONS,
    )


def describe(recording: Recording, whole: str, size: int, step: int) -> str:
    """Return a phrase with the bytes that rank 0 sent in forward, which is step `step`, and in backward.

    size: the bytes of `whole`, which is the unit.
    """
    forward, backward = (recording.sent(0, step + way) / size for way in range(2))
    return f"{forward:.2f} × {whole} forward and {backward:.2f} × backward".replace("  ", " ")
