"""Published weights of Mixtral and Qwen3-MoE, under Hugging Face's names, also for a MoEGPT whose experts are split.

    ours, after layers.N.             theirs, after model.layers.N.
                                      Mixtral                                   Qwen3-MoE
    attention.q.norm.weight                                                     self_attn.q_norm.weight
    mlp.router.gate.weight            block_sparse_moe.gate.weight              mlp.gate.weight
    mlp.experts.E.gate.weight         block_sparse_moe.experts.E.w1.weight      mlp.experts.E.gate_proj.weight
    mlp.experts.E.up.weight           block_sparse_moe.experts.E.w3.weight      mlp.experts.E.up_proj.weight
    mlp.experts.E.down.weight         block_sparse_moe.experts.E.w2.weight      mlp.experts.E.down_proj.weight

Everything else is named as in a Llama, and computes the same function (`labs.llama`).  A softmax over all experts,
divided by the sum of the k, is the softmax after top-k: Mixtral's, and Qwen3-MoE's with `norm_topk_prob`.

Source: the library transformers 5.23, models/mixtral, models/qwen3_moe and conversion_mapping.py.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from labs import llama
from labs.llama.config_json import DEFAULTS, read_json, require_same, write_config
from labs.llama.weights import opened, require_fit
from labs.model import Config
from labs.moe.moe_gpt import MoEConfig, MoEGPT

MIXTRAL, QWEN = "mixtral", "qwen3_moe"
CLASSES = {MIXTRAL: "MixtralForCausalLM", QWEN: "Qwen3MoeForCausalLM"}
BLOCK = {MIXTRAL: "block_sparse_moe", QWEN: "mlp"}
EXPERT = {
    MIXTRAL: {"gate": "w1", "up": "w3", "down": "w2"},
    QWEN: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}
# Fields of a MoEConfig, and their names in config.json.
OWN = {
    MIXTRAL: {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "balance": "router_aux_loss_coef"},
    QWEN: {
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "balance": "router_aux_loss_coef",
        "hidden": "moe_intermediate_size",
        "head_width": "head_dim",
    },
}
SCORES = {True: "softmax after top-k", False: "softmax before top-k"}  # by norm_topk_prob
# Options that the course's GPT has with one value only; and values that transformers uses for missing names.
FIXED = {MIXTRAL: {}, QWEN: {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}}
MISSING: dict[str, dict[str, Any]] = {
    MIXTRAL: DEFAULTS
    | {"model_type": MIXTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "rope_theta": 1e6, "num_key_value_heads": 8},
    QWEN: DEFAULTS
    | {"model_type": QWEN, "num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
    | {"moe_intermediate_size": 768, "head_dim": None, "norm_topk_prob": False, "num_key_value_heads": 4}
    | {"max_position_embeddings": 32_768},
}


def kind_of(config: MoEConfig) -> str:
    return QWEN if config.is_normed else MIXTRAL


def names(config: MoEConfig) -> dict[str, str]:
    """Return `{our name: their name}` for every parameter of the whole model."""
    found = {ours: theirs for ours, theirs in llama.names(config).items() if ".mlp." not in ours}
    kind = kind_of(config)
    for i in range(config.depth):
        ours, theirs = f"layers.{i}.mlp", f"model.layers.{i}.{BLOCK[kind]}"
        for heads in "qk" if config.is_normed else "":
            found[f"layers.{i}.attention.{heads}.norm.weight"] = f"model.layers.{i}.self_attn.{heads}_norm.weight"
        found[f"{ours}.router.gate.weight"] = f"{theirs}.gate.weight"
        for e in range(config.experts):
            for matrix, w in EXPERT[kind].items():
                found[f"{ours}.experts.{e}.{matrix}.weight"] = f"{theirs}.experts.{e}.{w}.weight"
    return found


def read_mixtral(folder: str | Path) -> MoEConfig:
    """Read the shape of a folder's model.  Raises ValueError if a MoEGPT cannot compute such a model."""
    folder = Path(folder).expanduser()
    given = read_json(folder / "config.json")
    kind = given.get("model_type")
    if kind not in MISSING:
        raise ValueError(f"{folder} has model_type {kind!r}: experts are read from {' and '.join(map(repr, MISSING))}")
    if "num_local_experts" in given:  # the name in newer files
        given.setdefault("num_experts", given["num_local_experts"])
    config, theirs = llama.read_config(folder, MISSING[kind]), MISSING[kind] | given
    if kind == MIXTRAL and theirs.get("sliding_window") is not None:
        raise ValueError(
            f"{folder} has sliding_window {theirs['sliding_window']}: the course's attention sees all tokens, so load "
            "a model that has none"
        )
    for name, value in FIXED[kind].items():
        if theirs.get(name) not in (value, None):
            raise ValueError(f"{folder} has {name} {theirs[name]!r}: the course's GPT has {value!r}, and no other")
    plain = {field.name: getattr(config, field.name) for field in fields(Config)}
    own = {ours: theirs[name] for ours, name in OWN[kind].items()}
    scores = SCORES[theirs.get("norm_topk_prob", True)]
    return MoEConfig(**plain | own, scores=scores, is_normed=kind == QWEN)


def load_mixtral(model: MoEGPT, folder: str | Path) -> None:
    """Fill a model's parameters with the weights in a folder; of split experts, this rank reads its own alone.

    Raises ValueError, before a parameter changes, if the folder has another model, or only a part of this model.
    """
    folder, theirs, parameters = Path(folder).expanduser(), names(model.config), dict(model.named_parameters())
    its = read_mixtral(folder)
    require_same(model.config, its, folder)
    alike = ("experts", "top_k", "scores", "head_size", "is_normed")
    if any(getattr(its, name) != getattr(model.config, name) for name in alike):
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

    Raises ValueError if this rank has only some experts, and for a model that is neither Mixtral nor Qwen3-MoE.
    """
    config, folder, theirs = model.config, Path(folder).expanduser(), names(model.config)
    kind, plain = kind_of(config), MoEConfig.__dataclass_fields__
    always = ("shared", "capacity", "is_biased", *(("scores", "head_width") if kind == MIXTRAL else ()))
    if odd := [name for name in always if getattr(config, name) != plain[name].default]:
        value, only = getattr(config, odd[0]), plain[odd[0]].default
        raise ValueError(f"{odd[0]} is {value!r}, and in {kind} it is {only!r}, always")
    tensors = {theirs[name]: p.detach().contiguous() for name, p in model.named_parameters()}
    if missing := {*theirs.values()} - {*tensors}:
        raise ValueError(f"this rank has no {min(missing)}: save a whole model, before its experts are split")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(config, next(model.parameters()).dtype, folder)
    its = read_json(folder / "config.json") | {"model_type": kind, "architectures": [CLASSES[kind]]}
    its |= {name: getattr(config, ours) for ours, name in OWN[kind].items()}
    if kind == QWEN:
        its |= FIXED[kind] | {"head_dim": config.head_size, "norm_topk_prob": config.scores == SCORES[True]}
    (folder / "config.json").write_text(json.dumps(its, indent=2), encoding="utf-8")
