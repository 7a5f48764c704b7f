"""count_rows: the rows that a rank sends to each rank and receives from it, for the experts that its tokens chose."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Sends
from labs.exercises.engine.on_ranks import Draw, Exercise, Expected, Mistakes, checked
from labs.exercises.engine.scripts import Look, same_numbers
from labs.exercises.engine.value import as_if
from labs.exercises.experts._routed import SPREAD, Routed, by_member, worlds

SENDS, RECEIVES = "sends", "receives"
FEW = "right only for few rows"


def numbers(found: Any) -> Any:
    """Return whole numbers as a tensor; anything else as it is."""
    try:
        return torch.tensor([int(each) for each in found], dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        return found


def script(world: Routed, fn: Callable[..., Any]) -> Iterator[Look | None]:
    chosen = world.chosen[world.index()].clone()
    yield None
    returned = fn(chosen, list(world.rank_of), **world.process_group())
    sends, receives = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
    facts = {
        "changed": not same_numbers(chosen, world.chosen[world.index()]),
        "tensors": any(isinstance(each, Tensor) for each in (sends, receives)),
    }
    yield Look({SENDS: numbers(sends), RECEIVES: numbers(receives)}, facts)


def all_worlds(draw: Draw) -> dict[int, list[Routed]]:
    found = worlds(draw)
    many = replace(found[4][3], tokens=(2, 300, 1, 4), only=FEW)
    return found | {4: [*found[4], many]}


def told(sends: Tensor, receives: Tensor) -> dict[str, Tensor]:
    return {SENDS: sends, RECEIVES: receives}


def tokens(world: Routed, member: int) -> Tensor:
    """Return the number of a member's tokens, and not of its rows, that go to each rank."""
    ranks = torch.tensor(world.rank_of)[world.chosen[member]]
    return torch.stack([(ranks == rank).any(-1).sum() for rank in range(world.n)])


def without_own(rows: Tensor, member: int) -> Tensor:
    return torch.where(torch.arange(len(rows)) == member, 0, rows)


def enough(world: Routed, rank: int) -> float:
    """Return 8 bytes for each expert elsewhere, or for each other rank if there are more of these."""
    return 8 * max(world.n - 1, len(world.rank_of) - world.rank_of.count(world.members.index(rank)))


# fmt: off
HOW = "Who knows how many rows another rank will send?"
EXERCISE = Exercise(
    all_worlds,
    Expected(by_member(lambda w, i: told(w.rows[i], w.rows[:, i]))),
    question=HOW,
    script=script,
    sends=lambda w: Sends(least=w.n * (w.n - 1), enough=lambda rank: enough(w, rank)),
    mistakes=Mistakes((
        Mistake("receives are guessed, and not exchanged", HOW,
                as_if(by_member(lambda w, i: {RECEIVES: w.rows[i]})),
                symptom="an all-to-all that hangs, or sizes that do not fit, as soon as loads are uneven"),
        Mistake("sends and receives are swapped", "Row by row: who has it, and who computes it?",
                as_if(by_member(lambda w, i: told(w.rows[:, i], w.rows[i])))),
        Mistake("one's own rows are left out", "Does the all-to-all also hand a rank the rows that it keeps?",
                as_if(by_member(lambda w, i: told(without_own(w.rows[i], i), without_own(w.rows[:, i], i))))),
        Mistake("a token with two experts on a rank is counted once",
                "Each of the two experts needs the token as its input: how many rows are these?",
                as_if(by_member(lambda w, i: told(tokens(w, i), torch.stack([tokens(w, j)[i] for j in range(w.n)]))))),
    ), form=(
        Mistake("counted by expert, and not by rank", "On which rank is each expert, and what do its counts add up to?",
                lambda one: isinstance(one.received, Tensor) and len(one.received) == len(one.world.rank_of) != one.n),
    ), after=(
        Mistake("tensors, and not lists", "What does dist.all_to_all_single take as its split sizes?",
                lambda one: one.done.facts["tensors"] and "returned a tensor; a list is due"),
    ), sent=(
        Mistake("every rank is told all counts", "Which of these numbers does this rank need, of each other rank?",
                lambda sent: any(event.op == "all_gather" for event in sent.events) and sent.too_much),
    )),
    questions={SPREAD: "Where is expert 5, by `rank_of`?", FEW: "Which numbers can the dtype that travels hold?"},
)
# fmt: on


@answered
def count_rows(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(chosen, rank_of, group=None) -> (sends, receives)`, a whole number for each rank of the group.

    chosen: the experts of this rank's tokens, [tokens, top_k]; the number of tokens may differ between ranks
    rank_of: the rank of each expert in the group, a list

    Returns the text of the ✓ line, with the bytes sent.
    """
    recording = checked(EXERCISE, (fn,), seed).recording
    most = max(recording.sent(rank, 0) for rank in range(4))
    return f"a rank sent {most} bytes at most; 8 bytes for each expert elsewhere are 56"


def expected(chosen: Tensor, rank_of: list[int], group: dist.ProcessGroup | None = None) -> tuple[list[int], list[int]]:
    to = [rank_of[e] for e in chosen.flatten().tolist()]
    sends = [to.count(rank) for rank in range(dist.get_world_size(group))]
    dist.all_to_all_single(receives := torch.zeros(len(sends), dtype=torch.int64), torch.tensor(sends), group=group)
    return sends, receives.tolist()


count_rows.expected = expected  # the notebook goes on with this function, if the learner's is not right yet
