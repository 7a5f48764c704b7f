"""A ledger of values that each rank has: ranks with the same numbers share a row."""

from collections.abc import Mapping, Sequence

from labs.kit.drawing.tables import Ledger, ledger

PerRank = Sequence[Mapping[str, int]]  # {name: bytes} of each rank


def by_rank(predicted: PerRank, *measured: PerRank, names: Mapping[str, str], within: float = 0.10) -> Ledger:
    """Return a ledger of predictions and measurements; a row stands for all ranks that have the same numbers in it.

    predicted, measured: {name: bytes} of each rank; measured may be given once, or as ours and native.
    names: a dictionary from each name in these to the words for it in the table's rows.
    """
    rows: dict[tuple, list[int]] = {}
    for name in names:
        for rank, sides in enumerate(zip(predicted, *measured, strict=True)):
            rows.setdefault((name, *(side[name] for side in sides)), []).append(rank)
    named = [(f"{ranks_in_words(ranks)} {names[name]}", *values) for (name, *values), ranks in rows.items()]
    return ledger(named, within)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0 to 3" or "ranks 0, 2, 4"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_run = list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_run else f"ranks {', '.join(map(str, ranks))}"
