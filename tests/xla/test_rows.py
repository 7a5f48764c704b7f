"""Tests of the tour's rows of XLA's, against one process, as in the tour; P by labs.cost, from layouts of ours."""

import pytest

from labs.kit.commands import tour
from labs.kit.extras import jax_devices
from labs.kit.launch import run
from labs.kit.training.strategies import COMPILED, ONE_DEVICE, train
from labs.model import GPT
from tests.extras import need_jax

PLAN = tour.TourSettings(ranks=2, steps=2, batch=4, device="cpu")


@pytest.fixture(scope="module")
def one_process():
    job = ONE_DEVICE, lambda: GPT(PLAN.config), PLAN.batches(1, PLAN.steps), 1, PLAN.steps
    return run(train, *job, ranks=1, device="cpu")[0]


@pytest.mark.parametrize("strategy", COMPILED, ids=lambda strategy: strategy.name)
def test_a_row_is_one_process_s_training_and_shows_its_ledgers(strategy, one_process):
    need_jax()
    losses, reference = one_process
    row = tour.read(strategy, PLAN, 2, reference)
    assert row.differs == [] and row.losses == pytest.approx(losses, abs=1e-5)
    assert row.sent["predicted"] is None and row.sent["measured"] > 0
    for kind in "PS":
        assert row.held[kind]["measured"] == row.held[kind]["predicted"] > 0, kind
    assert row.held["peak"]["measured"] > row.held["temporary"]["measured"] > row.held["P"]["measured"]
    shown = repr(tour.show([row]))
    assert " – " in shown and "there is no formula" in shown
    assert tour.picture([row], PLAN).startswith(b"\x89PNG")


def test_a_row_with_wrong_numbers_is_reported(one_process, monkeypatch):
    need_jax()
    monkeypatch.setattr(tour, "on_devices", lambda *_, real=tour.on_devices, **options: real(wrong, PLAN, **options))
    [fault] = tour.read(COMPILED[0], PLAN, 2, one_process[1]).differs
    assert fault.startswith("gspmd-fsdp: parameters differ from one process's by ")


def wrong(plan):
    from labs.xla.training_result import Trained

    weights = {name: 1 + p.detach().numpy() for name, p in GPT(plan.config).named_parameters()}
    held = 3 * 4 * sum(w.size for w in weights.values()) // 2
    return Trained([5.0, 5.0], weights, "", held, [1.0, 1.0], 0, 0)


def test_it_says_which_ranks_and_which_extra_it_takes(monkeypatch):
    monkeypatch.setattr(jax_devices, "jax_missing", lambda: "")
    assert [COMPILED[0].fits(ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [True, True, False, True, False, True]
    with pytest.raises(ValueError, match="gspmd-tp cannot have --ranks 3: XLA cuts tensors into equal parts"):
        tour.choose("gspmd-tp", 3)
    monkeypatch.setattr(jax_devices, "jax_missing", lambda: "JAX is not installed: do this")
    with pytest.raises(ValueError, match="gspmd-fsdp cannot have --ranks 4: JAX is not installed: do this"):
        tour.choose("gspmd-fsdp", 4)
    assert not set(COMPILED) & set(tour.choose("all", 4))
