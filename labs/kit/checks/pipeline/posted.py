"""with_messages: what is sent and received between the instructions, so that no ranks wait for each other.

A message is a meeting: who sends waits for who receives, and the other way round.  The lists that come back are walked
on paper, and the first of them are obeyed by the executor in a job.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from labs import pp
from labs.kit.checks.answer import Mistake, answered, refuse
from labs.kit.checks.launching import job
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.pencil.sheet import PROCESSES, Sheet, Written, all_sheets
from labs.kit.checks.pipeline.listed import plain, read, require_the_same, run_for_real
from labs.kit.checks.pipeline.obeying import OWN_ORDERS
from labs.kit.checks.pipeline.stacked import Stacked, many, whole
from labs.pp.checker import stages_of
from labs.pp.instructions import reader
from labs.pp.messages import Receive, Send

MESSAGE = re.compile(r"(\d+[FB]\d+)(→|←)(\d+)")


@dataclass(frozen=True)
class Case:
    """Lists of F and B that can be run."""

    name: str
    lists: tuple[tuple[pp.Instruction, ...], ...]

    @cached_property
    def due(self) -> set[tuple[pp.Instruction, int, int]]:
        """(what is sent, from which rank, to which rank)"""
        ranks, stages = pp.ranks_of(self.lists), stages_of(self.lists)
        uses = [(x, rank, reader(x, stages)) for rank, order in enumerate(self.lists) for x in order]
        return {(x, rank, ranks[use.stage]) for x, rank, use in uses if use and ranks[use.stage] != rank}

    def __str__(self) -> str:
        return f"{self.name} on {many(len(self.lists), 'rank')}"


def cases() -> list[Case]:
    named = {
        "1F1B": [pp.one_f_one_b(4, 8), pp.one_f_one_b(2, 3), pp.one_f_one_b(8, 4), pp.one_f_one_b(1, 3)],
        "GPipe": [pp.gpipe(2, 3), pp.gpipe(4, 4)],
        "interleaved": [pp.interleaved(4, 8), pp.interleaved(2, 4, 3)],
        "a V": [whole(pp.zbv(2, 5)), whole(pp.zbv(4, 6))],
        "lists in orders of their own": [[list(map(pp.read, order.split())) for order in OWN_ORDERS]],
    }
    return [Case(name, tuple(map(tuple, lists))) for name, every in named.items() for lists in every]


# ---- on a process ----------------------------------------------------------------------------------------


def ask(fn: Callable[..., Any], tried: Sequence[Case]) -> list[Written]:
    return all_sheets(partial(written, fn), [Sheet((case,), None, str(case)) for case in tried])


def written(fn: Callable[..., Any], case: Case) -> Any:
    return plain(fn([list(order) for order in case.lists]))


# ---- what is seen ----------------------------------------------------------------------------------------


class Seen:
    """What came back for these lists."""

    def __init__(self, case: Case, returned: Any) -> None:
        self.case, self.plans = case, read_with_messages(returned)

    @cached_property
    def every(self) -> list[tuple[int, int, Any]]:
        """(rank, place, what stands there), rank by rank."""
        return [(rank, place, x) for rank, plan in enumerate(self.plans) for place, x in enumerate(plan)]

    def messages(self, kind: type) -> Iterator[tuple[int, int, Any, tuple[pp.Instruction, int, int]]]:
        """(rank, place, the message; what it carries, from which rank, to which rank)"""
        for rank, place, x in self.every:
            if isinstance(x, kind):
                ends = (rank, x.to) if isinstance(x, Send) else (x.source, rank)
                yield rank, place, x, (x.message, *ends)

    @cached_property
    def halt(self) -> tuple[str, str]:
        """Where nobody can go on: two that meet for different messages, and who waits for whom."""
        at = [0] * len(self.plans)
        while True:
            now = [plan[place] if place < len(plan) else None for place, plan in zip(at, self.plans, strict=True)]
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
                waits = [told(rank, x) for rank, x in enumerate(now) if x is not None]
                return "", f"all have come to where they wait: {'; '.join(waits)}" if waits else ""


def told(rank: int, x: Any) -> str:
    return f"rank {rank} to send {x.message!r} to {x.to}" if isinstance(x, Send) else f"rank {rank} for {x.message!r}"


def read_with_messages(value: Any) -> Any:
    if isinstance(value, list):
        return [read_with_messages(each) for each in value]
    if not (found := MESSAGE.fullmatch(value)):
        return read(value)
    kind = Send if found[2] == "→" else Receive
    return kind(pp.read(found[1]), int(found[3]))


# ---- what is wrong ---------------------------------------------------------------------------------------


def not_as_given(seen: Seen) -> str | None:
    for rank, (plan, order) in enumerate(zip(seen.plans, seen.case.lists, strict=True)):
        mine = [x for x in plan if isinstance(x, pp.Instruction)]
        if mine != list(order):
            return f"rank {rank} is to run {', '.join(map(repr, order))}, and runs {', '.join(map(repr, mine))}"
    return None


def not_due(seen: Seen) -> str | None:
    wrong = (
        f"rank {rank} has {x!r}" for rank, _, x, what in seen.messages(Send | Receive) if what not in seen.case.due
    )
    return next(wrong, None)


def once(kind: type) -> Callable[[Seen], str | None]:
    verb = {Send: "sent", Receive: "received"}[kind]

    def fits(seen: Seen) -> str | None:
        found = [what for *_, what in seen.messages(kind)]
        wrong = (
            f"what {x!r} makes on rank {source}, and rank {to} needs, is {verb} {found.count((x, source, to))} times"
            for x, source, to in sorted(seen.case.due, key=repr)
            if found.count((x, source, to)) != 1
        )
        return next(wrong, None)

    return fits


def too_early(seen: Seen) -> str | None:
    sends = seen.messages(Send)
    wrong = (f"rank {rank} comes to {x!r} first" for rank, at, x, _ in sends if x.message not in seen.plans[rank][:at])
    return next(wrong, None)


def too_late(seen: Seen) -> str | None:
    stages = stages_of(seen.case.lists)
    for rank, at, x, _ in seen.messages(Receive):
        use = reader(x.message, stages)
        if use in seen.plans[rank][:at]:
            return f"rank {rank} has run {use!r} when it comes to {x!r}"
    return None


def ragged(seen: Seen) -> bool:
    return (
        not isinstance(seen.plans, list)
        or len(seen.plans) != len(seen.case.lists)
        or not all(isinstance(plan, list) for plan in seen.plans)
    )


ONCE = "Which stage needs what this instruction makes, and which rank has it?"
# fmt: off
MISTAKES = (
    Mistake("nothing is returned", "Who will obey the lists?", lambda seen: seen.plans == "None"),
    Mistake("not a list for each rank", "How many lists were there, and how many come back?", ragged),
    Mistake("neither an instruction nor a message", "What does a list consist of: F and B, Send and Receive?",
            lambda seen: next((f"rank {rank} has {x!r} at place {place}" for rank, place, x in seen.every
                               if not isinstance(x, pp.Instruction | Send | Receive)), None)),
    Mistake("the instructions are not those that were given", "What was to be put in between, and what was to stay?",
            not_as_given),
    Mistake("a message that nobody needs", ONCE, not_due),
    Mistake("not sent once", ONCE, once(Send)),
    Mistake("not received once", ONCE, once(Receive)),
    Mistake("sent before it is made", "Which instruction makes it, and where does that stand?", too_early),
    Mistake("received after it is needed", "Which instruction needs it, and where does that stand?", too_late),
    Mistake("one message is taken for another",
            "Nothing but their order tells two messages between two ranks apart. Is it the same at both ends?",
            lambda seen: seen.halt[0]),
    Mistake("ranks wait for each other", "Take the messages in the order in which they come about, over all ranks. "
            "At which of these does its other end wait for a later one?", lambda seen: seen.halt[1],
            shows="a job that hangs, or only where a send waits for its receiver, as large ones do"),
)
# fmt: on


@answered
def with_messages(fn: Callable[..., Any], seed: int) -> str:
    """`fn(lists) -> lists`, with Send and Receive between F and B."""
    tried = cases()
    answers, others = job(ask, fn, tried, ranks=PROCESSES)
    plans = []
    for case, answer, other in zip(tried, answers, others, strict=True):
        seen = Seen(case, answer.returned)
        refuse(MISTAKES, seen, f"{case}: ")
        refuse(AFTERMATH, answer, f"{case}: ")
        require_the_same(case, answer, other)
        plans.append(seen.plans)
    world = Stacked(seed, len(tried[0].lists), lists=tried[0].lists)
    so = run_for_real(world, str(tried[0]), ONCE, plans[0])
    return (
        f"{len(tried)} schedules on 1 to 8 ranks come to their end, though each send waits for its receiver; "
        f"{tried[0]}, run for real, has one process's gradients{so}"
    )
