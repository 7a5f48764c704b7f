"""The challenge of 12: documents packed in one row, cut over four ranks so that the fewest keys and values travel.

No query sees another document.  So a rank needs only the keys and values of its own documents, up to its last token of
each, and in the judge's job an uneven all-to-all brings a rank those that it lacks.  A rank may have 10 % more tokens
than the mean, and take 10 % more products.

The bound, for a document of L tokens: order the ranks by their last token of it.  The last rank needs the keys of all
L tokens.  The tokens behind the last one of the j-th rank before it are all on j ranks.  Let t_j be the most tokens at
the end of the document that j ranks may hold, and whose products they may take; then the j-th rank needs L - t_j keys
or more.  A rank has what it needs, or receives it, and together they have L: so at least L - t_1, L - t_2, ... keys
are received, as far as these numbers are positive.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from labs.collectives import place
from labs.cp import Pieces, Tokens
from labs.cp.partial_softmax import attend
from labs.cp.ulysses import exchange
from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.challenge import Challenge, Function, Judged, job
from labs.kit.record import mark

RANKS, MORE, WIDTH = 4, 1.1, 2
BYTES = 2 * 8 * WIDTH  # of a key and its value
CASES = {
    "one document": (400,),
    "a long one": (240, 50, 40, 40, 20, 10),
    "two long ones": (150, 30, 150, 30, 40),
    "three": (130, 140, 130),
    "a long tail": (180, *[20] * 11),
}


class Taken(NamedTuple):
    """The keys that travel to all ranks, and the tokens and products of each rank."""

    keys: int
    tokens: list[int]
    products: list[int]


def most(lengths: Sequence[int]) -> tuple[int, int]:
    """Return the most tokens and the most products that a rank may have."""
    products = sum(length * (length + 1) // 2 for length in lengths)
    return int(MORE * sum(lengths) / RANKS), int(MORE * products / RANKS)


def bound(lengths: Sequence[int]) -> int:
    """Return the fewest keys that travel."""
    return sum(max(0, length - at_the_end(length, j, *most(lengths))) for length in lengths for j in range(1, RANKS))


def at_the_end(length: int, ranks: int, tokens: int, products: int) -> int:
    """Return the most tokens at the end of a document that some ranks may hold, and whose products they may take."""
    work = accumulate(range(length, 0, -1))  # of the last token, of the last two, ...
    return min(sum(each <= ranks * products for each in work), ranks * tokens)


def row(lengths: Sequence[int], places: Sequence[Sequence[int]]) -> Pieces:
    """Return the pieces of a row of documents; raise ValueError if a token is missing, or there twice."""
    return Pieces(places, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None])


def needed(pieces: Pieces, rank: int) -> list[int]:
    """Return the places of the keys that a rank's queries see."""
    numbers = pieces.documents[0].tolist()
    last = {numbers[at]: at for at in pieces.places[rank]}
    return [at for at, number in enumerate(numbers) if at <= last.get(number, -1)]


def taken(lengths: Sequence[int], places: Sequence[Sequence[int]]) -> Taken:
    """Return what a cut takes, on paper."""
    pieces, starts = row(lengths, places), [0, *accumulate(lengths)]
    work = [at - starts[number] + 1 for at, number in enumerate(pieces.documents[0].tolist())]
    keys = sum(len({*needed(pieces, rank)} - {*own}) for rank, own in enumerate(places))
    return Taken(keys, [*map(len, places)], [sum(work[at] for at in own) for own in places])


def cuts(fn: Function) -> list[list[list[int]]]:
    """Return what a function chooses in each case, as sorted lists."""
    found = (fn([*lengths], RANKS, *most(lengths)) for lengths in CASES.values())
    return [[sorted(int(at) for at in own) for own in places] for places in found]


def on_a_rank(chosen: Sequence[list[list[int]]]) -> list[bool]:
    """Compute the attention of each case on a rank, a step each; return whether it is one process's."""
    found, generator = [], torch.Generator().manual_seed(0)
    for lengths, places in zip(CASES.values(), chosen, strict=True):
        pieces = row(lengths, places)
        q, *pair = torch.randn(3, 1, 1, sum(lengths), WIDTH, generator=generator, dtype=torch.float64)
        mark("step")
        output = with_few_keys(q[:, :, None], torch.stack(pair), pieces)
        mark("end")
        whole = attend(q[:, :, None], torch.stack(pair), pieces.whole, pieces.whole)[0]
        found.append(torch.allclose(output, whole[..., pieces.places[place(None)[0]], :], rtol=0, atol=1e-12))
    return found


def with_few_keys(q: Tensor, pair: Tensor, pieces: Pieces) -> Tensor:
    """Return the attention of this rank's queries; of the keys and values of other ranks it receives what it needs."""
    rank, _ = place(None)
    keys = needed(pieces, rank)
    own = [{*places} for places in pieces.places]
    asked = [sorted({*needed(pieces, other)} & own[rank]) if other != rank else [] for other in range(RANKS)]
    coming = [sorted({*keys} & own[other]) if other != rank else [] for other in range(RANKS)]
    shapes = [(2, 1, 1, len(each), WIDTH) for each in coming]
    received = exchange([pair[:, :, :, each] for each in asked], shapes, None)
    order = [*coming, sorted({*keys} & own[rank])]
    parts = torch.cat([*received, pair[:, :, :, order[-1]]], 3)
    here = parts[:, :, :, torch.tensor([at for each in order for at in each]).argsort()]
    return attend(q[..., pieces.places[rank], :], here, pieces[rank], Tokens(keys, pieces.documents[:, keys]))[0]


def judge(fn: Function) -> Judged:
    (chosen,) = job(cuts, fn, ranks=1)
    for (called, lengths), places in zip(CASES.items(), chosen, strict=True):
        require_room(called, lengths, places)
    results, scores = job(on_a_rank, chosen, ranks=RANKS), {}
    for number, (called, lengths) in enumerate(CASES.items()):
        if not all(rank[number] for rank in results):
            raise Wrong(f"{called}: the attention is not one process's", "Which keys do a rank's queries see?")
        sent = sum(results.recording.sent(rank, number) for rank in range(RANKS))
        scores[called] = 100 * BYTES * bound(lengths) / sent
    return Judged.of(scores)


def require_room(called: str, lengths: Sequence[int], places: Sequence[Sequence[int]]) -> None:
    """Raise Wrong for what is no cut of the row, and if a rank has more than it may have."""
    if len(places) != RANKS:
        raise Wrong(f"{called}: {len(places)} lists of places were returned, and {RANKS} ranks need one each")
    try:
        took = taken(lengths, places)
    except ValueError as error:  # of Pieces
        raise Wrong(f"{called}: {error}", "Which tokens does each rank have?") from None
    for what, each, limit in zip(("tokens", "products"), took[1:], most(lengths), strict=True):
        if max(each) > limit:
            raise Wrong(f"{called}: rank {each.index(max(each))} has {max(each):,} {what}, and may have {limit:,}")


packed = Challenge(
    "packed",
    "12",
    "Packed documents, and the fewest keys that travel",
    "A row of documents on four ranks. Choose the tokens of each rank, so that the fewest keys and values travel. A "
    "rank may have 10 % more tokens than the mean, and take 10 % more products. Five rows differ in their documents.",
    judge,
    floor=31.7,
    course=69.6,
    possible=87.5,
    cases=CASES,
    bound=bound,
    measured=taken,
)
