"""The constants in `fitted.py` are the tool's: it would write the same text, and no step away from them is better."""

from dataclasses import replace
from pathlib import Path

import pytest

from labs.plan import fitted
from tools import plan_constants as tool


def test_the_module_is_as_the_tool_writes_it():
    written = Path(fitted.__file__).read_text(encoding="utf-8")
    assert tool.text(fitted.FITTED) == written


def test_every_source_of_the_tables_has_its_constants():
    alike = tuple(table for table, _ in tool.ALIKE.values())
    sources = {tool.source(case) for case in tool.cases_of(tool.OTHERS + tool.NANOTRON + alike)}
    assert sources == fitted.FITTED.keys() - {"fused kernels"}


@pytest.mark.parametrize("name", ["matmul", "launch", "outer"])
def test_no_step_away_is_better(name):
    """Of the nanotron runs, for the constants that matter most."""
    cases = [case for case in tool.cases_of(tool.NANOTRON) if case.tokens]
    constants = fitted.FITTED["nanotron, EFA"]

    def loss(factor):
        other = replace(constants, **{name: factor * getattr(constants, name)})
        return tool.time_loss(tool.with_constants(cases, lambda _: other))

    assert loss(1.0) < min(loss(0.8), loss(1.25))


def test_the_simplex_finds_a_valley():
    found = tool.least(lambda x: (x[0] - 3) ** 2 + (x[0] * x[1] - 6) ** 2, [1.0, 1.0], 200)
    assert found == pytest.approx([3, 2], rel=1e-3)
