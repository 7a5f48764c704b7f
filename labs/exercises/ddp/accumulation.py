"""accumulation: gradient accumulation over several micro-batches with one synchronisation, in the course's wrappers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from labs.ddp import Naive, Overlapped
from labs.exercises.ddp._awkward_training import MicroBatch, TrainingWorld, odd, train, wide
from labs.exercises.ddp._wrong_gradients import QUESTION, describe, line, tables
from labs.exercises.engine.answer import Mistake, answered, refuse
from labs.exercises.engine.by_script import Play, checked
from labs.exercises.engine.learner_job import job
from labs.exercises.engine.on_ranks import BF16, F32, Draw
from labs.exercises.engine.scripts import Look, play_all


def worlds(draw: Draw) -> dict[int, list[TrainingWorld]]:
    case = partial(odd, draw)
    return {
        3: [case(3, micro_batches=5, steps=2), case(3, micro_batches=4, overlapped=True, steps=2)],
        2: [
            case(2),
            case(2, micro_batches=3, buffers=True),
            case(2, micro_batches=3, overlapped=True, repeated=True),
        ],
        4: [
            case(4, micro_batches=3, dtype=F32),
            case(4, micro_batches=2, dtype=BF16),
            draw.world(TrainingWorld, 4, dtype=F32, micro_batches=4),
        ],
        1: [case(1, micro_batches=2)],
        0: [case(micro_batches=2)],
    }


class Noting(Overlapped):
    """A data-parallel wrapper that notes whether any all-reduce has begun when its sync() is called."""

    begun = 0

    def sync(self) -> None:
        if self.syncing:
            self.begun = len(self.works)
        super().sync()


def script(world: TrainingWorld, fn: Callable[..., Any]) -> Iterator[Look | None]:
    model = world.model()
    wrapped = Noting(model, bucket_bytes=500) if world.overlapped else Naive(model)

    def accumulate(wrapped: nn.Module, batch: list[MicroBatch]) -> dict[str, Any]:
        given = list(batch)
        fn(wrapped, batch)
        taken = len(batch) != len(given) or any(a is not b for a, b in zip(batch, given, strict=True))
        return {"taken": taken, "asleep": world.overlapped and not wrapped.begun}

    return train(world, model, wrapped, accumulate)


# fmt: off
LEFT = (
    Mistake("the caller's list has changed", "What does the caller's next step find in it?",
            describe("taken", "the list of micro-batches is not what it was before the call")),
    Mistake("the last backward is within no_sync()",
            "How does a wrapper that sends during backward know which one is the last?",
            describe("asleep", "no all-reduce had begun when sync() was called"),
            symptom="right, but as slow as without overlap"),
)
GRAPHS = (
    Mistake("the graphs of all micro-batches are kept", "What is freed by backward, and when do you call it?",
            lambda held: held[1] > 1.5 * held[0] and f"{held[0]:,} bytes with 1 micro-batch, {held[1]:,} with 4",
            symptom="many micro-batches take as much memory as one large batch"),
)
# fmt: on
PLAY = Play(worlds, script, tables(*LEFT, exact=True), QUESTION)


@answered
def accumulation(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(model, micro_batches)`: it runs all backwards of a step, and one synchronisation.

    `model` is a wrapper of labs.ddp; `model(*micro_batch)` returns the mean loss of a micro-batch.  All micro-batches
    are equally large.  Afterwards each gradient must be that of the mean loss over all micro-batches of all ranks.
    """
    sentence = line(checked(PLAY, (fn,), seed))
    one_graph_at_a_time(fn, seed)
    return sentence.format(" and step, for 4 micro-batches")


def one_graph_at_a_time(fn: Callable[..., Any], seed: int) -> None:
    """Raise Wrong if the activations held grow with the number of micro-batches."""
    worlds = [wide(Draw(seed), 2, micro_batches=k) for k in (1, 4)]
    recording = job(play_all, script, (fn,), worlds, ranks=2, record="memory").recording
    refuse(GRAPHS, tuple(recording.held(0, step)["A"] for step in (0, 1)), "activations held at the peak: ")
