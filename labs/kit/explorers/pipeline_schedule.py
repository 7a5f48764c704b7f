"""The schedule explorer's picture: a pipeline schedule of labs.pp in time, with its bubble and the activations alive.

    picture(**BEGIN)      the picture; if the schedule does not exist in these sizes, the text of its error

`labs.kit.play.schedule` shows this picture below its controls.  A rank has the same layers, however many stages they
are cut into: with two stages per rank, the forward of a stage takes half of the time `forward`.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from textwrap import wrap

from labs.kit.drawing.palette import WRONG
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.pipeline_gantt import LONG, draw_simulation
from labs.kit.drawing.svg import Canvas
from labs.pp.schedules import SCHEDULES
from labs.pp.simulation import simulate

# CONTROLS has the values of each control, by its name: a sequence becomes a slider, a mapping becomes a menu.
# BEGIN has the control's first value.
CONTROLS: dict[str, Sequence | Mapping] = {
    "schedule": {name: name for name in SCHEDULES},
    "ranks": tuple(range(1, 9)),
    "microbatches": tuple(range(1, 17)),
    "stages_per_rank": (1, 2, 3, 4),
    "forward": (0.5, 1, 1.5, 2, 3),
    "backward": (0.5, 1, 1.5, 2, 3, 4),
    "send": (0, 0.1, 0.2, 0.5, 1),
}
BEGIN = {"schedule": "1f1b", "ranks": 4, "microbatches": 8, "stages_per_rank": 1}
BEGIN |= {"forward": 1, "backward": 2, "send": 0}


def picture(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int, forward: float, backward: float, send: float
) -> Drawing:
    """Draw a pipeline schedule at these settings; the two halves of a split backward take equally long.

    forward, backward: the time of a micro-batch on all stages of a rank.
    send: the time of a message, as a multiple of `forward`.
    """
    try:
        lists = SCHEDULES[schedule](ranks, microbatches, stages_per_rank)
    except ValueError as refused:
        return sentence(str(refused))
    F, B = forward / stages_per_rank, backward / stages_per_rank
    return draw_simulation(simulate(lists, F=F, B=B, I=B / 2, W=B / 2, send=send * forward))


def usual_stages(schedule: str) -> int:
    """Return the default number of stages per rank of a pipeline schedule."""
    return signature(SCHEDULES[schedule]).parameters["stages_per_rank"].default


def sentence(words: str, title: str = "No such schedule") -> Drawing:
    lines = wrap(words, 90)
    canvas = Canvas(LONG + 172, 30 + 20 * len(lines), title, words)
    canvas.lines(16, 24, lines, anchor="start", fill=WRONG)
    return canvas.drawing(words)
