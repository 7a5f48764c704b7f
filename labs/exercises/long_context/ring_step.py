"""ring_step: keys and values go to the next rank while this rank attends to them, and the parts are merged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.collectives import place
from labs.cp import Pieces, merge, zigzag
from labs.cp.partial_softmax import Part, attend
from labs.exercises.engine.answer import Mistake, Wrong, answered, says
from labs.exercises.engine.common_mistakes import Sends
from labs.exercises.engine.on_ranks import F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, World, same_numbers
from labs.exercises.engine.value import as_if
from labs.kit.nccl.would_hang import SOUND, would_hang
from labs.kit.watch import c10d_tap

NAMES = "the output", "the log-sum-exp", "the pair that arrived"


@dataclass(frozen=True)
class Ring(World):
    """A world in which keys and values go round, a step at a time; the last step, which sends nothing, is left out."""

    tokens: int = 0

    @property
    def pieces(self) -> Pieces:
        return Pieces(zigzag(self.tokens, self.n))

    def numbers(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the queries [B, K, G, T, E] and the pair of keys and values [2, B, K, T, E] of a member."""
        own, draw = len(self.pieces.places[index]), self.generator(index)
        q, pair = (torch.randn(*dims, own, 3, generator=draw, dtype=F64) for dims in ((1, 2, 2), (2, 1, 2)))
        return q.to(self.dtype), pair.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numbers(0)[1].nbytes

    def source(self, index: int, step: int) -> int:
        """Return the member whose keys and values a member has in a step."""
        return (index - step) % self.n

    def attend(self, index: int, step: int, pair: Tensor) -> Part:
        """Return the attention of a member's queries to a pair, as if it was the pair of this step."""
        pieces = self.pieces
        return attend(self.numbers(index)[0], pair, pieces[index], pieces[self.source(index, step)])

    def part(self, index: int, step: int) -> Part:
        return self.attend(index, step, self.numbers(self.source(index, step))[1])

    def values(self, parts: Callable[[int], list[Part]], arrives: int = 1) -> list[dict[str, Tensor]]:
        """Return the values of each member: those parts merged, and the pair of `arrives` members before."""
        pairs = [self.numbers((self.source(index, self.step) - arrives) % self.n)[1] for index in range(self.n)]
        return [dict(zip(NAMES, (*reduce(merge, parts(i)), pairs[i]), strict=True)) for i in range(self.n)]

    def expected(self, arrives: int = 1) -> list[dict[str, Tensor]]:
        return self.values(lambda index: [self.part(index, step) for step in range(self.step + 1)], arrives)

    def not_merged(self) -> list[dict[str, Tensor]]:
        return self.values(lambda index: [self.part(index, self.step)])

    def too_late(self) -> list[dict[str, Tensor]]:
        """Return the values if each rank attends to the pair that has arrived."""
        before = [self.numbers(self.source(index, self.step + 1))[1] for index in range(self.n)]
        if len({pair.shape for pair in before}) > 1:
            return self.expected()

        def parts(index: int) -> list[Part]:
            earlier = [self.part(index, step) for step in range(self.step)]
            return [*earlier, self.attend(index, self.step, before[index])]

        return self.values(parts)

    def __str__(self) -> str:
        return f"{self.within}, {self.tokens} tokens of {self.dtype_name}"


def worlds(draw: Draw) -> dict[int, list[Ring]]:
    odd, on = "right only where all pieces are equally long", draw.random.choice((3, 5))
    return {
        4: [
            draw.world(Ring, 4, tokens=16, steps=3),
            draw.world(Ring, 4, tokens=16, steps=3, dtype=F32),
            draw.world(Ring, 4, tokens=draw.random.choice((21, 27, 30)), steps=3, only=odd),
            draw.world(Ring, 4, tokens=12, steps=2, group=(0, 2, 3), only="right only on the group of all ranks"),
        ],
        2: [draw.world(Ring, 2, tokens=8, only="right only on some numbers of ranks")],
        on: [draw.world(Ring, on, tokens=2 * on, steps=on - 1, only="right only on some numbers of ranks")],
    }


class Order(c10d_tap.Listener):
    """The order of events in a step: a message is posted, a wait for one, attention."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        self.notes.append(call.op)

    def waiting(self, call: c10d_tap.IssuedCall) -> None:
        self.notes.append("wait")


def round_the_ring(world: Ring, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play the steps of a ring: yield before each, and then a look with the parts so far and the pair that arrived."""
    me, so_far = world.index(), None
    pair = world.numbers(me)[1]
    for step in range(world.steps):
        received = torch.empty_like(world.numbers(world.source(me, step + 1))[1])
        before, order = pair.clone(), Order()

        def attend_to(pair: Tensor, step: int = step, order: Order = order) -> Part:
            order.notes.append("attend")
            return world.attend(me, step, pair)

        yield None
        with order:
            returned = fn(pair, received, so_far, attend_to, **world.process_group())
        facts = {"changed": not same_numbers(before, pair), "order": order.notes}
        try:
            (output, logsumexp), arrived = returned
        except (TypeError, ValueError):
            output, logsumexp, arrived = returned, None, None
        yield Look(dict(zip(NAMES, (output, logsumexp, arrived), strict=True)), facts)
        so_far, pair = (output, logsumexp), arrived


def late(notes: list[str]) -> str | bool:
    posts = [place for place, note in enumerate(notes) if note in ("send", "recv")]
    return "attend" in notes and notes.index("attend") < max(posts, default=0) and "attends, and then sends or receives"


def waits(notes: list[str]) -> str | bool:
    return {"attend", "wait"} <= {*notes} and notes.index("wait") < notes.index("attend") and "waits, and then attends"


# fmt: off
MEANWHILE = "What can this rank compute while the next keys and values are on their way?"
TOGETHER = "Every rank sends to the next. If a send waits for its receive, which rank is the first to receive?"
EXERCISE = Exercise(
    worlds,
    Expected(lambda world: world.expected(), tolerance={F64: 1e-10, F32: 1e-4}),
    question="Whose keys and values are here in this step, and whose arrive meanwhile?",
    script=round_the_ring,
    sends=lambda world: Sends(
        least=sum(world.numbers(world.source(i, world.step))[1].nbytes for i in range(world.n)),
        enough=lambda rank: world.numbers(world.source(world.members.index(rank), world.step))[1].nbytes,
        messages=lambda rank: 1, ops=("send", "recv"),
    ),
    mistakes=Mistakes((
        Mistake("the pair goes the other way", "Rank r sends to r + 1. From whom does it receive?",
                lambda one: one.name == NAMES[2] and one.n > 2 and as_if(lambda w: w.expected(arrives=-1))(one)),
        Mistake("nothing has arrived", "Which tensor does the next step begin with?",
                lambda one: one.name == NAMES[2] and as_if(lambda w: w.expected(arrives=0))(one),
                symptom="each rank attends to its own keys N times"),
        Mistake("the parts are not merged", "Of which keys is the softmax that you return?",
                lambda one: one.world.step > 0 and as_if(Ring.not_merged)(one)),
        Mistake("attends to what has arrived", "`attend` knows whose keys are here in this step. Which pair are they "
                "in?", as_if(Ring.too_late), symptom="the last piece is seen twice, or the own piece never"),
        Mistake("the first part is merged with itself", "What is there to merge in the first step?", lambda one:
                one.world.step == 0 and as_if(lambda w: w.values(lambda i: [w.part(i, 0)] * 2))(one)),
    ), after=(
        Mistake("the messages are posted after the attention", MEANWHILE,
                lambda one: late(one.done.facts["order"]), symptom="a timeline in which no message is hidden"),
        Mistake("waits before it attends", MEANWHILE, lambda one: waits(one.done.facts["order"]),
                symptom="a timeline in which no message is hidden"),
    ), raised=(
        Mistake("right only in the steps after the first", "What is there to merge in the first step?",
                says("NoneType' object|cannot unpack non-iterable NoneType")),
    )),
)
# fmt: on


@answered
def ring_step(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(pair, received, so_far, attend, group=None) -> ((output, log-sum-exp), received)`, one step of a ring.

    pair: the keys and values that are here, [2, B, K, T, E], which go to the next rank and stay as they are
    received: a tensor for those of the previous rank
    so_far: the output and log-sum-exp of the earlier steps, or None in the first
    attend: `attend(pair)` returns the output and log-sum-exp of this step's keys
    """
    recording = checked(EXERCISE, (fn,), seed).recording
    verdict = would_hang(recording)
    if verdict.name != SOUND:
        raise Wrong(f"on GPUs the job {verdict.name}:\n{verdict.findings[0].why}", TOGETHER, "not posted together")
    return f"rank 0 sent {recording.sent(0, 0)} bytes, its own piece, and attended meanwhile; it would not hang on NCCL"


def one_step(
    pair: Tensor, received: Tensor, so_far: Part | None, attend: Any, group: dist.ProcessGroup | None = None
) -> tuple[Part, Tensor]:
    """Return the parts so far, merged with this step's, and the pair of the previous rank, which arrives meanwhile."""
    (rank, ranks), post = place(group), partial(dist.P2POp, group=group)
    sent, coming = post(dist.isend, pair, group_peer=(rank + 1) % ranks), (rank - 1) % ranks
    works = dist.batch_isend_irecv([sent, post(dist.irecv, received, group_peer=coming)])
    part = attend(pair)
    so_far = part if so_far is None else merge(so_far, part)
    for work in works:
        work.wait()
    return so_far, received


ring_step.expected = one_step  # the notebook goes on with this function, if the learner's is not right yet
