"""Does this turn Partial() into Shard(dim)?  Each rank's piece, as torch.chunk cuts it, of the sum of all summands.

On 1 to 8 ranks: dims that do not divide, shorter than there are ranks, empty; each dim of one, two and three; five
dtypes; not contiguous; a group of some ranks; two calls in a row.  The summand stays as it was.  What is sent is a
reduce-scatter, its padding included; what is held is looked at over two calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, Wrong, answered, instead, refuse, show
from labs.kit.checks.case import SETTLED, Outcome, close, isclose, largest_of
from labs.kit.checks.job import blame_luck, job, noted
from labs.kit.checks.left import AFTERMATH, OVERWRITTEN, Aftermath
from labs.kit.checks.mixture import mixture
from labs.kit.checks.wire import Late, same_bits
from labs.kit.launch import Results
from labs.kit.record import mark

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0, torch.int64: 0.0, torch.int32: 0.0}
BUDGET = (64, 96)  # the shape whose bytes stand in the line of success
EMPTY = "right only where no piece is empty"
KEPT = 0.1  # × the summand, when a call is over, beyond the piece
COPIES = 4.5  # × the summand besides it: it, laid out anew and padded, and what arrives


@dataclass(frozen=True)
class Case(shared.Case):
    shape: tuple[int, ...]
    dim: int
    group: tuple[int, ...] = ()  # all ranks if it is left out
    strided: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        return self.group or tuple(range(self.ranks))

    @property
    def longest(self) -> int:
        return -(-self.shape[self.dim] // len(self.members))

    @property
    def leaves_somebody_empty(self) -> bool:
        return self.longest * (len(self.members) - 1) >= self.shape[self.dim]

    def summand(self, rank: int) -> Tensor:
        """Numbers that bfloat16 adds up exactly, and that float32 cannot hold."""
        drawn = {
            torch.bfloat16: lambda g: torch.randint(1, 16, self.shape, generator=g).bfloat16(),
            torch.int64: lambda g: torch.randint(2**54, 2**56, self.shape, generator=g),
            torch.int32: lambda g: torch.randint(2**24, 2**26, self.shape, generator=g, dtype=torch.int32),
        }.get(self.dtype, lambda g: torch.randn(self.shape, generator=g, dtype=torch.float64).to(self.dtype))
        x = drawn(self.generator(rank))
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.strided else x

    def piece(self, whole: Tensor, index: int, dim: int | None = None) -> Tensor:
        """What index holds of a whole tensor, cut along `dim`; no elements behind the end."""
        dim = self.dim if dim is None else dim
        pieces = whole.chunk(len(self.members), dim)
        return pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)

    def total(self) -> Tensor:
        return torch.stack([self.summand(rank) for rank in self.members]).sum(0, dtype=self.dtype)

    def __str__(self) -> str:
        within = f"the group of ranks {self.members}" if self.group else self.who
        return f"{within}, {self.shape} of {self.dtype_name}, dim {self.dim}{', not contiguous' * self.strided}"


@answered
def partial_to_shard(fn: Callable[..., Any], seed: int) -> str:
    """`fn(summand, dim, group=None) -> piece`: this rank's, along dim, of the sum of all ranks' summands."""
    for ranks, cases in drawn(seed).items():
        results = play(fn, cases, ranks)
        judge_all(cases, results)
        if ranks == 4:
            most = max(results.recording.sent(rank, 0) for rank in range(4)) / (4 * prod(BUDGET))
    case = Case(seed, 4, dtype=torch.float32, shape=(256, 128), dim=1)
    memory = job(hold, fn, case, ranks=4, record="memory").recording
    for rank in range(4):
        held = [memory.held(rank, step)["peak"] / 4 / prod(case.shape) - 1 for step in range(4)]
        refuse(HELD, Held(held[0], held[1], held[3], 1 / case.ranks), f"{case}: rank {rank} ")
    return f"you sent {most:.2f} × the tensor per rank; the least possible is 0.75 ×"


def play(fn: Callable[..., Any], cases: list[Case], ranks: int) -> Results:
    try:
        return job(all_cases, fn, cases, ranks=ranks)
    except Wrong as wrong:
        others = [case for case in cases if not case.leaves_somebody_empty]
        if not (wrong.raised or wrong.untouched or len(others) == len(cases)):
            judge_all(others, job(all_cases, fn, others, ranks=ranks))
            first = wrong.answer.text.splitlines()[0]
            question = "A rank whose own piece is empty has summands of the others' pieces. Who waits for them?"
            raise Wrong(f"where a rank's piece is empty, {first}", question, EMPTY) from None
        raise


def drawn(seed: int) -> dict[int, list[Case]]:
    """By number of ranks; those of 4 begin with the budget's, and the idea itself."""
    draw = random.Random(seed)

    def case(ranks: int, shape: tuple[int, ...], dim: int = 0, only: str = "", **options: Any) -> Case:
        return Case(draw.randrange(2**40), ranks, shape=shape, dim=dim, only=only, **options)

    a, many = draw.randrange(2, 6), draw.choice((5, 6, 7, 8))
    return {
        4: [
            case(4, BUDGET, dtype=torch.float32),
            case(4, (8, a)),
            case(4, (8, a), 0, "right only the first time"),
            case(4, (a, 12), 1),
            case(4, (3, 8, a), 1),
            case(4, (2, 3, 8), 2),
            case(4, (3, 3, 8), 2),
            case(4, (4 * a + draw.randrange(1, 4), 3)),
            case(4, (3, 9), 1),
            *(case(4, shape, dim, EMPTY) for shape, dim in (((5, a), 0), ((a, 2), 1), ((1,), 0), ((0, 3), 0))),
            *(
                case(4, (9, 4), 0, "right only in some dtypes", dtype=t)
                for t in (torch.float32, torch.bfloat16, torch.int64, torch.int32)
            ),
            case(4, (6, 10), 1, "right only for contiguous tensors", strided=True),
            case(4, (8, 3), 0, "right only for contiguous tensors", strided=True),
            case(4, (2, 3, 9), 2, "right only for contiguous tensors", strided=True),
            case(4, (7, 4), 0, "right only on the group of all ranks", group=(1, 2, 3)),
        ],
        3: [case(3, (6, a), 0), case(3, (7, 2))],
        1: [case(1, (5, 3), 1, "right only on more than one rank")],
        many: [case(many, (2 * many, 3), 0), case(many, (3, many + 1), 1, EMPTY)],
    }


# ---- on a rank -------------------------------------------------------------------------------------------


@dataclass
class Scattered(Outcome):
    overwritten: bool = False  # what was returned, in a later call


def all_cases(fn: Callable[..., Any], cases: list[Case]) -> list[Scattered | None]:
    called = [one_case(fn, case, group_of(case.group) if case.group else None) for case in cases]
    for outcome, returned in filter(None, called):
        outcome.overwritten = isinstance(returned, Tensor) and not same_bits(returned, outcome.returned)
    return [each and each[0] for each in called]


@cache
def group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(members))


def one_case(fn: Callable[..., Any], case: Case, group: dist.ProcessGroup | None) -> tuple[Scattered, Any] | None:
    """And what was returned, itself."""
    rank = dist.get_rank()
    if rank not in case.members:
        mark("step")
        return None
    x = case.summand(rank)
    with Late(rank, case.seed) as wire, Aftermath() as aftermath:
        mark("step")
        returned = noted(case, fn, x, case.dim, **({} if group is None else {"group": group}))
        mark("end")
    told = returned.detach().clone() if isinstance(returned, Tensor) else show(returned)
    outcome = Scattered([x], told, wire.touched)
    aftermath.tell(outcome)
    return outcome, returned


def hold(fn: Callable[..., Any], case: Case) -> None:
    """Two calls in a row, and after each of them a step in which nothing happens, but that the piece is there."""
    x = case.summand(dist.get_rank())
    for _ in range(2):
        mark("step")
        piece = fn(x, case.dim)
        mark("end")
        time.sleep(SETTLED)
        mark("step")
        mark("end")
        del piece


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class One:
    """One rank's part of a call; `index` is its number in the group."""

    case: Case
    index: int
    outcome: Outcome

    @property
    def rank(self) -> int:
        return self.case.members[self.index]

    @property
    def found(self) -> Any:
        return self.outcome.returned

    def is_piece(self, piece: Tensor) -> bool:
        return piece.numel() > 0 and self.found.shape == piece.shape and close(self.found, piece, 1e-5)

    @property
    def due(self) -> Tensor:
        return self.case.piece(self.case.total(), self.index)


def judge_all(cases: list[Case], results: Results) -> None:
    for step, case in enumerate(cases):
        ones = [One(case, index, results[rank][step]) for index, rank in enumerate(case.members)]
        events = [event for event in results.recording.events if event.step == step and event.rank in case.members]
        try:
            judge(ones)
            judge_traffic(case, [results.recording.sent(rank, step) for rank in case.members], events)
        except Wrong as wrong:
            raise blame_luck(wrong, events).also(case.only) from None
        for one in ones:
            refuse((OVERWRITTEN, *AFTERMATH), one.outcome, f"{case}: on rank {one.rank} ")


def judge(ones: list[One]) -> None:
    for one in ones:
        where = f"{one.case}: rank {one.rank} "
        refuse(RETURNED, one, where)
        due = one.due
        largest = largest_of(map(one.case.summand, one.case.members))
        if not close(one.found, due, TOLERANCE[one.case.dtype], largest):
            differs = ~isclose(one.found, due, 1e-5 if TOLERANCE[one.case.dtype] else 0.0)
            found, right = one.found.flatten(), due.flatten()
            at = int((differs if differs.any() else one.found != due).flatten().nonzero()[0])
            refuse(VALUES, one, f"{where}at element {at} has {instead(found[at], right[at])}\n")
        if not torch.equal(one.outcome.after[0], one.case.summand(one.rank)):
            raise Wrong(
                f"{where}has a different summand than before",
                "Who may still need the summand?",
                "the summand has changed",
            )


def judge_traffic(case: Case, sent: list[int], events: list[Any]) -> None:
    whole, n = prod(case.shape) * case.dtype.itemsize, len(case.members)
    padded = whole // max(1, case.shape[case.dim]) * case.longest * n
    if sum(sent) < (n - 1) * whole:
        raise Wrong(
            f"{case}: the ranks sent {sum(sent):,} bytes; {(n - 1) * whole:,} is the least possible",
            "How else did the numbers get there?",
            "less than the least possible",
        )
    if max(sent) > (n - 1) / n * padded + 16 * n:
        told = f"{case}: a rank sent {max(sent):,} bytes; {(n - 1) * padded // n:,} are enough"
        if any(event.op == "all_reduce" for event in events):
            question = "An all-reduce brings everything to everybody. Who needs which part?"
            raise Wrong(told, question, "an all-reduce where a part is enough")
        if any(event.dtype != str(case.dtype).removeprefix("torch.") for event in events):
            raise Wrong(told, "In which dtype do the numbers travel?", "a different dtype travels")
        raise Wrong(told, "Which part of your summand does each other rank need?", "too many bytes")


CALLER = "What does the caller need to hold when you are done?"
PADDING = "Which of the elements are padding, and who cuts them off?"
RETURNED = (
    Mistake("nothing is returned", CALLER, lambda one: one.found == "None" if isinstance(one.found, str) else False),
    Mistake("not a tensor", CALLER, lambda one: not isinstance(one.found, Tensor) and f"returned {one.found}"),
    Mistake(
        "the dtype changed",
        "In which dtype was the summand?",
        lambda one: one.found.dtype != one.case.dtype and f"returned {show(one.found)}",
    ),
    Mistake(
        "the whole sum instead of a piece",
        "Partial() to Replicate() is another row of the table. Which part is this rank's?",
        lambda one: one.found.shape == one.case.shape != one.due.shape and f"returned {show(one.found)}",
    ),
    Mistake(
        "the padding is still there",
        PADDING,
        lambda one: (
            one.found.numel() > one.due.numel()
            and one.found.ndim == one.due.ndim
            and one.found.shape[one.case.dim] == one.case.longest
            and f"returned {show(one.found)}; its piece has shape {tuple(one.due.shape)}"
        ),
        shows="right where the dim divides; elsewhere the last pieces end in zeros",
    ),
    Mistake(
        "cut along another dim",
        "Which dim does Shard(dim) name?",
        lambda one: (
            any(
                one.found.shape == one.case.piece(one.case.total(), one.index, dim).shape != one.due.shape
                for dim in range(len(one.case.shape))
                if dim != one.case.dim
            )
            and f"returned {show(one.found)}; its piece has shape {tuple(one.due.shape)}"
        ),
    ),
    Mistake(
        "a piece of another shape",
        "How does torch.chunk cut this many elements into N pieces?",
        lambda one: (
            one.found.shape != one.due.shape
            and f"returned {show(one.found)}; its piece has shape {tuple(one.due.shape)}"
        ),
    ),
)


def scattered_in_memory_order(one: One) -> bool:
    """A run of the flat sum, and not a piece along the dim."""
    flat = one.case.total().flatten()
    start = one.index * one.due.numel()
    return (
        one.is_piece(flat[start : start + one.due.numel()].view(-1).reshape(one.due.shape))
        if (start + one.due.numel() <= len(flat))
        else False
    )


def rotated(one: One) -> str | None:
    whole = one.case.total()
    for place in range(len(one.case.members)):
        if place != one.index and one.is_piece(one.case.piece(whole, place)):
            return f"That is piece {place}."
    return None


def times(one: One, value: Callable[[int], float]) -> bool:
    """Whether each rank's numbers are in it so many times."""
    pieces = [one.case.piece(one.case.summand(rank), one.index).flatten() for rank in one.case.members]
    found = mixture(one.found.flatten(), pieces)
    due = torch.tensor([value(rank) for rank in one.case.members], dtype=torch.float64)
    return found is not None and torch.allclose(found, due, atol=1e-3)


VALUES = (
    Mistake(
        "averaged instead of summed",
        "What do the summands make: a sum, or a mean?",
        lambda one: times(one, lambda rank: 1 / len(one.case.members)),
    ),
    Mistake(
        "one's own summand",
        "Where are the others' summands?",
        lambda one: (
            one.is_piece(one.case.piece(one.case.summand(one.rank), one.index))
            or times(one, lambda rank: float(rank == one.rank))
        ),
        shows="no error, and numbers that are too small: a summand was taken for the tensor",
    ),
    Mistake("the pieces are rotated", "Which piece is rank r's?", rotated),
    Mistake(
        "cut in the order of memory",
        "Which elements lie side by side in memory, and which side by side along the dim?",
        lambda one: one.case.dim > 0 and (scattered_in_memory_order(one) or sums_of_all(one)),
    ),
    Mistake(
        "rounded on the way",
        "In which dtype do the numbers travel, and in which are they added?",
        lambda one: close(one.found, one.due.to(one.found.dtype), 2e-2) and "It is right but for its last digits.",
    ),
    Mistake(
        "read before it was written",
        "Who writes into this tensor, and when is that done?",
        lambda one: not one.found.isfinite().all(),
    ),
    Mistake("", "Of which summands, and of which of their elements, is this made?", lambda one: True),
)


def sums_of_all(one: One) -> bool:
    """The right sums, at other places."""
    whole = one.case.total().flatten().double()
    return bool((one.found.flatten().double()[:, None] - whole[None]).abs().min(1).values.max() < 1e-9)


@dataclass(frozen=True)
class Held:
    """By a rank, × the summand, besides it."""

    most: float  # in the first call
    after: float  # it, with what it returned
    later: float  # after the second call, with what that returned
    piece: float


HELD = (
    Mistake(
        "something is kept from every call",
        "Which name still refers to it when you have returned?",
        lambda held: (
            held.later > held.after + KEPT
            and f"holds {held.after:.2f} × the tensor after one call, {held.later:.2f} × after two"
        ),
    ),
    Mistake(
        "more than the piece is kept",
        "What is still there, because of a name or of a view that is left?",
        lambda held: (
            held.after > held.piece + KEPT
            and f"holds {held.after:.2f} × the tensor when the call is over; its piece is {held.piece:.2f} ×"
        ),
        shows="right, but all that arrived stays in memory as long as the piece",
    ),
    Mistake(
        "full copies are kept",
        "How many copies of the whole tensor are there at once?",
        lambda held: held.most > COPIES and f"held {held.most:.2f} × the tensor besides the tensor itself",
    ),
)
