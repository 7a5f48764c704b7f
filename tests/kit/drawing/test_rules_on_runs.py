"""Tests of rules of thumb beside published runs: ratios of a few invented speeds, whose errors are known."""

from types import SimpleNamespace

import pytest

from labs import plan
from labs.kit import draw
from labs.kit.drawing import rules_on_runs
from labs.plan import Layout
from labs.plan.compare import left_out_of, predicted


def case(tokens, **layout):
    return SimpleNamespace(group=("8B", 8), tokens=tokens, layout=Layout(**layout))


RUNS = [(case(100), 100), (case(200, pp=2), 300), (case(50, tp=2), 40)]


def test_the_error_of_a_planned_ratio_is_a_factor_either_way():
    # 100/200 is planned as 100/300, 100/50 as 100/40, and 200/50 as 300/40
    assert draw.ratio_errors(RUNS) == pytest.approx([0.25, 0.5, 0.875])
    assert draw.order(RUNS) == 1
    assert "100%" in str(draw.pairs(RUNS))


def test_a_rule_is_the_best_run_that_obeys_beside_the_best_that_does_not():
    obeys = rules_on_runs.RULES["a pipeline"][1]
    (row,) = rules_on_runs.of_rule(RUNS, ("8B",), obeys)
    assert row == ("8B", 8, 0.5, pytest.approx(1 / 3))
    picture = draw.rules(RUNS, 0.1)
    assert "a pipeline: 8B on 8 GPUs 0.50 ×" in picture.alt and "32 sequences each" in picture.svg
    assert ">0.50 ×<" in picture.svg


def test_a_rule_by_the_plan_and_its_verdict():
    found = SimpleNamespace(
        feasible=[SimpleNamespace(layout=Layout(pp=2), seconds=3.0), SimpleNamespace(layout=Layout(), seconds=2.0)]
    )
    assert draw.rule_times("a pipeline", found) == 1.5
    assert [draw.verdict(times, 0.1, 0.4) for times in (1.05, 1.3, 0.5)] == [
        "a tie", "1.3 × as long: leans", "2.0 × as quick: decides",
    ]  # fmt: skip


def test_published_runs_have_every_rule():
    runs = [(each, each.tokens) for each in plan.published.read("nanotron_playbook")[0]]
    assert {
        rule for rule, (models, obeys) in rules_on_runs.RULES.items() if [*rules_on_runs.of_rule(runs, models, obeys)]
    }
    assert max(draw.ratio_errors(runs[:50])) == pytest.approx(0)


def test_the_thresholds_are_those_of_healthy_runs_that_the_constants_were_not_fitted_on():
    cases = [each for each in plan.published.read("nanotron_playbook")[0] if each.is_target]
    errors = draw.ratio_errors([(each, predicted(left_out_of(each)).tokens_per_gpu) for each in cases])
    found = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
    assert found == pytest.approx((rules_on_runs.TIE, rules_on_runs.SURE), abs=0.005)
