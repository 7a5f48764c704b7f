"""The batch of a step, cut into micro-batches: is it the same batch on every rank?

The first stage's rank reads x, and the last stage's rank reads y.  If x and y come from different batches, no operation
fails: the loss compares outputs with the targets of other inputs.  So in the first step the ranks compare their
batches:

    x with x, y with y     by a checksum of their numbers, on all ranks that were given one, even if they do not read it
    x with y               by the number of sequences in them

In later steps no batches are compared between ranks: a rank only checks that its own x and y have the size of the first
step.  So two mistakes stay unseen if all batches have the same size: ranks that read different batches and were given
only the x or y that they read, and ranks whose batches agree in the first step and differ later.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import fingerprint, on_all_ranks
from labs.model import CrossEntropy, counted

Described = tuple[torch.Size, str] | None  # the shape and the fingerprint of an x or y


class GivenBatches:
    """The batches that ranks pass to a pipeline, and the checks of them.

    microbatches: the number of micro-batches in a batch.
    ends: the ranks in the group that have the first and the last stage.
    needs_y: whether the last stage's rank must pass y.

    size: the number of sequences in a batch; None until the first step.
    tokens: the number of tokens in a sequence, which only labs.parallel needs.
    """

    def __init__(self, microbatches: int, ends: tuple[int, int], group: ProcessGroup | None, needs_y: bool = True):
        self.microbatches, self.ends, self.group, self.needs_y = microbatches, ends, group, needs_y
        self.size: int | None = None
        self.tokens: int | None = None

    def anew(self, needs_y: bool) -> "GivenBatches":
        return GivenBatches(self.microbatches, self.ends, self.group, needs_y)

    def cut(self, x: Tensor | None, y: Tensor | None, look: Callable[[], Any]) -> list[Sequence[Tensor]]:
        """Return the micro-batches of x and of y; an empty tuple if x or y is None.

        look: a function that checks everything else on this rank, and raises an error if it is wrong.

        Raises ValueError or TypeError for batches that do not fit, in the first step on every rank.
        """
        if self.size is None:
            self.size = self.agreed(x, y, look)
        else:
            described(x, y, look)
        for name, batch, rank in zip("xy", (x, y), self.ends, strict=True):
            if batch is None and rank == dist.get_rank(self.group) and (self.needs_y or name == "x"):
                raise unread(name, dist.get_rank())
            if batch is not None and len(batch) != self.size:
                raise ValueError(
                    f"{name} is a batch of {len(batch)}, and in the first step it was one of {self.size}: give batches "
                    "of one size, or make another Pipeline"
                )
        return [() if batch is None else batch.chunk(self.microbatches) for batch in (x, y)]

    def agreed(self, x: Tensor | None, y: Tensor | None, look: Callable[[], Any]) -> int:
        """Return the size of the batch; all ranks compare the same values, so all raise one error, or none."""
        everyones = on_all_ranks(partial(described, x, y, look, fingerprint), self.group)
        by_rank = dict(zip(dist.get_process_group_ranks(self.group or dist.group.WORLD), everyones, strict=True))
        sizes = [
            self.size_of("xy"[i], {rank: given[i] for rank, given in by_rank.items()}, [*by_rank][end])
            for i, end in enumerate(self.ends)
            if i == 0 or self.needs_y or by_rank[[*by_rank][end]][1]
        ]
        if sizes[0] != sizes[-1]:
            raise ValueError(
                f"x is a batch of {sizes[0]}, and y one of {sizes[-1]}: give the first stage's rank the inputs of a "
                "batch, and the last one's its targets"
            )
        return sizes[0]

    def size_of(self, name: str, given: dict[int, Described], reader: int) -> int:
        """Return the size of the batch x or y; raise ValueError if ranks were given different batches.

        given: `{rank: shape and fingerprint, or None}`; reader: the rank that reads the batch.
        """
        if given[reader] is None:
            raise unread(name, reader)
        shape, its_fingerprint = given[reader]
        if not shape or shape[0] == 0:
            raise ValueError(f"{name} has shape {tuple(shape)}: a batch has one or more in its first dim")
        if shape[0] % self.microbatches:
            raise ValueError(
                f"{name} is a batch of {shape[0]}, which is not divisible by {self.microbatches} micro-batches"
            )
        for rank, other in given.items():
            if other is not None and other[1] != its_fingerprint:
                raise ValueError(
                    f"{name} is not the same everywhere: {its_fingerprint} on rank {reader}, which reads it, but "
                    f"{other[1]} on rank {rank}; give all ranks one batch, or None to those that do not read it"
                )
        return shape[0]


def described(
    x: Any, y: Any, look: Callable[[], Any], by: Callable[[Tensor], str] = lambda x: ""
) -> list[tuple[torch.Size, str] | None]:
    for name, batch in (("x", x), ("y", y)):
        if batch is not None and not isinstance(batch, Tensor):
            raise TypeError(
                f"{name} is a {type(batch).__name__}: a pipeline cuts one tensor into micro-batches, so stack or "
                "concatenate what belongs together, and take it apart in the stage, or in the loss"
            )
    look()
    return [None if batch is None else (batch.shape, by(batch)) for batch in (x, y)]


def require_weighed(y: Tensor | None, loss: Any, over: float | None, group: ProcessGroup | None) -> float | None:
    """Return the divisor of the batch's summed losses: `over`, or the number of targets that count.

    The divisor is None if no target is ignored.  Raises ValueError without `over` if the loss is no CrossEntropy, whose
    sum can be divided, or if several pipelines read parts of one batch.
    """
    if over is not None or y is None or y.dtype is not torch.int64 or y.is_meta or counted(y) == y.numel():
        return over
    if not isinstance(loss, CrossEntropy):
        way_out = "let the loss be labs.model.CrossEntropy(), as model.loss is"
    elif dist.get_world_size(group) < dist.get_world_size():
        way_out = "give over=, the number of targets that count in the whole batch, divided by the number of its parts"
    else:
        return counted(y)
    raise ValueError(
        f"{y.numel() - counted(y)} of {y.numel()} targets are -100, which a loss ignores: the mean of the means of "
        f"micro-batches, or of ranks, is not the batch's mean where they ignore different numbers; {way_out}"
    )


def unread(name: str, rank: int) -> ValueError:
    stage = {"x": "first", "y": "last"}[name]
    return ValueError(f"{name} is None on rank {rank}, which has the {stage} stage and reads it")
