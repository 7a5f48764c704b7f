"""Tests of labs.deepspeed.configuration: numbers worked out by hand, and settings from DeepSpeed 0.19.8's
documentation.
"""

import re
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from labs.deepspeed import configuration
from labs.deepspeed.configuration import (
    ACCUMULATION,
    LIVE,
    MICRO,
    REUSE,
    TRAIN,
    batch_sizes,
    from_fsdp,
    like_zero,
    require_known,
    to_fsdp,
)
from labs.kit.launch import run


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({TRAIN: 24, MICRO: 2, ACCUMULATION: 3}, (24, 2, 3)),
        ({MICRO: 2, ACCUMULATION: 3}, (24, 2, 3)),
        ({TRAIN: 24, ACCUMULATION: 3}, (24, 2, 3)),
        ({TRAIN: 24, MICRO: 2}, (24, 2, 3)),
        ({TRAIN: 24}, (24, 6, 1)),
        ({MICRO: 2}, (8, 2, 1)),
    ],
)
def test_what_is_left_out_follows_from_the_rest(config, sizes):
    assert batch_sizes(config, ranks=4) == sizes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({TRAIN: 16, MICRO: 2, ACCUMULATION: 4}, "16, but 2 sequences × 4 micro-batches × 4 ranks are 32: leave one"),
        ({TRAIN: 18}, "18 cannot be cut into 1 micro-batches on 4 ranks: take 16 or 20"),
        ({TRAIN: 3}, "3 cannot be cut into 1 micro-batches on 4 ranks: take 4"),
        ({TRAIN: 16, MICRO: 3}, "16 cannot be cut into micro-batches of 3 on 4 ranks: take 12 or 24"),
        ({ACCUMULATION: 4}, "has neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ({TRAIN: 0}, "train_batch_size is 0: it must be an integer of 1 or more"),
        ({MICRO: "auto"}, "is 'auto': it must be an integer"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(config, message):
    with pytest.raises(ValueError, match=message) as error:
        batch_sizes(config, ranks=4)
    assert "\n" not in str(error.value)


def test_a_key_that_is_not_known_is_reported_with_the_nearest_one():
    require_known(like_zero(3) | {TRAIN: 4})
    with pytest.raises(ValueError, match=r"'zero_optimisation' is no key .* did you mean 'zero_optimization'"):
        require_known({"zero_optimisation": {"stage": 2}})
    with pytest.raises(ValueError, match="'xyzzy' is no key of a configuration of DeepSpeed: take it out"):
        require_known({"xyzzy": 1})
    with pytest.raises(ValueError, match="zero_optimization of DeepSpeed is 2: give a dictionary"):
        require_known(2, where="zero_optimization")


def test_every_stage_is_set_not_to_clip_and_how_much_to_reduce_at_once():
    for stage in (1, 2, 3):
        config = like_zero(stage, bucket=100)
        assert config["gradient_clipping"] == 0 and config["zero_optimization"]["reduce_bucket_size"] == 100


def test_the_settings_of_fully_shard_in_its_words():
    assert from_fsdp() == like_zero(3)
    low = from_fsdp(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert low["bf16"] == {"enabled": True} and low["communication_data_type"] == "fp32"
    # the reduction uses the dtype of the computation
    assert "communication_data_type" not in from_fsdp(param_dtype=torch.bfloat16)
    kept = from_fsdp(reshard_after_forward=False)["zero_optimization"]
    assert kept[configuration.REUSE] == kept["stage3_max_live_parameters"] == 10**9
    assert from_fsdp(offload=True)["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    with pytest.raises(ValueError, match=r"reduce_dtype is torch.float64: DeepSpeed trains in"):
        from_fsdp(reduce_dtype=torch.float64)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_there_and_back(reshard_after_forward, offload, param_dtype, reduce_dtype):
    settings = {
        "reshard_after_forward": reshard_after_forward,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "offload": offload,
    }
    assert to_fsdp(from_fsdp(**settings), parameters=10**6) == settings


def test_by_its_own_thresholds_a_small_model_is_not_resharded():
    bare = {"zero_optimization": {"stage": 3}}
    assert not to_fsdp(bare, parameters=10**9)["reshard_after_forward"]
    assert to_fsdp(bare, parameters=10**9 + 1)["reshard_after_forward"]


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 2}, "stage 2 keeps all parameters on each rank, and fully_shard never does"),
        ({}, "stage 0 keeps"),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "parameters and optimizer state are offloaded to none, nvme: fully_shard",
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "parameters and optimizer state are offloaded to cpu, none: fully_shard",
        ),
    ],
)
def test_what_has_no_counterpart_is_reported(zero, message):
    with pytest.raises(ValueError, match=message):
        to_fsdp({"zero_optimization": zero}, parameters=10)


ZERO = {"stage": 3}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bf16": True}, "bf16 is True: DeepSpeed takes a dictionary, such as {'enabled': true}, there"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled is 'auto', which Hugging Face's Trainer fills in: give a value"),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled is 'true': DeepSpeed takes true or false there"),
        ({"train_batch_size": "auto"}, "train_batch_size is 'auto', which"),
        ({"zero_optimization": ZERO | {REUSE: "auto"}}, f"zero_optimization.{REUSE} is 'auto'"),
        ({"zero_optimization": ZERO | {"reduce_bucket_size": "auto"}}, "reduce_bucket_size is 'auto'"),
        (
            {"zero_optimization": ZERO | {"offload_param": None}},
            "zero_optimization.offload_param is null: give a value",
        ),
        ({"zero_optimization": ZERO | {LIVE: "1e9"}}, f"{LIVE} is '1e9': DeepSpeed takes a number of parameters there"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage is '3': DeepSpeed takes an integer there"),
        ({"zero_optimization": True}, "zero_optimization in a configuration of DeepSpeed is True: give a dictionary"),
        ({"bf16": None}, "bf16 is null: give a value, or take it out"),
        ({"bfloat16": {"enabled": True}}, "bfloat16 is an older name: say bf16"),
        ({"zero_optimization": ZERO | {"cpu_offload": True}}, "cpu_offload is an older name: say offload_optimizer"),
        ({"zero_optimization": ZERO | {"max_reuse_distance": 0}}, f"max_reuse_distance is an older name: say {REUSE}"),
        (
            {"communication_data_type": "float32"},
            "communication_data_type is 'float32': DeepSpeed takes 'fp32', 'bf16'",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        (
            {TRAIN: 8, "optimizer": {"type": "Adam", "params": {"lr": 1}}, "gradient_clipping": 1.0},
            "fully_shard has no setting for train_batch_size, optimizer.type, optimizer.params.lr, gradient_clipping:",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "no setting for fp16.loss_scale: take that out"),
        ({"zero_optimization": ZERO | {"zero_hpz_partition_size": 8}}, "no setting for zero_optimization.zero_hpz"),
        (
            {"zero_optimization": ZERO | {"offload_param": {"device": "cpu", "max_in_cpu": 3}}},
            "offload_param.max_in_cpu",
        ),
    ],
)
def test_what_would_be_dropped_on_the_way_to_fully_shard_is_reported(config, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        to_fsdp({"zero_optimization": ZERO} | config, parameters=10)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_every_key_of_deepspeeds_own_is_translated_or_refused():
    """Check that only keys without numbers leave the settings unchanged; the installed DeepSpeed lists its keys."""

    def names():
        fields = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
        return {*fields, *(field.alias for field in fields.values() if field.alias)}

    fields = run(names, ranks=1)[0]
    kept = set()
    for key in fields - {"stage", "offload_param", "offload_optimizer", REUSE, LIVE}:
        try:
            assert to_fsdp({"zero_optimization": ZERO | {key: 7}}, 10) == to_fsdp({"zero_optimization": ZERO}, 10)
            kept.add(f"zero_optimization.{key}")
        except ValueError as error:
            assert key in str(error)
    assert kept <= configuration.SAYS_NO_NUMBERS
