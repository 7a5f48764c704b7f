"""Tests of labs.llama.weights against transformers: the same file, the same tokens; and broken folders.

transformers takes seconds to import, so only one test does it.
"""

import importlib
import json
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from labs.generate import generate
from labs.kit.launch import run
from labs.llama import load, names, read_config, save
from labs.llama.weights import NAMES
from labs.mesh import Mesh
from labs.model import GPT
from labs.tp import gpt_plan, parallelize, slices
from tests.llama.common import LONG, ODD, SCALED

PROMPT = torch.randint(ODD.vocab, (3, 5), generator=torch.Generator().manual_seed(1))


def equal(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def emptied(config, dtype=torch.float32):
    model = GPT(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


# ---- comparison with transformers ------------------------------------------------------------------------

SIZES = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPES = {
    "plain": {"rope_theta": 10_000.0, "num_key_value_heads": 6},
    "grouped queries, another theta": {"num_key_value_heads": 2, "rope_theta": 500.0},
    "one head of keys, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "in several files": {"num_key_value_heads": 3},
    "bfloat16": {"num_key_value_heads": 2},
    "scaled positions, another eps": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 500.0} | SCALED,
        "rms_norm_eps": 1e-6,
    },
}


def test_transformers_computes_the_same_from_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
    for name, shape in SHAPES.items():
        it_saves_and_we_load(transformers, tmp_path / name, name, shape)
    for number, config in enumerate((ODD, replace(ODD, tied=True, rope_base=10_000.0), LONG)):
        we_save_and_it_loads(transformers, tmp_path / str(number), config)


def it_saves_and_we_load(transformers, folder, name, shape):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | shape)
    llama = transformers.LlamaForCausalLM(config)
    for parameter in llama.parameters():
        if parameter.ndim == 1:  # gains of one would hide a gain that is not loaded
            parameter.data.uniform_(0.5, 2)
    llama.to(torch.bfloat16 if name == "bfloat16" else torch.float32)
    llama.save_pretrained(folder, max_shard_size="20KB" if name == "in several files" else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (name == "in several files")

    model = emptied(read_config(folder), torch.float64)
    load(model, folder)
    llama = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = llama.generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(generate(model, PROMPT, 20), expected), name
    # No tie may decide: transformers' angles and norms are float32 in any dtype.
    logits = llama(expected).logits
    first, second = logits[:, 4:-1].topk(2).values.unbind(-1)
    assert (model(expected) - logits).abs().max() * 20 < (first - second).min(), name
    assert expected[:, 5:].unique().numel() > 5


def we_save_and_it_loads(transformers, folder, config):
    model = GPT(config, seed=2)
    save(model, folder)
    llama, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert llama.dtype == torch.float32
    tokens = torch.randint(config.vocab, (2, config.context), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(llama(tokens).logits, model(tokens), rtol=0, atol=1e-5)


# ---- saving and loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_comes_back(tmp_path, tied, dtype):
    model = GPT(replace(ODD, tied=tied), seed=2).to(dtype)
    save(model, tmp_path / "folder")
    assert read_config(tmp_path / "folder") == model.config
    again = emptied(model.config, dtype)
    load(again, tmp_path / "folder")
    assert equal(model, again)
    assert len(load_file(tmp_path / "folder" / "model.safetensors")) == len(list(model.parameters()))


def test_a_rank_of_a_split_model_gets_its_slices(tmp_path):
    whole, part = GPT(ODD, seed=2), emptied(ODD)
    save(whole, tmp_path)
    slices = {}
    for name, parameter in part.named_parameters():
        if parameter.ndim == 2:
            rows, columns = parameter.shape
            by_columns = name.endswith(("o.weight", "down.weight"))
            slices[name] = (slice(None), slice(columns // 2, None)) if by_columns else (slice(0, rows // 2),)
    slices["head.weight"] = (slice(37, 37),)
    for name, where in slices.items():
        parameter = part.get_parameter(name)
        parameter.data = parameter.data[where].clone()
    load(part, tmp_path, slices)
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)[slices.get(name, ())]), name


def on_ranks(folder):
    """Split a model while it still has other weights, then load and generate."""
    mesh = Mesh((dist.get_world_size(),), ("tp",))
    model = parallelize(GPT(read_config(folder), seed=9).double(), mesh, gpt_plan(ODD))
    load(model, folder, slices(model))
    return generate(model, PROMPT, 20).tolist()


def test_ranks_that_load_their_slices_generate_the_same(tmp_path):
    model = GPT(ODD, seed=2).double()
    model.head.weight.data *= 20  # makes choices clear
    save(model, tmp_path)
    expected = generate(model, PROMPT, 20).tolist()
    assert list(run(on_ranks, tmp_path, ranks=3)) == [expected] * 3


def test_every_parameter_has_a_name_of_its_own():
    for config in (ODD, replace(ODD, tied=True)):
        found = names(config)
        assert list(GPT(config).state_dict().keys() - found.keys()) == []
        assert len(set(found.values())) == len(list(GPT(config).parameters()))


def test_a_longer_context_takes_the_same_weights(tmp_path):
    save(GPT(ODD, seed=2), tmp_path)
    model = emptied(replace(ODD, context=50))
    load(model, tmp_path)
    assert equal(model, GPT(ODD, seed=2))


# ---- broken folders --------------------------------------------------------------------------------------


def change(folder, added=None, dropped=None):
    """Save the folder's tensors again, with some changed."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | (added or {})
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, path)


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def lose_a_file(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BIAS = "model.layers.0.self_attn.q_proj.bias"
BROKEN = {
    "no folder": (lambda at: (at / "config.json").unlink(), r"config.json cannot be read .*: give a folder as"),
    "no json": (lambda at: (at / "config.json").write_text("{"), "config.json cannot be read"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "cut short": (cut_short, "model.safetensors cannot be read .*not fully covered.: give a folder"),
    "a file is missing": (lose_a_file, "model-00002-of-00002.safetensors cannot be read"),
    "a tensor too many": (
        lambda at: change(at, {BIAS: torch.zeros(48)}),
        f"has {BIAS}, for which the course's GPT has no parameter",
    ),
    "a tensor too few": (
        lambda at: change(at, dropped="lm_head.weight"),
        "has no lm_head.weight, which is head.weight",
    ),
    "a different shape": (
        lambda at: change(at, {"lm_head.weight": torch.zeros(38, 48)}),
        r"lm_head.weight is F32 \(38, 48\) in .*: by its config.json it must be \(37, 48\)",
    ),
    "whole numbers": (
        lambda at: change(at, {"lm_head.weight": torch.zeros(37, 48, dtype=torch.int8)}),
        r"lm_head.weight is I8 \(37, 48\) in .* in one of F64, F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_reported_and_changes_nothing(tmp_path, name):
    do, said = BROKEN[name]
    save(GPT(ODD, seed=2), tmp_path)
    do(tmp_path)
    refused(GPT(ODD, seed=3), tmp_path, said)


def refused(model, folder, said, slices=None):
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said) as raised:
        load(model, folder, slices)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True) if not q.is_meta)


@pytest.mark.parametrize(
    ("config", "slices", "said"),
    [
        (replace(ODD, hidden=30), {}, "hidden is 30 in the model and 28 in .*: make the model with GPT"),
        (replace(ODD, rope_base=1e4), {}, "rope_base is 10000.0 in the model and 500.0 in"),
        (LONG, {}, "eps is 1e-06 in the model and 1e-05 in"),
        (replace(LONG, eps=1e-5), {}, r"rope_scaling is RopeScaling\(.*\) in the model and None in"),
        (replace(ODD, tied=True), {}, "tied is True in the model and False in"),
        (ODD, {"head": (slice(0, 1),)}, "slices has 'head', which is no parameter of this model"),
        (ODD, {"head.weight": (slice(0, 36),)}, r"head.weight is \(37, 48\) .* slices has \(36, 48\) of \(37, 48\)"),
    ],
)
def test_another_model_is_refused(tmp_path, config, slices, said):
    save(GPT(ODD), tmp_path)
    refused(GPT(config, seed=3), tmp_path, said, slices)


def test_a_model_without_numbers_or_of_parts_is_refused(tmp_path):
    with torch.device("meta"):
        empty = GPT(ODD)
    save(GPT(ODD), tmp_path)
    refused(empty, tmp_path, r"embed.weight is on the meta device: give it memory first, with model.to_empty")
    part = GPT(ODD)
    part.head.weight.data = part.head.weight.data[:20]
    refused(part, tmp_path, r"head.weight is \(20, 48\) in the model, and slices has \(37, 48\) of \(37, 48\) for it")
    with pytest.raises(ValueError, match=r"head.weight is \(20, 48\), a part of \(37, 48\): save a whole model"):
        save(part, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_old_files_have_more_than_is_needed(tmp_path):
    model = GPT(replace(ODD, tied=True), seed=2)
    save(model, tmp_path)
    more = {NAMES["head.weight"]: torch.zeros(37, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    change(tmp_path, more)
    again = emptied(model.config)
    load(again, tmp_path)
    assert equal(model, again)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert more.keys() < set(file.keys())
