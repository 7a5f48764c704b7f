"""The mistakes in FSDP, in the order in which they are tried.

unshard, reshard       GATHERED, DROPPED    a parameter after each call
                       VALUES               a parameter whose numbers are not those of all ranks' shards
                       STEP                 what a step left behind
                       SENT                 a step on a rank: more sent than needed, or less than possible?
                       HELD                 bytes held over whole steps
prefetch               WALK                 what happened on a rank, in its order
hsdp_gradient          PIECE                what a rank returned
                       MEAN                 a piece that is not the mean's: whose gradients is it made of?
                       ALIKE                replicas side by side
                       AVERAGED             a step: what was sent
                       WHOLE                what is behind the piece, and what the call left
                       KEPT                 bytes held over whole steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from labs.kit.checks.answer import Mistake
from labs.kit.checks.case import close
from labs.kit.checks.left import AFTERMATH, OVERWRITTEN
from labs.kit.checks.mixture import COEFFICIENTS, all_are

if TYPE_CHECKING:
    from labs.kit.checks.fsdp.body import Found
    from labs.kit.checks.fsdp.judge import Parameter, Piece, Sent, Steps

# ---- unshard and reshard ---------------------------------------------------------------------------------


def another(found: Found) -> str | bool:
    return found.now != found.given and f"it was {found.given}, and is {found.now}"


def other_size(found: Found) -> str | bool:
    return found.nbytes != found.due and f"its storage has {found.nbytes} bytes; {found.due} are due"


NOT_FREED = "full parameters are never freed"
SAME = "How can a storage change its size, and stay the same storage?"
GATHERED = (
    Mistake(
        "the parameter is a different one",
        "What were its shape and dtype before it was filled?",
        lambda found: found.same and another(found),
    ),
    Mistake(
        "full has other memory",
        SAME,
        lambda found: (
            not found.same and "it has different memory than before, and the layer still looks at the old memory"
        ),
    ),
    Mistake("storage of another size", "What does resize_ take: elements, or bytes?", other_size),
)
DROPPED = (
    Mistake(
        NOT_FREED,
        "What holds the memory: the tensor, or the storage that it shares with all of its views?",
        other_size,
        shows="right, but a rank's memory grows up to the whole model",
    ),
    GATHERED[1],
    GATHERED[0],
)

PADDED = "Shards of unequal length cannot meet in one all-gather. What makes them equal, and who takes it off again?"
WHOSE = "Whose rows belong where?"


def missing(p: Parameter) -> str | None:
    rows = p.found.isnan().flatten(1).any(1) if p.found.ndim > 1 else p.found.isnan()
    return f"Nobody has written row {int(rows.nonzero()[0])}." if rows.any() else None


def of_another_time(p: Parameter) -> str | None:
    for step in range(p.step):
        if torch.equal(p.found, p.case.wholes(step)[p.number].to(p.case.dtype)):
            return f"That is what it was in step {step}."
    return None


def moved_rows(p: Parameter) -> str | None:
    """Rows of this parameter in places of others."""
    for row, values in enumerate(p.found):
        same = [i for i, due in enumerate(p.due) if torch.equal(values, due)]
        if same and row not in same:
            return f"Row {same[0]} stands in the place of row {row}."
    return None


def of_others(p: Parameter) -> str | None:
    """Numbers of the group's other parameters."""
    others = torch.cat([w.to(p.case.dtype).flatten() for i, w in enumerate(p.wholes) if i != p.number] or [p.due[:0]])
    foreign = torch.isin(p.found, others) & ~torch.isin(p.found, p.due)
    return f"{int(foreign.sum())} of its numbers are other parameters'." if foreign.any() else None


VALUES = (
    Mistake(
        "the parameters of the step before",
        "What has the optimizer changed since, and who has told the others?",
        of_another_time,
        shows="the loss stands still, or a rank trains with what it had at first",
    ),
    Mistake(
        "rounded on the way",
        "In which dtype do the numbers travel?",
        lambda p: close(p.found, p.due, 1e-2) and "It is right but for its last digits.",
    ),
    Mistake(
        "one's own shard everywhere",
        WHOSE,
        lambda p: (
            len(p.mine) and all(torch.isin(row, p.mine).all() for row in p.found) and "All of it is the rank's own."
        ),
    ),
    Mistake("a piece is missing", "Who has the other rows, and how do they get here?", missing),
    Mistake(
        "the pieces of several parameters are mixed up",
        "A row of the table has a piece of each parameter. Where do the pieces of one parameter stand?",
        of_others,
    ),
    Mistake("rows in the wrong order", WHOSE, moved_rows),
    Mistake(
        "padding among the numbers",
        PADDED,
        lambda p: bool((p.found == 0).any()) and f"{int((p.found == 0).sum())} of its numbers are 0.",
    ),
    Mistake("", "What does each rank bring, and where does it go?", lambda _: True),
)


def too_many_calls(sent: Sent) -> str | bool:
    calls = f"{sent.calls} collectives" if sent.calls else f"{sent.messages} messages"
    return sent.calls + sent.messages > sent.enough_calls and f"{calls} for one group of {sent.parameters} parameters"


SENT = (
    Mistake(
        "gathered in the wrong dtype",
        "In which dtype does the layer compute, and what do the extra digits cost on the way?",
        lambda sent: sent.wider and f"{sent.text}; they travel as {sent.wider}",
        shows="twice the bytes of the formula, with a param_dtype",
    ),
    Mistake(
        "an all-reduce where a part is enough",
        "An all-reduce adds. Who has anything to add to another's rows?",
        lambda sent: sent.all_reduced and f"it sent {sent.all_reduced:,} bytes as an all-reduce",
    ),
    Mistake(
        "a collective for each parameter",
        "What does a message cost, however short? How many would a layer of nine parameters send?",
        lambda sent: sent.calls == sent.parameters > 1 and too_many_calls(sent),
        shows="many short all-gathers in a layer's timeline, and more time than bytes / bandwidth",
    ),
    Mistake("too many messages", "Which pieces could travel together?", too_many_calls),
    Mistake("too many bytes", "Who has which rows already?", lambda sent: sent.bytes > sent.enough and sent.text),
    Mistake(
        "less than the least possible",
        "How else did the rows get there?",
        lambda sent: sent.bytes < sent.least and f"it sent {sent.bytes:,} bytes; its own rows are {sent.least:,}",
    ),
    Mistake(
        "a barrier",
        "The gather is over when all rows are here. What do the ranks wait for after it, or before it?",
        lambda sent: sent.barriers > 0 and f"{sent.barriers} of its collectives are barriers",
        shows="right, but every layer waits for the slowest rank once more",
    ),
)
STEP = (
    Mistake(
        "the shard has changed",
        "What will the optimizer update in the next step?",
        lambda visit: visit.shards_changed and "the shards are not what they were",
    ),
    *AFTERMATH,
)
HELD = (
    Mistake(
        "copies of full parameters are kept",
        "Which of your variables still refers to what was gathered?",
        lambda held: held.rest > 0.2 and f"held {held.rest:.2f} × the group when all was over",
    ),
    Mistake(
        "more than two copies at a time",
        "One copy travels, and the layer computes with another: what is the third?",
        lambda held: held.too_much and f"held {held.most:.2f} × the group {held.too_much}",
    ),
)

# ---- prefetch --------------------------------------------------------------------------------------------


def other_order(steps: Steps) -> str | None:
    used = [number for what, number in steps.notes if what == "begin"]
    return f"computed layers {used}, and not {list(steps.order)}" if used != list(steps.order) else None


def without_numbers(steps: Steps) -> str | bool:
    return steps.way.wrong is not None and (
        f"layer {steps.order[steps.way.wrong]} computed when its parameters were not there"
    )


def never_dropped(steps: Steps) -> str | bool:
    return steps.way.held > 0 and f"{steps.way.held} of {len(set(steps.order))} layers are still held at the end"


def held_at_once(most: Callable[[Steps], bool]) -> Callable[[Steps], str | bool]:
    return lambda steps: most(steps) and f"{steps.most} of {len(set(steps.order))} layers were held at one moment"


def late(steps: Steps, how_many: Callable[[int, int], bool]) -> str | bool:
    """The gather of the next layer comes after the layer before it, or is waited for before."""
    pairs = len(steps.order) - 1
    text = f"the gather of layer {steps.order[steps.late[0] + 1]} was not under way while layer " if steps.late else ""
    return pairs > 0 and how_many(len(steps.late), pairs) and f"{text}{steps.order[steps.late[0]]} computed"


def waited_early(steps: Steps) -> str | bool:
    first = next(iter(steps.early), None)
    return first is not None and (
        f"layer {steps.order[first + 1]} was waited for before layer {steps.order[first]} had computed"
    )


AHEAD = "Which layer must be here now, and which one may still be on its way?"
WALK = (
    Mistake(
        "computed before it was there",
        "gather() returns at once. Which call waits?",
        without_numbers,
        shows="NaN, or the numbers of another step, on a slow wire only",
    ),
    Mistake("layers left out, or in another order", "In which order does the model use its layers?", other_order),
    Mistake(
        "every layer is held",
        "At the last layer's turn, what of the first one is still here? Then what has sharding saved?",
        held_at_once(lambda steps: len(set(steps.order)) > 2 and steps.most == len(set(steps.order))),
        shows="quick, but the peak is the whole model's",
    ),
    Mistake(
        "gathered for nothing",
        "Who uses what comes after the last layer?",
        lambda steps: (
            steps.gathers != len(steps.order)
            and f"it gathered {steps.gathers} times, to compute {len(steps.order)} times"
        ),
    ),
    Mistake(NOT_FREED, "Who drops the last one?", never_dropped),
    Mistake("three layers at a time", AHEAD, held_at_once(lambda steps: steps.most > 2)),
    Mistake(
        "waited for before it is needed",
        "What could this rank compute, instead of standing still for the next layer?",
        waited_early,
        shows="gathers begin early, but the waiting is as long as without prefetch",
    ),
    Mistake(
        "nothing is in flight while a layer computes",
        AHEAD,
        lambda steps: late(steps, lambda n, pairs: n == pairs),
        shows="a comb of waiting in the timeline",
    ),
    Mistake("some gathers come late", AHEAD, lambda steps: late(steps, lambda n, pairs: n > 0)),
    Mistake(
        "collectives that nobody asked for",
        "Which line begins them?",
        lambda steps: steps.collectives > steps.gathers and f"{steps.collectives} collectives, {steps.gathers} gathers",
    ),
    Mistake(
        "the list of layers has changed",
        "Whose list is it, and who goes through it in the next step?",
        lambda steps: not steps.way.listed and "the list of layers is not what it was before the call",
    ),
)

# ---- the gradient of HSDP --------------------------------------------------------------------------------

PLACE = "Which piece does the optimizer of this rank step, and who else steps it?"
PIECE = (
    Mistake(
        "nothing is returned",
        "What does the caller need to hold when you are done?",
        lambda piece: piece.seen.kind == "None" and "None was returned",
    ),
    Mistake("not a tensor", PLACE, lambda piece: piece.found is None and f"{piece.seen.kind} was returned"),
    Mistake(
        "nothing is sharded",
        PLACE,
        lambda piece: (
            piece.case.shape[1] > 1 and piece.found.numel() == piece.case.n and f"{piece.seen.kind} was returned"
        ),
        shows="right, but each rank holds the whole gradient",
    ),
    Mistake(
        "sharded along the wrong axis",
        "Over which axis is a parameter cut, and over which is it copied?",
        lambda piece: piece.size_of(piece.case.shape[0]) and f"{piece.seen.kind} was returned; {piece.needed}",
    ),
    Mistake(
        "sharded over all ranks",
        "How many ranks hold the same piece?",
        lambda piece: piece.size_of(piece.case.ranks) and f"{piece.seen.kind} was returned; {piece.needed}",
    ),
    Mistake(
        "a piece of another size",
        PLACE,
        lambda piece: piece.found.shape != piece.due.shape and f"{piece.seen.kind} was returned; {piece.needed}",
    ),
    Mistake(
        "the dtype changed",
        "In which dtype was the gradient?",
        lambda piece: piece.found.dtype != piece.case.dtype and f"{piece.seen.kind} was returned",
    ),
)


def one_axis(axis: int) -> Callable[[Piece], str | bool]:
    """Made of this rank's line along `axis` alone."""

    def fits(piece: Piece) -> str | bool:
        made, line = piece.made, piece.line(axis)
        if made is None or piece.case.shape[1 - axis] == 1:
            return False
        others = [rank for rank in range(piece.case.ranks) if rank not in line]
        row = made.times[line]
        return all_are(made.times[others], 0) and all_are(row, float(row[0])) and not all_are(row, 0) and made.told

    return fits


def divided_by_all(piece: Piece) -> str | bool:
    """The other replicas' part is missing, and yet all ranks were counted."""
    return bool(piece.made) and all_are(piece.made.times[piece.line(1)], 1) and one_axis(1)(piece)


def times(piece: Piece, factors: set[float]) -> str | bool:
    return piece.made and any(all_are(piece.made.times, x) for x in factors - {1}) and piece.made.told


def another_piece(piece: Piece) -> str | None:
    for place, due in enumerate(piece.mean.chunk(piece.case.shape[1])):
        if place != piece.place and close(piece.found, due, piece.tolerance):
            return f"It is piece {place} of the mean; piece {piece.place} is due."
    return None


MEAN = (
    Mistake(
        "rounded on the way",
        "In which dtype do the gradients travel?",
        lambda piece: close(piece.found, piece.due, 2e-2) and "It is right but for its last digits.",
    ),
    Mistake(
        "sharded along the wrong axis",
        "Over which axis is a parameter cut, and over which is it copied?",
        lambda piece: piece.case.shape[0] == piece.case.shape[1] and another_piece(piece),
    ),
    Mistake("another rank's piece", PLACE, another_piece),
    Mistake(
        "the other replicas are missing",
        "When is the sum over the replicas available, and at which line do you read it?",
        divided_by_all,
    ),
    Mistake(
        "never averaged over the replicas",
        "Who steps the same piece with a different gradient, and how long do the copies stay equal?",
        one_axis(1),
        shows="the loss goes down on every rank, and the replicas drift apart",
    ),
    Mistake("never averaged over the shards", "Whose data has this gradient seen?", one_axis(0)),
    Mistake(
        "averaged twice",
        "Who divides, by how many, and how often?",
        lambda piece: times(piece, {1 / size for size in (*piece.case.shape, piece.case.ranks)}),
        shows="as if the learning rate were smaller, by the size of an axis",
    ),
    Mistake(
        "divided by one axis only",
        "How many gradients were added up, over both axes?",
        lambda piece: min(piece.case.shape) > 1 and times(piece, set(piece.case.shape)),
        shows="as if the learning rate were larger, by the size of the other axis",
    ),
    *(replace(row, fits=lambda piece, row=row: piece.made and row.fits(piece.made)) for row in COEFFICIENTS),
    Mistake("", "Which gradients went into this piece, and how often?", lambda _: True),
)

ALIKE = (
    Mistake(
        "not the same bits on every replica",
        "Does every replica add up in the same order? Replicas that differ by a bit drift apart.",
        lambda pieces: (
            any(not torch.equal(pieces[0], other) for other in pieces)
            and "the pieces of replicas differ in their last bits"
        ),
    ),
)
AVERAGED = (
    Mistake(
        "reduced in the wrong dtype",
        "Who needs the extra digits?",
        lambda sent: sent.wider and f"{sent.text}; they travel as {sent.wider}",
    ),
    Mistake(
        "whole gradients cross the replicas",
        "Which axis goes first, so that the other one has less to carry?",
        lambda sent: (
            sent.shards > 1
            and sent.crosses
            and f"it sent {sent.crossing:,} bytes to other replicas; {sent.least_crossing:,.0f} are enough"
        ),
        shows="more bytes between the nodes than DDP with a shard would send",
    ),
    Mistake(
        "one replica sends for all",
        "What does the rank send that hands the sum to all other replicas, and what does a ring share out evenly?",
        lambda sent: sent.bytes > sent.enough and sent.from_one and sent.text,
    ),
    Mistake(
        "too many bytes",
        "How often does each number travel, and who needs it?",
        lambda sent: sent.bytes > sent.enough and sent.text,
    ),
    Mistake(
        "less than the least possible",
        "How else did the gradients get there?",
        lambda sent: sent.bytes < sent.least and sent.text,
    ),
)
WHOLE = (
    Mistake(
        "a view keeps the whole gradient",
        "When is memory freed if a view of it is left?",
        lambda seen: seen.storage > seen.returned.nbytes and f"the memory behind the piece has {seen.storage} bytes",
    ),
    Mistake(
        "the gradient has changed",
        "Which line writes into the memory that you were given, and who may still read it?",
        lambda seen: seen.changed and "the gradient is not what it was before the call",
    ),
    OVERWRITTEN,
    *AFTERMATH,
)
KEPT = (
    Mistake(
        "gradients are kept from step to step",
        "Which of your variables still refers to what was there a step ago?",
        lambda held: held.rest > 0.6 and f"held {held.rest:.2f} × the gradient when all was over",
    ),
    Mistake(
        "more than two copies at a time",
        "One copy arrives, and another is added up: what is the third?",
        lambda held: held.too_much and f"held {held.most:.2f} × the gradient {held.too_much}",
    ),
)
