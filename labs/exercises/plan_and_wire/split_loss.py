"""split_loss: a loss over a split vocabulary needs three numbers per token all-reduced, for any vocabulary size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.dtensor.placement import piece
from labs.exercises.engine import differentiated as ways
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sends
from labs.exercises.engine.on_ranks import F32, F64, Draw, Mistakes, checked
from labs.exercises.engine.value import One, as_if


@dataclass(frozen=True)
class Loss(ways.Split):
    """A cross-entropy over a vocabulary that is split over the ranks.

    turned: by how many ranks the sizes of the parts are rotated, so that an empty part need not be the last one.
    highest: the size of the extreme logits.  Token 0 has only low ones; each other token has a high one on one rank.
    """

    tokens: int = 9
    vocabulary: int = 20
    turned: int = 0
    highest: float = 1

    result = "loss"
    whole = "its logits"
    shape = ()

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

    def all_reduces(self) -> tuple[int, float]:
        """Return the most all-reduces that are allowed in this step, and their elements.

        The tokens may travel in a few parts, but not each by itself.
        """
        return (0, 0) if self.step else (12, 3 * self.tokens)

    def sends(self) -> Sends:
        """Return the least and the most bytes that may be sent.

        A number may take 8 bytes.  At the least one number per token is sent, by all ranks but one.
        """
        least = super().sends().least / 6
        return super(Loss, replace(self, dtype=F64)).sends()._replace(least=least)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.tokens * self.vocabulary // self.ranks


def worlds(draw: Draw) -> dict[int, list[Loss]]:
    a, b = draw.random.randrange(4, 8), draw.random.randrange(5, 9)
    high, odd = {"highest": 1e4}, 4 * a + draw.random.randrange(1, 4)
    options = [*ways.usual(tokens=64, vocabulary=96), high, *ways.UNUSUAL[:2]]
    options += [{"vocabulary": odd}, {"vocabulary": 9}, {"vocabulary": 5, "turned": 1}]  # a rank's part is empty
    options += [{"vocabulary": 3, "turned": 2}, {"vocabulary": 9, "turned": 3} | high]
    others = (draw.random.choice((6, 7, 8)), 1)  # on six, a gather of one number is more than three all-reduces
    options += [{"ranks": ranks, "vocabulary": ranks * b + ranks // 2} for ranks in others]
    return ways.draw_worlds(draw, Loss, options)


def losses(*makes: Callable[..., list[Tensor]]) -> Callable[[One], bool]:
    """Return a row's test: whether the losses are those that one of the functions computes.

    makes: functions from what the ranks of a group bring to the loss on each of them
    """

    def of_group(world: Loss, make: Callable[..., list[Tensor]], group: tuple[int, ...]) -> ways.Numbers:
        return [{"loss": loss} for loss in make([world.brings(rank) for rank in group])]

    return as_if(lambda world: (world.by_rank(partial(of_group, world, make)) for make in makes))


def by_own_highest(brought: Sequence[ways.Brought]) -> list[Tensor]:
    """Return losses from exponentials relative to each rank's own highest logit, added up as if relative to one."""
    logits = [x.double() for each in brought if (x := each["logits"]).shape[1]]
    rows = torch.cat([x - x.amax(1, True) for x in logits], 1)
    target = rows.gather(1, brought[0]["targets"][:, None])[:, 0]
    return [(rows.exp().sum(1).log() - target).mean()] * len(brought)


def parts_of(brought: Sequence[ways.Brought]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return for each token the log-sum-exp, the target's logit, the highest logit, and the ranks that have the target.

    The last value is a list: for each rank, whether it has the logit of the token's target.
    """
    logits, targets = torch.cat([each["logits"].double() for each in brought], 1), brought[0]["targets"]
    places = [(targets - each["first"], each["logits"].shape[1]) for each in brought]
    here = [(place >= 0) & (place < size) for place, size in places]
    return logits.logsumexp(1), logits.gather(1, targets[:, None])[:, 0], logits.amax(1), here


def with_own_targets(brought: Sequence[ways.Brought], relative: bool = False) -> list[Tensor]:
    """Return losses as if a target's logit were known only on its own rank."""
    total, target, highest, here = parts_of(brought)
    top = highest * relative
    return [(total - top - mine * (target - top)).mean() for mine in here]


def over_own_tokens(brought: Sequence[ways.Brought]) -> list[Tensor]:
    """Return losses that are divided by the number of tokens whose target is on the rank."""
    total, target, _, here = parts_of(brought)
    return [(total - target).sum() / mine.sum().clamp(min=1) for mine in here]


def from_one(world: Loss) -> Iterator[ways.Numbers]:
    """Yield the gradients as if the incoming gradient were 1."""
    if world.step:
        came = [float(world.comes_back(rank)) for rank in world.members]
        yield [
            {name: x / by for name, x in expected.items()} for expected, by in zip(world.expected(), came, strict=True)
        ]


# fmt: off
EXERCISE = ways.both_ways(
    worlds,
    question="Of which sums over the vocabulary is the loss made, and what does each rank add to them?",
    memory=Memory(lambda draw: Loss(0, 4, dtype=F32, tokens=256, vocabulary=512), during=9, after=1, between=4.5),
    mistakes=Mistakes((
        Mistake("summed over the tokens", "By what is the sum over all tokens divided?",
                as_if(lambda w: w.times(w.tokens))),
        Mistake("relative to each rank's own highest logit",
                "Exponentials are added up across ranks: relative to which maximum did each rank take them?",
                losses(by_own_highest)),
        Mistake("a target's logit stays on its rank",
                "Which rank has the logit of a token's target, and how do the others learn of it?",
                losses(with_own_targets, partial(with_own_targets, relative=True)),
                symptom="another loss on each rank"),
        Mistake("divided by the tokens of one rank", "Of how many tokens is the loss a mean, and on which ranks?",
                losses(over_own_tokens)),
        ways.SUMMED_TOO,
        Mistake("the gradient that comes in is left out",
                "The loss may be scaled before backward. Where does your gradient learn of it?", as_if(from_one),
                symptom="right until the loss is divided by the number of micro-batches"),
        ways.NOT_FINITE,
        Mistake("the right loss with a wrong gradient",
                "softmax, minus one at the target: over which columns, and on which rank?",
                lambda one: one.world.step == 1,
                symptom="a loss that agrees with one process at step 0, and at no other"),
    ), sent=(
        ways.TOO_MANY,
        Mistake("logits are gathered", "Which numbers of a token do the other ranks need, if not all of its logits?",
                lambda sent: ways.gathered(sent) and max(sent.seen.sent.values()) > 2 * sent.expected.enough(0)
                and sent.too_much,
                symptom="memory that grows with the vocabulary on every rank: nothing was gained by splitting "
                    "the head"),
        Mistake("more than three numbers per token",
                "Which numbers about a token does every rank need from all others?", lambda sent: sent.too_much),
    )),
)
# fmt: on


@answered
def split_loss(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(logits, targets, first, group=None) -> loss`, the mean cross-entropy (0-dim), the same on every rank.

    logits: this rank's columns, [tokens, columns]; there may be none
    targets: the same on every rank, [tokens]
    first: the place in the vocabulary of this rank's first column

    Returns the text of the ✓ line, with the numbers sent per token.
    """
    recording = checked(EXERCISE, (fn,), seed).recording
    numbers = sum(event.bytes_in for event in recording.select(0, 2)) / (64 * 4)
    return f"you sent {numbers:.2f} numbers per token forward and none backward; 3 are enough for any vocabulary"
