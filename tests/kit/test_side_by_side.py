"""A test of the ledgers of several strategies: each one's own bytes, whatever was trained before."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest

from labs import cost
from labs.data import Batches, corpus
from labs.kit.train import ledgers, strategies
from labs.model import GPT, PRESETS

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_each_strategy_has_its_own_losses_and_bytes():
    config = replace(PRESETS["tiny"], depth=1, context=16)
    loader = Batches(corpus().tokens, 4, config.context)
    rows = {name: strategies.ROWS[name] for name in ("zero-1", "zero-3")}
    found = ledgers(rows, partial(GPT, config), [loader[step] for step in range(3)], ranks=2)
    assert found["zero-1"].losses == pytest.approx(found["zero-3"].losses)
    for name, each in found.items():
        predicted = rows[name].predict(cost.Job(config, batch=2, ranks=2))
        assert each.sent == predicted.sent
        assert [each.held[kind] for kind in "PGSA"] == [getattr(predicted.held, kind) for kind in "PGSA"]
        assert each.held["peak"] < sum(each.held.values()) - each.held["peak"]
