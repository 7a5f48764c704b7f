"""The checks on paper: what is told beside a mistake's name.  Right and wrong answers: tests/answers."""

from dataclasses import replace

import pytest

from labs import cost
from labs.kit import check
from labs.kit.checks.pencil.held import held
from labs.model import PRESETS
from tests.answers.held_per_rank import table
from tests.answers.together import together


@pytest.mark.parametrize("name", ["my_shard", "fill_buckets", "held_per_rank", "bytes_by_kind", "ring_seconds"])
def test_what_it_raises_is_told_with_its_line(name):
    def fn(*args):
        return args[99]

    answer = getattr(check, name)(fn)
    assert answer.ok is False and "IndexError" in answer.text and "args[99]" in answer.text


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
    assert second.text.endswith("; wrong for stage 3") and second.mistake == "a gather is missing"
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
