"""Tests of labs.deepspeed's saved states against the same training, not interrupted.

Offload is tested in the same jobs, because starting DeepSpeed takes long.
"""

from functools import partial

import pytest
import torch

from labs.deepspeed import engine
from labs.deepspeed.configuration import MICRO, like_zero
from labs.deepspeed.saved import UNIVERSAL, load, to_universal
from labs.kit.launch import run
from tests.extras import need_deepspeed
from tests.models import Tied

ADAM = partial(torch.optim.AdamW, lr=0.01)
OFFLOAD = {2: ("offload_optimizer",), 3: ("offload_optimizer", "offload_param")}


def begun(stage, offload=(), seed=0, **others):
    config = like_zero(stage) | {MICRO: 2} | others
    config["zero_optimization"] |= {key: {"device": "cpu"} for key in offload}
    model = Tied()
    with torch.no_grad():
        model.scale += seed
    return engine.initialize(model, config, ADAM)


def trained(made, *steps):
    """Train for these steps, and return the parameters. All ranks read the same, so their number does not matter."""
    for step in steps:
        x, y = torch.randint(13, (2, 2, 5), generator=torch.Generator().manual_seed(step))
        made.backward(made(x, y))
        made.step()
    return engine.full(made)


def save(folder):
    """Save each stage, and return the parameters at the end of its continued training, and of one with offload."""
    ends = {}
    for stage in (2, 3):
        made = begun(stage)
        trained(made, 0, 1)
        made.save_checkpoint(f"{folder}/{stage}")
        ends[stage] = trained(made, 2)
        ends[stage, "offloaded"] = trained(begun(stage, OFFLOAD[stage]), 0, 1, 2)
    return ends


def resume(folder, of, stage, universal):
    made = begun(stage, seed=1, **(UNIVERSAL if universal else {}))
    load(made, f"{folder}/{of}")
    return trained(made, 2)


def resume_all(folder):
    ends, refused = {}, []
    for stage in (2, 3):
        ends[stage] = resume(folder, stage, stage, True)
        for of, universal in ((stage, False), (5 - stage, True)):
            with pytest.raises(ValueError) as error:
                resume(folder, of, stage, universal)
            refused.append(str(error.value))
    return ends, refused


def convert(folder):
    made = [to_universal(f"{folder}/{stage}") for stage in (2, 3)]
    return {str(path.relative_to(folder)) for where in made for path in where.rglob("*.pt")}


def test_a_training_continues_on_as_many_ranks_and_converted_on_fewer(tmp_path):
    need_deepspeed()
    ends = run(save, tmp_path, ranks=4, device="cpu")[0]
    files = run(convert, tmp_path, ranks=1, device="cpu")[0]
    for name in (
        "2/global_step2_universal/zero/embed.weight/fp32.pt",
        "3/global_step2_universal/zero/scale/exp_avg.pt",
    ):
        assert name in files
    resumed, refused = run(resume_all, tmp_path, ranks=2, device="cpu")[0]
    for stage in (2, 3):
        for name, p in ends[stage].items():
            assert torch.allclose(resumed[stage][name], p, atol=1e-6), name
            assert torch.allclose(ends[stage, "offloaded"][name], p, atol=1e-6), name
    for sentence, part in zip(refused, ["saved by 4 ranks, and here are 2", "saved under stage"] * 2, strict=True):
        assert part in sentence and "\n" not in sentence


def test_a_missing_checkpoint_is_reported(tmp_path):
    need_deepspeed()
    with pytest.raises(FileNotFoundError, match="has no file 'latest': call save_checkpoint first"):
        to_universal(tmp_path)
