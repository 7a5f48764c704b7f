"""Tests of `fitted.csv`: the tool would write the same text, and no step away from its constants is better."""

from dataclasses import replace

import pytest

from labs.plan import constants as fitted
from tools import plan_constants as tool


def test_the_table_is_as_the_tool_writes_it():
    assert tool.text(fitted.fits()) == fitted.FITS.read_text(encoding="utf-8")


def test_every_software_and_source_of_the_tables_has_its_constants():
    cases = [case for case in tool.cases_of(tool.OTHERS + tool.PLAYBOOK) if case.is_target]
    assert {case.setup.software for case in cases} == {*fitted.FITTED} == {*fitted.EVIDENCE}
    assert {tool.left_out(case) for case in cases} == {*fitted.WITHOUT}


def test_the_goals():
    """Check the medians: 15 % for software that the fit has seen; 25 % for a source that is left out."""
    for evidence in fitted.EVIDENCE.values():
        assert evidence["fitted"] < 0.15 and evidence["left_out"] < 0.25
        assert evidence["least"] < 1 < evidence["most"]


@pytest.mark.parametrize("name", ["matmul", "passes", "launch"])
def test_no_step_away_is_better(name):
    """Check the constants that matter most, over all sources of PyTorch."""
    cases = [case for case in tool.cases_of(tool.OTHERS + tool.PLAYBOOK) if case.is_target]
    cases = [case for case in cases if case.setup.software == "pytorch"]
    constants = fitted.FITTED["pytorch"]

    def loss(factor):
        return tool.loss_of(cases)(replace(constants, **{name: factor * getattr(constants, name)}))

    assert loss(1.0) < min(loss(0.8), loss(1.25))


def test_the_simplex_finds_a_valley():
    found = tool.least(lambda x: (x[0] - 3) ** 2 + (x[0] * x[1] - 6) ** 2, [1.0, 1.0], 200)
    assert found == pytest.approx([3, 2], rel=1e-3)
