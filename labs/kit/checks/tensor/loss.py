"""split_loss: a loss over a split vocabulary; three numbers per token, all-reduced, however large that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.dtensor.placement import piece
from labs.kit.checks.answer import Mistake, answered
from labs.kit.checks.ranks import F32, Draw
from labs.kit.checks.tensor import ways
from labs.kit.record import Event


@dataclass(frozen=True)
class Loss(ways.Split):
    """highest: logits of ± this are among them: all low ones of token 0, and a high one of each on one rank alone."""

    tokens: int = 9
    vocabulary: int = 20
    turned: int = 0  # the first rank that has a part of the vocabulary's beginning, and the last ones before it
    highest: float = 1

    result = "loss"
    shape = ()
    calls = (12, 0)  # the tokens may go in a few parts, but not each by itself

    def brings(self, rank: int) -> ways.Brought:
        members = self.fellows(rank)
        me, n = members.index(rank), len(members)
        sizes = [piece(self.vocabulary, n, (each - self.turned) % n)[1] for each in range(n)]
        first, size = sum(sizes[:me]), sizes[me]
        signs = torch.randint(-1, 1, (self.tokens, size), generator=self.generator(rank, 1))
        signs[me::n, :1], signs[0] = 1, -1
        targets = torch.randint(self.vocabulary, (self.tokens,), generator=self.generator(63, 2))
        logits = 3 * self.numbers([self.tokens, size], rank) + self.highest * signs
        return {"logits": logits, "targets": targets, "first": first}

    def on_one(self, brought: Sequence[ways.Brought]) -> Tensor:
        return F.cross_entropy(torch.cat([each["logits"] for each in brought], 1), brought[0]["targets"])

    def due_numbers(self) -> tuple[float, float]:
        return 3 * self.tokens, 0

    def least(self, way: int) -> float:
        return self.tokens * (way == 0)

    def counted(self, event: Event) -> float:
        """Of any dtype."""
        return event.sent / (getattr(torch, event.dtype) if event.dtype else self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.tokens * self.vocabulary // self.ranks


def worlds(draw: Draw) -> list[Loss]:
    a, b = draw.random.randrange(4, 8), draw.random.randrange(5, 9)
    high, odd = {"highest": 1e4}, 4 * a + draw.random.randrange(1, 4)
    options = [{}, {"dtype": F32, "tokens": 64, "vocabulary": 96}, ways.AGAIN, high, ways.UNUSUAL[0], ways.UNUSUAL[1]]
    options += [{"vocabulary": odd}, {"vocabulary": 9}, {"vocabulary": 5, "turned": 1}]  # a rank has nothing
    options += [{"vocabulary": 3, "turned": 2}, {"vocabulary": 9, "turned": 3} | high]
    others = (draw.random.choice((6, 7, 8)), 1)  # on six, a gather of one number is more than three all-reduces
    options += [{"ranks": ranks, "vocabulary": ranks * b + ranks // 2} for ranks in others]
    return ways.drawn(draw, Loss, options)


def by_own_highest(one: ways.One) -> bool:
    """Exponentials relative to each rank's own highest logit, and added up as if to a common one."""
    brought = [one.case.brings(member) for member in one.members]
    rows = torch.cat([x - x.amax(1, True) for each in brought if (x := each["logits"].double()).shape[1]], 1)
    return one.same((rows.exp().sum(1).log() - rows.gather(1, brought[0]["targets"][:, None])[:, 0]).mean())


def parts_of(one: ways.One) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token: the logarithm of its sum, its target's logit, its highest one, and whether the target is here."""
    brought = [one.case.brings(member) for member in one.members]
    mine = brought[one.members.index(one.rank)]
    logits, place = torch.cat([each["logits"].double() for each in brought], 1), mine["targets"] - mine["first"]
    here = (place >= 0) & (place < mine["logits"].shape[1])
    return logits.logsumexp(1), logits.gather(1, mine["targets"][:, None])[:, 0], logits.amax(1), here


def with_own_targets(one: ways.One) -> bool:
    total, target, highest, here = parts_of(one)
    return any(one.same((total - top - here * (target - top)).mean()) for top in (0, highest))


def over_own_tokens(one: ways.One) -> bool:
    total, target, _, here = parts_of(one)
    return one.same((total - target).sum() / here.sum().clamp(min=1))


# fmt: off
EXERCISE = ways.Exercise(
    worlds,
    wide=[Loss(0, 4, dtype=F32, tokens=256, vocabulary=512)], unit="its logits", kept=4.6, most=9.1,
    question="Of which sums over the vocabulary is the loss made, and what does each rank add to them?",
    mistakes=(
        Mistake("summed over the tokens", "By what is the sum over all tokens divided?",
                lambda one: one.times(one.case.tokens)),
        Mistake("relative to each rank's own highest logit",
                "Exponentials are added up across ranks: relative to which maximum did each rank take them?",
                lambda one: one.is_result and by_own_highest(one)),
        Mistake("a target's logit stays on its rank",
                "Which rank has the logit of a token's target, and how do the others learn of it?",
                lambda one: one.is_result and with_own_targets(one), shows="another loss on each rank"),
        Mistake("divided by the tokens of one rank", "Of how many tokens is the loss a mean, and on which ranks?",
                lambda one: one.is_result and over_own_tokens(one)),
        ways.SUMMED_TOO,
        Mistake("the gradient that comes in is left out",
                "The loss may be scaled before backward. Where does your gradient learn of it?",
                lambda one: not one.is_result and one.times(1 / float(one.case.comes_back(one.rank))),
                shows="right until the loss is divided by the number of micro-batches"),
        ways.NOT_FINITE,
        Mistake("the right loss with a wrong gradient",
                "softmax, minus one at the target: over which columns, and on which rank?",
                lambda one: not one.is_result,
                shows="a loss that agrees with one process at step 0, and at no other"),
    ),
    sending=(
        Mistake("logits are gathered", "Which numbers of a token do the other ranks need, if not all of its logits?",
                ways.too_much(lambda sent: ways.gathered(sent) and sent.found > 2 * sent.enough),
                shows="memory that grows with the vocabulary on every rank: nothing was gained by splitting the head"),
        Mistake("more than three numbers per token",
                "Which numbers about a token does every rank need from all others?", ways.too_much(bool)),
    ),
)
# fmt: on


@answered
def split_loss(fn: Callable[..., Any], seed: int) -> str:
    """`fn(logits, targets, first, group=None) -> loss`: the mean cross-entropy (0-dim), the same on every rank.

    logits [tokens, columns]: this rank's, perhaps none, of the vocabulary from `first` on; targets [tokens]: the same.
    """
    recording = ways.checked(EXERCISE, (fn,), seed)
    numbers = sum(event.bytes_in for event in recording.select(0, 2)) / (64 * 4)
    return f"you sent {numbers:.2f} numbers per token forward and none backward; 3 are enough for any vocabulary"
