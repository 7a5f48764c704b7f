"""The check that ranks multiplied their shards' gradients by the same factors between sync() and step().

If each rank clips by the norm of its own shards, each rank scales its gradients by another factor, and the update
points in another direction.  No operation fails, since the shards are ordinary tensors.  So `Zero` remembers some
numbers of each gradient at sync(), and the ranks compare the factors one step later.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from labs.agree import Some


@dataclass(eq=False)
class Scaled:
    """The factors by which one rank multiplied its shards' gradients.

    factors: one per shard; None, which equals any factor, if the shard has no gradient, or one that was changed in
        another way than by a factor.
    rounding: the relative difference up to which two factors are the same.
    """

    factors: list[float | None] = field(default_factory=list)
    rounding: float = 0.0

    where_they_part: ClassVar[tuple[str, str]] = (
        "ranks scale their gradients differently",
        "clip with labs.clip.clip_gradients(zero.shards, max_norm, groups=(None,)): a norm of each rank's own shards "
        "(nn.utils.clip_grad_norm_) is another on every rank",
    )

    @classmethod
    def since(cls, before: list[Some | None], shards: Iterable[Tensor]) -> "Scaled":
        after = remembered(shards)
        factors = [factor(*pair) if all(pair) else None for pair in zip(before, after, strict=True)]
        return cls(factors, max((some.rounding for some in after if some), default=0.0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scaled):
            return False
        pairs = zip(self.factors, other.factors, strict=False)  # `factors` is empty if only step() called sync()
        return all(a is None or b is None or math.isclose(a, b, rel_tol=self.rounding) for a, b in pairs)

    def __str__(self) -> str:
        # The text is the same on all ranks in nearly every step, and then the ranks compare nothing else.
        known = sorted({f"{x:.3g}" for x in self.factors if x is not None} - {"1"})
        return f"multiplied them by {', '.join(known) or 1}"


def remembered(shards: Iterable[Tensor]) -> list[Some | None]:
    return [None if shard.grad is None else Some.of(shard.grad) for shard in shards]


def factor(before: Some, after: Some) -> float | None:
    largest = max(before.numbers, key=abs, default=0.0)
    if not largest or before.spoiled or after.spoiled:
        return None
    by = after.numbers[before.numbers.index(largest)] / largest
    return by if after == replace(before, numbers=[by * x for x in before.numbers]) else None
