"""bring_back: the results of rows return to their tokens' ranks and places, and are weighed and added up."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered, says
from labs.exercises.engine.common_mistakes import Sends
from labs.exercises.engine.on_ranks import F32, Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, same_numbers
from labs.exercises.engine.value import as_if
from labs.exercises.experts import _routed
from labs.exercises.experts._routed import NO_TOKENS, SPREAD, Routed, by_member
from labs.moe import AllToAll

ORDER = "not added in the order of the experts' numbers"


def worlds(draw: Draw) -> dict[int, list[Routed]]:
    found = _routed.worlds(draw)
    spread = found[4][1]
    odd = replace(spread, dtype=F32, is_odd=True, rank_of=(3, 2, 1, 0, 3, 2, 1, 0), only=ORDER)
    return found | {4: [*found[4], replace(spread, dtype=F32, only=""), odd]}


def given(world: Routed, i: int) -> tuple[Any, ...]:
    """Return the arguments of a member: results, order, sends, receives, weights."""
    sends, receives = world.rows[i].tolist(), world.rows[:, i].tolist()
    return world.computed_by(i), world.order[i].clone(), sends, receives, world.weights[i].clone()


def script(world: Routed, fn: Callable[..., Any]) -> Iterator[Look | None]:
    arguments, before = given(world, world.index()), given(world, world.index())
    yield None
    y = fn(*arguments, **world.process_group())
    pairs = zip(arguments, before, strict=True)
    changed = any(not same_numbers(*each) if isinstance(each[0], Tensor) else each[0] != each[1] for each in pairs)
    yield Look({"": y}, {"changed": changed})


def weighed(weights: Tensor, results: Tensor) -> Tensor:
    """Return the weighted sum of each token's results, one after another."""
    products = (weights[..., None] * results.view(*weights.shape, results.shape[-1])).unbind(1)
    return sum(products[1:], products[0])


def unweighed(w: Routed, i: int) -> Tensor:
    return weighed(w.weights[i] * 0 + 1, w.results[i])


# fmt: off
PLACE = "The i-th row that was sent belongs to place order[i]: where does its result go?"
EXERCISE = Exercise(
    worlds,
    Expected(by_member(lambda w, i: weighed(w.weights[i], w.results[i]))),
    question=PLACE,
    script=script,
    sends=lambda w: Sends(
        least=w.nbytes * int(w.rows.sum() - w.rows.diagonal().sum()),
        enough=lambda rank: w.nbytes * int(w.rows[:, w.members.index(rank)].sum()),
    ),
    mistakes=Mistakes((
        Mistake("the sort is not undone", PLACE, as_if(by_member(lambda w, i: weighed(w.weights[i], w.sorted(i)))),
                symptom="tokens that get the results of other tokens, and a loss that hardly falls"),
        Mistake("sorted again, and not back", PLACE,
                as_if(by_member(lambda w, i: weighed(w.weights[i], w.sorted(i)[w.order[i]])))),
        Mistake("the results are not weighed", "What did the router say about each of the k results?",
                as_if(by_member(unweighed))),
        Mistake("the weights of other rows", "In which order are the rows, and in which the weights?",
                as_if(by_member(lambda w, i: weighed(w.weights[i].flatten()[w.order[i].argsort()].view_as(w.weights[i]),
                                                     w.results[i])))),
        Mistake("averaged over the k", "Do the router's weights add up to 1, or to k?",
                as_if(by_member(lambda w, i: weighed(w.weights[i] / w.top_k, w.results[i])))),
    ), sent=(
        Mistake("every rank gets all results", "Which rank has the token of this result?",
                lambda sent: any(event.op == "all_gather" for event in sent.events) and sent.too_much),
    ), raised=(
        Mistake("sends and receives are not exchanged", "Who sends on the way back as many rows as it received?",
                says("(?i)split sizes")),
    )),
    questions={
        SPREAD: "Rows are sorted by rank, and then by expert: what does that change here?",
        NO_TOKENS: "How many numbers does a row have, where there is no row?",
        ORDER: "A token's results come back rank by rank: in which order would one process add them?",
    },
)
# fmt: on


@answered
def bring_back(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(results, order, sends, receives, weights, group=None) -> y`, [tokens, numbers of a row].

    results: the results of the rows that came to this rank, the first rank's first
    order: the places of this rank's own rows in [tokens × top_k], in the order in which they were sent
    sends, receives: the numbers of rows that went to each rank, and came from it
    weights: the router's weights, [tokens, top_k]; a token's experts are in ascending order

    Returns the text of the ✓ line, with the bytes sent.
    """
    passed, first = checked(EXERCISE, (fn,), seed), worlds(Draw(seed))[4][0]
    sent = sum(passed.recording.sent(rank, 0) for rank in range(4))
    return (
        f"you sent {sent / EXERCISE.sends(first).least:.2f} × the results for other ranks; the least possible is 1.00 ×"
    )


def expected(results: Tensor, order: Tensor, *sides: Any) -> Tensor:
    *counts, weights = sides
    back = AllToAll.apply(results, *counts[::-1], None)
    return weighed(weights, back[order.argsort()])


bring_back.expected = expected  # the notebook goes on with this function, if the learner's is not right yet
