"""Answers to placements (05): the strategies, as a table."""

from labs.dtensor import Partial, Replicate, Shard
from tests.answers import Exercise

answers = Exercise("placements")
LINE = "five strategies, each obeyed by a job: it holds and sends what the strategy does"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def table():
    R, P, S = Replicate(), Partial(), Shard(0)
    return {
        "DDP": ([R], [R], [R]),
        "ZeRO 1": ([R], [P], [S]),
        "ZeRO 2": ([R], [S], [S]),
        "ZeRO 3": ([S], [S], [S]),
        "HSDP": ([R, S], [R, S], [R, S]),
    }


ROWS = {
    "DDP": "([R], [R], [R])",
    "ZeRO 1": "([R], [P], [S])",
    "ZeRO 2": "([R], [S], [S])",
    "ZeRO 3": "([S], [S], [S])",
    "HSDP": "([R, S], [R, S], [R, S])",
}


@answers.right(line=LINE)
def as_tuples():
    return {name: tuple(map(tuple, row)) for name, row in table().items()}


def but(**rows):
    """Other rows."""
    names = {"ddp": "DDP", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3", "hsdp": "HSDP"}
    return {f'"{names[key]}": {ROWS[names[key]]}': f'"{names[key]}": {row}' for key, row in rows.items()}


# ---- wrong -----------------------------------------------------------------------------------------------


def row(mistake, **rows):
    answers.spoil(table, mistake, but(**rows))


row("the gradient is reduced to everybody", zero1="([R], [R], [S])")  # as PyTorch's own
row("P is whole", zero3="([R], [S], [S])")
row("P is sharded", zero2="([S], [S], [S])")
row("G is whole", zero2="([R], [P], [S])")
row("G is sharded", zero1="([R], [S], [S])")
row("S is whole", zero3="([S], [S], [R])")
row("S is sharded", ddp="([R], [R], [S])")
row("sharded over the wrong axis", hsdp="([S, R], [S, R], [S, R])")
row("sharded over both axes", hsdp="([S, S], [S, S], [S, S])")
row("the gradient stays a summand", ddp="([R], [P], [R])")
row("parameters or optimizer state as summands", ddp="([P], [R], [R])")
row("more is sent than this strategy sends", zero2="([R], [Shard(1)], [S])")
row("a dim that the weight lacks", zero3="([Shard(2)], [Shard(2)], [Shard(2)])")
row("not one placement for each axis", hsdp="([S], [S], [S])")
row("not three kinds", zero2="([R], [S])")
row("not placements", zero1='(["Replicate"], ["Partial"], ["Shard"])')
answers.spoil(table, "a strategy is missing", {f'"HSDP": {ROWS["HSDP"]},': ""})
