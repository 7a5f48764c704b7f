"""Functions on ranks that are differentiated: a call, forward and backward, against what one process makes of it.

    PLAN = Exercise(
        worlds=lambda draw: [draw.world(Border, 4, …), …],
        mistakes=(Mistake("copy sends forward", "…?", lambda one: …), …),
        question="Follow x through the split layer: where is it whole, and where a summand?",
    )

On 1 to 8 ranks and in two groups at the same time, some calls twice: pieces that differ, and empty ones, no dimension,
no element, three dtypes, transposed, gradients that are expanded, under no_grad; once with the bytes held.  What holds
for all of them is not written there, but stands here: FORM, VALUES, AFTER, SENT and HELD, in this order.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache, cached_property
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks import rows
from labs.kit.checks.answer import Mistake, Wrong, instead, refuse, show
from labs.kit.checks.case import SETTLED, close, isclose
from labs.kit.checks.launching import blame_luck, job, noted
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.ranks import BF16, F32, F64, Draw
from labs.kit.checks.scripts import Done, Functions, Look, Seen, World, played
from labs.kit.record import Event, Recording, mark

TOLERANCE = {F64: 1e-10, F32: 1e-5, BF16: 3e-2}
UNSEEN = "an autograd kernel was not registered"  # what torch says where a backward passes a collective by
Brought = dict[str, Any]

# ---- what it is tried on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split(World):
    """A call on every rank, forward and backward, a step each.

    Each kind has brings(rank); on_one(brought), one process's result of what all ranks bring; the `shape` of a result;
    and, forward and backward, `calls` and due_numbers(): so many all-reduces, and of so many elements in all.
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
        return [(0, 2), (1, 3)] if self.paired else [tuple(range(self.ranks))]

    def fellows(self, rank: int) -> tuple[int, ...]:
        return next(members for members in self.groups if rank in members)

    def setting(self) -> dict[str, Any]:
        """What a call is given besides."""
        return {"group": groups_of_two()[dist.get_rank() % 2]} if self.paired else {}

    def prepare(self, functions: Functions, brought: Brought, **setting: Any) -> Functions:
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

    def due_numbers(self) -> tuple[float, float]:
        return self.calls[0] * prod(self.shape), self.calls[1] * prod(self.shape)

    def least(self, way: int) -> float:
        """Numbers that each rank but one must send."""
        return 2 * self.due_numbers()[way]

    def counted(self, event: Event) -> float:
        """What was sent, in numbers of the dtype."""
        return event.sent / self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The unit of bytes held."""
        return self.dtype.itemsize * prod(self.shape)

    def due(self, members: tuple[int, ...]) -> list[dict[str, Tensor]]:
        """For each of these ranks the result and all gradients, if no others bring anything."""
        brought = [{name: leaf(value) for name, value in self.brings(member).items()} for member in members]
        for each in brought:
            each |= {name: brought[0][name] for name in self.alike}
        result = self.on_one(brought)
        coming = [self.comes_back(member).double() for member in members]
        result.backward(torch.stack(coming).sum(0) if self.own_gradients else coming[0])
        gradients = [{name: x.grad for name, x in each.items() if floating(x)} for each in brought]
        return [{self.result: result.detach()} | of_rank for of_rank in gradients]

    @property
    def unusual(self) -> dict[str, Any]:
        """What is not as in most cases."""
        usual = {f.name: f.default for f in fields(self) if f.name not in ("seed", "step")} | {"ranks": 4}
        return {name: value for name, default in usual.items() if (value := getattr(self, name)) != default}

    @property
    def peculiar(self) -> str:
        """The name of what is right everywhere but here."""
        return next((told for name, told in PECULIAR.items() if name in self.unusual), "")

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in self.unusual.items() if name not in ("ranks", "dtype")]
        return ", ".join([self.who, self.dtype_name, *told])


PECULIAR = {
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
AGAIN = {"again": True}
UNUSUAL = ({"graded": False}, {"paired": True}, {"laid_out": "expanded"}, {"laid_out": "transposed"}, {"dtype": BF16})


def drawn(draw: Draw, kind: type[Split], options: Sequence[dict[str, Any]]) -> list[Any]:
    return [kind(draw.random.randrange(2**40), **{"ranks": 4} | each) for each in options]


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def leaf(value: Any) -> Any:
    return value.detach().double().requires_grad_() if floating(value) else value


@cache
def groups_of_two() -> list[dist.ProcessGroup]:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])]


# ---- on a rank -------------------------------------------------------------------------------------------


def there_and_back(world: Split, *functions: Callable[..., Any]) -> Iterator[Look | None]:
    rank, changed, setting = dist.get_rank(), "", world.setting()
    brought = {name: world.laid(x, rank) for name, x in world.brings(rank).items()}
    leaves = {name: x.clone().requires_grad_(world.graded) for name, x in brought.items() if floating(x)}
    given = deepcopy(brought) | {name: x * 1 for name, x in leaves.items()}  # to a leaf nobody can write
    with torch.set_grad_enabled(world.graded), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        called = noted(world, world.prepare, functions, given, **setting)
        yield None
        result = world.call(called, given, **setting)
        yield Look({"": result})
        gradient = world.comes_back(rank)
        yield None
        if isinstance(result, Tensor) and result.requires_grad and result.shape == world.shape:
            gradient = gradient.to(result.dtype)
            memory = torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # behind an expanded one
            before = memory.clone()
            torch.autograd.backward([result], [gradient])
            changed = "" if torch.equal(memory, before) else "the gradient that came in"
        spoiled = [name for name, x in brought.items() if isinstance(x, Tensor) and not torch.equal(given[name], x)]
        changed = changed or (f"{spoiled[0]!r}, which it was given," if spoiled else "")
        gradients = {name: leaves.get(name, x).grad for name, x in given.items() if floating(x)}
        unseen = any(UNSEEN in str(each.message) for each in told)
        yield Look(facts={"gradients": gradients, "changed": changed, "unseen": unseen})


def hold(functions: Functions, worlds: list[Split]) -> None:
    """Two calls of each; of each: a step forward, a step backward, and one in which nothing happens."""
    for world in worlds:
        leaves = {name: x.requires_grad_() if floating(x) else x for name, x in world.brings(dist.get_rank()).items()}
        gradient = world.comes_back(dist.get_rank())
        for _ in range(2):
            mark("step")
            given = {name: x * 1 if floating(x) else x for name, x in leaves.items()}
            end = (world.call(functions, given) * gradient).sum()  # which does not need the result again
            del given
            time.sleep(SETTLED)
            mark("step")
            end.backward()
            del end
            for x in filter(floating, leaves.values()):
                x.grad = None
            gc.collect()  # a class that is made in each call goes only then
            time.sleep(SETTLED)
            mark("step")
            mark("end")


# ---- what is seen ----------------------------------------------------------------------------------------


class Called:
    """On a rank: what was returned, the gradients, and what is not as it was."""

    def __init__(self, there: Done, back: Done) -> None:
        self.returned, self.gradients = there.values[""], back.facts["gradients"]
        self.changed, self.unseen = back.facts["changed"], back.facts["unseen"]
        if there.overwritten and not self.changed:
            self.changed = "its result, after later calls,"
        self.left, self.seconds = there.left or back.left, there.seconds + back.seconds


class One:
    """On one rank the result, or the gradient of what goes by `name`."""

    def __init__(self, case: Split, rank: int, name: str, called: list[Called], due: Tensor, forward: Sent) -> None:
        self.case, self.rank, self.name, self.called, self.forward = case, rank, name, called, forward
        self.is_result, self.members = name == case.result, case.fellows(rank)
        self.found, self.due, self.n = self.on(rank), due, len(self.members)

    def on(self, rank: int) -> Any:
        return self.called[rank].returned if self.is_result else self.called[rank].gradients.get(self.name)

    @property
    def right(self) -> bool:
        """(Where nothing comes back there need be no gradient.)"""
        if self.found is None:
            return not self.due.any()
        found, dtype = self.found, self.case.dtype
        return isinstance(found, Tensor) and found.dtype == dtype and close(found, self.due, TOLERANCE[dtype])

    def same(self, value: Tensor | float, tolerance: float = 1e-5) -> bool:
        return bool(self.found.numel()) and close(self.found.double(), value, tolerance)

    def times(self, factor: float) -> bool:
        return factor != 1 and bool(self.due.any()) and self.same(factor * self.due)

    @cached_property
    def alone(self) -> bool:
        """Is it what this rank makes of it by itself?"""
        return self.n > 1 and self.same(self.case.due((self.rank,))[0][self.name])

    @cached_property
    def summed(self) -> bool:
        """Is it the sum of what all members should have?"""
        dues = [of_rank[self.name] for of_rank in self.case.due(self.members)]
        alike = self.n > 1 and all(due.shape == self.due.shape for due in dues)
        return alike and bool(self.due.any()) and self.same(sum(dues))

    @property
    def what(self) -> str:
        return f"the {self.name}" if self.is_result else f"the gradient of {self.name!r}"

    @property
    def first(self) -> str:
        at = int((~isclose(self.found, self.due, TOLERANCE[self.case.dtype])).flatten().nonzero()[0])
        found = self.found.flatten()[at]
        return f"{self.what} at element {at} is {instead(found, self.due.flatten()[at].to(found.dtype))}"


class Sent:
    """What a rank sent on one way of a call; in numbers of the case's dtype, or of any for a loss."""

    def __init__(self, case: Split, rank: int, way: int, seen: Seen) -> None:
        self.case, self.events, members = case, seen.of(rank), case.fellows(rank)
        self.strangers = {other for event in self.events for other in event.ranks} - set(members)
        ring, due = 2 * (len(members) - 1) / len(members), case.due_numbers()[way]  # × a tensor, in an all-reduce
        by_member = {member: sum(map(case.counted, seen.of(member))) for member in members}
        self.total, self.found = sum(by_member.values()), by_member[rank]
        # An all-reduce may be made of two collectives, or of a ring of messages.
        parts = {"all_reduce": 1, "barrier": 1, "send": 0.5 / max(1, len(members) - 1), "recv": 0}
        self.calls, self.due_calls = sum(parts.get(e.op, 0.5) for e in self.events), case.calls[way]
        self.enough = ring * due + 2 * len(members) * bool(due)  # and what odd pieces add
        self.least = (len(members) - 1) * case.least(way)
        direction = ("forward", "backward")[way]
        told, enough = f"{self.found:,.0f} numbers {direction}", f"{self.enough:,.0f} by {self.due_calls} are enough"
        self.text = f"rank {rank} sent {told} by {len(self.events)} call{'s' * (len(self.events) != 1)}; {enough}"


class Held:
    """On one rank, beyond what was there before the first call: in the second, and after each."""

    def __init__(self, exercise: Exercise, case: Split, recording: Recording, rank: int, first: int) -> None:
        base = recording.during(rank, first)[0][1]
        steps = [[(n - base) / case.nbytes for _, n in recording.during(rank, first + step)] for step in range(6)]
        self.after, self.most = (steps[2][0], steps[5][0]), max(steps[3] + steps[4])
        self.between = steps[4][0] - steps[2][0]
        self.unit, self.kept, self.enough = exercise.unit, exercise.kept, exercise.most

    def told(self, when: str, *sizes: float) -> str:
        return f"held {', and then '.join(f'{size:.2f}' for size in sizes)} × {self.unit} {when}"


# ---- mistakes that are the same everywhere ---------------------------------------------------------------


def form(fits: Callable[[One], bool]) -> Callable[[One], str | bool]:
    told = "{} is {}; this rank's is of {}, {}"
    return lambda one: fits(one) and told.format(one.what, show(one.found), one.case.dtype_name, tuple(one.due.shape))


def too_much(fits: Callable[[Sent], Any]) -> Callable[[Sent], Any]:
    return lambda sent: sent.found > sent.enough and fits(sent) and sent.text


def gathered(sent: Sent) -> bool:
    ops = ("all_gather", "gather", "broadcast")
    return any(event.op in ops and event.dtype == sent.case.dtype_name for event in sent.events)


def summands(question: str) -> Mistake:
    return Mistake("the summands are never added up", question, lambda one: one.is_result and one.alone)


# fmt: off
RESULT = (
    Mistake("nothing is returned", rows.HOLD, lambda call: call.returned is None),
    Mistake("not a tensor", rows.HOLD,
            lambda call: not isinstance(call.returned, Tensor) and f"{call.returned} was returned"),
)
FORM = (
    Mistake("no gradient",
            "Which of your lines does autograd not see: one under no_grad, on .data, or on a detached tensor?",
            form(lambda one: one.found is None),
            shows="the loss stands still: nothing in front of a split layer is trained"),
    Mistake("a different shape or dtype", "What are its shape and dtype on one process?",
            form(lambda one: one.found.shape != one.due.shape or one.found.dtype != one.case.dtype)),
)
NOT_FINITE = Mistake(
    "not finite", "What is exp of 10,000, by what may all of the exponentials be divided, and what is 0 × ∞ or ∞ − ∞?",
    lambda one: not one.found.isfinite().all(), shows="a loss of inf or nan, late in a training")
SUMMED_TOO = Mistake("the gradient is summed as well",
                     "Is the gradient that comes back a summand, or is it whole, and the same on every rank?",
                     lambda one: not one.is_result and (one.times(one.n) or one.summed),
                     shows="gradients N times too large before a layer, and not after it")
VALUES = (
    NOT_FINITE,
    Mistake("N times too large", "How many ranks add the same to it?", lambda one: one.times(one.n)),
    Mistake("averaged instead of summed", "What do the summands make: a sum, or a mean?",
            lambda one: one.times(1 / one.n)),
    Mistake("rounded on the way", "In which dtype do the numbers travel, and in which are they added?",
            lambda one: one.same(one.due, 5e-3) and "It is right but for its last digits."),
    Mistake("", "", lambda one: True),
)
AFTER = (
    Mistake("changed in place", "Whose memory is that, and who may still read it?",
            lambda call: call.changed and f"{call.changed} is not what it was",
            shows="right in a test of its own, wrong in a model, where something else reads the same tensor"),
    Mistake("a collective that autograd does not see",
            "What is the backward of this collective, and who has told autograd?",
            lambda call: call.unseen and "torch warns: backward skips a collective, as if it were not there",
            shows="a warning from torch, and gradients that are right by luck"),
    *AFTERMATH,
)
NOT_DUE = Mistake("something is sent where nothing is due",
                  "What do the other ranks have already, and so need not be sent?",
                  lambda sent: not sent.due_calls and sent.events and sent.text)
SENT = (
    Mistake("one rank adds up for all",
            "How much does that rank send, and how much does each rank send in an all-reduce?",
            too_much(lambda sent: {"reduce", "broadcast"} <= {event.op for event in sent.events})),
    Mistake("gathered, where a sum belongs",
            "What does each rank have: a piece of the result, or a summand? What does splitting gain, if you gather?",
            too_much(gathered), shows="right, but each rank receives what the others hold: weights, or activations"),
    Mistake("a different dtype travels", "What does that cost?",
            too_much(lambda sent: any(event.dtype != sent.case.dtype_name for event in sent.events if event.sent))),
    Mistake("too many bytes", "How often does each number travel, and who needs it?", too_much(bool)),
    Mistake("a collective over the wrong ranks", "Who has called it, in that group?",
            lambda sent: sent.strangers and f"ranks {sorted(sent.strangers)} take part, but are not in the group"),
    Mistake("too many collectives", "What does each of them cost, however little it sends?",
            lambda sent: sent.calls > sent.due_calls + 0.01 and sent.text,
            shows="the right numbers and bytes, and a job that waits for the network"),
    Mistake("less than the least possible", "How else did the numbers get there?",
            lambda sent: sent.total < 0.999 * sent.least and sent.text),
)
HELD = (
    Mistake("something is kept from every call", "Which of your variables still refers to it when backward is over?",
            lambda held: (held.after[0] > 1.1 or held.after[1] > held.after[0] + 0.1)
            and held.told("after one call", *held.after)),
    Mistake("kept for backward, but not needed there", "Which numbers does your backward read?",
            lambda held: held.between > held.kept and held.told("between forward and backward", held.between),
            shows="activations that are as large as without splitting"),
    Mistake("too many copies at a time", "How many tensors of this size are there at the worst moment?",
            lambda held: held.most > held.enough and held.told("at the peak", held.most)),
)
# fmt: on

# ---- an exercise -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exercise:
    """The first of the worlds is a plain one, and those of the line of success come second.

    raised: rows about what is told of an error; forms, mistakes: about a result or a gradient on a rank; sending: about
    one way.  wide: where bytes held are looked at; kept, most: × the `unit`, between forward and backward, when the
    result is gone, and at the most.
    """

    worlds: Callable[[Draw], Sequence[Any]]
    mistakes: Sequence[Mistake]
    question: str
    _: KW_ONLY
    raised: Sequence[Mistake] = ()
    forms: Sequence[Mistake] = ()
    sending: Sequence[Mistake] = ()
    wide: Sequence[Split] = ()
    unit: str = ""
    kept: float = 0
    most: float = 0


def checked(exercise: Exercise, functions: Functions, seed: int) -> Recording:
    """Of the first job; raise Wrong at the first thing that is not as it must be."""
    worlds = exercise.worlds(Draw(seed))
    recordings = []
    for ranks in dict.fromkeys(world.ranks for world in worlds):
        alike = [world for world in worlds if world.ranks == ranks]
        try:
            recordings.append(played(there_and_back, functions, alike, judge_of(exercise))[1])
        except Wrong as wrong:
            at = [world for world in alike if wrong.raised and f"(with {world})" in wrong.answer.text]
            raise (wrong.also(at[0].peculiar) if at else wrong).told_by(exercise.raised) from None
    if exercise.wide:
        recording = job(hold, functions, exercise.wide, ranks=4, record="memory").recording
        for index, world in enumerate(exercise.wide):
            for rank in range(4):
                refuse(HELD, Held(exercise, world, recording, rank, 6 * index), f"{world}: rank {rank} ")
    return recordings[0]


def judge_of(exercise: Exercise) -> Callable[[Seen], None]:
    """A call is judged when its backward is over."""
    there: list[Seen] = []

    def judge(seen: Seen) -> None:
        if seen.world.step == 0:
            there[:] = [seen]
            return
        try:
            judge_call(exercise, seen.world, (there[0], seen))
        except Wrong as wrong:
            told = blame_luck(wrong, [*there[0].events, *seen.events])
            raise (told if told.answer.mistake else told.also(seen.world.peculiar)) from None

    return judge


def judge_call(exercise: Exercise, case: Split, ways: tuple[Seen, Seen]) -> None:
    called = [Called(*both) for both in zip(*(seen.done for seen in ways), strict=True)]
    sent = [Sent(case, rank, way, ways[way]) for way in range(2) for rank in range(case.ranks)]
    dues = {rank: due for group in case.groups for rank, due in zip(group, case.due(group), strict=True)}
    for rank, of_rank in enumerate(called):
        refuse(RESULT, of_rank, f"{case}: on rank {rank} ")
    for name in dues[0] if case.graded else (case.result,):
        for rank in range(case.ranks):
            one = One(case, rank, name, called, dues[rank][name], sent[rank])
            if not one.right:
                refuse((*exercise.forms, *FORM), one, f"{case}: on rank {rank}, ")
                values = (*exercise.mistakes, *VALUES)
                refuse(values, one, f"{case}: on rank {rank}, {one.first}\n", exercise.question)
    for rank, of_rank in enumerate(called):
        refuse(AFTER, of_rank, f"{case}: on rank {rank} ")
    for one in sent:
        refuse((NOT_DUE, *exercise.sending, *SENT), one, f"{case}: ")


def told(recording: Recording, whole: str, size: int, step: int) -> str:
    """What was sent in a step forward and the one backward, × the bytes of `whole`."""
    forward, backward = (recording.sent(0, step + way) / size for way in range(2))
    return f"{forward:.2f} × {whole} forward and {backward:.2f} × backward".replace("  ", " ")
