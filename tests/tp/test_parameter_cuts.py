"""Tests of labs.tp.parameter_cuts: ranks get whole heads."""

from dataclasses import replace

import pytest

from labs.dtensor import Replicate, Shard
from labs.kit.launch import run
from labs.model import GPT
from labs.tp import (
    gpt_plan,
    placements,
)
from labs.tp.parameter_cuts import Keys, Queries
from tests.tp.common import SMALL, split, tp_mesh

# ---- refusals --------------------------------------------------------------------------------------------


def groups_after_a_split():
    config = replace(SMALL, heads=4, kv_heads=2)
    mesh = tp_mesh()
    split(gpt_plan(config), GPT(config), mesh)
    return ("tp", "by 2") in mesh.groups


def test_groups_of_neighbours_are_made_where_all_ranks_are():
    """Make the groups early: if only some ranks run the first forward, they would wait for the others there."""
    assert all(run(groups_after_a_split, ranks=4))


@pytest.mark.parametrize(
    ("heads", "ranks", "nearest"),
    [((8, 2), 3, "2 or 4"), ((6, 3), 4, "3 or 6"), ((6, 3), 7, "6"), ((5, 5), 8, "5")],
)
def test_heads_that_cannot_be_split(heads, ranks, nearest):
    for style in (Queries(*heads), Keys(*heads)):
        with pytest.raises(
            ValueError, match=rf"{heads[0]} query heads over {heads[1]} .* {ranks} ranks: use {nearest}$"
        ):
            style.cut(heads[0] * 4, 0, ranks)


# ---- tables ----------------------------------------------------------------------------------------------


def test_a_plan_prints_and_parameters_say_how_they_lie():
    assert "layers.*.attention.o      RowwiseParallel(heads=Queries(heads=6, kv_heads=3))" in repr(gpt_plan(SMALL))

    def where():
        return placements(split(gpt_plan(SMALL)))

    lie = run(where, ranks=2)[0]
    assert lie["layers.1.mlp.up.weight"] == lie["embed.weight"] == Shard(0)
    assert lie["layers.1.mlp.down.weight"] == Shard(1) and lie["norm.weight"] == Replicate()
