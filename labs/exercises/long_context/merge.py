"""merge: the attention to two parts of the keys becomes the attention to both, given the log-sum-exp of each part."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from labs.cp import merge as textbook
from labs.cp.partial_softmax import Part
from labs.exercises.engine.answer import Mistake, answered, says
from labs.exercises.engine.differentiated import NOT_FINITE
from labs.exercises.engine.on_ranks import F32, F64, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, World, same_numbers
from labs.exercises.engine.value import One, as_if

OUTPUT, LOGSUMEXP = NAMES = "the output", "the log-sum-exp"


@dataclass(frozen=True)
class Parts(World):
    """A world with parts of the keys, which are merged one after the other, a step each.

    shape: the shape of q, [heads, queries, width].
    size: the size of the scores.
    blind: whether some queries see no key of a part, one query no key at all, and none a key of parts 0, 2, ...
    """

    shape: tuple[int, ...] = (2, 5, 3)
    size: float = 1.0
    blind: bool = False

    @cached_property
    def parts(self) -> list[Part]:
        return [self.part(number) for number in range(self.steps + 1)]

    @property
    def nbytes(self) -> int:
        return self.parts[0][0].nbytes

    def part(self, number: int) -> Part:
        draw, keys = self.generator(number), 3 + number
        scores = torch.randn(*self.shape[:-1], keys, generator=draw, dtype=F64) * self.size
        if self.blind:
            hidden = slice(None) if number % 2 == 0 else slice(number, None, len(self.shape))
            scores[..., hidden, :] = scores[..., 0, :] = -torch.inf
        values = torch.randn(*self.shape[:-2], keys, self.shape[-1], generator=draw, dtype=F64)
        lowest = torch.finfo(self.dtype).min
        logsumexp = scores.logsumexp(-1).clamp(min=lowest)
        return ((scores - logsumexp[..., None]).exp() @ values).to(self.dtype), logsumexp.to(self.dtype)

    def merged(self, steps: int) -> Part:
        """Return the parts of the first steps as one, by the softmax of all of their log-sum-exps."""
        outputs, logsumexps = (torch.stack(each).double() for each in zip(*self.parts[: steps + 1], strict=True))
        output = (logsumexps.softmax(0)[..., None] * outputs).sum(0)
        return output.to(self.dtype), logsumexps.logsumexp(0).to(self.dtype)

    def __str__(self) -> str:
        sizes = f"{len(self.parts)} parts of the keys, q of shape {self.shape} and {self.dtype_name}"
        return sizes + ", large scores" * (self.size > 1) + ", queries that see no key of a part" * self.blind

    @property
    def when(self) -> str:
        return f", part {self.step} and part 1" if self.step == 0 else f", part {self.step + 1} and those before it"


def worlds(draw: Draw) -> dict[int, list[Parts]]:
    every = [
        draw.world(Parts, 1),
        draw.world(Parts, 1, steps=4),
        draw.world(Parts, 1, dtype=F32, shape=(2, 2, 7, 4)),
        draw.world(Parts, 1, shape=(draw.random.randrange(6, 9), 4), only="right only for some shapes"),
        draw.world(Parts, 1, shape=(2, 0, 3), only="right only where there are queries"),
        draw.world(Parts, 1, size=3000.0, steps=2, only="right only for small scores"),
        draw.world(Parts, 1, dtype=F32, size=300.0, only="right only for small scores"),
        draw.world(Parts, 1, blind=True, steps=3, only="right only where each query sees a key of both parts"),
    ]
    return {1: every}


def in_turn(world: Parts, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play the merge of each part with those before it."""
    so_far = world.parts[0]
    for part in world.parts[1:]:
        given = [*so_far, *part]
        before = [x.clone() for x in given]
        yield None
        returned = fn(so_far, part)
        so_far = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        changed = not all(map(same_numbers, before, given))
        old = any(now is x for now in so_far for x in given if x.numel())
        yield Look(dict(zip(NAMES, so_far, strict=True)), {"changed": changed, "old": old})


def is_(name: str, *formulas: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[One], bool]:
    """Return a row's test: whether the value of this name is that of one of `formulas(o_a, l_a, o_b, l_b)`."""

    def instead(world: Parts) -> Iterator[list[dict[str, Tensor]]]:
        for formula in formulas:
            value = formula(*world.merged(world.step), *world.parts[world.step + 1])
            if value.isfinite().all():
                yield [{name: value}]

    return as_if(instead)


def weighed(weigh: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Return a formula of the output, in which `weigh(l_a, l_b)` returns the weight of each part."""

    def output(o_a: Tensor, l_a: Tensor, o_b: Tensor, l_b: Tensor) -> Tensor:
        w_a, w_b = weigh(l_a, l_b)
        return w_a[..., None] * o_a + w_b[..., None] * o_b

    return output


# fmt: off
WEIGHT = "How much does each part count, if one has a thousand keys that fit, and the other a single one that does not?"
SUM = "By what was the output of a part divided, and by what must the output of both be divided?"
EXERCISE = Exercise(
    worlds,
    Expected(lambda w: [dict(zip(NAMES, w.merged(w.step + 1), strict=True))], tolerance={F64: 1e-10, F32: 1e-4}),
    question=SUM,
    script=in_turn,
    mistakes=Mistakes((
        NOT_FINITE,
        Mistake("all parts count alike", WEIGHT, is_(OUTPUT, lambda o_a, l_a, o_b, l_b: (o_a + o_b) / 2),
                symptom="a loss that is a little too high, on several ranks alone"),
        Mistake("the outputs are added", SUM, is_(OUTPUT, lambda o_a, l_a, o_b, l_b: o_a + o_b)),
        Mistake("weighed by the logarithms", "Which number is the sum itself, if l is its logarithm?",
                is_(OUTPUT, weighed(lambda l_a, l_b: (l_a / (l_a + l_b), l_b / (l_a + l_b))))),
        Mistake("the weights are exchanged", "Which part's sum belongs to which part's output?",
                is_(OUTPUT, weighed(lambda l_a, l_b: ((l_b - l_a).sigmoid(), (l_a - l_b).sigmoid())))),
        Mistake("not divided by the sum of both", SUM,
                is_(OUTPUT, *(weighed(lambda l_a, l_b, of=of: ((l_a - of(l_a, l_b)).exp(), (l_b - of(l_a, l_b)).exp()))
                              for of in (torch.maximum, lambda a, b: a, lambda a, b: b, lambda a, b: 0)))),
        Mistake("the log-sum-exp of one part", "Which keys does the next merge believe to be in this part?",
                is_(LOGSUMEXP, lambda o_a, l_a, o_b, l_b: torch.maximum(l_a, l_b),
                    lambda o_a, l_a, o_b, l_b: l_a, lambda o_a, l_a, o_b, l_b: l_b),
                symptom="right on two ranks, and wrong on three"),
        Mistake("the logarithms are added", "What is the logarithm of a sum, and what that of a product?",
                is_(LOGSUMEXP, lambda o_a, l_a, o_b, l_b: l_a + l_b)),
    ), after=(
        Mistake("not new tensors", "Whose tensors are a and b, and who may change them later?",
                lambda one: one.done.facts["old"] and "returned a tensor that it was given"),
    ), raised=(
        Mistake("a weight along the head's width", "A weight belongs to a query. Along which dim does o have its E "
                "numbers?", says("The size of tensor")),
    )),
)
# fmt: on


@answered
def merge(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(a, b) -> (output, log-sum-exp)` of the keys of both parts, new tensors; a and b stay as they are.

    a, b: pairs of an output [..., queries, width] and the log-sum-exp of each query [..., queries]
    """
    checked(EXERCISE, (fn,), seed)
    return "2 to 5 parts are one softmax, also with scores in the thousands, and for queries that see no key of a part"


merge.expected = textbook  # the notebook goes on with this function, if the learner's is not right yet
