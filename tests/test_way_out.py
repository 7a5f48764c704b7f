"""Tests of the scripts at the end of notebooks, without the kit, against one process that takes the same steps."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.data import Batches, corpus
from labs.deepspeed import engine
from labs.kit.launch import run
from labs.kit.training.strategies import ADAMW
from labs.model import GPT, PRESETS
from labs.moe import MOE_PRESETS, MoEGPT
from tests.extras import need_deepspeed
from tools import notebooks, warm

# otherwise each rank imports the modules that run notebooks
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FOLDER = notebooks.ROOT / "scripts"
SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
TINY = ("tiny", 12, False, tuple(ADAMW.items()))  # notebooks 01 to 04 train this
SMALL = ("small", 16, True, (("lr", 2e-3),))
EXPERTS = ("tiny-moe", 8, False, tuple(ADAMW.items()))  # notebook 12b trains this
TRAINS = {"ddp": TINY, "ep": EXPERTS}  # the others train SMALL
DEEPSPEED = "train_with_deepspeed"  # DeepSpeed trains in no float64
LOOP = re.compile(r"(for step in range\((?:first, )?)\d+(?=\))")
CONFIG = re.compile(r"(?<=config = )(?:MOE_)?PRESETS\S+")
LOSS = re.compile(r"step (\d+): loss (\S+)")
# AdamW turns rounding errors in float32, which differ between CPUs, into full-size steps.
IN_DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
STEPS, CONTEXT = 4, 16  # texts as long as the scripts' would take seconds per step


@cache
def one_process(size, batch, clip, settings):
    config = replace((PRESETS | MOE_PRESETS)[size], context=CONTEXT)
    model = MoEGPT(replace(config, balance=0.0)) if size in MOE_PRESETS else GPT(config)
    model, batches, losses = model.double(), Batches(corpus().tokens, batch, config.context), []
    optimizer = torch.optim.AdamW(model.parameters(), **dict(settings))
    for step in range(STEPS):
        losses.append(model(*batches[step]))
        losses[-1].backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def printed(scripts, folder):
    """Run the scripts one after the other on a rank of a job that has its process group, and return rank 0's output."""
    os.chdir(folder)
    dist.init_process_group = dist.destroy_process_group = lambda: None
    output = {}
    for name, script in scripts.items():
        with redirect_stdout(io.StringIO()) as out:
            exec(script, {})
        output[name] = out.getvalue()
    return output


def in_double(script, steps):
    return IN_DOUBLE + short(script, steps)


def short(script, steps):
    assert len(LOOP.findall(script)) == len(CONFIG.findall(script)) == 1
    script = CONFIG.sub(rf"dataclasses.replace(\g<0>, context={CONTEXT})", script)
    return "import dataclasses\n" + LOOP.sub(rf"\g<1>{steps}", script)


SPLIT = ["parallel"]  # two dimensions of two ranks each, or three
OTHERS = [name for name in SCRIPTS if name not in (*SPLIT, DEEPSPEED)]


@pytest.mark.parametrize(("names", "ranks"), [(OTHERS, 2), (SPLIT, 4), pytest.param(SPLIT, 8, marks=pytest.mark.depth)])
def test_each_script_prints_one_processs_losses(names, ranks, tmp_path):
    scripts = {name: in_double(SCRIPTS[name], 3) for name in names}
    for name, output in run(printed, scripts, tmp_path, ranks=ranks, device="cpu")[0].items():
        losses = [float(loss) for _, loss in LOSS.findall(output)]
        assert losses == pytest.approx(one_process(*TRAINS.get(name, SMALL))[:3], abs=6e-5), name


@pytest.mark.filterwarnings(*(f"ignore:{said}" for said in engine.NOT_THE_LEARNERS))
def test_deepspeed_s_script_prints_one_processs_losses(tmp_path):
    need_deepspeed()
    script = {DEEPSPEED: short(SCRIPTS[DEEPSPEED], 3)}
    output = run(printed, script, tmp_path, ranks=2, device="cpu")[0][DEEPSPEED]
    losses = [float(loss) for _, loss in LOSS.findall(output)]
    # The dtype is float32, but the eps is so large that AdamW makes little of rounding.
    assert losses == pytest.approx(one_process(*SMALL[:3], (*SMALL[3], ("eps", 1e-4)))[:3], abs=1e-3)


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(tmp_path):
    (tmp_path / "job.py").write_text(in_double(SCRIPTS["checkpoint"], STEPS))
    torchrun = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": FOLDER.parent, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = dict(capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, **variables})
    done = subprocess.run([*torchrun, "--nproc-per-node=2", "job.py", "--kill-at=3"], **job)
    assert done.returncode == 0, done.stderr
    steps, losses = zip(*LOSS.findall(done.stdout), strict=True)
    assert "failed (exitcode: " in done.stderr, "a rank is killed in the fourth step"
    # It is killed after its own third step: rank 0, which prints, may be stopped before it has printed this step.
    assert steps in (("0", "1", "2", "2", "3"), ("0", "1", "2", "3")), "saved after two steps"
    expected = one_process(*SMALL)
    assert [*map(float, losses)] == pytest.approx([expected[int(step)] for step in steps], abs=6e-5)
    more = subprocess.run([*torchrun, "--nproc-per-node=3", "job.py"], **job)
    assert more.returncode == 0, more.stderr  # one of these ranks has not saved


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_without_the_laboratory_and_stands_in_a_notebook(name):
    assert "labs.kit" not in SCRIPTS[name]
    shown = "# ```python\n" + "".join(f"# {line}".rstrip() + "\n" for line in SCRIPTS[name].splitlines()) + "# ```\n"
    texts = [source.read_text(encoding="utf-8") for source in notebooks.sources(notebooks.ROOT)]
    assert sum(shown in text and f"scripts/{name}.py" in text for text in texts) == 1
