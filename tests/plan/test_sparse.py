"""Tests of plans of models with experts, of long contexts and of 8-bit products."""

import json
from dataclasses import replace

import pytest

from labs.kit.commands import plan as command
from labs.model import PRESETS
from labs.plan import CLUSTERS, Layout, Setup, plan, search, sparse
from labs.plan.pace import circling_seconds, exchange_seconds, seconds
from labs.plan.room import held_by
from labs.plan.sparse import SPARSE, read_sparse

QWEN, B200 = SPARSE["qwen3-30b-a3b"], CLUSTERS["B200"].of(8)
LLAMA = replace(PRESETS["llama3-8b"], context=131_072)


@pytest.mark.parametrize(
    ("name", "all_of_them", "of_a_token"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("gpt-oss-120b", 116.8, 5.7),  # 5.1 without the embedding, as its authors count
    ],
)
def test_parameters_are_as_published(name, all_of_them, of_a_token):
    counted = [number / 1e9 for number in sparse.parameters(SPARSE[name])]
    assert counted == pytest.approx([all_of_them, of_a_token], rel=0.02)


QWEN_JSON = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
MIXTRAL_JSON = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
DEEPSEEK_JSON = {
    "model_type": "deepseek_v3",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18_432,
    "max_position_embeddings": 163_840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
OSS_JSON = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}


def write(folder, values):
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("qwen3-30b-a3b", QWEN_JSON),
        ("mixtral-8x7b", MIXTRAL_JSON),
        ("deepseek-v3", DEEPSEEK_JSON),
        ("gpt-oss-120b", OSS_JSON),
    ],
)
def test_a_config_json_is_read(tmp_path, name, values):
    assert read_sparse(write(tmp_path, values)) == SPARSE[name]


def test_what_is_no_such_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model_type 'llama': the models with experts that a plan knows are"):
        read_sparse(write(tmp_path, {"model_type": "llama"}))
    with pytest.raises(ValueError, match="experts in some layers only, at intervals"):
        read_sparse(write(tmp_path, QWEN_JSON | {"decoder_sparse_step": 2}))
    with pytest.raises(ValueError, match="does not say n_routed_experts or num_local_experts or num_experts"):
        read_sparse(write(tmp_path, {k: v for k, v in QWEN_JSON.items() if k != "num_experts"}))
    with pytest.raises(ValueError, match="active is 9: a token uses 1 to 8 of 8 experts"):
        replace(SPARSE["mixtral-8x7b"], active=9)
    with pytest.raises(ValueError, match="dense_layers is 48: the model has 48 layers in all"):
        replace(QWEN, dense_layers=48)


def test_experts_that_ranks_share_are_held_once():
    """Check the state of plain data parallelism: every rank has all experts, or an eighth of them."""
    setup, layout = Setup(QWEN, B200, 8, 4096), Layout(replicas=8)
    every, shared = (held_by(setup, layout._replace(ep=ep), 0) for ep in (1, 8))
    experts = 48 * sparse.expert_matrices(QWEN)
    saved = every.P - shared.P
    assert saved == pytest.approx(2 * experts * 7 / 8, rel=1e-6)
    assert every.A == shared.A


def test_tokens_go_to_their_experts_and_back():
    """Check the bytes by hand: a row of 2 D bytes to 8 experts and back, in forward and in backward, over NVLink."""
    setup = Setup(QWEN, B200, 8, 4096, constants=Setup(QWEN, B200, 8).constants)
    sent = 4 * 2 * 4096 * 8 * 2048 * 7 / 8
    assert exchange_seconds(setup, 1, 1, 1, 8) == pytest.approx(sent / 900e9)
    across = replace(setup, cluster=CLUSTERS["B200"].of(16))
    away = 4 * 2 * 4096 * 8 * 2048 * (7 / 16 / 900e9 + 8 / 16 / 50e9)
    assert exchange_seconds(across, 1, 1, 1, 16) == pytest.approx(away)


def test_a_long_context_is_split():
    """Check that cp divides activations and operations, and what goes round: keys and values, three times in all."""
    setup = Setup(LLAMA, CLUSTERS["H100, InfiniBand"].of(8), 8)
    whole, split = (Layout(shards=8 // cp, zero=3, accumulation=cp, cp=cp) for cp in (1, 4))
    ours, theirs = (held_by(setup, each, 0).A for each in (split, whole))
    assert 4 * ours == pytest.approx(theirs, rel=1e-6)
    assert seconds(setup, split).compute == pytest.approx(seconds(setup, whole).compute, rel=0.05)
    link = setup.cluster.link(4, 1)
    both = 2 * 2 * 131_072 / 4 * 8 * 128
    assert circling_seconds(setup, 1, 1, 4) == pytest.approx(9 * (link.begin + link.latency + both / link.bandwidth))
    assert search(LLAMA, setup.cluster, 16).best.layout.cp == 4


def test_eight_bits_are_faster_by_what_products_take():
    layout = Layout(shards=8, zero=1, ep=8, accumulation=8)
    wide, narrow = (seconds(Setup(QWEN, B200, 64, 4096, software="bridge", bits=bits), layout) for bits in (16, 8))
    assert wide.compute / 2 < narrow.compute < wide.compute and wide.tensor == narrow.tensor
    with pytest.raises(ValueError, match="bits is 4: a plan is for products of 16 or 8 bits"):
        Setup(QWEN, B200, 64, bits=4)


@pytest.mark.parametrize(
    ("config", "layout", "says"),
    [
        (QWEN, Layout(shards=8, zero=1, ep=16), "16 ranks cannot share 128 experts evenly among the 8 ranks"),
        (QWEN, Layout(shards=8, zero=1, ep=3), "3 ranks cannot share 128 experts evenly"),
        (PRESETS["llama3-8b"], Layout(shards=8, zero=1, ep=8), "ep is 8, but the model has no experts"),
        (QWEN, Layout(shards=4, zero=1, cp=3, accumulation=2), "shards 4 × tp 1 × cp 3 = 12, but there are 8 GPUs"),
        (QWEN, Layout(cp=0), "cp is 0: it must be a whole number"),
    ],
)
def test_a_layout_that_cannot_be_run(config, layout, says):
    with pytest.raises(ValueError, match=says):
        plan(Setup(config, B200, 8, 4096), layout)


def test_the_command_takes_a_model_with_experts(tmp_path, capsys):
    asked = ["--gpus", "8", "--cluster", "B200", "--software", "bridge", "--bits", "8", "--context", "4096"]
    asked += ["--layout", "replicas=1,shards=8,zero=1,ep=8"]
    assert command.main(["qwen3-30b-a3b", *asked]) == 0
    named = capsys.readouterr().out
    assert "experts over 8 ranks" in named and "fitted to 91 published runs" in named
    assert command.main(["--config", str(write(tmp_path, QWEN_JSON) / "config.json"), *asked]) == 0
    assert capsys.readouterr().out == named
