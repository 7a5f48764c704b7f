"""Schedules: the order in which each rank runs its forwards and backwards.

A schedule is data, which a function without side effects returns.  The table is for rank r of p and m micro-batches.
The table assumes that m is large enough, that F, I and W take the same time, and that B takes as long as I and W
together:

                  stages per rank  bubble               activations alive
    gpipe         1                (p - 1) / m          m                      all forwards, then all backwards
    1f1b          1                (p - 1) / m          p - r                  each backward as early as possible
    interleaved   v > 1, a loop    (p - 1) / (v m)      (v + 1) p - 2 r - 1    1f1b with stages v times smaller
    zb1p          v, a loop        (p - 1) / (3 v m)    v p                    W fills the time in which a rank waits
    zbv           2, a V           (p - 1) / (6 m)      2 p                    a rank that has begun never waits
    dualpipev     2, a V           (p - 1) / (6 m)      2 p + 1                F and B of two micro-batches in pairs

Activations are counted per stage: a stage that is v times smaller has activations that are v times smaller.  In a loop,
rank r has the stages r, r + p, r + 2 p, ...  In a V, rank r has the stages r and 2 p - 1 - r, so that the first and the
last stage are on the same rank.

Sources: Huang et al. 2019, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, arXiv 2104.04473, section 2.2 (1F1B,
interleaved); Qi et al. 2023, arXiv 2401.10241, sections 2 and 6 (ZB-H1, now called ZB1P; ZB-V); DeepSeek-AI
2024, arXiv 2412.19437, section 3.2.1, and its repository, DualPipe (DualPipeV).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain

from labs.pp.checker import validate
from labs.pp.instructions import KINDS, B, F, I, Instruction, W
from labs.pp.simulation import simulate


class Schedule(list[list[Instruction]]):
    """A list of instructions for each rank; its repr is a timeline.

    Raises WrongSchedule for lists that cannot be run.
    """

    def __init__(self, lists: Iterable[Iterable[Instruction]]):
        super().__init__(map(list, lists))
        validate(self)

    def __repr__(self) -> str:
        return repr(simulate(self))


def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    require("gpipe", ranks, microbatches, stages_per_rank, exactly=1)
    rounds = [range(microbatches)]
    return Schedule(each(F, [rank], rounds) + each(B, [rank], rounds) for rank in range(ranks))


def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    require("1f1b", ranks, microbatches, stages_per_rank, exactly=1)
    rounds = [range(microbatches)]
    return Schedule(
        in_turns(each(F, [rank], rounds), each(B, [rank], rounds), warmup=ranks - 1 - rank) for rank in range(ranks)
    )


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    require("interleaved", ranks, microbatches, stages_per_rank, at_least=2)
    rounds, lists = in_rounds("interleaved", ranks, microbatches, stages_per_rank), []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        warmup = (stages_per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank)
        lists.append(in_turns(each(F, stages, rounds), each(B, stages[::-1], rounds), warmup))
    return Schedule(lists)


def zb1p(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Return the schedule ZB1P: on rank r, each W runs after r more I's have followed its own I, or at the end.

    The nearer a rank is to the last, the longer its W's wait; the W's fill the end of a step, when no forward is left.
    """
    require("zb1p", ranks, microbatches, stages_per_rank)
    rounds, lists = in_rounds("zb1p", ranks, microbatches, stages_per_rank), []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        warmup = (stages_per_rank - 1) * len(rounds[0]) + ranks - 1 - rank
        order = in_turns(each(F, stages, rounds), each(I, stages[::-1], rounds), warmup)
        lists.append(with_weights(order, behind=rank))
    return Schedule(lists)


def zbv(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    require("zbv", ranks, microbatches, stages_per_rank, exactly=2)
    p, m = ranks, max(microbatches, 2 * ranks - 1)  # fewer micro-batches are cut from a longer schedule
    lists = (
        along_a_v(
            rank,
            p,
            (2 * (p - rank) - 1, "aF"),
            (rank, "zF aF"),
            (p - rank, "zF zI zW"),
            (m - 2 * p + rank + 1, "aF aI aW zF zI zW"),
            (p - rank - 1, "aI aW zF zI zW"),
            (rank, "aI zI"),
            (p - rank, "aI aW"),
            (rank, "zW"),
            (rank, "aW"),
        )
        for rank in range(p)
    )
    return Schedule([x for x in order if x.microbatch < microbatches] for order in lists)


def dualpipev(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the schedule DualPipeV, whose steps aF zB and zF aB are pairs of instructions of two micro-batches.

    The messages of one instruction of a pair are in flight while the other computes.
    """
    require("dualpipev", ranks, microbatches, stages_per_rank, exactly=2)
    p, m = ranks, microbatches
    if m < 2 * p:
        raise ValueError(f"dualpipev on {p} ranks takes {2 * p} micro-batches or more, not {m}")
    return Schedule(
        along_a_v(
            rank,
            p,
            (2 * (p - rank - 1), "aF"),
            (rank + 1, "aF zF"),
            (p - rank - 1, "zI W zF"),
            (m - 2 * p + rank + 1, "aF zB zF aB"),
            (p - rank - 1, "zB zF aB"),
            ((rank + 1) // 2, "zB aB"),
            ((rank + 1) % 2, "zB aI"),
            ((rank + 1) // 2, "zI aI"),
            (p - rank - 1, "W aI"),
            (rank + 1, "W"),
        )
        for rank in range(p)
    )


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb1p": zb1p,
    "zbv": zbv,
    "dualpipev": dualpipev,
}


# ---- building blocks -------------------------------------------------------------------------------------


def each(kind: type[Instruction], stages: Iterable[int], rounds: list[range]) -> list[Instruction]:
    """Return instructions of one kind: all micro-batches of a round at each stage in turn, then the next round."""
    return [kind(s, m) for round in rounds for s in stages for m in round]


def in_turns(forwards: list[Instruction], backwards: list[Instruction], warmup: int) -> list[Instruction]:
    """Return `warmup` forwards, then a forward and a backward in turns, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    turns = len(forwards) - warmup
    return [*forwards[:warmup], *chain(*zip(forwards[warmup:], backwards[:turns], strict=True)), *backwards[turns:]]


def in_rounds(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[range]:
    """Return the micro-batches of each round: a round has as many as there are ranks, or a few more.

    With one stage per rank, there is one round of all micro-batches.
    """
    number = max(1, microbatches // ranks) if stages_per_rank > 1 else 1
    size, rest = divmod(microbatches, number)
    if rest:
        raise ValueError(
            f"{name}: {microbatches} micro-batches cannot be cut into {number} equal rounds of at least {ranks}: give "
            f"{microbatches - rest} or {microbatches - rest + number}"
        )
    return [range(first, first + size) for first in range(0, microbatches, size)]


def with_weights(order: list[Instruction], behind: int) -> list[Instruction]:
    """Add W's to `order`: after each I, the W of the I that is `behind` I's before it; the last W's at the end."""
    written, due = [], deque()
    for x in order:
        written.append(x)
        if isinstance(x, I):
            due.append(W(x.stage, x.microbatch))
            written += [due.popleft()] if len(due) > behind else []
    return [*written, *due]


def along_a_v(rank: int, ranks: int, *phases: tuple[int, str]) -> list[Instruction]:
    """Return the instructions of a rank whose two stages lie in a V.

    phases: pairs (times, words), in turn; the words of each are repeated `times` times.  A word has a stage and a kind
        of instruction: a is the rank's first stage, z its other one, so that aF is the forward of the next micro-batch
        in stage a.  W without a stage is the W of the I that has waited longest.
    """
    stages = {"a": rank, "z": 2 * ranks - 1 - rank}
    written, turn, due = [], Counter(), []
    for word in chain(*(words.split() * times for times, words in phases)):
        stage, kind = stages.get(word[0]), KINDS[word[-1]]
        if kind is W:
            x = next(x for x in due if stage in (None, x.stage))
            due.remove(x)
        else:
            x = kind(stage, turn[stage, kind is F])
            turn[stage, kind is F] += 1
            due += [W(stage, x.microbatch)] if kind is I else []
        written.append(x)
    return written


def require(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, exactly: int | None = None, at_least: int = 1
) -> None:
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if type(number) is not int:
            raise ValueError(f"{what} is {number!r}: {name} takes a whole number")
        if number < 1:
            raise ValueError(f"{what} is {number}: {name} takes 1 or more")
    if stages_per_rank < at_least or exactly not in (None, stages_per_rank):
        raise ValueError(
            f"stages_per_rank is {stages_per_rank}: {name} takes {exactly if exactly else f'{at_least} or more'}"
        )
