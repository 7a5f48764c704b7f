"""propagate: layouts pass from a few tensors to all others, from operation to operation, until nothing is new.

Each operation is the letters of its tensors and their names, inputs first; a cut is the number of one dim.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper
from labs.exercises.gspmd.meet import met
from labs.exercises.gspmd.pass_on import passed_on

Operations = Sequence[tuple[Sequence[str], Sequence[str]]]  # (letters, name) of each tensor of each operation
Cuts = dict[str, int]

TRAINING = "ik,kj->ij x w1 h; ij,jk->ik h w2 y; ik,jk->ij dy w2 dh; ij,kj->ik dh w1 dx; ik,ij->kj x dh dw1"
FORWARD = "ik,kj->ij x w h; ij,ij->ij h b g; ij,jl->il g v y"
CASES = (  # operations; given cuts; times as many elements as others have
    (FORWARD, {"x": 0}, {}),
    (FORWARD, {"y": 0}, {}),
    (FORWARD, {"v": 1}, {}),
    (FORWARD, {"b": 1}, {}),
    ("abc,c->abc x s n; abc,cd->abd n w y; abd,abd->abd y y2 z", {"z": 1}, {}),
    ("ab->ba x t; ba,ac->bc t w y", {"y": 0}, {}),
    ("ab->ab x a; ab->ab a b; ab->ab x c; ab->ab c d", {"b": 0}, {}),  # x is known in reverse; c and d a round later
    ("ab->ab x c; ab->ab c d; ab,bc->ac d v e; ab->ab x a; ab->ab a b", {"b": 0}, {}),
    (TRAINING, {"x": 0, "dy": 0}, {}),
    (TRAINING, {"w1": 1, "w2": 0}, {}),
    ("ik,kj->ij x w y; ij,jl->il y v z", {"x": 0, "w": 1}, {"x": 3}),  # FSDP: w moves
    ("ik,kj->ij x w y; ij,jl->il y v z", {"x": 0, "w": 1}, {"w": 3}),  # few tokens: x moves
    ("ik,kj->ij x w y", {"x": 1, "w": 1}, {"x": 3}),  # w has the letter of x, too, and stays as it is
    ("ik,kj->ij x w y; ij,jl->il y v z", {"w": 0}, {}),  # the sum's letter: y learns nothing
)


def propagated(
    operations: Operations,
    cut: Mapping[str, int],
    sizes: Mapping[str, int],
    pass_on: Callable[..., Any] = passed_on,
    meet: Callable[..., str] = met,
    *,
    rounds: int = 10**6,
    back: bool = True,
    keep: bool = True,
) -> Cuts:
    """Return {name: dim} for all tensors that the cuts reach.

    rounds: at most this many rounds
    back: whether a round also goes from the last operation to the first
    keep: whether a known cut is kept when another one arrives
    """
    found, before = dict(cut), None
    while before != found and rounds > 0:
        before, rounds = dict(found), rounds - 1
        for dims, names in (*operations, *(reversed(operations) if back else ())):
            here = [found.get(name) for name in names]
            if any(dim is not None for dim in here):
                letter = meet(dims, here, [sizes[name] for name in names])
                cuts = zip(dims, here, strict=True)
                followed = [dim if dim is not None and own[dim] == letter else None for own, dim in cuts]
                news = zip(names, pass_on(dims, followed), strict=True)
                found |= {name: dim for name, dim in news if dim is not None and not (keep and name in found)}
    return found


def news_only(operations: Operations, cut: Mapping[str, int], *others: Any) -> Cuts:
    return {name: dim for name, dim in propagated(operations, cut, *others).items() if name not in cut}


def with_none(operations: Operations, *others: Any) -> dict[str, int | None]:
    return dict.fromkeys(name for _, names in operations for name in names) | propagated(operations, *others)


def first_letter(dims: Sequence[str], cut: Sequence[int | None], sizes: Sequence[int]) -> str:
    return next(own[dim] for own, dim in zip(dims, cut, strict=True) if dim is not None)


def without_meet(operations: Operations, cut: Mapping[str, int], sizes: Mapping[str, int], *others: Any) -> Cuts:
    return propagated(operations, cut, sizes, meet=first_letter)


# fmt: off
MISTAKES = (
    Mistake("one pass from first to last", "Only the layout of the last result is known. When does the first operation "
            "learn of it?", as_if(propagated, rounds=1, back=False),
            symptom="layouts that were given for results are gathered, although all inputs could have followed them"),
    Mistake("one round, and no more", "On the way back, a layout reaches the first operation. Who tells those "
            "after it?", as_if(propagated, rounds=1)),
    Mistake("a known cut is replaced", "Somebody gave this tensor its layout. May another letter change it?",
            as_if(propagated, keep=False, rounds=3)),
    Mistake("meet is not asked", "Two tensors of an operation are cut along different letters. Which letter is passed "
            "on?", as_if(without_meet)),
    Mistake("the given cuts are missing", "The tensors that were given have a layout, too. Where is it?",
            as_if(news_only)),
    Mistake("None, where nothing is known", "What does the docstring say about tensors that no cut reaches?",
            as_if(with_none)),
)
# fmt: on


def read(text: str) -> Operations:
    """Return the operations that a line of CASES describes."""
    found = []
    for each in text.split("; "):
        letters, *names = each.split(" ")
        found.append((letters.replace("->", ",").split(","), names))
    return found


@answered
def propagate(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(operations, cut, sizes, pass_on, meet) -> {name: dim}` of all tensors that a cut reaches.

    Return the ✓ line.

    operations: (letters of each tensor, name of each tensor), inputs first
    cut: {name: dim} of the tensors whose layout is given
    sizes: {name: number of elements}
    pass_on, meet: the functions of the two exercises before
    """
    draw, sheets = random.Random(seed), []
    for text, cut, larger in CASES:
        operations, times = read(text), draw.randrange(2, 2000)
        sizes = {name: times * larger.get(name, 1) for _, names in operations for name in names}
        arguments = operations, dict(cut), sizes, passed_on, met
        sheets.append(Sheet(arguments, propagated(*arguments), f"{text}, of which {cut} is given", fills=True))
    draw.shuffle(sheets)
    return on_paper(fn, sheets, MISTAKES, "Which operation has a tensor whose cut is known, and one whose cut is not?")


propagate.expected = propagated  # the notebook goes on with this function, if the learner's is not right yet
