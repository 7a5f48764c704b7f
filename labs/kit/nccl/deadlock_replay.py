"""A replay of all ranks' calls under NCCL's rules of order, until all calls are done or the ranks are in a deadlock.

Each rank runs its program of calls and waits (calls.py).  A `Call` joins the rank's queue for the call's communicator.
The first call of a queue is in flight, and the next call begins when the first is done.  At a `Wait`, the rank blocks
until the awaited call is done.

    collective    is done when it is in flight on all members of its communicator
    send, recv    are done together; the messages of a communicator from one rank to another match in order
    batch         has all its messages in flight at once, and is done when all its messages are

NCCL's strictness depends on sizes, settings and versions, so `Rules` has rules from the most lenient to the strictest.
Each rule includes the rules before it:

    KIND          a send is done as soon as it is in flight, since NCCL has buffers for small messages
    SENDS_WAIT    a send waits for its recv
    ONE_QUEUE     a rank has one queue for all communicators: a device runs all calls in one order
    TOGETHER      batches that exchange messages are done together, or not at all

The calls are replayed twice under each rule.  In one replay, communicators are made early, one for each group.  In the
other replay (`lazy`), a communicator is made at its first use, where all its members meet, and each pair of ranks has a
communicator for sends and recvs outside of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from labs.kit.nccl.calls import Communicator, NcclCall, Program, describe
from labs.kit.watch.communication import Event


class Rules(IntEnum):
    """NCCL's rules for when a call waits for other calls, from the most lenient to the strictest."""

    KIND, SENDS_WAIT, ONE_QUEUE, TOGETHER = range(4)


@dataclass(frozen=True)
class Stop:
    """A rank that waits in a call until another rank (`awaited`) makes the same call.

    first_use: whether the rank waits at the first use of a communicator, where the members meet before the call itself.
    """

    rank: int
    event: Event
    awaited: int
    first_use: bool = False

    def __str__(self) -> str:
        where = (
            f"the first use of its communicator, {describe(self.event)}," if self.first_use else describe(self.event)
        )
        return f"rank {self.rank} stands at {where} until rank {self.awaited} comes to it"


@dataclass(frozen=True)
class Standstill:
    """The ranks of a deadlock, which wait for each other, or, without a circle, for a rank that has ended."""

    stops: tuple[Stop, ...]
    is_circle: bool

    @property
    def lines(self) -> list[str]:
        """Return a line of text for each rank that waits."""
        *others, last = map(str, self.stops)
        return [*others, last if self.is_circle else f"{last}, and that never happens"]

    def __str__(self) -> str:
        return "; ".join(self.lines)


@dataclass(frozen=True)
class Match:
    """The events of a matched call: a send and its recv, or a collective on all its members."""

    events: tuple[Event, ...]


@dataclass(eq=False)
class Task:
    """A call of one rank in a queue of the replay.

    name: the operation, which must be the same on all members; "" for sends and recvs.
    """

    call: NcclCall
    queue: Communicator
    name: str
    members: tuple[int, ...]
    open: list[Event] = field(default_factory=list)  # sends and recvs without their match
    is_done: bool = False
    partners: list[Task] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.call.rank


class Replay:
    """A replay of all ranks' calls; `stopped` is the deadlock, or None, and `matches` has the calls that were matched.

    ranks: the ranks that were recorded; all other ranks are assumed to make every call that these ranks wait for.
    """

    def __init__(self, programs: Mapping[int, Program], ranks: Collection[int], rules: Rules, lazy: bool):
        self.rules, self.lazy, self.ranks = rules, lazy, set(ranks)
        self.programs = {rank: tuple(self.steps(programs.get(rank, []))) for rank in sorted(self.ranks)}
        self.place = dict.fromkeys(self.programs, 0)
        self.queues: dict[tuple[int, Communicator], deque[Task]] = {}
        self.meeting: dict[Communicator, dict[int, Task]] = {}
        self.halves: dict[tuple[object, ...], deque[tuple[Event, Task]]] = {}
        self.matches: list[Match] = []
        self.beginning: deque[Task] = deque()
        self.going = deque(self.programs)
        while self.going or self.beginning:
            if self.beginning:
                self.begin(self.beginning.popleft())
            else:
                self.go_on(self.going.popleft())
        self.stopped = self.standstill()

    def steps(self, program: Program) -> Iterator[tuple[Task, bool]]:
        """Yield (task, True) where the rank waits for a task, and (task, False) where the rank issues a task."""
        tasks: dict[NcclCall, Task] = {}
        used = set()
        for step in program:
            if not isinstance(step, NcclCall):
                if self.rules < Rules.ONE_QUEUE:  # with one queue, a rank waits for each call at once
                    yield tasks[step.call], True
                continue
            key, members = step.communicator(self.lazy), step.members(self.lazy)
            if self.lazy and key not in used:
                used.add(key)
                meet = Task(step, (*key, "made"), "made", members)
                yield meet, False
                yield meet, True
            name = "" if step.is_message else step.first.op
            tasks[step] = Task(step, key, name, members)
            yield tasks[step], False
            if self.rules >= Rules.ONE_QUEUE:
                yield tasks[step], True

    # ---- a rank, a queue ---------------------------------------------------------------------------------

    def go_on(self, rank: int) -> None:
        """Run a rank's program until the rank must wait for another rank."""
        program = self.programs[rank]
        while self.place[rank] < len(program):
            task, is_wait = program[self.place[rank]]
            if is_wait and not task.is_done:
                return
            self.place[rank] += 1
            if not is_wait:
                queue = self.queues.setdefault((rank, task.queue), deque())
                queue.append(task)
                if len(queue) == 1:
                    self.beginning.append(task)

    def begin(self, task: Task) -> None:
        if task.name:
            self.meet(task)
            return
        task.open = [event for event in task.call.events if event.peer in self.ranks]
        for event in tuple(task.open):
            self.post(event, task)
        self.finish_if_done(task)

    def meet(self, task: Task) -> None:
        meeting = self.meeting.setdefault(task.queue, {})
        meeting[task.rank] = task
        here = {rank for rank in task.members if rank in self.ranks}
        if meeting.keys() >= here and len({other.name for other in meeting.values()}) == 1:
            del self.meeting[task.queue]
            if task.name != "made":
                self.matches.append(Match(tuple(meeting[rank].call.first for rank in task.members if rank in here)))
            for other in meeting.values():
                self.finish(other)

    def post(self, event: Event, task: Task) -> None:
        """Match a send with its recv, or a recv with its send; if the other is not there yet, queue this one for it."""
        is_send = event.op == "send"
        way = (task.queue, event.rank, event.peer) if is_send else (task.queue, event.peer, event.rank)
        if is_send and self.rules == Rules.KIND:
            task.open.remove(event)
        if not (others := self.halves.get((*way, not is_send))):
            self.halves.setdefault((*way, is_send), deque()).append((event, task))
            return
        half, other = others.popleft()
        self.matches.append(Match((event, half) if is_send else (half, event)))
        for own, its in ((event, task), (half, other)):
            if own in its.open:
                its.open.remove(own)
        if self.rules == Rules.TOGETHER:
            task.partners.append(other)
            other.partners.append(task)
        if other is not task:
            self.finish_if_done(other)

    def finish_if_done(self, task: Task) -> None:
        together = reached(task)
        if not task.is_done and not any(other.open for other in together):
            for other in together:
                self.finish(other)

    def finish(self, task: Task) -> None:
        task.is_done = True
        queue = self.queues[task.rank, task.queue]
        queue.popleft()
        if queue:
            self.beginning.append(queue[0])
        self.going.append(task.rank)

    # ---- no rank can continue ----------------------------------------------------------------------------

    def standstill(self) -> Standstill | None:
        stands = next(filter(None, map(self.stands_at, self.programs)), None)
        if stands is None:
            return None
        stops: dict[Task, Stop] = {}
        while stands is not None and stands not in stops:
            stops[stands], following = self.stop(stands)
            stands = following
        first = [*stops].index(stands) if stands else 0
        return Standstill(tuple(stops.values())[first:], stands is not None)

    def stands_at(self, rank: int) -> Task | None:
        """Return the task in flight that keeps a rank from continuing, or a task that never ends, or None."""
        if self.place[rank] < len(self.programs[rank]):
            task, _ = self.programs[rank][self.place[rank]]
            return self.queues[rank, task.queue][0]
        return next((queue[0] for (whose, _), queue in self.queues.items() if whose == rank and queue), None)

    def stop(self, task: Task) -> tuple[Stop, Task | None]:
        """Return the Stop of a task, and the task in which the awaited rank is, or None if that rank has ended."""
        if task.name:
            meeting = self.meeting[task.queue]
            here = (rank for rank in task.members if rank in self.ranks)
            awaited = next(rank for rank in here if rank not in meeting or meeting[rank].name != task.name)
            stop = Stop(task.rank, task.call.first, awaited, first_use=task.name == "made")
        elif task.open:
            awaited = task.open[0].peer
            stop = Stop(task.rank, task.open[0], awaited)
        else:
            partner = next(other for other in reached(task) if other.open)
            return Stop(task.rank, task.call.first, partner.rank), partner
        queue = self.queues.get((awaited, task.queue))
        return stop, queue[0] if queue else self.stands_at(awaited)


def reached(task: Task) -> dict[Task, None]:
    """Return a task, and all tasks that can only be done together with it (batches that exchange messages)."""
    found, todo = {}, [task]
    while todo:
        if (one := todo.pop()) not in found:
            found[one] = None
            todo += one.partners
    return found
