"""Tests of the course in a real JupyterHub: jobs of two learners, updates by nbgitpuller, and a class at once."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest

from tools.hub import play
from tools.hub.play import CHECK, FIRST, ROOT, Learner

pytestmark = [pytest.mark.soak, pytest.mark.alone]

# A sum over ranks that goes on until there is a file `over`; it says whether the sum is right.
JOB = """
from pathlib import Path
import torch, torch.distributed as dist
from labs.kit.launch import run
def add(value):
    total, steps, over = 0, 0, False
    while not over:
        x = torch.tensor([value, Path("over").exists()])
        dist.all_reduce(x)
        total, steps, over = total + int(x[0]), steps + 1, bool(x[1])
        Path("begun").touch()
    return total == 4 * value * steps
"""


@pytest.fixture(scope="module")
def installed():
    """Install JupyterHub and its proxy, where that is possible."""
    environment = play.ENVIRONMENT.relative_to(ROOT)
    command = ["make", f"VENV={environment}", f"{environment}/hub"]
    why = "memory is read as Linux tells it" * (sys.platform != "linux") or "npm is missing" * (not shutil.which("npm"))
    if not why:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        why = "".join(done.stderr.splitlines()[-1:]) * bool(done.returncode)
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs JupyterHub, and npm for its proxy: {why}")


@pytest.fixture(scope="module")
def hub(installed):
    with play.hub() as found:
        yield found


@pytest.fixture
def learners(hub, tmp_path):
    found = [Learner(hub, f"{name}-{tmp_path.name}") for name in ("ann", "bob")]
    upstream = play.repository(tmp_path / "upstream")
    for learner in found:
        learner.start()
        learner.pull(upstream)
    return *found, upstream


def begin(learner, kernel, value):
    """Begin a job, and wait until its ranks have exchanged something."""
    begun = learner.home / "course/notebooks/begun"
    begun.unlink(missing_ok=True)
    cell = kernel.begin(f"run(add, {value}, ranks=4)")
    play.wait_for(begun.exists)
    return cell


def temporary(processes):
    """Return the files for a while that processes have open or mapped: of temporary folders and shared memory."""
    folders = (tempfile.gettempdir(), "/dev/shm")
    files = {each.path for process in processes for each in (*process.open_files(), *process.memory_maps())}
    return {file for file in files if file.startswith(folders)}


def test_a_learner_whose_job_is_stopped_disturbs_nobody(hub, learners):
    ann, bob, _ = learners
    anns, bobs = ann.open(), bob.open()
    for kernel in (anns, bobs):
        kernel.run(JOB)
    going_on = begin(ann, anns, 3)
    stopped = begin(bob, bobs, 5)
    of = play.processes(hub.folder)
    shared = temporary(of[ann.name]) & temporary(of[bob.name])
    assert shared <= {str(hub.folder / "log")}
    ports = [each.laddr for name in (ann.name, bob.name) for process in of[name] for each in process.net_connections()]
    assert ports and {address.ip for address in ports} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    bob.api("POST", f"{bobs.path}/interrupt")
    assert "KeyboardInterrupt" in bobs.result(stopped)
    begin(bob, bobs, 7)
    gone = [each for each in play.processes(hub.folder)[bob.name] if not each.name().startswith("jupyterhub")]
    assert len(gone) == 6  # the kernel, the process that forks ranks, and four ranks
    bob.api("DELETE", bobs.path)
    assert not psutil.wait_procs(gone, timeout=play.PATIENCE)[1]
    (ann.home / "course/notebooks/over").touch()
    assert anns.result(going_on) == "[True, True, True, True]"
    with pytest.raises(RuntimeError, match="403"):
        play.Server(bob.url, ann.token).api("GET", "/api/contents/course")


def test_a_pull_over_edited_notebooks_loses_nothing(learners):
    ann, _, upstream = learners
    answer = play.lesson()[2]
    ann.write(answer)
    here, there = ann.home / "course/notebooks", upstream / "notebooks"
    (here / "98_new.ipynb").write_text("the learner's")
    (here / "02_collectives.ipynb").unlink()
    changed = json.loads((there / FIRST).read_text())
    exercise = next(cell for cell in changed["cells"] if CHECK in "".join(cell["source"]))
    exercise["source"] = "another exercise"
    changed["cells"][0]["source"] = "# Another title"
    (there / FIRST).write_text(json.dumps(changed, indent=1, ensure_ascii=False) + "\n")
    (there / "01_one_device.ipynb").write_text("changed")
    (there / "98_new.ipynb").write_text("the teacher's")
    play.commit(upstream)
    ann.pull(upstream)
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads((here / FIRST).read_text())["cells"]}
    assert cells[exercise["id"]] == answer
    assert cells[changed["cells"][0]["id"]] == "# Another title"
    assert (here / "01_one_device.ipynb").read_text() == "changed"
    assert (here / "02_collectives.ipynb").read_text() == (there / "02_collectives.ipynb").read_text()
    assert sorted(file.read_text() for file in here.glob("98_new*")) == ["the learner's", "the teacher's"]
    assert (here / "98_new.ipynb").read_text() == "the teacher's"


def test_two_at_once_need_the_memory_that_the_first_notebook_states(installed):
    assert play.play(2)["learner, MB"] < 1000
