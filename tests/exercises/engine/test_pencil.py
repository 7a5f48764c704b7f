"""Tests of the checks on paper: what they say beside a mistake's name.  Their answers are in tests/exercises."""

from dataclasses import replace

import pytest

from labs import cost
from labs.exercises.plan_a_run.bottlenecks import REPORTS
from labs.exercises.plan_a_run.forecast import TABLE
from labs.exercises.zero.held_per_rank import held
from labs.model import PRESETS
from labs.plan.published import RUNS, rows_of
from tests.answers.together import together
from tests.exercises.zero.stages_by_event import table


def test_a_wrong_table_says_of_which_stages():
    rows = [
        {"sync": ("reduce_scatter",) * 3},
        {"before_backward": ("", "", "")},
        {"gradient_ready": ("", "", "")},
        {"step": ["all_gather", "all_gather", None]},
        {"step": None},
    ]
    functions = [lambda changed=changed: table() | changed for changed in rows]
    first, second, third, *others = together([("stages_by_event", (fn,), False) for fn in functions])
    assert first.text.endswith("; wrong for stages 2 and 3") and "done already" in first.question
    assert second.text.endswith("; wrong for stage 3") and not second.mistake
    assert third.text.endswith("; wrong for stages 2 and 3") and "which part of it" in third.question
    assert all(answer.ok is False for answer in others)


@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_rank_holds_is_what_cost_predicts(stage, ranks):
    config = replace(PRESETS["tiny"], depth=3)
    layers = [sum(layer.sizes) for layer in cost.gpt_layers(config)]
    P, _, S = held(stage, layers, ranks, (4, 4, 8))
    predicted = cost.zero(cost.Job(config, 1, ranks), stage).held
    assert (P, S + 4 * len(layers)) == (predicted.P, predicted.S), "AdamW counts its steps, in 4 bytes a vector"


def test_reports_of_bottlenecks_are_rows_of_the_playbook():
    """Compare each report with its row, and its `best` with the best row of the table."""
    published = [row for row in rows_of(RUNS) if row["table"] == TABLE and row["tokens_per_gpu"]]
    for report, _ in (each for name, each in REPORTS.items() if name != "G"):
        alike = [row for row in published if (row["model"], row["gpus"]) == (report.model, str(report.gpus))]
        assert max(int(row["tokens_per_gpu"]) for row in alike if row["is_target"] == "1") == report.best
        accumulation, batch = report.microbatches.split(" of ")
        names = {"tp": report.tp, "pp": report.pp, "micro_batch": batch, "accumulation": accumulation}
        [found] = [row for row in alike if all(row[k] == str(v) for k, v in names.items()) and agrees(row, report)]
        assert float(found["gib"]) == report.GiB and int(found["replicas"]) * int(found["shards"]) == report.dp


def agrees(row, report):
    return int(row["tokens_per_gpu"]) == report.tokens
