"""A stage of PyTorch's own pipelines: what it holds while it runs an instruction, and what is left of that.

It holds what `labs.cost.pipeline_stages` says, except for this:

    the first stage    has no I: W is its whole backward
    from I to W        all that F has kept but the logarithms of the probabilities; and the gradients of what norms
                       have made, of which W makes those of their weights
    split by tp        the loss, its gradient, and the sums, as `labs.cost.torch_split` has them

Read in PyTorch 2.13: torch/distributed/pipelining/stage.py and _backward.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from labs.cost.model_states import FLOAT, Moment
from labs.cost.pipeline_stages import StageMemory, gradients_of_layer
from labs.cost.saved_activations import Part, Within
from labs.cost.split import Share
from labs.cost.split_activations import parts_of
from labs.cost.torch_split import torch_backward


@dataclass(frozen=True)
class TorchStage(StageMemory):
    """words: of the whole vocabulary, which the embedding's gradient has, if that is split."""

    words: int = 0

    @property
    def logits(self) -> int:
        return FLOAT * self.job.tokens * self.job.config.vocab * self.is_last

    @property
    def made(self) -> int:
        """Elements of the gradients of its parameters, as backward makes them."""
        return sum(self.sizes) + (self.words - self.job.config.vocab) * self.job.config.dim * self.is_first

    @property
    def left(self) -> int:
        return self.kept - self.logits

    @property
    def gradients(self) -> int:
        return super().gradients + self.x * (2 * self.job.config.depth + self.is_last)

    @property
    def parts(self) -> list[Part]:
        is_split = isinstance(self.job.config, Share)
        parts = torch_backward(self.job, self.words * self.job.config.dim) if is_split else parts_of(self.job)
        return parts[0 if self.is_last else 3 : None if self.is_first else -1]

    def does(self, kind: str) -> str:
        """The instruction that it runs for one of this kind; "" for none."""
        return {"I": "", "W": "B"}.get(kind, kind) if self.is_first else kind

    def during(self, kind: str, first: bool) -> Iterator[Moment]:
        if kind == "W":
            # One matrix after another, whose input and gradients go: it holds the most as it begins, or ends.
            yield Moment("W begins", **{"G" if first else "temporary": FLOAT * self.largest})
            if first:
                yield self.after("W").plus(G=FLOAT * self.made)
        elif kind == "I":  # it lets nothing go
            yield from (replace(at, A=0) for at in self.in_backward(first, split=True))
        else:
            yield from super().during(kind, first)

    def after(self, kind: str, **_: bool) -> Moment:
        """Messages are left out."""
        x = 0 if self.is_first else self.x
        match kind:
            case "F":
                return Moment(kind, A=self.kept - x, temporary=FLOAT * self.is_last + self.logits)
            case "B":
                return Moment(kind, A=x - self.kept)
            case "I":
                return Moment(kind, A=self.left - self.kept, temporary=self.gradients)
        return Moment(kind, A=x - self.left, temporary=-self.gradients)

    def ends(self, part: Part) -> tuple[int, int, int]:
        match part.name.split()[0]:
            case "head":
                return 0, self.logits, 0
            case "layer":
                return 0, gradients_of_layer(self.job) + 2 * self.x, 0
            case "norm":
                return 0, self.x, 0
        return 0, 0, 0

    def within(self, part: Part, at: Within) -> tuple[int, int, int, int]:
        match at.name.split()[0]:
            case "gate":
                return 0, FLOAT * self.job.tokens * self.job.config.hidden, 0, 0
            case "norm":
                return (*self.ends(part), 0)
        return 0, 0, 0, 0
