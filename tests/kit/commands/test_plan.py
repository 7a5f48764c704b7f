"""Tests of python -m labs plan: its output, the refusals of arguments, and two published measurements."""

import json
import re

import pytest

from labs.kit.commands import plan


def test_the_command(capsys):
    assert plan.main(["llama3-8b", "--gpus", "8", "--batch", "64"]) == 0
    output = capsys.readouterr().out
    assert (
        "8 × H100, InfiniBand, 64 sequences of 8192 tokens" in output
        and "The simplest within 1% of the quickest is" in output
        and "Grid(" in output
    )
    assert plan.main(["llama3-405b", "--gpus", "8", "--batch", "8"]) == 1
    assert "No layout fits." in capsys.readouterr().out
    assert plan.main(["llama3-8b", "--gpus", "12"]) == 2
    assert "give a multiple of 8" in capsys.readouterr().err
    assert plan.main([]) == 2
    assert capsys.readouterr().err == "give a model or --config config.json: one of them\n"


def test_what_an_engineer_types(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA2), encoding="utf-8")
    right = {
        "llama3-8b --gpus 12 --node 4 --batch 96 --list 3": "12 × H100, InfiniBand, 96 sequences of 8192 tokens",
        "llama3-8b --gpus 8 --batch 64 --context 32k --software compiled": "64 sequences of 32768 tokens",
        "llama3-8b --gpus 8 --batch 16 --layout shards=8,batch=2": "It is number ",
        f"--config {path} --gpus 8 --batch 64 --card 40GB": "of 40.0 GB",
        "llama3-8b --gpus 7": "cannot be run: 512 sequences do not divide by 7, but 518 would",
    }
    for words, says in right.items():
        assert plan.main(words.split()) == 0, words
        assert says in capsys.readouterr().out, words
    assert plan.main(["llama3-8b", "--gpus", "4", "--card", "RTX 4090"]) == 1
    assert "4 × RTX 4090" in (output := capsys.readouterr().out) and "with 512 sequences it would fit" in output
    wrong = {
        "--card 5090": "card '5090' is not known: give its memory, like 24GB, or one of H100",
        "--layout shards=3,batch=2": "shards 3 × tp 1 = 3, but there are 32 GPUs",
        "--config other.json": "give a file of the name config.json",
        "--context 32m": "'32m' is no number of tokens: write it like 4096 or 32k",
        "--layout shard=8": "'shard=8' is no field of a layout: write some of tp=1, ",
        "--software jax": "software 'jax' is not known: the nearest is ",
        "--cluster H10": "cluster 'H10' is not known: the nearest is ",
    }
    for words, says in wrong.items():
        model = [] if "config" in words else ["llama3-8b"]
        assert plan.main([*model, *words.split()]) == 2 and says in capsys.readouterr().err, words
    assert plan.main(["llama-8b"]) == 2
    assert "model 'llama-8b' is not known: the nearest is 'llama3-8b', of tiny" in capsys.readouterr().err


LLAMA2 = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11_008,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("gpus, shards, tp, measured", [(8, 8, 1, 5762), (128, 128, 1, 5605), (64, 8, 8, 4378)])
def test_torchtitans_own_layouts_on_its_own_machine(gpus, shards, tp, measured, capsys):
    """Check that the printed range contains the measurement [torchtitan, arXiv 2410.06511]; the last row is
    compiled.
    """
    batch = shards * (12 if tp > 1 else 2)
    layout = f"shards={shards},tp={tp},zero=3,batch={batch // shards},accumulation=1,recompute=selective"
    words = ["llama3-8b", "--gpus", f"{gpus}", "--batch", f"{batch}", "--cluster", "H100, 96 GB, 500 W"]
    software = "compiled" if tp > 1 else "pytorch"
    assert plan.main([*words, "--layout", layout, "--software", software]) == 0
    low, high = re.search(r"([\d,]+) to ([\d,]+) ", capsys.readouterr().out).groups()
    assert int(low.replace(",", "")) <= measured <= int(high.replace(",", ""))
