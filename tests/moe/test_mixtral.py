"""Tests of labs.moe.mixtral, for both models, against transformers: the same files, the same tokens; split experts."""

import importlib
import json
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labs.kit.launch import run
from labs.mesh import Mesh
from labs.moe import ExpertParallel, MoEConfig, MoEGPT, load_mixtral, read_mixtral, save_mixtral
from labs.moe.expert_parallel import AXES

ODD = MoEConfig(37, 48, 2, 6, 3, hidden=28, context=40, rope_base=500.0, experts=5, top_k=3, balance=0.125)
SIZES = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "router_aux_loss_coef": 0.125,
    "rope_theta": 500.0,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tokens():
    return torch.randint(ODD.vocab, (2, ODD.context), generator=torch.Generator().manual_seed(2))


QWEN = replace(ODD, is_normed=True, head_width=12, eps=1e-6)
QWEN_SIZES = SIZES | {"num_experts": 5, "moe_intermediate_size": 28, "head_dim": 12, "norm_topk_prob": True}
KINDS = {"Mixtral": (ODD, SIZES), "Qwen3Moe": (QWEN, QWEN_SIZES)}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_from_the_same_files(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    odd, sizes = KINDS[kind]
    make = getattr(transformers, f"{kind}ForCausalLM")
    theirs = make(getattr(transformers, f"{kind}Config")(**sizes))
    for name, p in theirs.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(p)
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_mixtral(tmp_path / "theirs") == odd
    model = MoEGPT(odd)
    load_mixtral(model, tmp_path / "theirs")
    # PyTorch's grouped product, which transformers uses, has no float64.
    assert torch.allclose(theirs(tokens()).logits, model(tokens()), rtol=0, atol=1e-4)
    others = [odd, replace(odd, tied=True)]
    others += [replace(odd, scores="softmax before top-k", head_width=None)] if odd.is_normed else []
    for number, config in enumerate(others):
        model = MoEGPT(config, seed=2)
        save_mixtral(model, tmp_path / str(number))
        theirs, report = make.from_pretrained(tmp_path / str(number), output_loading_info=True)
        assert not any(report.values()), report
        assert torch.allclose(theirs(tokens()).logits, model(tokens()), rtol=0, atol=1e-5)


def loaded(folder):
    """Return whether this rank's parameters are those of the whole model, and the sentence of a save."""
    model = ExpertParallel(MoEGPT(ODD, seed=3), Mesh((1, 2), AXES)).module
    load_mixtral(model, folder)
    whole = dict(MoEGPT(ODD, seed=2).named_parameters())
    same = all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError) as error:
        save_mixtral(model, folder)
    return same, len(model.layers["0"].mlp.experts), str(error.value), dist.get_rank()


def test_a_rank_reads_its_own_experts_and_other_models_are_refused(tmp_path):
    folder = tmp_path / "ours"
    save_mixtral(MoEGPT(ODD, seed=2), folder)
    for same, experts, sentence, rank in run(loaded, folder, ranks=2):
        assert same and experts == (3, 2)[rank]
        assert "save a whole model, before its experts are split" in sentence

    def refuse(do, text, *given):
        with pytest.raises(ValueError) as error:
            do(*given)
        assert text in str(error.value)

    refuse(load_mixtral, "make it with MoEGPT(read_mixtral(folder))", MoEGPT(replace(ODD, experts=4)), folder)
    refuse(load_mixtral, "dim is 24 in the model", MoEGPT(replace(ODD, dim=24)), folder)
    refuse(save_mixtral, "shared is 1, and in mixtral it is 0, always", MoEGPT(replace(ODD, shared=1)), folder)
    for key, value, text in (
        ("model_type", "llama", "has model_type 'llama': experts are read from 'mixtral' and 'qwen3_moe'"),
        ("model_type", "qwen3_moe", "hidden is 28 in the model and 768 in"),
        ("sliding_window", 8, "has sliding_window 8: the course's attention sees all tokens"),
        ("num_hidden_layers", 1, "do not both have"),
    ):
        text_of = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(json.loads(text_of) | {key: value}), encoding="utf-8")
        config = replace(ODD, depth=1) if key == "num_hidden_layers" else ODD
        refuse(load_mixtral, text, MoEGPT(config), folder)
        (folder / "config.json").write_text(text_of, encoding="utf-8")
    save_mixtral(MoEGPT(QWEN), folder)
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(theirs | {"mlp_only_layers": [1]}), encoding="utf-8")
    refuse(read_mixtral, "has mlp_only_layers [1]: the course's GPT has [], and no other", folder)
