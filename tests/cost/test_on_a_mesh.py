"""Tests of labs.cost.parallel: where it must agree with others, and what multiplies.  tests/test_parallel.py runs
jobs.
"""

from dataclasses import asdict, replace

import pytest

from labs import cost, pp
from labs.cost import Job
from tests.cost.common import TINY

CONFIG = replace(TINY, depth=4)
ALONE = {"pp": 1, "replicate": 1, "shard": 1, "tp": 1}


def predicted(microbatches=4, rank=0, config=CONFIG, **axes):
    axes = ALONE | axes
    ranks = axes["pp"] * axes["replicate"] * axes["shard"] * axes["tp"]
    plans = pp.plan(pp.one_f_one_b(axes["pp"], microbatches))
    return cost.parallel(Job(config, 2, ranks, rank, accumulation=microbatches), plans, axes)


@pytest.mark.parametrize("tied", [False, True])
def test_a_mesh_with_only_pp_is_a_pipeline(tied):
    config, plans = replace(CONFIG, tied=tied), pp.plan(pp.one_f_one_b(2, 4))
    for rank in range(2):
        alone, composed = cost.pp(Job(config, 2, 2, rank, accumulation=4), plans), predicted(4, rank, config, pp=2)
        assert (composed.sent, composed.textbook) == (alone.sent, alone.textbook)
        assert {op: n for op, n in composed.collectives.items() if n} == {
            op: n for op, n in alone.collectives.items() if n
        }
        kinds = asdict(alone.held)
        assert {kind: asdict(composed.held)[kind] for kind in "PGSA"} == {kind: kinds[kind] for kind in "PGSA"}


def test_micro_batches_multiply_the_messages_along_pp_and_tp_but_not_those_along_the_data_axes():
    assert predicted(8, shard=2).sent == predicted(4, shard=2).sent == cost.fsdp(Job(CONFIG, 2, 2), False).sent
    assert predicted(8, pp=2, tp=2).sent == 2 * predicted(4, pp=2, tp=2).sent
    with_shards = [predicted(m, pp=2, shard=2, tp=2).sent - predicted(m, pp=2, tp=2).sent for m in (4, 8)]
    assert with_shards[0] == with_shards[1] > 0


def test_axes_of_another_job_are_refused():
    plans = pp.plan(pp.one_f_one_b(2, 4))
    with pytest.raises(ValueError, match="8 ranks and plans for 2 are not pp 2 × replicate 1 × shard 1 × tp 2"):
        cost.parallel(Job(CONFIG, 2, 8, accumulation=4), plans, ALONE | {"pp": 2, "tp": 2})
