"""Four collectives by hand, in place: a broadcast by a tree; reduce_scatter, all_gather and all_reduce by rings.

    collective       tensors sent, all ranks    messages of a rank    rounds allowed (a ring's; twice if calls block)
    broadcast        N - 1                      ceil(log2 N)          ceil(log2 N)
    reduce_scatter   N - 1                      N - 1                 2 (N - 1)
    all_gather       N - 1                      N - 1                 2 (N - 1)
    all_reduce       2 (N - 1)                  2 (N - 1)             4 (N - 1)

A reduce_scatter or an all_gather cannot send less than N - 1 tensors in all, and an all_reduce twice that (Patarasuk
and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").  A broadcast needs N - 1
messages, and ceil(log2 N) rounds, because the number of ranks with the tensor at most doubles in each.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake
from labs.exercises.engine.around_a_call import nonsense
from labs.exercises.engine.common_mistakes import Sends, Sent
from labs.exercises.engine.on_ranks import BF16, F32, I64, Draw, Given
from labs.exercises.engine.scripts import Look, same_numbers
from labs.exercises.engine.value import One
from labs.kit.record import Event, Recording

BUDGET, BUDGET_STEP = 4096, 1  # float32 elements, and the step: the same in every call, like the ✓ line
LARGE = 1 << 16


@dataclass(frozen=True)
class InPlace(Given):
    """A world in which the function writes its result into its input.

    root: the global rank whose tensor a broadcast sends.
    """

    root: int = 0

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.flatten().tensor_split(self.n)

    def own(self, index: int) -> Tensor:
        return self.tensor(self.members[index])

    def own_or_infinity(self, index: int) -> Tensor:
        """Return a rank's input of a broadcast; in float32, all but the root have infinity, which must not spread."""
        own = self.own(index)
        return own.fill_(torch.inf) if self.dtype is F32 and self.members[index] != self.root else own

    def only_my_piece(self, index: int) -> Tensor:
        """Return a rank's input of an all-gather: its piece of the gathered tensor, and nonsense elsewhere."""
        x = nonsense(torch.empty(prod(self.shape), dtype=self.dtype))
        self.pieces(x)[index].copy_(self.pieces(self.gathered)[index])
        return x.view(self.shape) if not self.strided else x.view(self.shape).t().contiguous().t()

    @property
    def gathered(self) -> Tensor:
        return self.tensor(63)


def in_place(world: InPlace, fn: Callable[..., Any], brings: str = "own") -> Iterator[Look | None]:
    """Play one call of a collective: yield before it, and then a look at the tensor that it changed in place.

    brings: the name of the method that returns a rank's input.
    """
    x = getattr(world, brings)(world.index())
    before, root = x.clone(), (world.root,) if world.root else ()
    yield None
    fn(x, *root, **world.process_group())
    yield Look({"": x}, {"before": before})


def worlds(draw: Draw, rooted: bool = False) -> dict[int, list[InPlace]]:
    """Return the worlds of a collective; those of 4 ranks begin with a plain one and the one of the budget.

    rooted: whether the collective has a root.
    """
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
            # A group of its own keeps the messages before a refusal apart from those of other worlds.
            case(4, (3, 5), "right only for contiguous tensors", strided=True, refusable=True, group=(0, 1, 2, 3)),
        ],
        # The large tensor comes last, since a large message that nobody waits for may hang instead of being reported.
        3: [
            *on(3, 3 * pick.randrange(2, 7), odd(3), 2, only="right only when the number of ranks is a power of two"),
            case(3, LARGE, "right only for small tensors", dtype=F32, traced=True),
        ],
        2: on(2, 2 * pick.randrange(2, 7), odd(2), 1, only="right only on more than two ranks"),
        1: on(1, pick.randrange(2, 7), 0, only="right only on more than one rank"),
        # A group of four ranks, so that the number of ranks is not the reason if it fails.
        many: [
            *on(many, odd(many), many, many - 1, only="right only on up to four ranks"),
            *(
                case(many, size, "right only on the group of all ranks", root, group=(1, 2, 3, 4))
                for size, root in ((12, 2), (odd(4), 1))
            ),
        ],
    }


def count_rounds(events: list[Event]) -> int:
    """Return the length of the longest chain, in which a send follows everything that its rank received or sent before.

    A round is everything that can happen at once if a rank sends one message and receives one message at a time.
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
    """Return a row's test, which describes a call that takes more rounds than `enough(ranks)`."""

    def matches(sent: Sent) -> str | None:
        if sent.too_much or sent.other_dtypes:  # the rows about messages say more than this one
            return None
        rounds, expected = count_rounds(sent.events), enough(sent.world.n)
        return (
            f"it took {rounds} rounds, as ranks wait for each other in turn; {expected} are enough"
            if rounds > expected
            else None
        )

    return matches


def unchanged(one: One) -> bool:
    return same_numbers(one.received, one.done.facts["before"])


# fmt: off
NOTHING = Mistake("nothing arrived", "Which line writes into the tensor that you were given?",
                  lambda one: unchanged(one) and f"Rank {one.rank} still has what it brought.")
WHOLE = Mistake("whole tensors travel",
                "How large is what you hand to your neighbour, and which part of it is needed there?",
                lambda sent: any(event.bytes_in == sent.world.nbytes for event in sent.seen.messages)
                and sent.world.nbytes > sent.world.dtype.itemsize and sent.too_much,
                symptom="the right answer, for N/2 to N times the bytes")
TURNS = Mistake("too many rounds", "Could every rank send and receive at the same moment?",
                too_many_rounds(lambda n: 2 * (n - 1)))
# fmt: on


def ring(copies: int) -> Callable[[InPlace], Sends]:
    """Return the `sends` of an exercise on a ring collective, which sends copies × (N - 1) tensors over all ranks."""

    def sends(world: InPlace) -> Sends:
        each = copies * (world.n - 1)
        longest = world.pieces(world.xs[0])[0].nbytes
        total = each * world.nbytes
        return Sends(total, lambda rank: each * longest, lambda rank: each, ("send", "recv"), most=total)

    return sends


def wide(draw: Draw) -> InPlace:
    return draw.world(InPlace, 4, shape=(LARGE,), dtype=F32)


# fmt: off
SAME_ROUND = {"more messages than needed": "Could what goes to the same rank in the same round go as one message?"}
# fmt: on


def sent_line(recording: Recording, least: float) -> str:
    """Return the line of success, with the most bytes that a rank sent in the step of the budget."""
    most = max(recording.sent(rank, BUDGET_STEP) for rank in range(4)) / (BUDGET * 4)
    return f"you sent {most:.2f} × the tensor per rank; the least possible is {least:.2f} ×"
