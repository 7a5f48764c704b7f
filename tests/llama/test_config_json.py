"""Tests of labs.llama.config_json: published ones are read, and what the course cannot compute is refused."""

import json
import re
from dataclasses import replace

import pytest

from labs.llama import read_config
from labs.model import Config, parameters
from labs.rope import RopeScaling
from tests.llama.common import LONG, SCALED

OLDER = {name: value for name, value in SCALED.items() if name != "rope_type"} | {"type": "llama3"}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
SEVEN_B = Config(32_000, 4096, 32, 32, 32, 11_008, context=4096)


def config_of(folder, **changes):
    found = {name: value for name, value in (LLAMA_2 | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(found))
    return read_config(folder)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, SEVEN_B),
        ({"num_key_value_heads": 8, "head_dim": 128, "attention_bias": False}, replace(SEVEN_B, kv_heads=8)),
        ({"num_key_value_heads": None, "head_dim": None, "mlp_bias": None}, SEVEN_B),
        ({"rope_theta": 5e5}, replace(SEVEN_B, rope_base=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, replace(SEVEN_B, rope_base=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, replace(SEVEN_B, rope_base=5e5)),
        ({"tie_word_embeddings": True}, replace(SEVEN_B, tied=True)),
        ({"tie_word_embeddings": ..., "max_position_embeddings": ...}, replace(SEVEN_B, context=2048)),
        ({"rms_norm_eps": 1e-6}, replace(SEVEN_B, eps=1e-6)),
        ({"rms_norm_eps": ...}, replace(SEVEN_B, eps=1e-6)),
        ({"rope_scaling": SCALED}, replace(SEVEN_B, rope_scaling=LONG.rope_scaling)),
        (
            {"rope_scaling": SCALED | {"original_max_position_embeddings": None}},
            replace(SEVEN_B, rope_scaling=replace(LONG.rope_scaling, context=4096)),
        ),
        (
            {"rope_scaling": {key: value for key, value in SCALED.items() if not key.startswith("original")}},
            replace(SEVEN_B, rope_scaling=replace(LONG.rope_scaling, context=4096)),
        ),
        ({"rope_scaling": OLDER}, replace(SEVEN_B, rope_scaling=LONG.rope_scaling)),
    ],
)
def test_config_json_is_read_as_transformers_reads_it(tmp_path, changes, config):
    assert config_of(tmp_path, **changes) == config


LLAMA_3 = {  # settings that the published ones share, beyond those that the course's GPT always has
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
SCALED_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED = {
    "Llama-3.1-8B": {
        "eos_token_id": 128001,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rope_scaling": {"factor": 8.0} | SCALED_3,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "rope_scaling": {"factor": 32.0} | SCALED_3,
        "tie_word_embeddings": True,
    },
    "Llama-3.3-70B-Instruct": {
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "rope_scaling": {"factor": 8.0} | SCALED_3,
        "tie_word_embeddings": False,
    },
}
COUNTS = dict(zip(PUBLISHED, (8_030_261_248, 1_235_814_400, 70_553_706_496), strict=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_llama_3_is_read(tmp_path, name):
    theirs = LLAMA_3 | PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    config = read_config(tmp_path)
    assert config.rope_scaling == RopeScaling(theirs["rope_scaling"]["factor"], low=1.0, high=4.0, context=8192)
    assert (config.context, config.tied) == (131_072, theirs["tie_word_embeddings"])
    assert parameters(config) == COUNTS[name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "has attention_bias True: the course's GPT has False"),
        ({"mlp_bias": True}, "has mlp_bias True"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu': the course's GPT has 'silu'"),
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1"),
        ({"model_type": "qwen3"}, "has model_type 'qwen3': the course's GPT has 'llama'"),
        ({"head_dim": 64}, "has head_dim 64: the course's GPT has 128"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "config.json does not say low_freq_factor"),
        ({"rope_scaling": SCALED | {"high_freq_factor": 0.1}}, "high=0.1, context=8): factor is 1 or more, low less"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "has rope_type 'linear': the course's GPT has 'default' a",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "has rope_type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config {'bits': 4}"),
        ({"hidden_size": ...}, "does not say hidden_size: it must be the configuration of a Llama"),
        ({"num_attention_heads": 30}, "dim 4096 is not divisible by 30 heads"),
        ({"num_key_value_heads": 5}, "32 heads are not divisible by 5 kv_heads"),
    ],
)
def test_what_the_course_cannot_compute_is_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        config_of(tmp_path, **changes)
    assert "\n" not in str(raised.value)
