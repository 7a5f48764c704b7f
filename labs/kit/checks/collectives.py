"""Is this function that collective?  Jobs on inputs chosen to be awkward.

    cases (in this order)         what only fails here
    4 ranks, sizes that divide    the idea itself; then the budget, always on the same sizes
    4 ranks, sizes that do not    pieces of unequal size, pieces of no element at all
    4 ranks, two dimensions       pieces that are rows
    4 ranks, other roots          a tree that only grows from rank 0
    4 ranks, other dtypes         numbers that travel as float32
    ranks 1, 2 and 3 of 4         peers taken for global ranks, or the wrong group
    3 ranks, 2 ranks              what is only right for a power of two, or for more than two
    4 ranks, bytes held           full copies where a piece would do

What is judged, in this order: type, luck, values (values.py), tools, bytes, messages, rounds (traffic.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks.answer import NEVER_ENDS, Wrong, answered, job, show
from labs.kit.checks.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, KINDS, REDUCE_SCATTER, Case, Kind, Outcome
from labs.kit.checks.traffic import by_hand, count_rounds, not_by_luck, within_budget
from labs.kit.checks.values import right_type, right_values, same_bits
from labs.kit.checks.wire import SlowWire
from labs.kit.launch import Results
from labs.kit.record import Recording, mark

BUDGET = 4096  # float32 elements; the same in every call, so that the line of success is
POWERS_ONLY = "right only when the number of ranks is a power of two"
ALL_RANKS_ONLY = "right only on the group of all ranks"
LARGE = 1 << 16  # elements whose bytes held are measured


@dataclass(frozen=True)
class Part:
    """Cases that share what is awkward about them, and the name of the mistake that only fails here."""

    mistake: str
    cases: list[Case]


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def broadcast(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, root=0, group=None)`: every rank's x becomes global rank `root`'s, in place, by a tree."""
    recording, step = every_job(BROADCAST, fn, seed)
    rounds = count_rounds([event for event in recording.events if event.step == step])
    return f"{rounds} rounds on 4 ranks; the least possible is {BROADCAST.rounds(4)}"


@answered
def reduce_scatter(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None) -> piece`: piece r of x becomes the sum over all ranks on rank r, which also returns it."""
    return sent_line(*every_job(REDUCE_SCATTER, fn, seed), least=0.75)


@answered
def all_gather(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: rank r brings piece r of x; afterwards every rank has all of them, in place."""
    return sent_line(*every_job(ALL_GATHER, fn, seed), least=0.75)


@answered
def all_reduce(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: every rank's x becomes the sum over all ranks, in place."""
    return sent_line(*every_job(ALL_REDUCE, fn, seed), least=1.5)


def sent_line(recording: Recording, step: int, least: float) -> str:
    most = max(recording.sent(rank, step) for rank in range(4)) / (BUDGET * 4)
    return f"you sent {most:.2f} × the tensor per rank; the least possible is {least:.2f} ×"


# ---- jobs ------------------------------------------------------------------------------------------------


def every_job(kind: Kind, fn: Callable[..., Any], seed: int) -> tuple[Recording, int]:
    """Put `fn` through all of them; the recording and the step of the budget's case."""
    draw = random.Random(seed)
    seeds = itertools.count(draw.randrange(2**40))

    def case(size: int, members: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> Case:
        return Case(next(seeds), size, members, **options)

    def odd(n: int) -> int:
        return n * draw.randrange(3, 9) + draw.randrange(1, n)

    def members(n: int) -> tuple[int, ...]:
        return tuple(range(n))

    whole = "right only for some sizes" if kind.rooted else "right only when the size divides by the number of ranks"
    three, two, group = members(3), members(2), (1, 2, 3)
    four_ranks = [
        Part("", [case(4 * draw.randrange(6, 12)), case(BUDGET, dtype=torch.float32)]),
        Part(whole, [case(4 * draw.randrange(3, 9) + more) for more in (1, 2)] + [case(3), case(1), case(0)]),
        Part("right only in one dimension", [case(15, shape=(3, 5)), case(35, shape=(7, 5))]),
        Part("right only from root 0", [case(odd(4), root=root) for root in (2, 1, 3)] if kind.rooted else []),
        Part(
            "right only in some dtypes", [case(odd(4), dtype=d) for d in (torch.float32, torch.int64, torch.bfloat16)]
        ),
        Part(
            ALL_RANKS_ONLY,
            [case(12, group, root=2, subgroup=True), case(odd(3), group, root=1, subgroup=True)],
        ),
    ]
    three_ranks = [case(3 * draw.randrange(2, 7), three), case(odd(3), three, root=2), case(2, three)]
    two_ranks = [case(2 * draw.randrange(2, 7), two), case(odd(2), two, root=1), case(1, two)]
    try:
        recording = play_all(kind, fn, 4, [part for part in four_ranks if part.cases])
    except Wrong as wrong:
        if wrong.answer.mistake == ALL_RANKS_ONLY:  # or is it that the group has three members?
            play_all(kind, fn, 3, [Part(POWERS_ONLY, three_ranks)])
        raise
    play_all(kind, fn, 3, [Part(POWERS_ONLY, three_ranks)])
    play_all(kind, fn, 2, [Part("right only on more than two ranks", two_ranks)])
    bytes_held(kind, fn, Case(next(seeds), LARGE, (0, 1, 2, 3), dtype=torch.float32))
    return recording, 1


def play_all(kind: Kind, fn: Callable[..., Any], ranks: int, parts: list[Part]) -> Recording:
    """All parts in one job.  Where that job fails as a whole, each in its own, to see which of them it was."""
    cases = [case for part in parts for case in part.cases]
    try:
        results = job(one_rank, kind.name, fn, cases, ranks=ranks)
    except Wrong as wrong:
        if wrong.answer.text != "untouched" and wrong.answer.mistake != NEVER_ENDS:
            for part in parts:
                play(kind, fn, ranks, part)
        raise
    names = [part.mistake for part in parts for _ in part.cases]
    judge_all(kind, cases, results, names)
    return results.recording


def play(kind: Kind, fn: Callable[..., Any], ranks: int, part: Part) -> None:
    within = f"in the group of ranks {part.cases[0].members}" if part.cases[0].subgroup else f"on {ranks} ranks"
    try:
        results = job(one_rank, kind.name, fn, part.cases, ranks=ranks, when=within)
    except Wrong as wrong:
        raise wrong.also(part.mistake) from None
    judge_all(kind, part.cases, results, [part.mistake] * len(part.cases))


def judge_all(kind: Kind, cases: list[Case], results: Results, names: list[str]) -> None:
    """Raise Wrong for the first case that is not right, by its part's name where nothing more exact is known."""
    for step, (case, name) in enumerate(zip(cases, names, strict=True)):
        try:
            judge(kind, case, [results[rank][step] for rank in case.members], results.recording, step)
        except Wrong as wrong:
            raise wrong.also(name) from None


def one_rank(name: str, fn: Callable[..., Any], cases: list[Case]) -> list[Outcome | None]:
    """Every case on one rank, one step each; None where it is not a member."""
    kind, rank = KINDS[name], dist.get_rank()
    groups = {case.members: dist.new_group(list(case.members)) for case in cases if case.subgroup}
    outcomes = []
    for case in cases:
        if rank not in case.members:
            mark("step")
            outcomes.append(None)
            continue
        x = kind.brings(case, case.members.index(rank)).view(case.shape or (-1,))
        with SlowWire(rank, case.seed) as wire:
            mark("step")
            returned = call(kind, fn, x, case, groups[case.members] if case.subgroup else None)
            mark("end")
        outcomes.append(Outcome(x.flatten(), snapshot(returned), wire.touched))
    return outcomes


def call(kind: Kind, fn: Callable[..., Any], x: Tensor, case: Case, group: dist.ProcessGroup | None) -> Any:
    within = {} if group is None else {"group": group}
    try:
        return fn(x, case.root, **within) if case.root and kind.rooted else fn(x, **within)
    except Exception as error:
        error.add_note(f"(with {case})")
        raise


def snapshot(returned: Any) -> Any:
    """A returned tensor as it is now; of anything else, what it is."""
    return returned.detach().clone() if isinstance(returned, Tensor) else show(returned)


def hold(name: str, fn: Callable[..., Any], case: Case) -> None:
    kind = KINDS[name]
    x = kind.brings(case, dist.get_rank())
    mark("step")
    call(kind, fn, x, case, None)
    mark("end")


def bytes_held(kind: Kind, fn: Callable[..., Any], case: Case) -> None:
    """Beside the tensor itself, one more copy of it is plenty."""
    recording = job(hold, kind.name, fn, case, ranks=4, record="memory").recording
    tensor = case.size * 4
    for rank in range(4):
        beside = recording.held(rank, 0)["peak"] / tensor - 1
        if beside > 1.05:
            raise Wrong(
                f"{case}: rank {rank} held {beside:.2f} × the tensor beside the tensor itself",
                "Whose numbers do you keep after you have used them?",
                "full copies are kept",
            )


def judge(kind: Kind, case: Case, outcomes: list[Outcome], recording: Recording, step: int) -> None:
    """Raise Wrong for the first thing that is not right: type, luck, values, tools, bytes, messages, rounds."""
    events = [event for event in recording.events if event.step == step and event.rank in case.members]
    for index, outcome in enumerate(outcomes):
        right_type(kind, case, index, outcome)
    not_by_luck(case, outcomes, events)
    right_values(kind, case, outcomes)
    by_hand(kind, events)
    within_budget(kind, case, events)
    same_bits(kind, case, outcomes)
