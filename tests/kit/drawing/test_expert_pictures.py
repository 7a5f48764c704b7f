"""Tests of the pictures of experts: they show what `labs.moe` does (snapshots: test_gallery)."""

import sys

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from labs.kit import draw
from labs.kit.drawing.expert_travel import rows_of_columns
from labs.kit.launch import run
from labs.moe import Experts, ParallelExperts
from tests.kit.drawing.gallery import CHOSEN, LOADS
from tests.kit.pictures import require_legible, texts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module


def rows_that_arrive(chosen, experts):
    """Return the rows that each of this rank's experts is called with, in the order of its calls."""
    seen = []

    class Noted(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, rows):
            seen.extend((self.number, *map(int, row)) for row in rows)
            return rows

    of_all = ParallelExperts(Experts({str(e): Noted(e) for e in range(experts)}), dist.group.WORLD)
    mine = chosen[dist.get_rank()]
    order = mine.flatten().argsort(stable=True)
    rows = torch.tensor([[dist.get_rank(), token] for token, its in enumerate(mine) for _ in its])[order].double()
    of_all(rows, mine.flatten().bincount(minlength=experts))
    return seen


def test_rows_reach_the_experts_that_the_picture_shows():
    """Check the third column against the rows with which each expert is called in a real job."""
    away = rows_of_columns(CHOSEN, {0: 0, 1: 0, 2: 1, 3: 1})[2]
    for drawn, real in zip(away, run(rows_that_arrive, CHOSEN, 4, ranks=2), strict=True):
        by_home = sorted(real, key=lambda row: row[1])  # an expert is called once for each home
        assert [(row.expert, row.home, row.token) for row in drawn] == by_home
    words = texts(draw.travel(CHOSEN, experts=4))
    assert [line for line in words if line.startswith(("sends", "gets"))][:4] == [
        "sends 3, 3",
        "sends 5, 1",
        "gets 3, 5",
        "gets 3, 1",
    ]


def test_many_tokens_are_legible():
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.rand(8, 12, generator=generator).topk(2).indices.sort().values for _ in range(4)]
    require_legible(draw.travel(chosen, experts=12))


def test_loads_are_told_as_multiples_of_the_even_share():
    figure = draw.expert_loads(LOADS)
    assert figure.alt.endswith("none: 0.42 to 1.75 in the last 3 steps; bias: 0.75 to 1.33 in the last 3 steps.")
    of_tensors = {name: [torch.tensor(step) for step in rows] for name, rows in LOADS.items()}
    assert draw.expert_loads(of_tensors).data == figure.data
    assert figure.text == "ExpertLoads(none, bias; 3 experts, 3 steps)"
