"""A model.safetensors file: a Llama's weights under Hugging Face's names, of which a rank reads only its slices."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from labs.llama.config_json import read_config, read_json, require_same, unreadable, write_config
from labs.model import GPT, Config

# Names of the parameters, ours and theirs; {} is the number of a layer.
NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.o.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
INDEX = "model.safetensors.index.json"  # names the file of each tensor, if there are several files
COMPUTED = "rotary_emb.inv_freq"  # a tensor in old files, which follows from rope_theta


def names(config: Config) -> dict[str, str]:
    """Return `{our name: their name}` for every parameter; a tied head is the embedding."""
    tied = {"head.weight": NAMES["embed.weight"]} if config.tied else {}
    return {ours.format(i): theirs.format(i) for i in range(config.depth) for ours, theirs in NAMES.items()} | tied


def whole_shapes(config: Config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(config).named_parameters()}


def load(model: GPT, folder: str | Path, slices: Mapping[str, tuple[slice, ...]] | None = None) -> None:
    """Fill a model's parameters, which may have any dtype and any device, with the weights in a folder.

    slices: for each parameter that is only a part of the whole model's, `{name: one slice per dim}`; trailing dims
        without a slice are whole.  No other parts of the files are read.

    Raises ValueError, before a parameter changes, if the folder has another model, or only a part of this model.
    """
    folder, slices, parameters = Path(folder).expanduser(), slices or {}, dict(model.named_parameters())
    require_same(model.config, read_config(folder), folder)
    if unknown := slices.keys() - parameters.keys():
        raise ValueError(f"slices has {min(unknown)!r}, which is no parameter of this model")
    with opened(folder) as files:
        require_whole(model.config, files, folder)
        sources = {name: files[theirs].get_slice(theirs) for name, theirs in names(model.config).items()}
        for name, parameter in parameters.items():
            require_fit(name, parameter, sources[name].get_shape(), slices.get(name, ()))
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(sources[name][slices.get(name, slice(None))])


@contextmanager
def opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Open a folder's files and yield `{tensor's name: its open file}`.

    The files are mapped into memory, so that only the parts that are used are read.
    """
    paths = [folder / "model.safetensors"]
    if not paths[0].exists() and (index := folder / INDEX).exists():
        files = sorted({*read_json(index).get("weight_map", {}).values()})
        if elsewhere := [name for name in files if Path(name).name != name]:
            raise ValueError(f"{index} names {elsewhere[0]!r}, which is not in its folder: fetch it again")
        paths = [folder / name for name in files]
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(path)) for path in paths]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error


def save(model: GPT, folder: str | Path) -> None:
    """Write config.json and model.safetensors, from which transformers makes the same model.

    Raises ValueError if this rank has only a part of the model.
    """
    folder, theirs, whole = Path(folder).expanduser(), names(model.config), whole_shapes(model.config)
    for name, parameter in model.named_parameters():
        if parameter.shape != whole[name]:
            raise ValueError(f"{name} is {tuple(parameter.shape)}, a part of {tuple(whole[name])}: save a whole model")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {theirs[name]: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(model.config, next(model.parameters()).dtype, folder)


# ---- checks ----------------------------------------------------------------------------------------------


def require_whole(config: Config, files: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless the folder has every tensor of the model in its shape, and no others."""
    wanted = names(config)
    for name, shape in whole_shapes(config).items():
        if (theirs := wanted[name]) not in files:
            raise ValueError(f"{folder} has no {theirs}, which is {name} here: fetch it or save it again")
        found = files[theirs].get_slice(theirs)
        if tuple(found.get_shape()) != shape or found.get_dtype() not in DTYPES.values():
            raise ValueError(
                f"{theirs} is {found.get_dtype()} {tuple(found.get_shape())} in {folder}: by its config.json it "
                f"must be {tuple(shape)}, in one of {', '.join(DTYPES.values())}"
            )
    # A tied head may be stored a second time.
    known = {*wanted.values(), *([NAMES["head.weight"]] if config.tied else [])}
    for theirs in files:
        if theirs not in known and not theirs.endswith(COMPUTED):
            raise ValueError(f"{folder} has {theirs}, for which the course's GPT has no parameter: load another model")


def require_fit(name: str, parameter: nn.Parameter, whole: list[int], part: tuple[slice, ...]) -> None:
    """Raise ValueError unless the parameter has the shape of this part of the whole, and memory to write to."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: give it memory first, with model.to_empty(device=...)")
    chosen = torch.empty(whole, device="meta")[part].shape
    if chosen != parameter.shape:
        raise ValueError(
            f"{name} is {tuple(parameter.shape)} in the model, and slices has {tuple(chosen)} of {tuple(whole)} for it"
        )
