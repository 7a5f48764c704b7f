"""deal_heads: each rank gets whole attention heads, and some ranks share keys and values.  The answer is numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any, NamedTuple

from labs.exercises.engine.answer import Mistake, answered, show
from labs.exercises.engine.by_script import Play, as_a_whole, checked
from labs.exercises.engine.learner_job import noted
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.tp.parameter_cuts import fits


class Deal(NamedTuple):
    heads: int
    kv_heads: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.heads} query heads over {self.kv_heads} of keys and values, {self.ranks} ranks"


@dataclass(frozen=True)
class Deals(World):
    """A world of two ranks, each of which calls the function for every rank of every deal of attention heads."""

    deals: tuple[Deal, ...] = ()

    def __str__(self) -> str:
        return "two ranks ask"


def worlds(draw: Draw) -> dict[int, list[Deals]]:
    always = [(8, 4, 2), (8, 2, 4), (6, 3, 2), (8, 8, 3), (8, 1, 4), (24, 2, 8), (4, 4, 4), (16, 2, 16), (6, 3, 1)]
    always.append((8, 8, 5))
    possible = [(k * m, k, n) for k in range(1, 9) for m in range(1, 7) for n in range(1, 13) if fits(k * m, k, n)]
    deals = tuple(Deal(*each) for each in always + draw.random.sample(possible, 11))
    return {2: [draw.world(Deals, 2, deals=deals)]}


def ask(world: Deals, fn: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    yield Look(
        facts={"answers": [[lists(noted(deal, fn, *deal, rank)) for rank in range(deal.ranks)] for deal in world.deals]}
    )


def whole(number: Any) -> int:
    """Return a whole number as an int: 2 for 2.0, too."""
    return int(number) if isinstance(number, float) and number.is_integer() else index(number)


def lists(returned: Any) -> list[list[int]] | str:
    """Return the answer as three lists of ints, or a description of another kind of answer."""
    try:
        queries, keys, sharers = (list(map(whole, numbers)) for numbers in returned)
    except (TypeError, ValueError):
        return show(returned)
    return [queries, keys, sharers]


class Dealt:
    """The answers that two processes got about a deal of attention heads, and the expected keys and sharers.

    expected_keys: for each rank, the heads of keys and values that its queries read.
    expected_sharers: for each rank, the ranks that were given the same heads of keys and values.
    """

    def __init__(self, deal: Deal, answers: list[Any], others: list[Any]) -> None:
        self.deal, self.description, self.alike = deal, answers, answers == others
        self.no_lists = next(
            (f"rank {r} is told {each}" for r, each in enumerate(answers) if isinstance(each, str)), None
        )
        if not self.no_lists:
            self.queries, self.keys, self.sharers = zip(*answers, strict=True)
            reads = [sorted({query * deal.kv_heads // deal.heads for query in own}) for own in self.queries]
            self.expected_keys = reads
            self.expected_sharers = [[rank for rank, keys in enumerate(self.keys) if keys == own] for own in self.keys]

    def first(self, matches: Callable[[int], str | bool]) -> str | None:
        """Return a sentence about the first rank that matches, or None."""
        return next((f"rank {r} {words}" for r in range(self.deal.ranks) if (words := matches(r))), None)


def each_deal(seen: StepOutcomes) -> Iterator[tuple[str, Dealt]]:
    """Yield the answers about each deal, with words for it."""
    for deal, *answers in zip(seen.world.deals, *(done.facts["answers"] for done in seen.done), strict=True):
        yield f"{deal}: ", Dealt(deal, *answers)


def not_once(lists: Sequence[list[int]], heads: int) -> tuple[int, list[int]] | None:
    """Return the first attention head that is not on exactly one rank, or that does not exist, and the head's ranks."""
    for head in {*range(heads), *chain(*lists)}:
        ranks = [r for r, own in enumerate(lists) for each in own if each == head]
        if len(ranks) != 1 or not 0 <= head < heads:
            return head, ranks
    return None


def keys_twice(dealt: Dealt) -> str | None:
    found = not_once(dealt.keys, dealt.deal.kv_heads) if dealt.deal.kv_heads >= dealt.deal.ranks else None
    return "keys and values {} are on ranks {}".format(*found) if found else None


def queries_twice(dealt: Dealt) -> str | None:
    found = not_once(dealt.queries, dealt.deal.heads)
    return "query head {} is on ranks {}".format(*found) if found else None


def uneven(dealt: Dealt) -> str | bool:
    heads, kv_heads, ranks = dealt.deal
    units = max(kv_heads, ranks)  # each rank gets the same number, and the first ones get one more if some are left
    each, more = divmod(units, ranks)
    expected, found = [heads // units * (each + (rank < more)) for rank in range(ranks)], list(map(len, dealt.queries))
    return found != expected and f"the ranks have {found} query heads, and not {expected}"


def not_read(dealt: Dealt) -> str | None:
    return dealt.first(
        lambda r: (
            sorted(dealt.keys[r]) != dealt.expected_keys[r]
            and f"has keys and values {dealt.keys[r]}; its queries {dealt.queries[r]} read {dealt.expected_keys[r]}"
        )
    )


def other_sharers(dealt: Dealt, alone: bool = False) -> str | None:
    found, expected = dealt.sharers, dealt.expected_sharers
    return dealt.first(
        lambda r: (
            found[r] != expected[r]
            and (found[r] == [r] or not alone)
            and f"adds up its gradient with {found[r]}; the same keys and values are on {expected[r]}"
        )
    )


# fmt: off
SHARE = "Whose queries have read the same keys and values, and so have a part of their gradient?"
PLAY = Play(
    worlds,
    ask,
    tables=(
        (each_deal, (
            Mistake("not three lists of heads and ranks", "Which heads, and which ranks, by their numbers?",
                    lambda dealt: dealt.no_lists),
            Mistake("not the same for everybody who asks",
                    "Whose heads are asked for: those of the rank that asks, or of the one in the arguments?",
                    lambda dealt: not dealt.alike and "they are told different lists for the same rank"),
            Mistake("a rank without a head",
                    "What does attention compute on a rank without queries, or without keys?",
                    lambda dealt: dealt.first(lambda r: not (dealt.queries[r] and dealt.keys[r])
                                              and f"has {dealt.description[r]}"),
                    symptom="an empty tensor in attention, where there are more ranks than heads of keys and values"),
            Mistake("a query head is missing, or there twice",
                    "Who computes head 0, 1, 2, ..., each once, and no other?", queries_twice),
            Mistake("keys and values that its queries do not read",
                    "H / K query heads read one head of keys and values: which one does query head h read?", not_read,
                    symptom="no error, but attention to another head's keys"),
            Mistake("keys and values twice, where there are enough", "Which queries should stay together?",
                    keys_twice),
            Mistake("uneven, or the extra heads are not on the first ranks",
                    "Which ranks have one more, and by how much?", uneven),
            Mistake("not in order", "In which order do the rows of q, k and v lie in memory?",
                    lambda dealt: dealt.first(lambda r: any(own != sorted(own) for own in dealt.description[r][:2])
                                              and f"has {dealt.description[r]}")),
            Mistake("ranks that share are not neighbours",
                    "Which ranks have the same heads of keys and values, and are they next to each other?",
                    lambda dealt: dealt.first(lambda r: (s := dealt.expected_sharers[r])[-1] - s[0] >= len(s)
                                              and f"shares with {s}"),
                    symptom="groups of ranks that do not fit those of labs/tp/parameter_cuts.py, or of a node"),
            Mistake("the gradient of shared keys and values is not summed", SHARE,
                    lambda dealt: other_sharers(dealt, alone=True),
                    symptom="copies of k and v that drift apart, where there are fewer of them than ranks"),
            Mistake("summed over the wrong ranks", SHARE, other_sharers),
        )),
        (as_a_whole, (
            Mistake("it sends", "What do the four numbers not tell you?",
                    lambda seen: seen.events and f"it calls {seen.events[0].op}"),
        )),
    ),
    question=SHARE,
)
# fmt: on


@answered
def deal_heads(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(heads, kv_heads, ranks, rank) -> (queries, keys, sharers)`, three lists of whole numbers.

    queries: this rank's query heads
    keys: the heads of keys and values that these read; no two ranks have the same ones if there are enough
    sharers: the ranks, in order and with this one, that must add up the gradient of these keys and values

    Returns the text of the ✓ line.
    """
    deals = checked(PLAY, (fn,), seed).seen[0].world.deals
    return f"{len(deals)} deals, on 1 to 16 ranks: each head once, its keys and values beside it, and not one message"
