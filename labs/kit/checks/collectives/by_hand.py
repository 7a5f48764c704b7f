"""Four collectives by hand, in place: a broadcast by a tree; reduce_scatter, all_gather and all_reduce by rings.

    collective       tensors sent, all ranks    messages of a rank    rounds allowed (a ring's; twice if calls block)
    broadcast        N - 1                      ceil(log2 N)          ceil(log2 N)
    reduce_scatter   N - 1                      N - 1                 2 (N - 1)
    all_gather       N - 1                      N - 1                 2 (N - 1)
    all_reduce       2 (N - 1)                  2 (N - 1)             4 (N - 1)

A reduce_scatter or an all_gather cannot send less than N - 1 tensors in all, an all_reduce twice that (Patarasuk and
Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"); a broadcast needs N - 1 messages,
and ceil(log2 N) rounds, as the ranks that know at most double in each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, log2, prod
from typing import Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.late_wire import nonsense
from labs.kit.checks.one import One, as_if
from labs.kit.checks.ranks import BF16, F32, I64, Draw, Exercise, Given, checked
from labs.kit.checks.rows import Sends, Sent
from labs.kit.checks.scripts import Look, same_numbers
from labs.kit.record import Event, Recording

BUDGET, BUDGET_STEP = 4096, 1  # float32 elements; the same in every call, so that the line of success is
LARGE = 1 << 16


@dataclass(frozen=True)
class InPlace(Given):
    """root: the global rank that has what all get."""

    root: int = 0

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.flatten().tensor_split(self.n)

    def own(self, index: int) -> Tensor:
        return self.tensor(self.members[index])

    def own_or_infinity(self, index: int) -> Tensor:
        """Of float32 all but the root bring infinity, which must leave no trace."""
        own = self.own(index)
        return own.fill_(torch.inf) if self.dtype is F32 and self.members[index] != self.root else own

    def only_my_piece(self, index: int) -> Tensor:
        """The gathered tensor's piece, and nonsense elsewhere."""
        x = nonsense(torch.empty(prod(self.shape), dtype=self.dtype))
        self.pieces(x)[index].copy_(self.pieces(self.gathered)[index])
        return x.view(self.shape) if not self.strided else x.view(self.shape).t().contiguous().t()

    @property
    def gathered(self) -> Tensor:
        return self.tensor(63)


def in_place(world: InPlace, fn: Callable[..., Any], brings: str = "own") -> Iterator[Look | None]:
    """What becomes of its tensor."""
    x = getattr(world, brings)(world.index())
    before, root = x.clone(), (world.root,) if world.root else ()
    yield None
    fn(x, *root, **world.process_group())
    yield Look({"": x}, {"before": before})


def with_its_piece(world: InPlace, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """What it returns; and what becomes of its tensor."""
    x = world.own(world.index())
    yield None
    returned = fn(x, **world.process_group())
    yield Look({"": returned}, {"x": x})


def worlds(draw: Draw, rooted: bool = False) -> dict[int, list[InPlace]]:
    """Those of 4 ranks begin with the idea itself, and the budget's."""
    pick = draw.random

    def case(ranks: int, size: int | tuple[int, ...], only: str = "", root: int = 0, **options: Any) -> InPlace:
        shape = size if isinstance(size, tuple) else (size,)
        return draw.world(InPlace, ranks, shape=shape, only=only, root=root * rooted, **options)

    def odd(n: int) -> int:
        return n * pick.randrange(3, 9) + pick.randrange(1, n)

    def on(ranks: int, *sizes: int, only: str) -> list[InPlace]:
        return [case(ranks, size, only, root=root % ranks) for root, size in enumerate(sizes)]

    even, many = 4 * pick.randrange(6, 12), pick.choice((5, 6, 7, 8))
    whole = "right only for some sizes" if rooted else "right only when the number of ranks divides the size"
    return {
        4: [
            case(4, even),
            case(4, BUDGET, dtype=F32),
            case(4, even, "right only in the first call"),
            *(case(4, size, whole) for size in (odd(4), 4 * pick.randrange(3, 9) + 2, 3, 1, 0)),
            *(case(4, shape, "right only in one dimension") for shape in ((3, 5), (7, 5), ())),
            *(case(4, odd(4), "right only from root 0", root=root) for root in (2, 1, 3) if rooted),
            *(case(4, odd(4), "right only in some dtypes", dtype=dtype) for dtype in (F32, I64, BF16)),
            # In a group of its own: what it sends before it refuses is nobody else's.
            case(4, (3, 5), "right only for contiguous tensors", strided=True, refusable=True, group=(0, 1, 2, 3)),
        ],
        # Large comes where what is right by luck has been told: a large message that nobody waits for may hang.
        3: [
            *on(3, 3 * pick.randrange(2, 7), odd(3), 2, only="right only when the number of ranks is a power of two"),
            case(3, LARGE, "right only for small tensors", dtype=F32, traced=True),
        ],
        2: on(2, 2 * pick.randrange(2, 7), odd(2), 1, only="right only on more than two ranks"),
        1: on(1, pick.randrange(2, 7), 0, only="right only on more than one rank"),
        # A group of four, so that it is not their number that is wrong there.
        many: [
            *on(many, odd(many), many, many - 1, only="right only on up to four ranks"),
            *(
                case(many, size, "right only on the group of all ranks", root, group=(1, 2, 3, 4))
                for size, root in ((12, 2), (odd(4), 1))
            ),
        ],
    }


# ---- rounds ----------------------------------------------------------------------------------------------


def count_rounds(events: list[Event]) -> int:
    """The longest chain: a send comes after what its rank has received or sent before it.

    A round is what can happen at one moment when a rank sends one message and receives one message at a time.
    """
    carrying = [e for e in events if e.op in ("send", "recv") and (e.bytes_in or e.bytes_out)]
    on_the_way: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    last_sent: dict[int, int] = defaultdict(int)
    last_received: dict[int, int] = defaultdict(int)
    for event in sorted(carrying, key=lambda e: e.start if e.op == "send" else e.end):
        if event.op == "send":
            last_sent[event.rank] = 1 + max(last_sent[event.rank], last_received[event.rank])
            on_the_way[event.rank, event.peer].append(last_sent[event.rank])
        elif on_the_way[event.peer, event.rank]:
            arrived = on_the_way[event.peer, event.rank].pop(0)
            last_received[event.rank] = max(arrived, 1 + last_received[event.rank])
    return max([*last_sent.values(), *last_received.values()], default=0)


def too_many_rounds(enough: Callable[[int], int]) -> Callable[[Sent], str | None]:
    def fits(sent: Sent) -> str | None:
        if sent.too_much or sent.other_dtypes:  # which says more
            return None
        rounds, due = count_rounds(sent.events), enough(sent.world.n)
        return (
            f"it took {rounds} rounds, as ranks wait for each other in turn; {due} are enough" if rounds > due else None
        )

    return fits


def tree(n: int) -> int:
    return ceil(log2(n))


def unchanged(one: One) -> bool:
    return same_numbers(one.found, one.done.facts["before"])


def right_on_one(one: One) -> str | None:
    right = [rank for rank, done in one.seen.ranks if one.near(done.values[""], one.due)]
    if unchanged(one) and len(right) == 1:
        return f"Rank {right[0]} has it; rank {one.rank} has what it brought."
    return None


def another_piece(one: One) -> str | None:
    pairs = list(enumerate(zip(one.world.pieces(one.found), one.world.pieces(one.due), strict=True)))
    for place, (piece, _) in pairs:
        for other, (_, due) in pairs:
            if other != place and piece.numel() and torch.equal(piece, due[: len(piece)]):
                return f"Piece {other} stands in the place of piece {place}."
    return None


def whole_sum_elsewhere(one: One) -> str | None:
    """What it returned is a part of a sum; in its tensor, another piece is a whole one."""
    pieces = zip(one.world.pieces(one.done.facts["x"]), one.world.pieces(one.world.total), strict=True)
    for place, (piece, due) in enumerate(pieces):
        if place != one.index and piece.numel() and due.any() and one.near(piece, due, 1e-5):
            return f"In the tensor of rank {one.rank}, piece {place} is a whole sum."
    return None


def rotated(world: InPlace) -> Iterator[list[Tensor]]:
    pieces = world.pieces(world.total)
    return ([*pieces[shift:], *pieces[:shift]] for shift in range(1, world.n))


def own_piece_only(one: One) -> str | bool:
    found, due = (one.world.pieces(x)[one.index] for x in (one.found, one.due))
    rounded = one.near(one.found, one.due, 2e-2)
    return one.near(found, due, 1e-5) and not rounded and f"Piece {one.index}, its own, is right."


def other_bits(sent: Sent) -> str | bool:
    first, *others = (done.values[""] for done in sent.seen.done)
    return not all(torch.equal(first, x) for x in others) and "the sums differ between ranks in their last bits"


# fmt: off
NOTHING = Mistake("nothing arrived", "Which line writes into the tensor that you were given?",
                  lambda one: unchanged(one) and f"Rank {one.rank} still has what it brought.")
WHOLE = Mistake("whole tensors travel",
                "How large is what you hand to your neighbour, and which part of it is needed there?",
                lambda sent: any(event.bytes_in == sent.world.nbytes for event in sent.seen.messages)
                and sent.world.nbytes > sent.world.dtype.itemsize and sent.too_much,
                shows="the right answer, for N/2 to N times the bytes")
TURNS = Mistake("too many rounds", "Could every rank send and receive at the same moment?",
                too_many_rounds(lambda n: 2 * (n - 1)))
# fmt: on


def ring(copies: int) -> Callable[[InPlace], Sends]:
    """copies: of the tensor that travel, × (N - 1)."""

    def sends(world: InPlace) -> Sends:
        each = copies * (world.n - 1)
        longest = world.pieces(world.xs[0])[0].nbytes
        total = each * world.nbytes
        return Sends(total, lambda rank: each * longest, lambda rank: each, ("send", "recv"), most=total)

    return sends


def by_tree(world: InPlace) -> Sends:
    total = (world.n - 1) * world.nbytes
    return Sends(total, lambda rank: inf, lambda rank: tree(world.n), ("send", "recv"), most=total)


def wide(draw: Draw) -> InPlace:
    return draw.world(InPlace, 4, shape=(LARGE,), dtype=F32)


# fmt: off
SAME_ROUND = {"more messages than needed": "Could what goes to the same rank in the same round go as one message?"}
BROADCAST = Exercise(
    partial(worlds, rooted=True),
    due=lambda world: [world.tensor(world.root)] * world.n,
    script=partial(in_place, brings="own_or_infinity"),
    sends=by_tree, wide=wide, most=1, rest=0,
    question="After one round two ranks know the tensor. How many could know it after the next one?",
    mistakes=(
        NOTHING,
        Mistake("what was there before leaves a trace", "What is 0 × infinity, and who may need a rank's old numbers?",
                lambda one: one.world.dtype is F32 and not one.found.isfinite().all()),
        Mistake("", "", as_if(lambda world: ([world.tensor(other)] * world.n for other in world.members))),
    ),
    sending=(
        Mistake("the root sends to all", "", lambda sent: too_many_rounds(tree)(sent)
                if sum(event.rank == sent.world.root for event in sent.seen.messages) == sent.world.n - 1 else None),
        Mistake("too many rounds", "", too_many_rounds(tree)),
    ),
    asks=SAME_ROUND | {
        "right only when the number of ranks is a power of two":
            "In the last round on three ranks, whom does each rank tell? Is there a rank with that number?",
    },
)
REDUCE_SCATTER = Exercise(
    worlds,
    due=lambda world: world.pieces(world.total),
    script=with_its_piece,
    summands=lambda world, index: [world.pieces(x)[index] for x in world.xs],
    sends=ring(1), wide=wide, most=1, rest=0.25,
    question="Which one piece does the neighbour need from you in this round?",
    forms=(
        Mistake("the whole tensor instead of a piece", "How does tensor_split cut this many elements into N pieces?",
                lambda one: isinstance(one.found, Tensor)
                and one.due.numel() != one.found.numel() == one.world.total.numel() and f"returned {one.told}"),
    ),
    mistakes=(
        Mistake("the pieces are rotated",
                "A partial sum sets out from rank r and takes N - 1 steps. Where does it end?",
                lambda one: as_if(rotated)(one) or whole_sum_elsewhere(one),
                shows="every number is right, but in another's place"),
    ),
    after=(
        Mistake("not in place", "Where would an all_gather go on from?",
                lambda one: not one.near(one.world.pieces(one.done.facts["x"])[one.index], one.due, 1e-5)
                and "returned what is right, but its piece of the tensor is not"),
    ),
    sending=(WHOLE, TURNS),
    asks=SAME_ROUND | {"another shape": "How does tensor_split cut this many elements into N pieces?"},
)
ALL_GATHER = Exercise(
    worlds,
    due=lambda world: [world.gathered] * world.n,
    script=partial(in_place, brings="only_my_piece"),
    sends=ring(1), wide=wide, most=1, rest=0,
    question="Which piece did you receive in the round before, and who lacks it now?",
    mistakes=(
        Mistake("right on one rank only", "How do the others learn it?", right_on_one),
        NOTHING,
        Mistake("a piece is missing", "", lambda one: one.found.isnan().any() and "A piece never arrived there."),
        Mistake("a piece in another's place", "Whose piece has just arrived, and where does that one belong?",
                another_piece),
    ),
    sending=(WHOLE, TURNS),
    asks=SAME_ROUND,
)
ALL_REDUCE = Exercise(
    worlds,
    due=lambda world: [world.total] * world.n,
    script=in_place,
    summands=lambda world, index: world.xs,
    pieces=InPlace.pieces,
    sends=ring(2), wide=wide, most=1, rest=0,
    question="What if each rank first became responsible for the sum of one piece only?",
    mistakes=(
        Mistake("right on one rank only", "How do the others learn it?", right_on_one),
        NOTHING,
        Mistake("pieces that nobody gathered", "Who knows the sum of the other pieces?", own_piece_only),
    ),
    sending=(
        WHOLE,
        replace(TURNS, fits=too_many_rounds(lambda n: 4 * (n - 1))),
        Mistake("not the same bits on every rank", "Does every rank add up in the same order?", other_bits),
    ),
    asks=SAME_ROUND,
)
# fmt: on


@answered
def broadcast(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, root=0, group=None)`: every rank's x becomes global rank `root`'s, in place, by a tree."""
    events = checked(BROADCAST, (fn,), seed).recording.events
    rounds = count_rounds([event for event in events if event.step == BUDGET_STEP])
    return f"{rounds} rounds on 4 ranks; the least possible is {tree(4)}"


@answered
def reduce_scatter(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None) -> piece`: piece r of x becomes the sum over all ranks on rank r, which also returns it."""
    return sent_line(checked(REDUCE_SCATTER, (fn,), seed).recording, least=0.75)


@answered
def all_gather(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: rank r brings piece r of x; afterwards every rank has all of them, in place."""
    return sent_line(checked(ALL_GATHER, (fn,), seed).recording, least=0.75)


@answered
def all_reduce(fn: Callable[..., Any], seed: int) -> str:
    """`fn(x, group=None)`: every rank's x becomes the sum over all ranks, in place."""
    return sent_line(checked(ALL_REDUCE, (fn,), seed).recording, least=1.5)


def sent_line(recording: Recording, least: float) -> str:
    most = max(recording.sent(rank, BUDGET_STEP) for rank in range(4)) / (BUDGET * 4)
    return f"you sent {most:.2f} × the tensor per rank; the least possible is {least:.2f} ×"
