"""Is this function that collective?  Values, messages, bytes, rounds and memory, on inputs chosen to be awkward.

    cases (in this order)         what only fails here
    4 ranks, sizes that divide    the idea itself; then the budget, always on the same sizes
    4 ranks, sizes that do not    pieces of unequal size, pieces of no element at all
    4 ranks, other roots          a tree that only grows from rank 0
    4 ranks, other dtypes         numbers that travel as float32
    ranks 1, 2 and 3 of 4         peers taken for global ranks, or the wrong group
    3 ranks, 2 ranks              what is only right for a power of two, or for more than two
    4 ranks, bytes held           full copies where a piece would do

The least possible: a reduce_scatter or an all_gather cannot send less than N - 1 tensors in all, an all_reduce twice
that (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"), a broadcast
needs N - 1 messages, and ceil(log2 N) rounds, as the number of ranks that know at most doubles in each.

A round is what can happen at one moment when a rank sends one message and receives one message at a time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks.answer import Wrong, answered, instead, job, show
from labs.kit.checks.wire import SlowWire, nonsense
from labs.kit.launch import Results
from labs.kit.record import Event, Recording, mark

BUDGET = 4096  # float32 elements; the same in every call, so that the line of success is
POWERS_ONLY = "right only when the number of ranks is a power of two"
ALL_RANKS_ONLY = "right only on the group of all ranks"
LARGE = 1 << 16  # elements whose bytes held are measured
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0, torch.int64: 0.0}


@dataclass(frozen=True)
class Case:
    """One call: `size` elements of `dtype` from global rank `root`, in the group of the global ranks `members`."""

    seed: int
    size: int
    members: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    root: int = 0
    subgroup: bool = False
    shape: tuple[int, ...] = ()  # of `size` elements; one dimension if it is left out

    def tensor(self, rank: int) -> Tensor:
        """What global rank `rank` brings; numbers that bfloat16 adds up exactly, and that float32 cannot hold."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        if self.dtype is torch.bfloat16:
            return torch.randint(1, 32, (self.size,), generator=generator).to(self.dtype)
        if self.dtype is torch.int64:
            return torch.randint(2**54, 2**56, (self.size,), generator=generator)
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.dtype)

    def pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.tensor_split(len(self.members))

    def __str__(self) -> str:
        within = f"the group of ranks {self.members}" if self.subgroup else f"{len(self.members)} ranks"
        dtype = str(self.dtype).removeprefix("torch.")
        size = (
            f"a tensor of shape {self.shape}" if self.shape else f"{self.size} element{'' if self.size == 1 else 's'}"
        )
        return f"{within}, {size} of {dtype}"


@dataclass(frozen=True)
class Part:
    """Cases that share what is awkward about them, and the name of the mistake that only fails here."""

    mistake: str
    cases: list[Case]


@dataclass(frozen=True)
class Outcome:
    """What one rank had when its call was over."""

    tensor: Tensor
    returned: Any
    touched: list[int]


@dataclass(frozen=True)
class Kind:
    """A collective: what a rank brings, what it must have afterwards, and the least that this can cost."""

    name: str
    brings: Callable[[Case, int], Tensor]
    expected: Callable[[Case, int], Tensor]  # by index in the group
    copies: Callable[[int], int]  # tensors sent by all ranks together
    messages: Callable[[int], int]  # sent by one rank at most
    rounds: Callable[[int], int]
    question: str
    rooted: bool = False
    returns_piece: bool = False


def total(case: Case) -> Tensor:
    return torch.stack([case.tensor(rank) for rank in case.members]).sum(0)


def only_my_piece(case: Case, index: int) -> Tensor:
    """The full tensor's piece `index`, and nonsense elsewhere."""
    tensor = nonsense(torch.empty(case.size, dtype=case.dtype))
    case.pieces(tensor)[index].copy_(case.pieces(case.tensor(63))[index])
    return tensor


def bring_own(case: Case, index: int) -> Tensor:
    return case.tensor(case.members[index])


BROADCAST = Kind(
    "broadcast",
    bring_own,
    lambda case, index: case.tensor(case.root),
    copies=lambda n: n - 1,
    messages=lambda n: math.ceil(math.log2(n)),
    rounds=lambda n: math.ceil(math.log2(n)),
    question="After one round two ranks know the tensor. How many could know it after the next one?",
    rooted=True,
)
REDUCE_SCATTER = Kind(
    "reduce_scatter",
    bring_own,
    lambda case, index: case.pieces(total(case))[index],
    copies=lambda n: n - 1,
    messages=lambda n: n - 1,
    rounds=lambda n: 2 * (n - 1),
    question="Which one piece does the neighbour need from you in this round?",
    returns_piece=True,
)
ALL_GATHER = Kind(
    "all_gather",
    only_my_piece,
    lambda case, index: case.tensor(63),
    copies=lambda n: n - 1,
    messages=lambda n: n - 1,
    rounds=lambda n: 2 * (n - 1),
    question="Which piece did you receive in the round before, and who lacks it now?",
)
ALL_REDUCE = Kind(
    "all_reduce",
    bring_own,
    lambda case, index: total(case),
    copies=lambda n: 2 * (n - 1),
    messages=lambda n: 2 * (n - 1),
    rounds=lambda n: 4 * (n - 1),
    question="What if each rank first became responsible for the sum of one piece only?",
)


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def broadcast(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, root=0, group=None)`: every rank's x becomes global rank `root`'s, in place, by a tree."""
    recording, step = every_job(BROADCAST, fn, seed)
    rounds = len_rounds(recording, step)
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
        for part in parts if wrong.answer.text != "untouched" else []:
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


# ---- judgement -------------------------------------------------------------------------------------------


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


def right_type(kind: Kind, case: Case, index: int, outcome: Outcome) -> None:
    if not kind.returns_piece:
        return
    found, expected = outcome.returned, kind.expected(case, index)
    if not isinstance(found, Tensor):
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {found}, and not its piece, a tensor",
            "What does the caller need to hold when you are done?",
            "nothing is returned" if found == "None" else "not a tensor",
        )
    if found.shape != expected.shape:
        whole = found.numel() == case.size != expected.numel()
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {show(found)}; its piece has shape {tuple(expected.shape)}",
            f"How does tensor_split cut {case.size} elements into {len(case.members)} pieces?",
            "the whole tensor instead of a piece" if whole else "a piece of another size",
        )
    if found.dtype != expected.dtype:
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {show(found)}",
            "In which dtype was the tensor that you were given?",
            "the dtype changed",
        )


def right_values(kind: Kind, case: Case, outcomes: list[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        expected = kind.expected(case, index)
        found = outcome.returned if kind.returns_piece else outcome.tensor
        if not close(found, expected):
            raise explain(kind, case, index, found, expected, outcomes)
    for index, outcome in enumerate(outcomes if kind.returns_piece else []):
        if not close(case.pieces(outcome.tensor)[index], kind.expected(case, index)):
            raise Wrong(
                f"{case}: what rank {case.members[index]} returned is right, but piece {index} of its tensor is not",
                "From where would an all_gather go on?",
                "not in place",
            )


def same_bits(kind: Kind, case: Case, outcomes: list[Outcome]) -> None:
    if kind is ALL_REDUCE and any(not torch.equal(outcomes[0].tensor, o.tensor) for o in outcomes):
        raise Wrong(
            f"{case}: the sums differ between ranks in their last bits",
            "Does every rank add up in the same order?",
            "not the same bits on every rank",
        )


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[expected.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def explain(kind: Kind, case: Case, index: int, found: Tensor, expected: Tensor, outcomes: list[Outcome]) -> Wrong:
    """Where the first wrong element is, and, if it can be told, whose numbers stand there."""
    rank = case.members[index]
    differs = ~torch.isclose(found, expected, rtol=1e-5, atol=TOLERANCE[expected.dtype])
    first = int(differs.nonzero()[0]) if differs.any() else int((found != expected).nonzero()[0])
    text = f"{case}: on rank {rank} element {first} is {instead(found[first], expected[first])}"
    mistake, more = recognised(kind, case, index, found, outcomes)
    return Wrong(text + (f"\n{more}" if more else ""), VALUE_QUESTIONS.get(mistake, kind.question), mistake)


VALUE_QUESTIONS = {
    "rounded on the way": "In which dtype do the numbers travel, and in which are they added?",
    "pieces that nobody gathered": "Who knows the sum of the other pieces?",
    "nothing arrived": "Which line writes into the tensor that you were given?",
    "a receive that nobody waited for": "When may you read what irecv receives?",
    "averaged instead of summed": "What does the collective promise: the sum, or the mean?",
    "the pieces are rotated": "Where does a partial sum end that sets out from rank r and takes N - 1 steps?",
    "counted twice": "How many ranks add their numbers to a piece on its way?",
    "left out": "After how many steps has a piece met every rank?",
    "right on one rank only": "How do the others get to know it?",
}


def recognised(kind: Kind, case: Case, index: int, found: Tensor, outcomes: list[Outcome]) -> tuple[str, str]:
    """(name of the mistake, a sentence), as far as what was found tells; each may be empty."""
    values = [o.returned if kind.returns_piece else o.tensor for o in outcomes]
    right = [case.members[i] for i, value in enumerate(values) if close(value, kind.expected(case, i))]
    if found.dtype is torch.int64:
        return "", "Whole numbers this large are not exact in any floating-point dtype."
    before = kind.brings(case, index)
    if torch.equal(outcomes[index].tensor.nan_to_num(), before.nan_to_num()) and not kind.returns_piece:
        if len(right) == 1 and kind is not BROADCAST:
            return "right on one rank only", f"Rank {right[0]} has it; rank {case.members[index]} has what it brought."
        return "nothing arrived", f"Rank {case.members[index]} still has what it brought."
    expected = kind.expected(case, index)
    if torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        return "rounded on the way", "It is right but for its last digits."
    if kind is BROADCAST:
        owner = [r for r in case.members if torch.equal(found, case.tensor(r))]
        return "", f"That is rank {owner[0]}'s tensor." if owner else ""
    if kind is ALL_GATHER:
        return misplaced(case, found)
    if found.isnan().any():
        return "a receive that nobody waited for", "It was read before the message was there."
    if kind is ALL_REDUCE and close(case.pieces(found)[index], case.pieces(expected)[index]):
        return "pieces that nobody gathered", f"Piece {index}, its own, is right there."
    return summands(kind, case, index, found, values)


def misplaced(case: Case, found: Tensor) -> tuple[str, str]:
    """Which pieces of a gathered tensor are missing, or stand in another's place."""
    full = case.pieces(case.tensor(63))
    for place, piece in enumerate(case.pieces(found)):
        if piece.isnan().any():
            return "a piece is missing", f"Piece {place} never arrived there."
        for other, right in enumerate(full):
            if other != place and piece.numel() and torch.equal(piece, right[: len(piece)]):
                return "the pieces are rotated", f"In the place of piece {place} stands piece {other}."
    return "", ""


def summands(kind: Kind, case: Case, index: int, found: Tensor, values: list[Tensor]) -> tuple[str, str]:
    """How often each rank's numbers stand in what was found, and from which piece."""
    n = len(case.members)
    for shift in range(n):
        place = (index + shift) % n
        sources = [case.tensor(rank) for rank in case.members]
        if kind.returns_piece:
            sources = [case.pieces(source)[place] for source in sources]
        times = coefficients(found, sources)
        if times is None:
            continue
        if shift and torch.allclose(times, torch.ones(n, dtype=times.dtype), atol=1e-3):
            return "the pieces are rotated", f"Rank {case.members[index]} holds the sum of piece {place}."
        return name_coefficients(times, case.members)
    return "", ""


def name_coefficients(times: Tensor, members: tuple[int, ...]) -> tuple[str, str]:
    n = len(members)
    told = ", ".join(f"rank {r}'s {c:.2g} times" for r, c in zip(members, times.tolist(), strict=True))
    sentence = f"What it holds has {told}."
    if torch.allclose(times, torch.full_like(times, 1 / n), atol=1e-3):
        return "averaged instead of summed", sentence
    if (times < 0.01).any():
        return "left out", sentence
    if (times > 1.5).any():
        return "counted twice", sentence
    return "", sentence


def coefficients(found: Tensor, sources: list[Tensor]) -> Tensor | None:
    """The numbers c with found = Σ c_i sources_i, or None where there are none, or too few elements to tell."""
    matrix, right = torch.stack(sources, 1).double(), found.double()
    if len(right) < len(sources) or not right.isfinite().all():
        return None
    solution = torch.linalg.lstsq(matrix, right).solution
    exact = torch.allclose(matrix @ solution, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
    unique = len(right) > len(sources)
    return solution if exact and unique else None


def not_by_luck(case: Case, outcomes: list[Outcome], events: list[Event]) -> None:
    """If it is right, then only because a message was quick."""
    for event in events:
        if event.op in ("send", "recv") and not event.waited:
            verb = "sent to" if event.op == "send" else "received from"
            raise Wrong(
                f"{case}: nobody waited for what rank {event.rank} {verb} rank {event.peer} (at {event.issuer})",
                "When may you touch the tensor of an isend or irecv again?",
                f"a {'receive' if event.op == 'recv' else 'send'} that nobody waited for",
            )
    for index, outcome in enumerate(outcomes):
        if outcome.touched:
            raise Wrong(
                f"{case}: rank {case.members[index]} changed a tensor while it was being sent",
                "When may you touch the tensor of an isend again?",
                "changed while being sent",
            )


def by_hand(kind: Kind, events: list[Event]) -> None:
    used = sorted({event.op for event in events} - {"send", "recv"})
    if used:
        raise Wrong(
            f"the values are right, but they came by dist's own {' and '.join(used)}",
            "Which ranks send what to whom inside of it? Build that from isend and irecv.",
            "a built-in collective",
        )


def within_budget(kind: Kind, case: Case, events: list[Event]) -> None:
    """Bytes of all ranks and of the busiest, messages, rounds: against the least possible."""
    n = len(case.members)
    itemsize = torch.empty(0, dtype=case.dtype).element_size()
    tensor = case.size * itemsize
    as_dtype = {event.dtype for event in events if event.op == "send" and event.bytes_in}
    if as_dtype - {str(case.dtype).removeprefix("torch.")}:
        raise Wrong(
            f"{case}: the numbers travel as {' and '.join(sorted(as_dtype))}",
            "What does that cost, in bytes or in digits?",
            "another dtype travels",
        )
    sent: dict[int, int] = dict.fromkeys(case.members, 0)
    messages: dict[int, int] = dict.fromkeys(case.members, 0)
    for event in events:
        if event.op == "send" and event.bytes_in:
            sent[event.rank] += event.bytes_in
            messages[event.rank] += 1
    busiest = max(sent, key=sent.__getitem__)
    share = kind.copies(n) / n
    if sum(sent.values()) > kind.copies(n) * tensor or (
        not kind.rooted and sent[busiest] > share * tensor + 2 * itemsize
    ):
        whole = any(e.op == "send" and e.bytes_in == tensor and case.size > 1 for e in events) and not kind.rooted
        copies = f"{sent[busiest] / tensor:.2f} × the tensor; the least possible is {share:.2f} ×" if tensor else ""
        raise Wrong(
            f"{case}: rank {busiest} sent {copies}",
            kind.question,
            "whole tensors travel" if whole else "too many bytes",
        )
    if kind.rooted and (rounds := count_rounds(events)) > kind.rounds(n):
        flat = messages[case.root] == n - 1
        raise Wrong(
            f"{case}: {rounds} rounds, one message after the other; the least possible is {kind.rounds(n)}",
            kind.question,
            "the root sends to all" if flat else "too many rounds",
        )
    chatty = max(messages, key=messages.__getitem__)
    if messages[chatty] > kind.messages(n):
        raise Wrong(
            f"{case}: rank {chatty} sent {messages[chatty]} messages; {kind.messages(n)} are enough",
            "Could what goes to the same rank in the same round go as one message?",
            "too many messages",
        )
    if (rounds := count_rounds(events)) > kind.rounds(n):
        raise Wrong(
            f"{case}: it took {rounds} rounds, as ranks wait for each other in turn",
            "Could every rank send and receive at the same moment?",
            "too many rounds",
        )


def len_rounds(recording: Recording, step: int) -> int:
    return count_rounds([event for event in recording.events if event.step == step])


def count_rounds(events: list[Event]) -> int:
    """The longest chain: a send comes after what its rank has received or sent before it."""
    moments = [
        (e.start if e.op == "send" else e.end, e)
        for e in events
        if e.op in ("send", "recv")
        if e.bytes_in or e.bytes_out
    ]
    on_the_way: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    last_sent: dict[int, int] = defaultdict(int)
    last_received: dict[int, int] = defaultdict(int)
    for _, event in sorted(moments, key=lambda moment: moment[0]):
        if event.op == "send":
            last_sent[event.rank] = 1 + max(last_sent[event.rank], last_received[event.rank])
            on_the_way[event.rank, event.peer].append(last_sent[event.rank])
        elif on_the_way[event.peer, event.rank]:
            arrived = on_the_way[event.peer, event.rank].pop(0)
            last_received[event.rank] = max(arrived, 1 + last_received[event.rank])
    return max([*last_sent.values(), *last_received.values()], default=0)


KINDS = {kind.name: kind for kind in (BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE)}
