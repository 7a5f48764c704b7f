"""average_gradients: after one backward on every rank, each gradient becomes the mean over the ranks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from labs.exercises.ddp._awkward_training import Awkward, MicroBatch, TrainingWorld, odd, train
from labs.exercises.ddp._wrong_gradients import NOT_IN_PLACE, QUESTION, bytes_held, line, tables
from labs.exercises.engine.answer import answered
from labs.exercises.engine.by_script import Play, checked
from labs.exercises.engine.on_ranks import BF16, F32, Draw
from labs.exercises.engine.scripts import Look

TRAINED_ALONE = "right only where all that has a gradient is trained"


def worlds(draw: Draw) -> dict[int, list[TrainingWorld]]:
    case = partial(odd, draw)
    return {
        3: [case(3), case(3, spare=True, buffers=True), case(3, steps=2, spare=True, late=True)],
        2: [case(2, frozen_late=True, only=TRAINED_ALONE), case(2, spare=True), case(2, dtype=F32, evaluating=True)],
        4: [
            *(case(4, **options) for options in ({}, {"spare": True}, {"mixed": True}, {"dtype": BF16})),
            case(4, refusable=True),
            draw.world(TrainingWorld, 4, dtype=F32),
        ],
        1: [case(1)],
        0: [case(steps=2)],
    }


def script(world: TrainingWorld, fn: Callable[..., Any]) -> Iterator[Look | None]:
    model = world.model()

    def average(model: Awkward, batch: list[MicroBatch]) -> dict[str, Any]:
        model.square.requires_grad_(not world.frozen_late)
        fn(model)
        model.square.requires_grad_(True)
        return {}

    return train(world, model, model, average, prepare=lambda batch: model(*batch[0]).backward())


PLAY = Play(worlds, script, tables(NOT_IN_PLACE, exact=False), QUESTION)


@answered
def average_gradients(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(model)`, on every rank after its backward: every gradient becomes the mean over all ranks."""
    sentence = line(checked(PLAY, (fn,), seed))
    bytes_held(script, fn, seed)
    return sentence.format("")
