"""The scripts at the end of notebooks, without the laboratory.  Reference: one process that takes the same steps."""

import io
import re
import sys
from contextlib import redirect_stdout
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.kit.launch import run
from labs.kit.strategies import ADAMW
from labs.model import GPT, PRESETS
from tools import notebooks

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank imports what runs notebooks

FOLDER = notebooks.ROOT / "scripts"
SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
TINY = ("tiny", 12, False, tuple(ADAMW.items()))  # what notebooks 01 to 04 train
SMALL = ("small", 16, True, (("lr", 2e-3),))
TRAINS = {"ddp": TINY}  # the others train SMALL


@cache
def one_process(size, batch, clip, settings, steps):
    config = PRESETS[size]
    model, batches, losses = GPT(config).double(), Batches(corpus().tokens, batch, config.context), []
    optimizer = torch.optim.AdamW(model.parameters(), **dict(settings))
    for step in range(steps):
        losses.append(model(*batches[step]))
        losses[-1].backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def printed(script):
    """By rank 0 of a job that has its process group already: so it starts as quickly as any.

    In float64: in float32 AdamW makes of rounding, which differs between CPUs, as long a step as of a gradient.
    """
    torch.set_default_dtype(torch.float64)
    dist.init_process_group = dist.destroy_process_group = lambda: None
    with redirect_stdout(io.StringIO()) as out:
        exec(script, {})
    return out.getvalue()


def test_each_script_prints_one_processs_losses():
    loop = re.compile(r"(?<=for step in range\()\d+(?=\))")
    for name, script in SCRIPTS.items():
        assert len(loop.findall(script)) == 1
        told = run(printed, loop.sub("3", script), ranks=2, device="cpu")[0]
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", told)]
        assert losses == pytest.approx(one_process(*TRAINS.get(name, SMALL), steps=3), abs=6e-5), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_without_the_laboratory_and_stands_in_a_notebook(name):
    assert "labs.kit" not in SCRIPTS[name]
    shown = "# ```python\n" + "".join(f"# {line}".rstrip() + "\n" for line in SCRIPTS[name].splitlines()) + "# ```\n"
    texts = [source.read_text(encoding="utf-8") for source in notebooks.sources(notebooks.ROOT)]
    assert sum(shown in text and f"scripts/{name}.py" in text for text in texts) == 1
