"""The scripts at the end of notebooks, without the laboratory.  Reference: one process that takes the same steps."""

import io
import re
from contextlib import redirect_stdout
from functools import cache

import pytest
import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.kit.launch import run
from labs.model import GPT, PRESETS
from tools import notebooks

FENCED = re.compile(r"^# ```python\n(# import torch\n.*?)^# ```", re.MULTILINE | re.DOTALL)
SCRIPTS = {
    source.stem: "".join(line.removeprefix("#").removeprefix(" ") for line in found[1].splitlines(keepends=True))
    for source in notebooks.sources(notebooks.ROOT)
    if (found := FENCED.search(source.read_text(encoding="utf-8"))) and "dist.init_process_group()" in found[1]
}


@cache
def one_process(steps):
    config = PRESETS["small"]
    model, batches, losses = GPT(config), Batches(corpus().tokens, 16, config.context), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        losses.append(model(*batches[step]))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def test_there_are_such_scripts():
    assert {"09_tensor_parallel", "10_pipeline"} <= SCRIPTS.keys()


def printed(script):
    """By rank 0 of a job that has its process group already: so it starts as quickly as any."""
    dist.init_process_group = dist.destroy_process_group = lambda: None
    with redirect_stdout(io.StringIO()) as out:
        exec(script, {})
    return out.getvalue()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_one_processs_losses(name):
    assert "range(10)" in SCRIPTS[name]
    told = run(printed, SCRIPTS[name].replace("range(10)", "range(3)"), ranks=2, device="cpu")[0]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", told)]
    assert losses == pytest.approx(one_process(steps=3), abs=2e-4)
