"""Tests of labs.cost.job: impossible jobs are refused."""

import re

import pytest

from labs.cost import Job
from labs.model import Config
from tests.cost.common import TINY


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": "tiny"}, "config is 'tiny': it must be a labs.model.Config"),
        ({"batch": 0}, "batch is 0: it must be a whole number, and at least 1"),
        ({"batch": 2.0}, "batch is 2.0: it must be a whole number"),
        ({"ranks": -1}, "ranks is -1: it must be"),
        ({"accumulation": 0}, "accumulation is 0: it must be"),
        ({"context": 0}, "context is 0: it must be"),
        ({"context": 65}, "context is 65, more than the model's 64: shorten it, or give a config with"),
        ({"rank": 4}, "rank is 4: of 4 ranks it must be one of 0 to 3"),
        ({"rank": -1}, "rank is -1: of 4 ranks"),
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of 'float32', 'mixed', "),
        ({"config": Config(50, 12, 1, 6, 2, 20, 8)}, "head size 2 (dim 12 / 6 heads): PyTorch does not fuse attention"),
        ({"recompute": "half"}, "recompute is 'half': it must be one of 'none', 'selective', "),
    ],
)
def test_what_cannot_be_run_is_no_job(given, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        Job(**{"config": TINY, "batch": 3, "ranks": 4} | given)
    assert "\n" not in str(raised.value)
