"""The challenge of 16: name the bug of an unknown program by as few readings as possible.

Thirty programs are one step of training on four ranks, each with one bug of twenty kinds, some of them at two
places.  All of them run for real, each beside the right program, and the instruments of the clinic read them.

The bound: an answer reads an instrument, and chooses the next one by the value.  So it is a decision tree over the
table of all values, and the least mean depth of any such tree is found by trying all of them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, Case, Jobs, drawn, read
from labs.exercises.engine.answer import Wrong, show
from labs.exercises.engine.challenge import Challenge, Function, Judged, chance, job
from labs.kit.record import span
from labs.mesh import Mesh

LAYERS, SIZE, EACH, EPOCH = 3, 512, 3, 2
KINDS = {  # what the program does, and the places where it does so
    "summed instead of averaged": ("the gradients of the ranks are added up, and not averaged", [0]),
    "averaged twice": ("the sum of the gradients is divided by the number of ranks twice", [0]),
    "the loss is not divided by the number of micro-batches": (
        "the gradients of the micro-batches are added up, and not averaged",
        [0],
    ),
    "only the last micro-batch counts": ("the gradient of the last micro-batch replaces those before it", [0]),
    "only the last micro-batch is synchronised": ("the gradients of earlier micro-batches stay on their ranks", [0]),
    "nothing synchronised": ("each rank uses its own gradient", [0]),
    "left out": ("one rank adds zeros instead of its gradient", [0, 3]),
    "one rank's gradient everywhere": ("the gradient of one rank is sent to all others", [0, 2]),
    "data of another": ("one rank reads the data of another rank", [0]),
    "other seed": ("one rank draws its data by another seed", [1]),
    "narrow": ("the gradient of one layer is reduced in float32", [0, 1]),
    "reduced again": ("the averaged gradient of one layer is averaged over the ranks a second time", [0, 1, 2]),
    "kept": ("the gradients of all micro-batches of one layer stay in memory", [0, 1]),
    "waits at once": ("a call is waited for where it begins, while gradients are reduced or layers gathered", [0, 1]),
    "two orders": ("two ranks use two groups in the other order", [0, 1]),
    "rank missing": ("one rank does not take part in the sum for the norm", [1, 3]),
    "norm of a shard": ("each rank takes the norm of its own shard", [0]),
    "not updated": ("one rank does not update its shard", [0, 2]),
    "cast": ("the parameters are saved in float32", [0]),
    "first epoch again": ("after the restart the data of the first epoch is read", [0]),
}


class Program(NamedTuple):
    """A program of the family; at: the rank, the layer or the call that has the bug."""

    kind: str
    at: int


NO_END, ASKED = "no end", ("numbers", "gradients", "sent", "held", "time", "verdict")
RIGHT = Program("", 0)
FAMILY = [Program(kind, at) for kind, (_, places) in KINDS.items() for at in places]


def step(program: Program, seed: int) -> dict[str, Tensor]:
    """Take a step of training on this rank, and restart from a checkpoint; return what an instrument compares."""
    (kind, at), me = program, dist.get_rank()
    weights, tokens, gradients, works = weights_of(seed), [], [], []
    source = (me + 1) % RANKS if kind == "data of another" and me == at else me
    by = seed + 1 if kind == "other seed" and me == at else seed
    for layer in range(LAYERS):
        with span(f"backward {layer}"):
            data = [drawn((SIZE,), by, source, layer, k) for k in range(EACH)]
            each = [gradient(weights[layer], x) for x in data]
        total = (
            each[-1].clone()
            if kind in ("only the last micro-batch counts", "only the last micro-batch is synchronised")
            else sum(each)
        )
        total /= 1 if kind == "the loss is not divided by the number of micro-batches" else EACH
        if kind == "left out" and me == at:
            total.zero_()
        if kind == "narrow" and layer == at:
            total = total.float()
        if kind == "one rank's gradient everywhere":
            works.append(dist.broadcast(total, at, async_op=True))
        elif kind != "nothing synchronised":
            works.append(dist.all_reduce(total, async_op=True))
            if kind == "waits at once" and at == 0:
                works[-1].wait()
        gradients.append((total, sum(each[:-1]) / EACH if kind == "only the last micro-batch is synchronised" else 0))
        tokens.append(data[0][:4])
        if kind == "kept" and layer == at:
            kept = data, each  # noqa: F841
        del data, each
    for work in works:
        work.wait()
    by_ranks = {
        "summed instead of averaged": 1,
        "one rank's gradient everywhere": 1,
        "nothing synchronised": 1,
        "averaged twice": RANKS**2,
    }.get(kind, RANKS)
    gradients = [total.double() / by_ranks + rest for total, rest in gradients]
    if kind == "reduced again":
        dist.all_reduce(gradients[at])
        gradients[at] /= RANKS
    squares = sum(g.chunk(RANKS)[me].square().sum() for g in gradients)
    if kind != "norm of a shard" and not (kind == "rank missing" and me == at):
        dist.all_reduce(squares)
    works = []
    for layer, g in enumerate(gradients):
        with span(f"update {layer}"):
            shard = weights[layer].chunk(RANKS)[me].clone()
            shard -= 0.0 if kind == "not updated" and me == at else 0.1 * g.chunk(RANKS)[me]
        works.append(dist.all_gather(list(weights[layer].chunk(RANKS)), shard, async_op=True))
        if kind == "waits at once" and at == 1:
            works[-1].wait()
    for work in works:
        work.wait()
    order = sorted(("dp", "tp"), reverse=kind == "two orders" and me in (at, RANKS - 1 - at))
    groups = [mesh(dist.group.WORLD).get_group(axis) for axis in order]
    for work in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]:
        work.wait()
    values = {"tokens": torch.cat(tokens), "gradient": torch.cat(gradients), "norm": squares.sqrt()}
    saved = weights.float().double() if kind == "cast" else weights
    epoch = 0 if kind == "first epoch again" else EPOCH
    return values | {"parameters": weights, "resumed": saved, "next tokens": drawn((4,), seed, epoch, me)}


@cache
def mesh(_: dist.ProcessGroup) -> Mesh:
    return Mesh((2, 2), ("dp", "tp"))


def weights_of(seed: int) -> Tensor:
    return drawn((LAYERS, SIZE), seed) / SIZE**0.5


def gradient(weight: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of sin(weight · x)."""
    return (weight * x).sum().cos() * x


@cache
def parts(seed: int, rank: int = 0) -> list[list[Tensor]]:
    weights = weights_of(seed)

    def whole(source: int, k: int) -> Tensor:
        data = [drawn((SIZE,), seed, source, layer, k) for layer in range(LAYERS)]
        return torch.cat([gradient(*pair) for pair in zip(weights, data, strict=True)])

    return [[whole(source, k) for k in range(EACH)] for source in range(RANKS)]


@cache
def alone(seed: int) -> list[dict[str, Tensor]]:
    total = torch.stack([part for own in parts(seed) for part in own]).mean(0)
    after = weights_of(seed) - 0.1 * total.view(LAYERS, SIZE)
    same = {"gradient": total, "norm": total.norm(), "parameters": after, "resumed": after}
    tokens = [[drawn((SIZE,), seed, me, layer, 0)[:4] for layer in range(LAYERS)] for me in range(RANKS)]
    return [
        {"tokens": torch.cat(tokens[me])} | same | {"next tokens": drawn((4,), seed, EPOCH, me)} for me in range(RANKS)
    ]


def case_of(program: Program) -> Case:
    return Case("", program, RIGHT, step, alone, parts=parts, hangs=program.kind == "rank missing")


@cache
def table() -> tuple[dict[str, str], ...]:
    """Run all programs; return each one's values, {instrument: value}."""
    first, *cases = map(case_of, [RIGHT, *FAMILY])  # the first one makes the groups
    together, rows = Jobs((first, *cases)), []
    hanging = Jobs(tuple(case for case in cases if case.hangs))  # judged by a dry run of these alone
    for case in cases:
        jobs = hanging if case.hangs else together
        readings = {name: read(name, jobs, case) for name in ASKED}
        rows.append(
            {name: each.value if each.tells or each.value == NO_END else "right" for name, each in readings.items()}
        )
    return tuple(rows)


@cache
def least(programs: Collection[int] = frozenset(range(len(FAMILY)))) -> int:
    """Return the fewest readings, over all programs of this set, that name the kind of each of them."""
    if len({FAMILY[number].kind for number in programs}) == 1:
        return 0
    totals = []
    for name in ASKED:
        parts = defaultdict(set)
        for number in programs:
            parts[table()[number][name]].add(number)
        if len(parts) > 1:
            totals.append(sum(least(frozenset(part)) for part in parts.values()))
    return len(programs) + min(totals)


def bound() -> float:
    """Return the least mean number of readings per program."""
    return least() / len(FAMILY)


class Visit:
    """A visit to an unknown program, whose readings are counted.

    counts: {instrument: how often it was read}
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values, self.counts = values, Counter[str]()

    def read(self, instrument: str) -> str:
        """Return the instrument's value: "right", or a word for the difference from the right program."""
        if instrument not in self.values:
            raise ValueError(f"there is no instrument {instrument!r}: there are {', '.join(self.values)}")
        self.counts[instrument] += 1
        return self.values[instrument]


def on_a_rank(fn: Function, rows: Sequence[Mapping[str, str]]) -> list[tuple[str, dict[str, int]]]:
    """Return, for each program, the kind that `fn` names, and what it has read."""
    found = []
    for row in rows:
        kind = fn(visit := Visit(row))
        if kind not in KINDS:
            raise ValueError(f"it returned {show(kind)}, and one of the kinds is needed: {', '.join(KINDS)}")
        found.append((kind, dict(visit.counts)))
    return found


def measured(fn: Function, seed: int = 0) -> dict[str, Any]:
    """Try an answer on one program, drawn by a seed; return the kind it names, the planted one and its readings."""
    number = random.Random(seed).randrange(len(FAMILY))
    ((said, counts),) = on_a_rank(fn, [row := table()[number]])
    return {"named": said, "planted": FAMILY[number].kind, "readings": {name: row[name] for name in counts}}


def judge(fn: Function) -> Judged:
    job(on_a_rank, fn, [dict.fromkeys(ASKED, "right")], ranks=1)  # a stub ends here, before all programs run
    order = torch.randperm(len(FAMILY), generator=chance()).tolist()
    (found,) = job(on_a_rank, fn, [table()[number] for number in order], ranks=1, record=None)
    for number, (said, counts) in zip(order, found, strict=True):
        if said != (kind := FAMILY[number].kind):
            values = ", ".join(f"{name}: {table()[number][name]}" for name in counts) or "nothing"
            raise Wrong(f"it says {said!r} of a program with the bug {kind!r}, and has read {values}",
                        "Which instrument tells the two apart?")  # fmt: skip
    mean = sum(sum(counts.values()) for _, counts in found) / len(FAMILY)
    return Judged(100 * bound() / mean, f"{mean:.2f} readings per program, and the bound is {bound():.2f}")


unknown_bug = Challenge(
    "unknown_bug",
    "16",
    "Name an unknown bug by the fewest readings",
    "Thirty programs, each with one bug of twenty kinds. Read instruments, choose the next one by the values, and "
    "name the kind of each bug. A wrong name scores nothing; what counts is the mean number of readings.",
    judge,
    floor=35.6,
    course=83.1,
    possible=100.0,
    cases={kind: text for kind, (text, _) in KINDS.items()},
    bound=bound,
    measured=measured,
)
