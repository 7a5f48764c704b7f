"""Mixtral's published weights, under Hugging Face's names: loaded into a MoEGPT, also one whose experts are split.

    ours                              theirs, after model.layers.N.
    mlp.router.gate.weight            block_sparse_moe.gate.weight
    mlp.experts.E.gate.weight         block_sparse_moe.experts.E.w1.weight
    mlp.experts.E.up.weight           block_sparse_moe.experts.E.w3.weight
    mlp.experts.E.down.weight         block_sparse_moe.experts.E.w2.weight

Everything else is named as in a Llama, and computes the same function (`labs.llama`).  Mixtral's softmax over all
experts, divided by the sum of the k, is the softmax after top-k.  Qwen3-MoE normalises queries and keys, which the
course's attention does not, so its weights are refused.

Source: the library transformers 5.23, models/mixtral and conversion_mapping.py.
"""

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from labs import llama
from labs.llama.config_json import DEFAULTS, read_json, require_same, write_config
from labs.llama.weights import opened, require_fit
from labs.model import Config
from labs.moe.moe_gpt import MoEConfig, MoEGPT

EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
KIND = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
# Values that transformers uses for names that are missing in config.json.
MISSING = (
    DEFAULTS
    | KIND
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
    }
)


def names(config: MoEConfig) -> dict[str, str]:
    """Return `{our name: their name}` for every parameter of the whole model."""
    found = {ours: theirs for ours, theirs in llama.names(config).items() if ".mlp." not in ours}
    for i in range(config.depth):
        ours, theirs = f"layers.{i}.mlp", f"model.layers.{i}.block_sparse_moe"
        found[f"{ours}.router.gate.weight"] = f"{theirs}.gate.weight"
        for e in range(config.experts):
            for matrix, w in EXPERT.items():
                found[f"{ours}.experts.{e}.{matrix}.weight"] = f"{theirs}.experts.{e}.{w}.weight"
    return found


def read_mixtral(folder: str | Path) -> MoEConfig:
    """Read the shape of a folder's model.  Raises ValueError if it is no Mixtral, or has a sliding window."""
    folder = Path(folder).expanduser()
    config, theirs = llama.read_config(folder, MISSING), MISSING | read_json(folder / "config.json")
    if theirs.get("sliding_window") is not None:
        raise ValueError(
            f"{folder} has sliding_window {theirs['sliding_window']}: the course's attention sees all tokens, so load "
            "a model that has none"
        )
    return MoEConfig(
        **{field.name: getattr(config, field.name) for field in fields(Config)},
        experts=theirs["num_local_experts"],
        top_k=theirs["num_experts_per_tok"],
        balance=theirs["router_aux_loss_coef"],
    )


def load_mixtral(model: MoEGPT, folder: str | Path) -> None:
    """Fill a model's parameters with the weights in a folder; of split experts, this rank reads its own alone.

    Raises ValueError, before a parameter changes, if the folder has another model, or only a part of this model.
    """
    folder, theirs, parameters = Path(folder).expanduser(), names(model.config), dict(model.named_parameters())
    its = read_mixtral(folder)
    require_same(model.config, its, folder)
    if (its.experts, its.top_k, its.scores) != (model.config.experts, model.config.top_k, model.config.scores):
        raise ValueError(f"{folder} has other experts than the model: make it with MoEGPT(read_mixtral(folder))")
    with opened(folder) as files:
        if odd := {*files} ^ {*theirs.values()}:
            raise ValueError(f"{folder} and the model do not both have {min(odd)!r}: fetch it again, or load another")
        sources = {name: files[theirs[name]].get_slice(theirs[name]) for name in parameters}
        for name, parameter in parameters.items():
            require_fit(name, parameter, sources[name].get_shape(), ())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(sources[name][:])


def save_mixtral(model: MoEGPT, folder: str | Path) -> None:
    """Write config.json and model.safetensors, from which transformers makes the same model.

    Raises ValueError if this rank has only some experts, and for a model that is no Mixtral.
    """
    config, folder, theirs = model.config, Path(folder).expanduser(), names(model.config)
    plain = MoEConfig.__dataclass_fields__
    if odd := [n for n in ("shared", "scores", "capacity", "is_biased") if getattr(config, n) != plain[n].default]:
        raise ValueError(f"{odd[0]} is {getattr(config, odd[0])!r}, and Mixtral has {plain[odd[0]].default!r}, always")
    tensors = {theirs[name]: p.detach().contiguous() for name, p in model.named_parameters()}
    if missing := {*theirs.values()} - {*tensors}:
        raise ValueError(f"this rank has no {min(missing)}: save a whole model, before its experts are split")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(config, next(model.parameters()).dtype, folder)
    its = read_json(folder / "config.json") | KIND | {"architectures": ["MixtralForCausalLM"]}
    its |= {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k}
    its |= {"router_aux_loss_coef": config.balance}
    (folder / "config.json").write_text(json.dumps(its, indent=2), encoding="utf-8")
