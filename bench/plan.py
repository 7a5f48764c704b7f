"""A prediction of the tour's steps: the seconds of a step, from what its ranks compute and what its messages take.

A calibration runs in turns with the steps that are predicted from it, on the same ranks:

    computes    the row's own step, each message finished at once (labs/kit/simulated), on all ranks side by side
    messages    of each kind, in groups of each size, and in two places:
                    amid      after a computation, from which ranks do not return at the same time
                    behind    right after another message: the ranks have just met, and are awake
                The time of a message is what more messages add to a turn that computes as much and ends with one: in a
                turn without messages, nobody waits for the ranks that begin late.

A dry run tells how many messages there are, how many bytes each has, and which follow a computation.  The prediction is
the sum of both.  gloo's reduce-scatter sends as many bytes as an all-reduce, ours as many as theory says, so each is a
kind.  In a pipeline the sum is the result of `pp.simulate`, where a period in which more ranks compute than there are
cores lasts longer.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils.flop_counter import FlopCounterMode

from bench.figure import Figure, figure
from bench.step import BATCH, RANKS, Stepper, rounds, slowest, stepper
from labs import pp
from labs.group import all_gather, reduce_scatter, reduce_scatter_single
from labs.kit.commands.tour import ONE_OF_EACH
from labs.kit.dry import dry
from labs.kit.simulated.strategy_steps import NEIGHBOURS, rehearse
from labs.kit.simulated.without_other_ranks import unheard
from labs.kit.training.strategies import ROWS
from labs.kit.watch import c10d_tap
from labs.kit.watch.communication import Event
from labs.mesh import Mesh
from labs.model import GPT, PRESETS

COMPUTES = " computes"
SHORT, LONG = 64, 200_000  # numbers of float32
ONE, AMID, BEHIND = (0, 0, 0, 1), (1, 1, 1, 1), (0, 0, 0, 4)  # calls after each layer of a turn
CALIBRATED = 8  # rounds, which are enough for medians
TINY = PRESETS["tiny"]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Kind(NamedTuple):
    op: str
    among: int  # number of ranks in the group


class Message(NamedTuple):
    kind: Kind
    sent: int  # bytes
    place: tuple[int, ...]  # AMID or BEHIND


class Turn(NamedTuple):
    kind: Kind
    numbers: int
    calls: tuple[int, ...]


def there_and_back(full: Tensor, part: Tensor, group: ProcessGroup) -> None:
    me, other = dist.get_rank() % 2, dist.get_rank() ^ 1
    for sender in (0, 1):
        dist.send(full, other) if me == sender else dist.recv(full, other)


CALLS = {  # full, part, group -> what to call
    "all_reduce": lambda full, part, group: dist.all_reduce(full, group=group),
    "all_gather": all_gather,
    "all_to_all": lambda full, part, group: reduce_scatter(full, group),
    "reduce_scatter": lambda full, part, group: reduce_scatter_single(part, full, group=group),
    "send": there_and_back,
}


# ---- turns, on a rank ------------------------------------------------------------------------------------


def turn(calls: dict[str, Turn], name: str) -> Stepper:
    if name in calls:
        return among_layers(calls[name])
    if name.endswith(COMPUTES):
        return computes(name.removesuffix(COMPUTES))
    return stepper(name, share(name))


def among_layers(turn: Turn) -> Stepper:
    (op, among), numbers, calls = turn
    group = Mesh((dist.get_world_size() // among, among), ("apart", "among")).get_group("among")
    full, part = torch.zeros(numbers), torch.zeros(numbers // among)
    layer, x_BTD = GPT(TINY).layers["0"].requires_grad_(False), torch.zeros(BATCH, TINY.context, TINY.dim)

    def step() -> None:
        for count in calls:
            layer(x_BTD)
            for _ in range(count):
                CALLS[op](full, part, group)

    return step


def computes(name: str) -> Stepper:
    crossing = torch.empty(BATCH, TINY.context, TINY.dim, device="meta")
    beside = partial(NEIGHBOURS[ROWS[name].side], crossing) if is_pipeline(name) else nullcontext
    with alone():
        take = stepper(name, share(name))

    def step() -> None:
        with alone(), beside():
            take()

    return step


@contextmanager
def alone() -> Iterator[None]:
    """Pretend, while entered, that this rank is alone in a world of the job's size: messages finish at once."""
    job = dist.group.WORLD
    distributed_c10d._update_default_pg(pretended_world(dist.get_rank(), dist.get_world_size()))
    try:
        with unheard():
            yield
    finally:
        distributed_c10d._update_default_pg(job)


@cache
def pretended_world(rank: int, ranks: int) -> ProcessGroup:
    distributed_c10d._update_default_pg(None)
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=dist.HashStore(), group_name="alone")
    return dist.group.WORLD


def share(name: str) -> int:
    """Return the number of sequences of the tour's batch that a rank reads."""
    return BATCH * RANKS // ROWS[name].parts(RANKS)


def is_pipeline(name: str) -> bool:
    return "pp" in ROWS[name].axes(RANKS)


# ---- prediction ------------------------------------------------------------------------------------------


def figures(quick: bool) -> list[Figure]:
    return [each for ranks in (RANKS, RANKS // 2) for each in of_rows(ranks, 20 if quick else 60)]


def of_rows(ranks: int, count: int) -> list[Figure]:
    """Calibrate and predict the rows that take this many of the tour's ranks."""
    names = [name for name in ONE_OF_EACH if ROWS[name].ranks(RANKS) == ranks]
    messages = {name: messages_of(name, ranks) for name in names}
    kinds = sorted({message.kind for each in messages.values() for message in each})
    hows = (SHORT, ONE), (SHORT, AMID), (SHORT, BEHIND), (LONG, BEHIND)
    calls = {str(turn): turn for turn in (Turn(kind, *how) for kind in kinds for how in hows)}
    build, alone = partial(turn, calls), [name + COMPUTES for name in names]
    began = time.perf_counter()
    rounds([*calls, *alone], CALIBRATED, ranks, build)
    lasts = time.perf_counter() - began
    taken = rounds([*calls, *(each for pair in zip(alone, names, strict=True) for each in pair)], count, ranks, build)
    took = {turn: statistics.median(slowest(taken[name])) for name, turn in calls.items()}
    found = [Figure(f"calibration on {ranks} ranks", lasts, lasts, lasts, 1, "s", "at most 20")]
    for name in names:
        travel = [seconds_of(message, took) for message in messages[name]]
        predict = in_pipeline if is_pipeline(name) else in_turn
        pairs = zip(zip(*taken[name + COMPUTES], strict=True), slowest(taken[name]), strict=True)
        samples = [predict(each, travel) / real for each, real in pairs]
        note = f"{len(travel)} messages, {sum(each.sent for each in messages[name]):,} bytes"
        found.append(figure(f"{name}: predicted / measured", samples, note=note))
    return found


def messages_of(name: str, ranks: int) -> list[Message]:
    """Return the messages that rank 0 sends in a steady step."""
    [computed] = found = dry(two_steps, name, ranks=ranks)
    events = found.communication.select(0, 1)
    places = [AMID if before < now else BEHIND for before, now in pairwise(computed[-len(events) - 1 :])]
    placed = zip(events, places, strict=True)
    return [Message(kind_of(event), event.sent, place) for event, place in placed if event.op != "recv"]


def two_steps(name: str) -> list[int]:
    """Return the floating-point operations computed before each message; the count grows if ranks computed since the
    last one.
    """
    with FlopCounterMode(display=False) as counter, Computed(counter.get_total_flops) as computed:
        for _ in rehearse(ROWS[name], TINY, share(name)):
            pass
    return computed.before


class Computed(c10d_tap.Listener):
    def __init__(self, operations: Callable[[], int]) -> None:
        self.operations, self.before = operations, []

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        self.before.append(self.operations())


def kind_of(event: Event) -> Kind:
    """Return the kind of an event. A broadcast counts as an all-gather: PyTorch's DDP has one."""
    op = event.op if event.op in CALLS else "all_gather"
    return Kind(op, 2 if op == "send" else len(event.ranks))


def seconds_of(message: Message, took: dict[Turn, float]) -> float:
    """Return the seconds of a message: those of a short one in its place, plus the extra time of a long one in
    proportion to the bytes.
    """

    def of(numbers: int, calls: tuple[int, ...]) -> float:
        return took[Turn(message.kind, numbers, calls)]

    (op, n), sent, place = message
    of_long = 4 * LONG * {"send": 1, "all_reduce": 2 * (n - 1) / n}.get(op, (n - 1) / n)
    short = (of(SHORT, place) - of(SHORT, ONE)) / (sum(place) - sum(ONE))
    longer = (of(LONG, BEHIND) - of(SHORT, BEHIND)) / sum(BEHIND)
    return max(0.0, short) + sent / of_long * max(0.0, longer)


def in_turn(alone: Sequence[dict[str, float]], travel: Sequence[float]) -> float:
    """Return a step's seconds without a pipeline. alone: the seconds that each rank computes, by phase."""
    return max(rank["step"] for rank in alone) + sum(travel)


def in_pipeline(alone: Sequence[dict[str, float]], travel: Sequence[float]) -> float:
    """Return a step's seconds with 1F1B, one stage and one micro-batch per rank; a backward takes twice as long as its
    forward.
    """
    ranks, there = len(alone), travel[0] / 2
    piped, whole = (undisturbed([rank[phase] for rank in alone], CORES) for phase in ("pipeline", "step"))
    third = [each / ranks / 3 for each in piped]
    of = pp.simulate(pp.one_f_one_b(ranks, ranks), F=third, B=[2 * each for each in third], send=there)
    return on_cores(of, CORES) + whole[0] - piped[0]  # the first stage's backward comes last


def undisturbed(taken: Sequence[float], cores: int) -> list[float]:
    """Return the seconds that each task would take on a core of its own; they began at once, on fewer cores than
    tasks.
    """
    ends, own = sorted(taken), [0.0]
    for still, (since, until) in zip(range(len(ends), 0, -1), pairwise([0.0, *ends]), strict=True):
        own.append(own[-1] + (until - since) * min(1.0, cores / still))
    return [own[ends.index(each) + 1] for each in taken]


def on_cores(of: pp.Simulation, cores: int) -> float:
    """Return the seconds of a simulated schedule whose ranks share this many cores."""
    total = 0.0
    for since, until in pairwise(sorted({*of.start.values(), *of.end.values()})):
        busy = sum(of.start[x] < until and of.end[x] > since for x in of.end)
        total += (until - since) * max(1.0, busy / cores)
    return total
