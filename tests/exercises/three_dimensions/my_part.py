"""Answers to my_part (11): which layers, sequences, heads and pieces are a rank's."""

import torch

from labs.exercises.three_dimensions.my_part import MISTAKES
from tests.answers import Exercise

answers = Exercise("my_part")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def by_division(sizes, rank, layers, sequences, heads):
    pp, replicate, shard, tp = sizes
    rest, t = divmod(rank, tp)
    rest, s = divmod(rest, shard)
    p, r = divmod(rest, replicate)

    def part(whole, parts, number):
        each = whole // parts
        return number * each, (number + 1) * each

    return {
        "layers": part(layers, pp, p),
        "sequences": part(sequences, replicate * shard, r * shard + s),
        "heads": part(heads, tp, t),
        "piece": s,
    }


@answers.right
def by_torch(sizes, rank, layers, sequences, heads):
    p, r, s, t = torch.unravel_index(torch.tensor(rank), sizes)
    each = sequences // (sizes[1] * sizes[2])
    first = (r * sizes[2] + s) * each
    ends = layers // sizes[0], heads // sizes[3]
    return {
        "piece": s,
        "heads": [t * ends[1], (t + 1) * ends[1]],
        "layers": [p * ends[0], (p + 1) * ends[0]],
        "sequences": torch.stack([first, first + each]),
    }


# ---- wrong -----------------------------------------------------------------------------------------------

READ = "part(sequences, replicate * shard, r * shard + s)"
PIECE = '"piece": s,'

instead = answers.slips(by_division)


def read(mistake, words, **options):
    instead(mistake, READ, words, **options)


read("other sequences", "part(sequences, replicate * shard, r + s)")
instead("another piece", PIECE, '"piece": t,')
instead("other layers", "part(layers, pp, p)", "(0, layers)")
instead("other heads", "part(heads, tp, t)", "part(heads, tp * shard, t * shard + s)")
instead("not all parts, by these names", PIECE, "")

answers.instead(MISTAKES)
