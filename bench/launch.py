"""A job of 4 ranks up to its first all_reduce and the values back in the caller: run() against torchrun.

Both run the same function, one after the other.  run() is warm, as it is from the second cell of a notebook on.
torchrun keeps nothing warm.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.figure import Figure, figure, ratios
from labs.kit.launch import run

RANKS = 4
SCRIPT = """
import json, os, sys
import torch.distributed as dist
from bench.launch import first_sum

dist.init_process_group("gloo")
values = [None] * dist.get_world_size()
dist.all_gather_object(values, first_sum())
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(values, file)
dist.barrier()
dist.destroy_process_group()
"""


def first_sum() -> float:
    tensor = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor[0].item()


def ours() -> float:
    """Return the seconds that the job takes with run()."""
    start = time.perf_counter()
    assert list(run(first_sum, ranks=RANKS)) == [6.0] * RANKS
    return time.perf_counter() - start


def torchrun(folder: Path) -> float:
    """Return the seconds that the job takes with torchrun."""
    script, answer = folder / "job.py", folder / "answer.json"
    script.write_text(SCRIPT)
    options = ["--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(answer)]
    start = time.perf_counter()
    # torchrun puts the script's folder on the path instead of the current one, hence PYTHONPATH.
    subprocess.run(["env", f"PYTHONPATH={Path.cwd()}", *command], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    assert json.loads(answer.read_text()) == [6.0] * RANKS
    return seconds


def figures(quick: bool) -> list[Figure]:
    ours(), ours()
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(ours(), torchrun(Path(folder))) for _ in range(3 if quick else 10)]
    alone = [ours() for _ in range(20)]
    return [
        figure(
            "launch: torchrun / run()", ratios(pairs), target="at least 20", note="few pairs: torchrun takes seconds"
        ),
        figure("launch: run()", alone, "s"),
        figure("launch: torchrun", [peer for _, peer in pairs], "s"),
    ]
