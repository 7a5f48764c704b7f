"""Are the values right?  Where not: the first wrong element, and whose numbers stand in its place.

    found = Σ c_i × what rank i brought

A wrong sum is taken apart by least squares (mixture.py): c_i = 0 is a rank left out, 2 one counted twice, 1/N a mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labs.kit.checks.answer import Wrong, instead, show
from labs.kit.checks.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, Case, Kind, Outcome
from labs.kit.checks.mixture import mixture

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0, torch.int64: 0.0}


def right_type(kind: Kind, case: Case, index: int, outcome: Outcome) -> None:
    if not kind.returns_piece:
        return
    found, expected = outcome.returned, kind.expected(case, index)
    if not isinstance(found, Tensor):
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {found}, and not its piece, a tensor",
            "What does the caller need to hold when you are done?",
            "nothing is returned" if found == "None" else "not a tensor",
        )
    if found.shape != expected.shape:
        whole = found.numel() == case.size != expected.numel()
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {show(found)}; its piece has shape {tuple(expected.shape)}",
            f"How does tensor_split cut {case.size} elements into {len(case.members)} pieces?",
            "the whole tensor instead of a piece" if whole else "a piece of another size",
        )
    if found.dtype != expected.dtype:
        raise Wrong(
            f"{case}: rank {case.members[index]} returned {show(found)}",
            "In which dtype was the tensor that you were given?",
            "the dtype changed",
        )


def right_values(kind: Kind, case: Case, outcomes: list[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        expected = kind.expected(case, index)
        found = outcome.returned if kind.returns_piece else outcome.tensor
        if not close(found, expected):
            raise explain(kind, case, index, found, expected, outcomes)
    for index, outcome in enumerate(outcomes if kind.returns_piece else []):
        if not close(case.pieces(outcome.tensor)[index], kind.expected(case, index)):
            raise Wrong(
                f"{case}: what rank {case.members[index]} returned is right, but piece {index} of its tensor is not",
                "From where would an all_gather go on?",
                "not in place",
            )


def same_bits(kind: Kind, case: Case, outcomes: list[Outcome]) -> None:
    if kind is ALL_REDUCE and any(not torch.equal(outcomes[0].tensor, o.tensor) for o in outcomes):
        raise Wrong(
            f"{case}: the sums differ between ranks in their last bits",
            "Does every rank add up in the same order?",
            "not the same bits on every rank",
        )


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[expected.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def explain(kind: Kind, case: Case, index: int, found: Tensor, expected: Tensor, outcomes: list[Outcome]) -> Wrong:
    """Where the first wrong element is, and, if it can be told, whose numbers stand there."""
    rank = case.members[index]
    differs = ~torch.isclose(found, expected, rtol=1e-5, atol=TOLERANCE[expected.dtype])
    first = int(differs.nonzero()[0]) if differs.any() else int((found != expected).nonzero()[0])
    text = f"{case}: on rank {rank} element {first} is {instead(found[first], expected[first])}"
    mistake, more = recognised(kind, case, index, found, outcomes)
    return Wrong(text + (f"\n{more}" if more else ""), VALUE_QUESTIONS.get(mistake, kind.question), mistake)


VALUE_QUESTIONS = {
    "rounded on the way": "In which dtype do the numbers travel, and in which are they added?",
    "pieces that nobody gathered": "Who knows the sum of the other pieces?",
    "nothing arrived": "Which line writes into the tensor that you were given?",
    "a receive that nobody waited for": "When may you read what irecv receives?",
    "averaged instead of summed": "What does the collective promise: the sum, or the mean?",
    "the pieces are rotated": "Where does a partial sum end that sets out from rank r and takes N - 1 steps?",
    "counted twice": "How many ranks add their numbers to a piece on its way?",
    "left out": "After how many steps has a piece met every rank?",
    "right on one rank only": "How do the others get to know it?",
}


def recognised(kind: Kind, case: Case, index: int, found: Tensor, outcomes: list[Outcome]) -> tuple[str, str]:
    """(name of the mistake, a sentence), as far as what was found tells; each may be empty."""
    values = [o.returned if kind.returns_piece else o.tensor for o in outcomes]
    right = [case.members[i] for i, value in enumerate(values) if close(value, kind.expected(case, i))]
    if found.dtype is torch.int64:
        return "", "Whole numbers this large are not exact in any floating-point dtype."
    before = kind.brings(case, index)
    if torch.equal(outcomes[index].tensor.nan_to_num(), before.nan_to_num()) and not kind.returns_piece:
        if len(right) == 1 and kind is not BROADCAST:
            return "right on one rank only", f"Rank {right[0]} has it; rank {case.members[index]} has what it brought."
        return "nothing arrived", f"Rank {case.members[index]} still has what it brought."
    expected = kind.expected(case, index)
    if torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        return "rounded on the way", "It is right but for its last digits."
    if kind is BROADCAST:
        owner = [r for r in case.members if torch.equal(found, case.tensor(r))]
        return "", f"That is rank {owner[0]}'s tensor." if owner else ""
    if kind is ALL_GATHER:
        return misplaced(case, found)
    if found.isnan().any():
        return "a receive that nobody waited for", "It was read before the message was there."
    if kind is ALL_REDUCE and close(case.pieces(found)[index], case.pieces(expected)[index]):
        return "pieces that nobody gathered", f"Piece {index}, its own, is right there."
    return summands(kind, case, index, found, values)


def misplaced(case: Case, found: Tensor) -> tuple[str, str]:
    """Which pieces of a gathered tensor are missing, or stand in another's place."""
    full = case.pieces(case.tensor(63))
    for place, piece in enumerate(case.pieces(found)):
        if piece.isnan().any():
            return "a piece is missing", f"Piece {place} never arrived there."
        for other, right in enumerate(full):
            if other != place and piece.numel() and torch.equal(piece, right[: len(piece)]):
                return "the pieces are rotated", f"In the place of piece {place} stands piece {other}."
    return "", ""


def summands(kind: Kind, case: Case, index: int, found: Tensor, values: list[Tensor]) -> tuple[str, str]:
    """How often each rank's numbers stand in what was found, and from which piece."""
    n = len(case.members)
    for shift in range(n):
        place = (index + shift) % n
        sources = [case.tensor(rank) for rank in case.members]
        if kind.returns_piece:
            sources = [case.pieces(source)[place] for source in sources]
        times = mixture(found, sources)
        if times is None:
            continue
        if shift and torch.allclose(times, torch.ones(n, dtype=times.dtype), atol=1e-3):
            return "the pieces are rotated", f"Rank {case.members[index]} holds the sum of piece {place}."
        return name_coefficients(times, case.members)
    return "", ""


def name_coefficients(times: Tensor, members: tuple[int, ...]) -> tuple[str, str]:
    n = len(members)
    told = ", ".join(f"rank {r}'s {c:.2g} times" for r, c in zip(members, times.tolist(), strict=True))
    sentence = f"What it holds has {told}."
    if torch.allclose(times, torch.full_like(times, 1 / n), atol=1e-3):
        return "averaged instead of summed", sentence
    if (times < 0.01).any():
        return "left out", sentence
    if (times > 1.5).any():
        return "counted twice", sentence
    return "", sentence
