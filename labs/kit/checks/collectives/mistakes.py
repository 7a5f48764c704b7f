"""The mistakes in a collective, in the order in which they are tried.

    RETURNED    a rank: what it returned, and did it refuse?
    LUCK        the call: right, and only because a message was quick?
    VALUES      a rank whose numbers are wrong: whose numbers stand there instead?
    IN_PLACE    a rank: is its own tensor right as well?
    TRAFFIC     the call: built by hand, and no more sent than needed?
    LEFT        a rank: what has changed in its process, or what does it hold too much of?
    HELD        the same call twice, with its bytes held

A wrong sum is taken apart by least squares: Σ c_i × what rank i brought.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, show
from labs.kit.checks.case import close
from labs.kit.checks.collectives.cases import ALL_GATHER, LARGE
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.mixture import mixture

if TYPE_CHECKING:
    from labs.kit.checks.collectives.judge import Call, One

# ---- what it returned ------------------------------------------------------------------------------------


def returned_no_tensor(one: One) -> str | None:
    if one.kind.returns_piece and not isinstance(one.outcome.returned, Tensor):
        return f"rank {one.rank} returned {one.outcome.returned}, and not its piece, a tensor"
    return None


def returned_another_size(one: One) -> str | None:
    if one.kind.returns_piece and one.found.shape != one.expected.shape:
        return f"rank {one.rank} returned {show(one.found)}; its piece has shape {tuple(one.expected.shape)}"
    return None


def returned_all(one: One) -> str | None:
    return returned_another_size(one) if one.found.numel() == one.case.size != one.expected.numel() else None


HOLD = "What does the caller need to hold when you are done?"
SPLIT = "How does tensor_split cut this many elements into N pieces?"
RETURNED = (
    Mistake(
        "only some ranks refuse",
        "Which ranks see that the tensor is not contiguous?",
        lambda one: one.outcome.refused and f"rank {one.rank} raised an error, and others did not",
    ),
    Mistake("nothing is returned", HOLD, lambda one: one.outcome.returned == "None" and returned_no_tensor(one)),
    Mistake("not a tensor", HOLD, returned_no_tensor),
    Mistake("the whole tensor instead of a piece", SPLIT, returned_all),
    Mistake("a piece of another size", SPLIT, returned_another_size),
    Mistake(
        "the dtype changed",
        "In which dtype was the tensor that you were given?",
        lambda one: one.found.dtype != one.expected.dtype and f"rank {one.rank} returned {show(one.found)}",
    ),
)

# ---- right by luck ---------------------------------------------------------------------------------------


def nobody_waited_for(call: Call, op: str) -> str | None:
    verb = {"send": "sent to", "recv": "received from"}[op]
    for event in call.events:
        if event.op == op and not event.waited:
            return f"nobody waited for what rank {event.rank} {verb} rank {event.peer} (at {event.issuer})"
    return None


def touched_too_early(call: Call) -> str | None:
    for rank, outcome in zip(call.case.members, call.outcomes, strict=True):
        if outcome.touched:
            return f"rank {rank} changed a tensor while it was being sent"
    return None


NOT_YOURS = "When may you touch the tensor of an isend or irecv again?"
LUCK = (
    Mistake(
        "a receive that nobody waited for",
        NOT_YOURS,
        lambda call: nobody_waited_for(call, "recv"),
        shows="right on one machine, wrong numbers now and then on another",
    ),
    Mistake("a send that nobody waited for", NOT_YOURS, lambda call: nobody_waited_for(call, "send")),
    Mistake("changed while being sent", "When may you touch the tensor of an isend again?", touched_too_early),
)

# ---- wrong values ----------------------------------------------------------------------------------------


def unchanged(one: One) -> str | None:
    if one.kind.returns_piece or not torch.equal(one.outcome.after[0].nan_to_num(), one.before.nan_to_num()):
        return None
    return f"Rank {one.rank} still has what it brought."


def right_on_one(one: One) -> str | None:
    right = [other.rank for other in one.call.ranks if other.right]
    if unchanged(one) and not one.kind.rooted and len(right) == 1:
        return f"Rank {right[0]} has it; rank {one.rank} has what it brought."
    return None


def right_but_for_digits(one: One) -> str | None:
    near = torch.allclose(one.found, one.expected, rtol=1e-2, atol=1e-2 * float(one.expected.abs().max()))
    return "It is right but for its last digits." if near else None


def anothers_tensor(one: One) -> str | None:
    owners = [r for r in one.case.members if torch.equal(one.found, one.case.tensor(r))]
    return f"That is rank {owners[0]}'s tensor." if one.kind.rooted and owners else None


def missing_piece(one: One) -> str | None:
    for place, piece in enumerate(one.case.pieces(one.found)) if one.kind is ALL_GATHER else ():
        if piece.isnan().any():
            return f"Piece {place} never arrived there."
    return None


def misplaced_piece(one: One) -> str | None:
    for place, piece in enumerate(one.case.pieces(one.found)) if one.kind is ALL_GATHER else ():
        for other, right in enumerate(one.case.pieces(one.expected)):
            if other != place and piece.numel() and torch.equal(piece, right[: len(piece)]):
                return f"Piece {other} stands in the place of piece {place}."
    return None


def misplaced_sum(one: One) -> str | None:
    for shift in range(1, len(one.case.members)):
        place = (one.index + shift) % len(one.case.members)
        times = summands(one, place)
        if times is not None and torch.allclose(times, torch.ones_like(times), atol=1e-3):
            return f"Rank {one.rank} holds the sum of piece {place}."
    return whole_elsewhere(one) if one.kind.returns_piece else None


def whole_elsewhere(one: One) -> str | None:
    """What it returned is a part of a sum; in its tensor, another piece is a whole one."""
    for place, piece in enumerate(one.case.pieces(one.outcome.after[0])):
        due = one.kind.expected(one.case, place)
        if place != one.index and piece.numel() and due.any() and close(piece, due, 1e-5):
            return f"In the tensor of rank {one.rank}, piece {place} is a whole sum."
    return None


def own_piece_only(one: One) -> str | None:
    if one.kind.sums and not one.kind.returns_piece:
        found, expected = (one.case.pieces(x)[one.index] for x in (one.found, one.expected))
        return f"Piece {one.index}, its own, is right." if close(found, expected, 1e-5) else None
    return None


def summands(one: One, place: int) -> Tensor | None:
    """How often each rank's numbers stand in what was found, were it piece `place`; in a whole tensor's wrong piece."""
    if not one.kind.sums or (not one.kind.returns_piece and place != one.index):
        return None
    found = one.found
    if not one.kind.returns_piece:
        place = wrong_piece(one)
        found = one.case.pieces(found)[place]
    return mixture(found, [one.case.pieces(one.case.tensor(rank))[place] for rank in one.case.members])


def wrong_piece(one: One) -> int:
    """The first one."""
    pairs = zip(one.case.pieces(one.found), one.case.pieces(one.expected), strict=True)
    return next((place for place, (found, due) in enumerate(pairs) if not close(found, due, 1e-5)), one.index)


def made_of(one: One, fits: Callable[[Tensor], Any]) -> str | None:
    times = summands(one, one.index)
    if times is None or not fits(times):
        return None
    told = ", ".join(f"rank {r}'s {c:.2g} times" for r, c in zip(one.case.members, times.tolist(), strict=True))
    return f"There it has {told}, and each is due once."


VALUES = (
    Mistake(
        "",
        "",
        lambda one: (
            one.found.dtype is torch.int64 and "Whole numbers this large are not exact in any floating-point dtype."
        ),
    ),
    Mistake("right on one rank only", "How do the others learn it?", right_on_one),
    Mistake("nothing arrived", "Which line writes into the tensor that you were given?", unchanged),
    Mistake(
        "rounded on the way", "In which dtype do the numbers travel, and in which are they added?", right_but_for_digits
    ),
    Mistake("", "", anothers_tensor),
    Mistake("a piece is missing", "", missing_piece),
    Mistake(
        "a receive that nobody waited for",
        "When may you read what irecv receives?",
        lambda one: one.kind.sums and one.found.isnan().any() and "It was read before the message was there.",
    ),
    Mistake("pieces that nobody gathered", "Who knows the sum of the other pieces?", own_piece_only),
    Mistake(
        "a piece in another's place",
        "Whose piece has just arrived, and where does that one belong?",
        misplaced_piece,
    ),
    Mistake(
        "the pieces are rotated",
        "A partial sum sets out from rank r and takes N - 1 steps. Where does it end?",
        misplaced_sum,
        shows="every number is right, but in another's place",
    ),
    Mistake(
        "averaged instead of summed",
        "What does the collective promise: the sum, or the mean?",
        lambda one: made_of(one, lambda c: torch.allclose(c, torch.full_like(c, 1 / len(c)), atol=1e-3)),
    ),
    Mistake(
        "left out",
        "After how many steps has a piece met every rank?",
        lambda one: made_of(one, lambda c: (c < 0.01).any()),
        shows="the sum is too small, by one rank's numbers",
    ),
    Mistake(
        "counted twice",
        "How many ranks add their numbers to a piece on its way?",
        lambda one: made_of(one, lambda c: (c > 1.5).any()),
    ),
    Mistake("", "", lambda one: True),
)

IN_PLACE = (
    Mistake(
        "not in place",
        "Where would an all_gather go on from?",
        lambda one: (
            one.kind.returns_piece
            and not close(one.case.pieces(one.outcome.after[0])[one.index], one.expected, 1e-5)
            and f"what rank {one.rank} returned is right, but piece {one.index} of its tensor is not"
        ),
    ),
)

# ---- what travelled --------------------------------------------------------------------------------------


def built_in(call: Call) -> str | None:
    used = sorted({event.op for event in call.events} - {"send", "recv"})
    return f"the values are right, but they came through dist's own {' and '.join(used)}" if used else None


def another_dtype(call: Call) -> str | None:
    as_dtype = {event.dtype for event in call.messages} - {call.case.dtype_name}
    return f"the numbers travel as {' and '.join(sorted(as_dtype))}" if as_dtype else None


def too_many_bytes(call: Call) -> str | None:
    """By all ranks together, or by one that does more than its share: it may have the longest piece, each time."""
    longest = call.case.pieces(call.outcomes[0].after[0])[0].nbytes
    copies = call.kind.copies(call.n)
    rank, most = max(call.sent.items(), key=lambda item: item[1])
    if sum(call.sent.values()) <= copies * call.tensor_bytes and (call.kind.rooted or most <= copies * longest):
        return None
    share = f"; the least possible is {copies / call.n:.2f} ×"
    return f"rank {rank} sent {most / call.tensor_bytes:.2f} × the tensor{share}" if call.tensor_bytes else "sent bytes"


def whole_tensors(call: Call) -> str | None:
    whole = any(event.bytes_in == call.tensor_bytes for event in call.messages) and call.case.size > 1
    return too_many_bytes(call) if whole and not call.kind.rooted else None


def too_few_bytes(call: Call) -> str | None:
    sent, least = sum(call.sent.values()), call.kind.copies(call.n) * call.tensor_bytes
    return f"the ranks sent {sent:,} bytes to each other; {least:,} is the least possible" if sent < least else None


def too_many_rounds(call: Call) -> str | None:
    enough, told = call.kind.rounds(call.n), "as ranks wait for each other in turn"
    return f"it took {call.rounds} rounds, {told}; {enough} are enough" if call.rounds > enough else None


def from_the_root(call: Call) -> str | None:
    messages = sum(event.rank == call.case.root for event in call.messages)
    return too_many_rounds(call) if call.kind.rooted and messages == call.n - 1 else None


def too_many_messages(call: Call) -> str | None:
    for rank in call.case.members:
        sent, enough = sum(event.rank == rank for event in call.messages), call.kind.messages(call.n)
        if sent > enough:
            return f"rank {rank} sent {sent} messages; {enough} are enough"
    return None


def other_bits(call: Call) -> bool:
    first, *others = (outcome.after[0] for outcome in call.outcomes)
    return call.kind.sums and not call.kind.returns_piece and not all(torch.equal(first, x) for x in others)


TRAFFIC = (
    Mistake(
        "a built-in collective",
        "Which ranks send what to whom inside of it? Build that from isend and irecv.",
        built_in,
    ),
    Mistake("a different dtype travels", "What does that cost, in bytes or in digits?", another_dtype),
    Mistake(
        "whole tensors travel",
        "How large is what you hand to your neighbour, and which part of it is needed there?",
        whole_tensors,
        shows="the right answer, for N/2 to N times the bytes",
    ),
    Mistake("too many bytes", "", too_many_bytes),
    Mistake("less than the least possible", "How else did the numbers get there?", too_few_bytes),
    Mistake("the root sends to all", "", from_the_root),
    Mistake("too many rounds", "", lambda call: call.kind.rooted and too_many_rounds(call)),
    Mistake(
        "too many messages", "Could what goes to the same rank in the same round go as one message?", too_many_messages
    ),
    Mistake("too many rounds", "Could every rank send and receive at the same moment?", too_many_rounds),
    Mistake(
        "not the same bits on every rank",
        "Does every rank add up in the same order?",
        lambda call: other_bits(call) and "the sums differ between ranks in their last bits",
    ),
)

# ---- what is held, and left behind -----------------------------------------------------------------------

LEFT = (
    *AFTERMATH,
    Mistake(
        "kept out of torch's sight",
        "Whose memory is that, if not yours?",
        lambda seen: seen.python_bytes > 4 * LARGE and f"Python and NumPy held {seen.python_bytes:,} bytes",
    ),
)
# Beside the tensor itself, one more copy of it is plenty.
HELD = (
    Mistake(
        "something is kept from every call",
        "Which name still refers to it when you have returned?",
        lambda held: (
            held.after_second > held.after_first + 0.1
            and f"holds {held.after_first:.2f} × the tensor after one call, {held.after_second:.2f} × after two"
        ),
        shows="memory that grows from call to call",
    ),
    Mistake(
        "full copies are kept",
        "Whose numbers do you keep after you have used them?",
        lambda held: held.first > 1.05 and f"held {held.first:.2f} × the tensor besides the tensor itself",
    ),
)
