"""balanced: the places of each rank's tokens, so that under a causal mask all ranks take equally many products."""

import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

from labs.cp import contiguous, zigzag
from labs.exercises.engine.answer import Mistake, answered, first, refuse
from labs.exercises.engine.on_paper import Sheet, each_judged

SIZES = (16, 2), (96, 4), (1000, 4), (53, 3), (101, 4), (2999, 4), (999, 8), (16, 8), (25, 8), (7, 1)  # tokens, ranks
MORE, TOKENS = 2, 2  # products above the mean that a rank may take, × tokens; tokens that ranks may differ by


class Cut:
    """The places that were returned for a number of tokens and ranks."""

    def __init__(self, sheet: Sheet, places: Any) -> None:
        (self.tokens, self.ranks), self.places = sheet.arguments, places

    @property
    def is_cut(self) -> bool:
        lists = isinstance(self.places, list) and all(isinstance(own, list) for own in self.places)
        return lists and all(type(place) is int for own in self.places for place in own)

    @cached_property
    def products(self) -> list[int]:
        return [sum(place + 1 for place in own) for own in self.places]

    @property
    def excess(self) -> float:
        """The products of the rank that takes most, above the mean of all ranks."""
        return max(self.products) - sum(self.products) / self.ranks

    @property
    def uneven(self) -> bool:
        return max(map(len, self.places)) - min(map(len, self.places)) > TOKENS

    @property
    def unbalanced(self) -> bool:
        return self.excess > MORE * self.tokens

    def describe(self) -> str:
        mean, tokens = sum(self.products) // self.ranks, ", ".join(str(len(own)) for own in self.places)
        work = ", ".join(map("{:,}".format, self.products))
        return f"the ranks have {tokens} tokens, and take {work} products; the mean is {mean:,}"


def not_once(cut: Cut) -> str | None:
    given = sorted(place for own in cut.places for place in own)
    wrong = (place for place in {*given, *range(cut.tokens)} if given.count(place) != 1 or place >= cut.tokens)
    return first(f"token {place} is on {given.count(place)} ranks" for place in sorted(wrong)) if wrong else None


def heads_with_tails_in_order(cut: Cut) -> bool:
    """Return whether rank r has chunk r and chunk N + r."""
    heads = [own[: len(own) // 2] for own in cut.places]
    return [*map(min, heads)] == sorted(map(min, heads)) and [*map(max, cut.places)] == sorted(map(max, cut.places))


# fmt: off
LAST = "The last token attends to all tokens, the first one only to itself. Who should have which?"
MISTAKES = (
    Mistake("not a list of places for each rank", "Which tokens does rank 0 have, and which rank 1, by their numbers?",
            lambda cut: (not cut.is_cut or len(cut.places) != cut.ranks)
            and f"returned {str(cut.places)[:60]} ..."),
    Mistake("a token is missing, or there twice", "Who computes token 0, 1, 2, ..., each once, and no other?",
            not_once, symptom="right where 2 N divides the length, and an odd length loses tokens"),
    Mistake("a rank without tokens", "How many tokens does each rank get at least?",
            lambda cut: not all(cut.places) and cut.describe()),
    Mistake("not in ascending order", "In which order do a rank's tokens stand in the sequence?",
            lambda cut: first(f"rank {rank} has {own[:6]} ..." for rank, own in enumerate(cut.places)
                              if own != sorted(own))),
    Mistake("one chunk for each rank", LAST,
            lambda cut: cut.unbalanced and all(own[-1] - own[0] == len(own) - 1 for own in cut.places)
            and cut.describe(),
            symptom="a timeline in which all ranks wait for the last one"),
    Mistake("equal work, but not equal tokens", "Which work of a layer, and which activations, are the same for each "
            "token?", lambda cut: cut.uneven and not cut.unbalanced and cut.tokens % (2 * cut.ranks) == 0
            and cut.describe(), symptom="attention is balanced, and one rank runs out of memory"),
    Mistake("the first head goes with the first tail", "Rank 0's head works least. Which tail does it need?",
            lambda cut: cut.unbalanced and cut.ranks > 1 and heads_with_tails_in_order(cut) and cut.describe()),
    Mistake("the remainder is on one rank", "How long are the shortest and the longest chunk, if nothing divides T?",
            lambda cut: cut.uneven and cut.tokens % (2 * cut.ranks) and cut.describe(),
            symptom="a rank that waits, or other sizes than the receiver has made room for"),
    Mistake("", LAST, lambda cut: (cut.unbalanced or cut.uneven) and cut.describe()),
)
# fmt: on


@answered
def balanced(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(tokens, ranks) -> places`, a list of ascending places for each rank; return the ✓ line.

    A rank may take 2 × tokens products more than the mean, and have 2 tokens more than another rank.
    """
    draw = random.Random(seed)
    sizes = [*SIZES, *((draw.randrange(60, 400), draw.randrange(2, 9)) for _ in range(6))]
    sheets = [Sheet((tokens, ranks), None, f"{tokens:,} tokens, {ranks} ranks") for tokens, ranks in sizes]
    cut = each_judged(fn, sheets, judged)[2]
    last = Cut(sheets[2], [list(own) for own in contiguous(*sheets[2].arguments)]).products[-1]
    most = max(cut.products)
    return (
        f"of {sum(cut.products):,} products ({sheets[2]}) a rank takes {most:,} at most; in one chunk for each rank, "
        f"the last one takes {last:,}"
    )


def judged(sheet: Sheet, returned: Any) -> Cut:
    cut = Cut(sheet, returned)
    refuse(MISTAKES, cut, f"{sheet}: ")
    return cut


balanced.expected = zigzag  # the notebook goes on with this function, if the learner's is not right yet
