"""The prefetch explorer's picture: the timeline of a step, and below it the bytes that a rank held during the step.

    Stacked((timeline, memory))      two pictures, one above the other

`labs.kit.play.prefetch` shows this picture below a slider for the number of layers that are prefetched.
"""

from dataclasses import dataclass

from labs.kit.drawing.memory_over_time import memory
from labs.kit.drawing.picture import Picture
from labs.kit.drawing.timelines import timeline


@dataclass(frozen=True)
class Stacked:
    """Several pictures that a notebook cell shows one above the other."""

    pictures: tuple[Picture, ...]

    @property
    def html(self) -> str:
        return "<br>".join(picture.html for picture in self.pictures)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.pictures))

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}


def picture(talk, held, step: int) -> Stacked:
    """Draw the timeline of one step of a job, and below it rank 0's bytes held over the job's last step.

    talk: a labs.kit.record.Recording of kind "communication".
    held: a labs.kit.record.Recording of kind "memory", of the same job.
    step: the step of `talk` to show.
    """
    return Stacked((timeline(talk, step=[step]), memory(held, step=held.steps - 1, ranks=[0])))
