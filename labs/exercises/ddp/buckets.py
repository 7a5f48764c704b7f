"""buckets: one all-reduce for each bucket of gradients, in the wrapper's group and by the all-reduce it was given.

The wrapper builds on `labs.ddp`, which cuts the buckets, and is trained for several steps, with and without gradient
accumulation.  In a last world the wrapper's group has some of the ranks, and calls of the given all-reduce are counted.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from labs.ddp import in_buckets
from labs.exercises.ddp._awkward_training import WIDE, TrainingWorld, odd, train_wrapped
from labs.exercises.ddp._wrong_gradients import NOT_IN_PLACE, QUESTION, bytes_held, line, tables
from labs.exercises.engine.answer import Mistake, answered, refuse
from labs.exercises.engine.by_script import Play, checked
from labs.exercises.engine.on_ranks import BF16, F32, Draw
from labs.exercises.engine.scripts import Look

BUCKET_BYTES = 128 * 1024  # the bucket size that the exercise asks for
GROUP = (0, 2, 3)


def worlds(draw: Draw) -> dict[int, list[TrainingWorld]]:
    case = partial(odd, draw)
    return {
        3: [case(3, steps=3), case(3, micro_batches=3, steps=2)],
        2: [
            case(2, micro_batches=2, steps=3),
            case(2, steps=2, dtype=F32, evaluating=True),
            case(2, steps=2, refusable=True),
        ],
        4: [
            case(4, micro_batches=2, steps=2),
            case(4, steps=2, mixed=True),
            case(4, dtype=BF16),
            draw.world(TrainingWorld, 4, dtype=F32, steps=3),
        ],
        1: [case(1, steps=2)],
        0: [case(steps=2)],
    }


# ---- a group, and an all-reduce, of its own ----------------------------------------------------------------


def some_ranks(draw: Draw) -> dict[int, list[TrainingWorld]]:
    """Return a world in which some of the ranks train a model that has several buckets of 128 KiB."""
    options = {"sizes": (WIDE, WIDE, 2 * WIDE), "mixed": True, "steps": 2, "group": GROUP}
    return {4: [draw.world(TrainingWorld, 4, only="wrong in a group of only some ranks", **options)]}


def in_a_group(world: TrainingWorld, wrap: Callable[..., Any]) -> Iterator[Look | None]:
    """Train with an all-reduce of its own; yield before each step, and then a look with the number of its calls."""
    calls: list[int] = []

    def all_reduce(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return dist.all_reduce(*args, **options)

    for look in train_wrapped(world, wrap, **world.process_group(), all_reduce=all_reduce):
        if look:
            look.facts["calls"] = len(calls)
            calls.clear()
        yield look


# Rows are asked about counts: (collectives, buckets, calls of the given all-reduce).
# fmt: off
ONE_EACH = Mistake("not one all-reduce for each bucket",
                   "How many gradients does a bucket wait for, and which of them is the last?",
                   lambda counts: counts[0] != counts[1]
                   and "{} collectives were begun for {} buckets".format(*counts))
OWN = (
    ONE_EACH,
    Mistake("not with its own all-reduce",
            "Which all-reduce was the wrapper given, and under which name does it keep it?",
            lambda counts: counts[0] > counts[2]
            and f"{counts[0]} collectives were begun, {counts[2]} by self.all_reduce"),
)
# fmt: on


def own_group(wrap: Callable[..., Any], seed: int, bucket_bytes: int) -> None:
    """Raise Wrong if the wrapper is not right in a group of some ranks, or does not call the all-reduce it is given."""
    play = Play(some_ranks, in_a_group, tables(exact=True), QUESTION)
    for seen in checked(play, (wrap,), seed).seen:
        expected = len(in_buckets((p for p in seen.world.model().parameters() if p.requires_grad), bucket_bytes))
        for rank, done in seen.ranks:
            refuse(OWN, (len(seen.of(rank)), expected, done.facts["calls"]), f"{seen}: on rank {rank} ")


PLAY = Play(worlds, train_wrapped, tables(NOT_IN_PLACE, exact=True), QUESTION)


@answered
def buckets(wrap: Callable[..., Any], seed: int) -> str:
    """Check `wrap(model, **options)`: it returns a module like `labs.ddp.DataParallel`, with buckets of 128 KiB."""
    sentence = line(checked(PLAY, (wrap,), seed))
    own_group(wrap, seed, BUCKET_BYTES)
    bytes_held(train_wrapped, wrap, seed)
    return sentence.format(" and step")
