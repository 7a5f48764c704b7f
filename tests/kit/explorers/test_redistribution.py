"""Tests of the placement explorer: it draws what a real DTensor holds, and says what a redistribution sends.

The reference is DTensors on four ranks, and a recording of what they send.
"""

import sys

import cloudpickle
import pytest
import torch

from labs.dtensor import DTensor, Partial, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.kit import play
from labs.kit.drawing.dtensor_blocks import sentences
from labs.kit.explorers import redistribution as explorer
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from tests.kit.pictures import require_legible

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
PAIRS = [((P, R), (R, S0)), ((S0, S1), (R, R)), ((S0, S0), (S1, R)), ((R, S1), (S0, S1)), ((P, P), (S0, R))]
NAMES = {p: repr(p) for p in (R, P, S0, S1)}


def settings(source, target):
    places = zip(("from_a", "from_b", "to_a", "to_b"), (*source, *target), strict=True)
    return {"tensor": "7 × 5", "mesh": "2 × 2"} | {name: NAMES[p] for name, p in places}


def moved():
    """Return each rank's block before and after, by pair, in the picture's words."""
    mesh, said = Mesh((2, 2), ("a", "b")), []
    for source, target in PAIRS:
        block = Spec((7, 5), (2, 2), source).block(mesh.get_coordinate())
        x = DTensor.from_local(torch.ones(block.shape), mesh, source, shape=(7, 5))
        mark("step")
        y = x.redistribute(placements=target)
        mark("end")
        said.append((x.spec, y.spec, tuple(x.to_local().shape), tuple(y.to_local().shape)))
    return said


def test_it_shows_what_real_tensors_hold_and_send():
    result = run(moved, ranks=4, device="cpu", record="communication")
    for step, (source, target) in enumerate(PAIRS):
        text = play.placements(**settings(source, target)).still.text
        before, after, *_ = result[0][step]
        assert all(line in text for spec in (before, after) for line in sentences(spec))
        assert [line for line in text.splitlines() if "bytes at most" in line or "0 bytes" in line]
        sent = [result.recording.sent(rank, step) for rank in range(4)]
        told = [int(line.split(",")[-1].split()[0]) for line in text.splitlines() if line.startswith("along ")]
        assert max(sent) <= sum(told) and (len(told) > 1 or max(sent) == sum(told))
        for rank in range(4):
            coordinate = divmod(rank, 2)
            assert result[rank][step][2:] == (before.block(coordinate).shape, after.block(coordinate).shape)


def test_every_control_changes_the_picture():
    widget = play.placements()
    assert [[c.description for c in pair.children] for pair in widget.children[0].children] == [
        ["tensor", "mesh"],
        ["from a", "from b"],
        ["to a", "to b"],
    ]
    for name, value in {"mesh": "2 × 3", "tensor": "7 × 5", "from b": "Shard(1)", "to a": "Shard(1)"}.items():
        before = widget.stage.value
        widget.controls[name].label = value
        assert widget.stage.value != before, name


@pytest.mark.parametrize("mesh", explorer.CONTROLS["mesh"])
@pytest.mark.parametrize("tensor", explorer.CONTROLS["tensor"])
def test_words_fit_and_do_not_overlap(tensor, mesh):
    for source, target in [*PAIRS[:2], ((S1, S0), (S0, S1))]:
        placed = {f"from {axis}": p for axis, p in zip("ab", source, strict=True)}
        placed |= {f"to {axis}": p for axis, p in zip("ab", target, strict=True)}
        sizes = {name: explorer.CONTROLS[name][value] for name, value in (("tensor", tensor), ("mesh", mesh))}
        require_legible(explorer.picture(**sizes, **placed))
