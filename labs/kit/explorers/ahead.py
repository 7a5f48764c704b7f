"""The prefetch explorer's picture: the timeline of a step, and below it the bytes that a rank held meanwhile.

    Stacked((timeline, memory))      two pictures as one

`labs.kit.play.prefetch` puts a slider above it, for the number of layers that are prefetched.
"""

from dataclasses import dataclass

from labs.kit.drawing.memories import memory
from labs.kit.drawing.picture import Picture
from labs.kit.drawing.timelines import timeline


@dataclass(frozen=True)
class Stacked:
    """Pictures that a cell shows one above the other."""

    pictures: tuple[Picture, ...]

    @property
    def html(self) -> str:
        return "<br>".join(picture.html for picture in self.pictures)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.pictures))

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}


def picture(talk, held, step: int) -> Stacked:
    """Draw the timeline of a step of `talk`, and rank 0's memory in the last step of `held`.

    talk: a labs.kit.record.Recording of communication.
    held: a recording of memory, of the same job.
    """
    return Stacked((timeline(talk, step=[step]), memory(held, step=held.steps - 1, ranks=[0])))
