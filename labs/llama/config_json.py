"""A model's config.json, as Hugging Face's transformers writes it: the shape of a Llama, and its options."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from labs.model import Config
from labs.rope import RopeScaling

# Fields of a Config, and their names in config.json.
FIELDS = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "rope_base": "rope_theta",
    "eps": "rms_norm_eps",
}
# Fields of a RopeScaling, and their names in "rope_scaling".
SCALING = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
# Options that a Llama can have, and the only value that the course's GPT supports.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
# Values that transformers uses for names that are missing in config.json.
DEFAULTS = FIXED | {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}


def read_config(folder: str | Path, defaults: Mapping[str, Any] = DEFAULTS) -> Config:
    """Read the shape of a folder's model.  Raises ValueError if the course's GPT cannot compute such a model.

    defaults: values for names that are missing, and the only `model_type` that is read
    """
    path = Path(folder).expanduser() / "config.json"
    theirs = {**defaults} | {name: value for name, value in read_json(path).items() if value is not None}
    theirs |= rotary(theirs)
    theirs.setdefault("num_key_value_heads", theirs.get("num_attention_heads"))
    if (kind := theirs["rope_type"]) not in ("default", "llama3"):
        raise ValueError(f"{path} has rope_type {kind!r}: the course's GPT has 'default' and 'llama3', and no other")
    is_scaled = kind == "llama3"
    if theirs.get("original_max_position_embeddings") is None:  # transformers does the same
        theirs["original_max_position_embeddings"] = theirs["max_position_embeddings"]
    for name in [*FIELDS.values(), *(SCALING.values() if is_scaled else ())]:
        if theirs.get(name) is None:
            raise ValueError(f"{path} does not say {name}: it must be the configuration of a Llama")
    scaling = RopeScaling(**{ours: theirs[name] for ours, name in SCALING.items()}) if is_scaled else None
    config = Config(**{ours: theirs[name] for ours, name in FIELDS.items()}, rope_scaling=scaling)
    fixed = FIXED | {"model_type": defaults["model_type"], "quantization_config": None}
    fixed |= {} if "head_dim" in defaults else {"head_dim": config.head_size}
    for name, value in fixed.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"{path} has {name} {theirs[name]!r}: the course's GPT has {value!r}, and no other")
    return config


def rotary(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return rope_type and its parameters, for which each version of transformers has another place or name."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    return {"rope_type": given.get("type", "default"), **given}


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}): give a folder as transformers' save_pretrained() writes it")


def write_config(config: Config, dtype: torch.dtype, folder: Path) -> None:
    theirs = {name: getattr(config, ours) for ours, name in FIELDS.items()}
    if (scaling := config.rope_scaling) is not None:
        values = {name: getattr(scaling, ours) for ours, name in SCALING.items()}
        theirs["rope_scaling"] = {"rope_type": "llama3"} | values
    theirs |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": str(dtype).removeprefix("torch.")} | FIXED
    (folder / "config.json").write_text(json.dumps(theirs, indent=2), encoding="utf-8")


def require_same(ours: Config, theirs: Config, folder: Path) -> None:
    """Raise ValueError if two configurations differ, except in the context, on which no weight depends."""
    for name in [name for name in (*FIELDS, "rope_scaling") if name != "context"]:
        if getattr(ours, name) != getattr(theirs, name):
            raise ValueError(
                f"{name} is {getattr(ours, name)} in the model and {getattr(theirs, name)} in {folder}: "
                "make the model with GPT(read_config(folder))"
            )
