"""Mistakes that are the same everywhere, in the order in which their rows are tried.

FORM      a value on a rank: is it of the right kind?
LUCK      a call: has a rank touched a tensor before its message was complete?
VALUES    a value whose numbers are wrong: which summands are they made of?
AFTER     a value whose numbers are right: what was changed, or left behind?
SENT      a call: how many bytes were sent, and by which calls?
HELD      a rank: how many bytes does it hold, during a call and after it?
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, first, show
from labs.exercises.engine.around_a_call import AFTERMATH
from labs.exercises.engine.scripts import Script, StepOutcomes, World
from labs.exercises.engine.value import One, all_are
from labs.kit.record import Event

# ---- the form of a value ---------------------------------------------------------------------------------


def returned(matches: Callable[[Any, Any], bool]) -> Callable[[One], str | bool]:
    """Return a row's test, which describes a returned value if `matches(received, expected)`."""
    return lambda one: (
        matches(one.received, one.expected)
        and f"returned {one.description}{f' as {one.name}' * bool(one.name)}{describe_expected(one.expected)}"
    )


def describe_expected(expected: Any) -> str:
    return "" if expected is None else f"; {show(expected)} is due"


HOLD = "What does the caller need to hold when you are done?"
# fmt: off
FORM = (
    Mistake("only some ranks refuse", "Which ranks see what is wrong with the input?",
            lambda one: one.done.refused and "raised an error, and others did not"),
    Mistake("nothing is returned", HOLD, returned(lambda found, expected: isinstance(expected, Tensor) and found
        is None)),
    Mistake("not a tensor", HOLD,
            returned(lambda found, expected: isinstance(expected, Tensor) and not isinstance(found, Tensor))),
    Mistake("something is returned where nothing is due", "What does this rank know?",
            returned(lambda found, expected: expected is None and found is not None)),
    Mistake("another shape", "What is the shape of what is due here?",
            returned(lambda found, expected: isinstance(expected, Tensor) and found.shape != expected.shape)),
    Mistake("the dtype changed", "In which dtype was what you were given?",
            returned(lambda found, expected: isinstance(expected, Tensor) and found.dtype != expected.dtype)),
)
# fmt: on

# ---- right by luck ---------------------------------------------------------------------------------------


def nobody_waited_for(seen: StepOutcomes, op: str) -> str | None:
    verb = {"send": "sent to", "recv": "received from"}[op]
    hasty = (event for event in seen.events if event.op == op and not event.waited and "C++" not in event.issuer)
    return first(f"nobody waited for what rank {e.rank} {verb} rank {e.peer} (at {e.issuer})" for e in hasty)


# fmt: off
NOT_YOURS = "When may you touch the tensor of an isend or irecv again?"
LUCK = (
    Mistake("a receive that nobody waited for", NOT_YOURS, lambda seen: nobody_waited_for(seen, "recv"),
            symptom="right on one machine, wrong numbers now and then on another"),
    Mistake("a send that nobody waited for", NOT_YOURS, lambda seen: nobody_waited_for(seen, "send")),
    Mistake("changed while being sent", "When may you touch the tensor of an isend again?",
            lambda seen: first(f"rank {rank} changed a tensor while it was being sent"
                               for rank, done in seen.ranks if done.touched)),
)
# fmt: on

# ---- wrong numbers ---------------------------------------------------------------------------------------


def made_of(matches: Callable[[Tensor, int], Any]) -> Callable[[One], str | None]:
    """Return a row's test, which says how often each summand is in a wrong value, if `matches(times, index)`.

    times: how often each summand is in the value.
    index: the place of the rank among the members.
    """
    return lambda one: one.describe_times(lambda times: len(times) > 1 and matches(times, one.index))


def alone(times: Tensor, index: int) -> bool:
    """Return whether a wrong value is made of the rank's own summand alone."""
    return (times.abs() > 1e-3).nonzero().flatten().tolist() == [index]


def twice(times: Tensor) -> bool:
    """Return whether some summands are in a wrong value more than once, and all others once."""
    more = times > 1.5
    return bool(more.any()) and all_are(times[~more], 1)


# fmt: off
VALUES = (
    Mistake("", "", lambda one: one.received.dtype is torch.int64 and (bool((one.expected.abs() < 2**53).all())
            or "Whole numbers this large are not exact in any floating-point dtype.")),
    Mistake("read before it was there", "Who writes into this tensor, and when has that happened?",
            lambda one: not one.received.isfinite().all() and "There are numbers in it that nobody has written."),
    Mistake("rounded on the way", "In which dtype do the numbers travel, and in which are they added?",
            lambda one: one.near(one.received, one.expected, 2e-2) and "It is right but for its last digits."),
    Mistake("averaged instead of summed", "What is due: the sum, or the mean?",
            made_of(lambda times, _: all_are(times, 1 / len(times)))),
    Mistake("summed instead of averaged", "By what must the sum be divided?",
            made_of(lambda times, _: all_are(times, len(times)))),
    Mistake("one's own only", "Which line brings the others' numbers here?", made_of(alone)),
    Mistake("divided by the wrong number", "How many are added up?",
            made_of(lambda times, _: all_are(times, float(times[0])))),
    Mistake("a rank is left out", "Which ranks does your loop visit?",
            made_of(lambda times, _: (times.abs() < 1e-3).any()),
            symptom="the sum is too small, by one rank's numbers"),
    Mistake("counted twice", "How often is each rank's number added?", made_of(lambda times, _: twice(times))),
    Mistake("some ranks count more than others", "How often is each rank's number added, and how often divided?",
            made_of(lambda times, _: True)),
    Mistake("", "", lambda one: True),
)

# ---- right numbers ---------------------------------------------------------------------------------------
PYTHON_BYTES = 4  # × the bytes of a rank's input

AFTER = (
    Mistake("what was given has changed", "Whose tensor is it, and who may still need it?",
            lambda one: (changed := one.done.facts.get("changed"))
            and f"changed {changed if isinstance(changed, str) else 'what it was given'}",
            symptom="right in a test of its own, wrong in a model, where something else reads the same tensor"),
    Mistake("a later call writes into what this one returned", "Whose memory is the result, once you have returned it?",
            lambda one: one.name in one.done.overwritten and "returned what changed in a later call",
            symptom="accumulated gradients of which all but the last are lost"),
    Mistake("kept out of torch's sight", "Whose memory is that, if not yours?",
            lambda one: one.done.python_bytes > PYTHON_BYTES * one.world.nbytes
            and f"held {one.done.python_bytes:,} bytes in Python and NumPy"),
    *(replace(row, matches=lambda one, row=row: row.matches(one.done)) for row in AFTERMATH),
)
# fmt: on

# ---- messages --------------------------------------------------------------------------------------------


class Sends(NamedTuple):
    """The messages that a call may send.

    least, most: bytes that all ranks together must send at least, and may send at most.
    enough: `enough(rank)` returns the bytes that a rank may send.
    messages: `messages(rank)` returns the number of messages that a rank may send.
    ops: the only operations allowed, or () for all.
    """

    least: float
    enough: Callable[[int], float]
    messages: Callable[[int], int] | None = None
    ops: tuple[str, ...] = ()
    most: float = inf


@dataclass(frozen=True)
class Sent:
    """The messages that a call has sent, beside those that it may send."""

    seen: StepOutcomes
    expected: Sends

    @property
    def world(self) -> Any:
        return self.seen.world

    @property
    def events(self) -> list[Event]:
        return self.seen.events

    @cached_property
    def too_much(self) -> str | None:
        for rank, sent in sorted(self.seen.sent.items(), key=lambda item: -item[1]):
            if sent > (enough := self.expected.enough(rank)):
                return f"rank {rank} sent {sent:,} bytes; {enough:,.0f} are enough"
        if (total := sum(self.seen.sent.values())) > self.expected.most:
            return f"the ranks sent {total:,} bytes; {self.expected.most:,.0f} are enough"
        return None

    @property
    def foreign(self) -> list[str]:
        return sorted({event.op for event in self.events} - set(self.expected.ops)) if self.expected.ops else []

    @property
    def other_dtypes(self) -> list[str]:
        return sorted({event.dtype for event in self.events if event.dtype and event.sent} - {self.world.dtype_name})

    @cached_property
    def too_many(self) -> str | None:
        for rank in self.world.members if self.expected.messages else ():
            sent, enough = sum(event.rank == rank for event in self.seen.messages), self.expected.messages(rank)
            if sent > enough:
                are = "is" if enough == 1 else "are"
                return f"rank {rank} sent {sent} message{'s' * (sent != 1)}; {+enough} {are} enough"
        return None

    @property
    def too_little(self) -> str | None:
        total = sum(self.seen.sent.values())
        return (
            f"the ranks sent {total:,} bytes; {self.expected.least:,.0f} is the least possible"
            if total < self.expected.least
            else None
        )


def in_another_dtype(sent: Sent) -> str | None:
    sentence = sent.too_much or sent.too_little
    return f"{sentence}; they travel as {' and '.join(sent.other_dtypes)}" if sent.other_dtypes and sentence else None


# fmt: off
OTHER_DTYPE = Mistake("a different dtype travels", "What does that cost, in bytes or in digits?", in_another_dtype)
SENT = (
    Mistake("a built-in collective", "Which ranks send what to whom inside of it? Build that from isend and irecv.",
            lambda sent: sent.foreign and f"right, but it came through dist's own {' and '.join(sent.foreign)}"),
    Mistake("from whoever comes first",
            "Two calls in a row: could somebody's second message be taken for another's first?",
            lambda sent: sent.world.n > 2 and any(e.op == "recv" and e.peer is None for e in sent.events)
            and "a rank takes whatever message comes first"),
    Mistake("more messages than needed", "Which messages carry what somebody needs, and which could be left out?",
            lambda sent: sent.too_many),
    Mistake("an all-reduce where a part is enough",
            "An all-reduce brings everything to everybody. Who needs which part?",
            lambda sent: any(event.op == "all_reduce" for event in sent.events) and sent.too_much),
    OTHER_DTYPE,
    Mistake("too many bytes", "", lambda sent: sent.too_much),
    Mistake("less than the least possible", "How else did the numbers get there?", lambda sent: sent.too_little),
)
# fmt: on

# ---- bytes held ------------------------------------------------------------------------------------------


class HeldBeyond(NamedTuple):
    """The memory that a rank holds beyond what it held before, as a multiple of a unit, beside what it may hold.

    allowed: the Memory that the exercise allows.
    whole: the name of the unit.
    during, after, later: the memory held during a call, after one call and after two.
    between: the memory held between forward and backward.
    """

    allowed: Any
    whole: str
    during: float
    after: float
    later: float
    between: float = 0


SLACK = 0.1
# fmt: off
HELD = (
    Mistake("something is kept from every call", "Which name still refers to it when you have returned?",
            lambda held: held.later > held.after + SLACK
            and f"holds {held.after:.2f} × {held.whole} after one call, {held.later:.2f} × after two",
            symptom="memory that grows from call to call"),
    Mistake("kept for backward, but not needed there", "Which numbers does your backward read?",
            lambda held: held.between > held.allowed.between + SLACK
            and f"holds {held.between:.2f} × {held.whole} between forward and backward",
            symptom="activations that are as large as without splitting"),
    Mistake("something is kept from the call", "What is still there, because of a name or of a view that is left?",
            lambda held: held.after > held.allowed.after + SLACK
            and f"holds {held.after:.2f} × {held.whole} when the call is over; {held.allowed.after:.2f} × is due",
            symptom="right, but all that arrived stays in memory as long as the piece"),
    Mistake("full copies are kept", "Whose numbers do you keep after you have used them?",
            lambda held: held.during > held.allowed.during + SLACK
            and f"held {held.during:.2f} × {held.whole} besides what was there before"),
)
# fmt: on


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank may hold beyond those before, as multiples of the `nbytes` of a world.

    world: `world(draw)` returns the world in which they are measured.
    during, between, after: the bytes held in a call, between forward and backward, and after a call.
    script: plays the world; the engine's own if it is left out.
    mistakes: rows about a HeldBeyond, in place of the shared ones.
    """

    world: Callable[[Any], World]
    during: float
    after: float = 0
    between: float = inf
    script: Script | None = None
    mistakes: Sequence[Mistake] = ()
