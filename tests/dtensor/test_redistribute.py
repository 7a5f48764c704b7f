"""Tests of labs.dtensor.redistribute: its messages against the recorder and the textbook; numbers against the whole.

test_dtensor checks that its plans are torch's, step by step.
"""

from itertools import product
from math import prod

import pytest
import torch

from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import MOVES, plan, redistribute, sent
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def pairs(axes):
    """Return all (shape, from, to) between which a redistribution exists."""
    shapes = [(8, 4), (5, 3), (1, 2), (0, 3)]
    return [
        (shape, source, target)
        for shape in shapes
        for source in product((R, P, S0, S1), repeat=axes)
        for target in product((R, S0, S1), repeat=axes)
        if source != target
    ]


def local_part(full, spec, coordinate):
    """Return a rank's part of a tensor; its summand of a Partial is a share of each number that only this rank has."""
    block = full[spec.block(coordinate).slices].clone()
    for placement, ranks, place in zip(spec.placements, spec.mesh, coordinate, strict=True):
        if placement.is_partial():
            block = block * (place + 1) / sum(range(1, ranks + 1))
    return block


@pytest.mark.parametrize("shape_of_mesh", [(2,), (3,), (4,), (2, 2), (1, 2)])
def test_blocks_and_bytes_are_what_the_table_says(shape_of_mesh):
    cases, names = pairs(len(shape_of_mesh)), ("dp", "tp")[: len(shape_of_mesh)]

    def body():
        mesh = Mesh(shape_of_mesh, names)
        for shape, source, target in cases:
            full, spec = (
                torch.arange(1.0, prod(shape) + 1, dtype=torch.float64).view(shape),
                Spec(shape, mesh.shape, source),
            )
            local = local_part(full, spec, mesh.get_coordinate())
            if local.ndim == 2 and len(source) == 1:
                local = local.t().contiguous().t()
            mark("step")
            block = redistribute(local, spec, target, mesh)
            mark("end")
            expected = full[spec.but(target).block(mesh.get_coordinate()).slices]
            torch.testing.assert_close(
                block, expected, rtol=1e-14, atol=0, msg=lambda text, at=(shape, source, target): f"{at}: {text}"
            )
        return mesh.get_coordinate()

    results = run(body, ranks=prod(shape_of_mesh), record="communication")
    for number, (shape, source, target) in enumerate(cases):
        spec = Spec(shape, shape_of_mesh, source)
        collectives = [step.move.collective for step in plan(spec, target) if step.move.collective]
        for rank, coordinate in enumerate(results):
            assert results.recording.sent(rank, number) == 8 * sent(spec, target, coordinate), (shape, source, target)
            assert results.recording.counts(rank, number).total() == len(collectives)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_textbooks_formulas_are_its_limit(ranks):
    n = 64
    for (source, target), share in {
        (S0, R): 1,
        (P, R): 2,
        (P, S0): 1,
        (S0, S1): 1 / ranks,
        (R, S0): 0,
        (R, P): 0,
    }.items():
        assert sent(Spec((8, 8), (ranks,), (source,)), (target,), (0,)) == share * (ranks - 1) / ranks * n


def test_the_table_is_the_docstrings():
    import labs.dtensor.redistribute

    said = [line.split() for line in labs.dtensor.redistribute.__doc__.splitlines()]
    for line in repr(MOVES).splitlines():
        assert line.split() in said


def test_a_plan_can_be_read():
    assert str(plan(Spec((8, 8), (2, 2), (S0, S0)), (R, S0))) == (
        "[axis 1: Shard(0) → Replicate(), all_gather, axis 0: Shard(0) → Replicate(), all_gather, "
        "axis 1: Replicate() → Shard(0), nothing sent]"
    )
    assert plan(Spec((8, 8), (1, 2), (S0, R)), (R, R)) == []
    (step,) = plan(Spec((8,), (2,), (S0,)), (P,))
    with pytest.raises(
        RuntimeError, match=r"no move makes Partial\(\) of Shard\(0\): redistribute to Replicate\(\) first"
    ):
        _ = step.move
