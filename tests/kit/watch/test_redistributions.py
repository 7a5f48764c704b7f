"""Tests of redistributions against the recording of what was sent during them."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs.dtensor import Shard
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.kit.watch import redistributions
from labs.mesh import Mesh

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LAYOUTS = (
    {},
    {"0.weight": [Shard(0)], "0.bias": [Shard(0)], "2.weight": [Shard(1)]},
    {"0.weight": [Shard(1)], "2.weight": [Shard(0)], "x": [Shard(0)]},
)


def all_of_them():
    mesh, found = Mesh((dist.get_world_size(),), ("a",)), []
    for layouts in LAYOUTS:
        module = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8), nn.LayerNorm(8))
        x = redistributions.laid_out(module, layouts, torch.ones(6, 8), mesh)
        mark("step")
        with redistributions.watched() as moves:
            module(x).sum().backward()
        mark("end")
        found.append([dict(move) | {"times": times} for move, times in moves.items()])
    return found


def test_it_shows_everything_that_was_sent():
    results = run(all_of_them, ranks=3, device="cpu", record="communication")
    whole, megatron, other = results[0]
    for step, rows in enumerate(results[0]):
        assert results.recording.sent(0, step) == sum(row["times"] * row[redistributions.SENT] for row in rows)
    assert whole == []
    [forward] = [row for row in megatron if row["in"] == "forward" and row[redistributions.SENT]]
    assert (forward["operation"], forward["from"], forward["to"]) == ("native_layer_norm", "Partial()", "Shard(0)")
    [gelu] = [row for row in other if row["operation"] == "gelu"]
    assert gelu["why"] == "ab->ab, linear in nothing" and gelu["from"] == "Partial()"


def test_an_unknown_name_is_refused():
    with pytest.raises(RankError, match=r"layouts names 'up', which is no parameter: choose from weight, bias, x"):
        run(redistributions.redistributed, nn.Linear(2, 2), {"up": [Shard(0)]}, torch.ones(2, 2), ranks=1, device="cpu")
