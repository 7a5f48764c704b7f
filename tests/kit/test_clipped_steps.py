"""Tests of labs.kit.train's steps with clipping, and of the ledger by ranks. Notebook 11 runs them in real jobs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from labs import cost, pp
from labs.kit import beat, draw, train
from labs.kit.record import sent_and_held
from labs.model import GPT, PRESETS

ONE = torch.ones(2)


def test_the_largest_difference_is_over_all_ranks():
    expected = ([1.0, 2.0], {"a": ONE, "b": ONE})
    results = [([1.0, 2.5], {"a": ONE}), ([1.0, 2.0], {"b": 3 * ONE})]
    assert train.largest_difference(results, expected) == {"norm": 0.5, "parameter": 2.0}
    with pytest.raises(ValueError, match=r"no rank has the parameters \['b'\]"):
        train.largest_difference(results[:1], expected)


def test_a_prediction_by_axis_adds_up_to_that_of_cost():
    config, sizes = PRESETS["tiny"], (2, 1, 2, 2)
    said = train.predicted(config, sizes, 5, microbatches=2, batch=16)
    axes = dict(zip(("pp", "replicate", "shard", "tp"), sizes, strict=True))
    whole = cost.parallel(cost.Job(config, 4, 8, 5, accumulation=2), pp.plan(pp.one_f_one_b(2, 2)), axes)
    assert said["pp"] + said["shard"] + said["tp"] == whole.sent
    assert said["peak"] == whole.held.peak


def test_clipped_returns_the_norms_before_clipping():
    p = torch.nn.Parameter(torch.zeros(4))

    def backward(x, y):
        p.grad = x.clone()

    def clip(most):
        return torch.nn.utils.clip_grad_norm_([p], most)

    assert train.clipped([p], backward, clip, [(ONE.repeat(2), None)] * 2) == [2.0, 2.0]


def test_ranks_with_the_same_numbers_share_a_row():
    said = [{"pp": 1}, {"pp": 1}, {"pp": 1}, {"pp": 2}]
    table = draw.by_rank(said, said, names={"pp": "sent along pp"}).table()
    assert [row[0] for row in table.rows] == ["ranks 0 to 2 sent along pp", "rank 3 sent along pp"]


def test_what_each_rank_sends_and_holds_is_of_the_second_step():
    event = SimpleNamespace(dtype="float32", meta=False, group="mesh_tp", sent=8)
    sending = SimpleNamespace(select=lambda rank, step: [event] * (rank + step))
    holding = SimpleNamespace(
        ranks=2, moments=lambda rank, step: [(0.0, {"P": rank, "S": step})], steady=lambda rank: {"G": 4}
    )
    rows = [{"tp": 8, "P": 0, "S": 1, "G": 4}, {"tp": 16, "P": 1, "S": 1, "G": 4}]
    assert sent_and_held(sending, holding) == rows


def test_a_dry_step_sends_what_is_predicted():
    config, sizes = replace(PRESETS["tiny"], depth=2), (2, 1, 1, 2)
    said = train.predicted(config, sizes, 0, 2, 2, sequence_parallel=True)
    found = train.dry_step(config, sizes, 2).communication.sent(0, 1)
    assert found == said["pp"] + said["shard"] + said["tp"]


def test_one_process_returns_norms_and_parameters():
    model = GPT(PRESETS["tiny"])
    x = torch.zeros(1, 8, dtype=torch.long)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (norm,), after = train.one_process(model, [(x, x)])
    assert norm > 0 and any(not torch.equal(p, before[name]) for name, p in after.items())


def test_one_mesh_of_the_challenge_is_measured():
    fewest = beat.best_mesh.bound(beat.best_mesh.cases["few tokens"])
    assert beat.best_mesh.measured("few tokens", {"pp": 2, "shard": 4}) == fewest
    with pytest.raises(ValueError, match="there are 8 ranks"):
        beat.best_mesh.measured("few tokens", {"pp": 2})
