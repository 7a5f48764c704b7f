"""Tests of labs.xla.annotations against labs.model and torch's AdamW on one process; cuts of a weight by hand.

The jobs are real, a few for all tests.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from labs.kit.extras.jax_devices import on_devices
from labs.kit.launch import RankError, run
from labs.kit.training import strategies
from labs.kit.training.training_step import ADAMW
from labs.mesh.grid import Grid
from labs.model import GPT, Config
from labs.rope import RopeScaling
from labs.xla.hlo import counted
from tests.extras import need_jax

EIGHT_HEADS = Config(vocab=32, dim=32, depth=1, heads=8, kv_heads=8, hidden=64, context=8)
ODD = Config(vocab=13, dim=12, depth=1, heads=6, kv_heads=3, hidden=10, context=7, eps=1e-3)
ODD = [
    ODD,
    replace(ODD, tied=True, kv_heads=1, rope_base=500.0),
    replace(ODD, rope_scaling=RopeScaling(factor=4.0, low=1.0, high=2.0, context=5)),
]
SHARED = {"fsdp": {"dp": 8}, "tp": {"tp": 8}, "fsdp-tp": {"dp": 4, "tp": 2}}
STEPS = 4


def as_arrays(model):
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def tokens(config, batch, seed=0):
    return torch.randint(config.vocab, (2, batch, config.context), generator=torch.Generator().manual_seed(seed))


BATCHES = [tuple(tokens(EIGHT_HEADS, 16, seed)) for seed in range(STEPS)]


def forward(jobs):
    """Return logits and losses of several models, from arrays of one device."""
    import jax

    from labs.xla import gpt_in_jax

    both = jax.jit(
        lambda w, x, y, config: (gpt_in_jax.logits(w, x, config), gpt_in_jax.loss(w, x, y, config)), static_argnums=3
    )
    return [jax.tree.map(np.asarray, both(w, x, y, config)) for config, w, x, y in jobs]


def trained(meshes):
    from labs.xla.annotations import train

    batches = [tuple(part.numpy() for part in batch) for batch in BATCHES]
    return [train(EIGHT_HEADS, as_arrays(GPT(EIGHT_HEADS)), batches, sizes, ADAMW) for sizes in meshes]


@pytest.fixture(scope="module")
def reference():
    arguments = strategies.ONE_DEVICE, partial(GPT, EIGHT_HEADS), [BATCHES], 1, STEPS
    return run(strategies.train, *arguments, ranks=1, device="cpu")[0]


@pytest.fixture(scope="module")
def on_eight():
    need_jax()
    return dict(zip(SHARED, on_devices(trained, SHARED.values(), devices=8), strict=True))


def require_the_same(job, reference):
    losses, weights = reference
    np.testing.assert_allclose(job.losses, losses, atol=1e-5)
    assert job.weights.keys() == weights.keys()
    for name, p in weights.items():
        np.testing.assert_allclose(job.weights[name], p, atol=1e-4, err_msg=name)


def kinds_by_axis(job, sizes):
    grid = Grid(tuple(sizes.values()), tuple(sizes))
    return {(one.kind, one.axis(grid)) for one in job.collectives()}


def test_the_same_numbers_as_the_model_of_torch():
    need_jax()
    models = [GPT(config) for config in ODD]
    for model in models:
        with torch.no_grad():
            model.norm.weight += torch.linspace(-0.5, 0.5, 12)  # norms start from ones
    jobs = [(c, as_arrays(m), *(part.numpy() for part in tokens(c, 3))) for c, m in zip(ODD, models, strict=True)]
    for model, (config, _, x, y), (logits, loss) in zip(
        models, jobs, on_devices(forward, jobs, devices=1), strict=True
    ):
        x, y = map(torch.from_numpy, (x, y))
        with torch.no_grad():
            np.testing.assert_allclose(logits, model(x), atol=1e-5, err_msg=str(config))
            assert loss == pytest.approx(model(x, y).item(), abs=1e-5)


@pytest.mark.parametrize("layout", SHARED)
def test_any_layout_trains_as_one_device_does(layout, on_eight, reference):
    require_the_same(on_eight[layout], reference)


def test_each_layout_communicates_along_its_axes(on_eight):
    fsdp, tp, both = (on_eight[layout].collectives() for layout in SHARED)
    assert counted(fsdp)["all-gather"] >= 7 and "all-gather" not in counted(tp)
    assert {axis for _, axis in kinds_by_axis(on_eight["fsdp"], SHARED["fsdp"])} == {"dp"}
    assert kinds_by_axis(on_eight["tp"], SHARED["tp"]) == {("all-reduce", "tp")}
    assert {("all-gather", "dp"), ("all-reduce", "dp"), ("all-reduce", "tp")} <= kinds_by_axis(
        on_eight["fsdp-tp"], SHARED["fsdp-tp"]
    )
    assert sum(one.sent for one in both) > 0


def test_a_device_holds_its_part(on_eight):
    """Check weights and both moments, in float32; under TP, norms are whole."""
    everything = sum(p.numel() for p in GPT(EIGHT_HEADS).parameters())
    norms = 32 * (2 * EIGHT_HEADS.depth + 1)
    assert on_eight["fsdp"].held == 3 * 4 * everything // 8
    assert on_eight["tp"].held == 3 * 4 * ((everything - norms) // 8 + norms)
    assert on_eight["fsdp-tp"].held == 3 * 4 * ((everything - norms) // 8 + norms // 4)


def test_4_times_8_with_each_matrix_tiled_over_both_axes(reference):
    need_jax()
    sizes = {"dp": 4, "tp": 8}
    [job] = on_devices(trained, [sizes], devices=32)
    require_the_same(job, reference)
    everything, norms = sum(p.numel() for p in GPT(EIGHT_HEADS).parameters()), 32 * (2 * EIGHT_HEADS.depth + 1)
    assert job.held == 3 * 4 * ((everything - norms) // 32 + norms // 4)
    assert {("all-gather", "dp"), ("all-reduce", "dp"), ("all-reduce", "tp")} <= kinds_by_axis(job, sizes)


def refused():
    from labs.dtensor import Partial
    from labs.gspmd.annotated_layer import layout_of
    from labs.xla.annotations import laid_out, mesh_of, partition_spec

    sentences, down = [], layout_of("mlp.down.weight", ("dp",))
    for attempt in (
        lambda: mesh_of({"dp": 2, "tp": 3}),
        lambda: laid_out(np.zeros((8, 6)), mesh_of({"dp": 4}), down, "unaffected"),
        lambda: laid_out(np.zeros((6, 8)), mesh_of({"dp": 4}), down, "mlp.down.weight"),
        lambda: partition_spec([Partial()], ("tp",)),
    ):
        try:
            attempt()
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def test_what_does_not_fit_is_reported():
    need_jax()
    mesh, cut, summands = on_devices(refused, devices=4)
    assert mesh == "a mesh {'dp': 2, 'tp': 3} has 6 places, and there are 4 devices: change a size"
    assert cut.startswith("mlp.down.weight has a dim of 6, which is to be cut into 4 equal parts and cannot be")
    assert summands.startswith("[Partial()]: JAX has no annotation for summands")


def too_long():
    from labs.xla.gpt_in_jax import logits

    logits({}, np.zeros((1, 9), int), EIGHT_HEADS)


def test_more_tokens_than_the_context_are_refused():
    need_jax()
    with pytest.raises(RankError, match="9 tokens are more than the context of 8"):
        on_devices(too_long, devices=1)


def ignoring():
    """Return the refusal of a target of -100 by `train`, and the loss of the program that is not checked first."""
    from labs.xla.annotations import train
    from labs.xla.gpt_in_jax import loss

    weights, x = as_arrays(GPT(EIGHT_HEADS)), np.zeros((1, 4), int)
    y = np.array([[1, 2, -100, 3]])
    with pytest.raises(ValueError) as refused:
        train(EIGHT_HEADS, weights, [(x, x), (x, y)], {"dp": 1}, ADAMW)
    return str(refused.value), float(loss(weights, x, y, EIGHT_HEADS))


def test_targets_that_are_ignored_are_refused():
    need_jax()
    text, value = on_devices(ignoring, devices=1)
    assert text == "a target is -100, to be ignored, but this loss counts all: take labs.fsdp or labs.tp"
    assert np.isnan(value)
