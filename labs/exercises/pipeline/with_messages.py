"""with_messages: sends and receives between the instructions, in an order in which no ranks wait for each other.

A message is a meeting: the sender waits for the receiver, and the receiver for the sender.  The check goes through the
returned lists on paper, and the executor obeys the first of them in a job.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

from labs import pp
from labs.exercises.engine.answer import Mistake, answered, first, refuse
from labs.exercises.engine.on_paper import each_judged
from labs.exercises.pipeline._listed import FORM, Asked, Returned, run_for_real, written
from labs.exercises.pipeline._stages_run_by_lists import Stacked, many, whole
from labs.exercises.pipeline.obey import OWN_ORDERS
from labs.pp.checker import ranks_of, stages_of
from labs.pp.instructions import reader
from labs.pp.messages import Receive, Send

Message = tuple[pp.Instruction, int, int]  # the instruction that makes it, the sending rank, the receiving rank


def sheets() -> list[Asked]:
    """Return the sheets, each with lists of F and B that can be run."""
    named = {
        "1F1B": [pp.one_f_one_b(4, 8), pp.one_f_one_b(2, 3), pp.one_f_one_b(8, 4), pp.one_f_one_b(1, 3)],
        "GPipe": [pp.gpipe(2, 3), pp.gpipe(4, 4)],
        "interleaved": [pp.interleaved(4, 8), pp.interleaved(2, 4, 3)],
        "a V": [whole(pp.zbv(2, 5)), whole(pp.zbv(4, 6))],
        "lists in orders of their own": [[list(map(pp.read, order.split())) for order in OWN_ORDERS]],
    }
    return [
        Asked((lists,), expected(lists), f"{name} on {many(len(lists), 'rank')}")
        for name, every in named.items()
        for lists in every
    ]


def expected(lists: pp.Lists) -> list[Message]:
    """Return the messages that the lists of F and B need between ranks."""
    ranks, stages = ranks_of(lists), stages_of(lists)
    uses = [(x, rank, reader(x, stages)) for rank, order in enumerate(lists) for x in order]
    return [(x, rank, ranks[use.stage]) for x, rank, use in uses if use and ranks[use.stage] != rank]


def carried(rank: int, x: Send | Receive) -> Message:
    """Return the message that a Send or a Receive on a rank carries."""
    return (x.message, rank, x.to) if isinstance(x, Send) else (x.message, x.source, rank)


# ---- what is seen ----------------------------------------------------------------------------------------


class ReturnedMessages(Returned):
    """The lists with messages that were returned for the lists that were `given`."""

    def __init__(self, sheet: Asked, lists: Any) -> None:
        (self.given,) = sheet.arguments
        super().__init__(sheet, len(self.given), lists)

    @cached_property
    def halt(self) -> tuple[str, str]:
        """Return two sentences about the point where no rank can go on; each is "" if it does not apply.

        The first is about two ranks that meet for different messages, the second says which rank waits for which.
        """
        at = [0] * self.p
        while True:
            now = [plan[place] if place < len(plan) else None for place, plan in zip(at, self.lists, strict=True)]
            before = list(at)
            for rank, x in enumerate(now):
                if isinstance(x, pp.Instruction):
                    at[rank] += 1
                elif isinstance(x, Send) and isinstance(other := now[x.to], Receive) and other.source == rank:
                    if other.message != x.message:
                        return f"rank {rank} sends {x.message!r} to rank {x.to}, which receives {other.message!r}", ""
                    at[rank] += 1
                    at[x.to] += 1
            if at == before:
                waits = [describe(rank, x) for rank, x in enumerate(now) if x is not None]
                return "", f"all have come to where they wait: {'; '.join(waits)}" if waits else ""


def describe(rank: int, x: Any) -> str:
    return f"rank {rank} to send {x.message!r} to {x.to}" if isinstance(x, Send) else f"rank {rank} for {x.message!r}"


# ---- what is wrong ---------------------------------------------------------------------------------------


def not_as_given(seen: ReturnedMessages) -> str | None:
    for rank, (plan, order) in enumerate(zip(seen.lists, seen.given, strict=True)):
        mine = [x for x in plan if isinstance(x, pp.Instruction)]
        if mine != list(order):
            return f"rank {rank} is to run {', '.join(map(repr, order))}, and runs {', '.join(map(repr, mine))}"
    return None


def once(kind: type, verb: str) -> Callable[[ReturnedMessages], str | None]:
    """Return a row's test: which message is not sent, or received, exactly once."""

    def matches(seen: ReturnedMessages) -> str | None:
        times = Counter(carried(rank, x) for rank, _, x in seen.every if isinstance(x, kind))
        return first(
            f"what {x!r} makes on rank {source}, and rank {to} needs, is {verb} {times[x, source, to]} times"
            for x, source, to in seen.sheet.expected
            if times[x, source, to] != 1
        )

    return matches


def too_early(seen: ReturnedMessages) -> str | None:
    plans, then = seen.lists, ", and makes it later"
    return seen.first(lambda rank, at, x: isinstance(x, Send) and x.message not in plans[rank][:at], then)


def too_late(seen: ReturnedMessages) -> str | None:
    plans, stages, then = seen.lists, stages_of(seen.given), ", and has run what needs it"
    return seen.first(lambda r, at, x: isinstance(x, Receive) and reader(x.message, stages) in plans[r][:at], then)


ONCE = "Which stage needs what this instruction makes, and which rank has it?"
# fmt: off
MISTAKES = (
    *FORM[:-1],
    Mistake("neither an instruction nor a message", "What does a list consist of: F and B, Send and Receive?",
            lambda seen: seen.first(lambda rank, at, x: not isinstance(x, pp.Instruction | Send | Receive))),
    Mistake("the instructions are not those that were given", "What was to be put in between, and what was to stay?",
            not_as_given),
    Mistake("a message that nobody needs", ONCE,
            lambda seen: seen.first(lambda rank, at, x: isinstance(x, Send | Receive)
                                    and carried(rank, x) not in seen.sheet.expected)),
    Mistake("not sent once", ONCE, once(Send, "sent")),
    Mistake("not received once", ONCE, once(Receive, "received")),
    Mistake("sent before it is made", "Which instruction makes it, and where does that stand?", too_early),
    Mistake("received after it is needed", "Which instruction needs it, and where does that stand?", too_late),
    Mistake("one message is taken for another",
            "Nothing but their order tells two messages between two ranks apart. Is it the same at both ends?",
            lambda seen: seen.halt[0]),
    Mistake("ranks wait for each other", "Take the messages in the order in which they come about, over all ranks. "
            "At which of these does its other end wait for a later one?", lambda seen: seen.halt[1],
            symptom="a job that hangs, or only where a send waits for its receiver, as large ones do"),
)
# fmt: on


@answered
def with_messages(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(lists) -> lists`, with Send and Receive between F and B; return the ✓ line."""
    every = each_judged(fn, sheets(), judged)
    world = Stacked(seed, every[0].p, name=str(every[0].sheet), lists=tuple(map(tuple, every[0].given)))
    so = run_for_real(world, ONCE, every[0].lists)
    return (
        f"{len(every)} schedules on 1 to 8 ranks come to their end, though each send waits for its receiver; "
        f"{world.name}, run for real, has one process's gradients{so}"
    )


def judged(sheet: Asked, returned: Any) -> ReturnedMessages:
    seen = ReturnedMessages(sheet, written(returned))
    refuse(MISTAKES, seen, f"{sheet}: ")
    return seen
