"""labs.zero.state: what one stage has saved goes on in another, on another number of ranks, or is refused."""

import contextlib
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from labs.kit.launch import RankError, run
from labs.zero import Zero
from tests.models import Awkward, batch
from tests.zero.common import ADAMW, train


def test_a_state_goes_on_in_another_stage_on_another_number_of_ranks():
    saved = run(train, 3, torch.float64, ADAMW, 1, None, 5, ranks=3)[0]

    def rest(stage, state, ranks):  # the same data, on any number of ranks
        zero = Zero(model := Awkward(torch.float64, seed=1), stage, ADAMW)
        zero.load_state_dict(state)
        for step in range(5):
            parts = [batch(100 + step, i) for i in range(6)]
            for part in parts[dist.get_rank() :: ranks]:
                (model(part) * ranks / 6).backward()
            zero.step()
        held = [entry for unit in zero.optimizer.state.values() for entry in unit.values()]
        assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in held)
        return zero.state_dict()

    model = Awkward(torch.float64)
    model.load_state_dict(saved["model"])
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    state = {i: deepcopy(saved["optimizer"][name]) for i, name in enumerate(names)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for step in range(5):
        for i in range(6):
            (model(batch(100 + step, i)) / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage, ranks in ((1, 2), (2, 1), (3, 2)):
        again = run(rest, stage, saved, ranks, ranks=ranks)[0]
        for name, p in model.state_dict().items():
            torch.testing.assert_close(again["model"][name], p, rtol=1e-12, atol=1e-12)
        assert again["optimizer"]["scale"]["step"] == 10


def test_the_hyperparameters_and_buffers_travel_along():
    def body():
        zero = Zero(model := Awkward(), 2, ADAMW)
        model.offset *= 3
        zero.optimizer.param_groups[0]["lr"] = 0.125
        other = Zero(Awkward(seed=1), 3, ADAMW)
        other.load_state_dict(zero.state_dict())
        return other.optimizer.param_groups[0]["lr"], other.model.offset.tolist()

    assert run(body, ranks=2) == [(0.125, [3.0] * 7)] * 2


def test_a_state_loaded_after_a_broken_backward_is_what_is_computed_with():
    def body():
        zero = Zero(model := Awkward(torch.float64), 3, ADAMW)
        broken = model.mixed["norm"].register_full_backward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(batch(0, 0)).backward()
        broken.remove()
        zero.load_state_dict(Zero(Awkward(torch.float64, seed=1), 3, ADAMW).state_dict())
        return model(batch(0, 0)).item() == Awkward(torch.float64, seed=1)(batch(0, 0)).item()

    assert run(body, ranks=2) == [True, True]


def test_a_state_of_another_model_is_refused():
    def body():
        zero = Zero(Awkward(), 1, ADAMW)
        state = zero.state_dict()
        state["model"]["extra"] = state["model"].pop("offset")
        state["model"]["layers.0.0.bias"] = torch.zeros(5)
        zero.load_state_dict(state)

    with pytest.raises(RankError) as error:
        run(body, ranks=2)
    for part in (
        "'offset' is not in it",
        "'extra' is not in the model",
        "'layers.0.0.bias' has shape (5,) in it and (13,) in the model",
    ):
        assert part in str(error.value)
