"""Tests of the batch script on a small Slurm: a job that is told that its time ends saves, ends and is put back."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from labs.exercises.clusters._rehearsal import rehearsed, slurms_own_word
from tests.answers import from_notebook
from tests.clusters.small_slurm import Cluster, missing, said, small_slurm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "labs" / "clusters" / "train.sbatch"
LONG = 200.0  # s

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with small_slurm() as started:
        yield started


def filled(cluster: Cluster) -> Path:
    """Return the script with the head of this cluster, which asks for no account and no reservation."""
    lines = SCRIPT.read_text().splitlines(keepends=True)
    own = [line.replace("PARTITION", "main") for line in lines if "=ACCOUNT" not in line and "=RESERVATION" not in line]
    path = cluster.folder / "train.sbatch"
    path.write_text("".join(own))
    return path


def submitted(cluster: Cluster, folder: Path, *flags: str, slurms: Sequence[str] = ()) -> str:
    """Submit a training with a rank on each of two nodes; return the number of the job.

    flags, slurms: those of the training, and those of sbatch
    """
    own = {"RANKS_PER_NODE": "1", "FOLDER": str(folder), "OMP_NUM_THREADS": "1", "LABS_DEVICE": "cpu"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sbatch", "--parsable", "--chdir", str(ROOT), f"--output={cluster.folder}/out-%j", *slurms]
    own_flags = ("--mesh", "dp=2", "--evaluate", "0", "--sample", "0", "--report", str(folder / "logs"))
    command += [str(filled(cluster)), "configs/fsdp.toml", *own_flags, *flags]
    environment = os.environ | own | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def steps(folder: Path) -> list[int]:
    path = folder / "logs" / "steps.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait(true: object, what: str, cluster: Cluster) -> None:
    end = time.monotonic() + LONG
    while not true():
        told = "\n".join(path.read_text()[-3000:] for path in cluster.folder.glob("out-*"))
        assert time.monotonic() < end, f"{what}; the job says: {told}"
        time.sleep(0.1)


def test_a_job_whose_time_ends_saves_and_is_put_back_into_the_queue(cluster, tmp_path):
    folder = cluster.folder / "saved"
    job = submitted(cluster, folder, "--steps", "100000")
    wait(lambda: len(steps(folder)) > 1, "no step was made", cluster)
    said("scancel", "--signal=USR1", "--batch", job)  # as --signal does before the time limit
    wait(lambda: "Restarts=1" in said("scontrol", "show", "job", job), "the job was not put back", cluster)
    said("scancel", job)
    [saved] = [path for path in folder.glob("step-*") if not path.name.endswith(".draft")]
    assert saved.name == f"step-{steps(folder)[-1]}"
    assert "start it again, and it goes on" in (cluster.folder / f"out-{job}").read_text()


@pytest.mark.soak
def test_a_job_that_nears_its_time_limit_saves_and_goes_on_by_itself(cluster):
    folder = cluster.folder / "limited"
    # Slurm counts in minutes, and may send the signal up to a minute early.
    job = submitted(cluster, folder, "--steps", "100000", slurms=["--time=2", "--signal=B:USR1@30"])
    wait(lambda: "Restarts=1" in said("scontrol", "show", "job", job), "the job was not put back", cluster)
    [saved] = [path for path in folder.glob("step-*") if not path.name.endswith(".draft")]
    last = int(saved.name.removeprefix("step-"))
    wait(lambda: steps(folder)[-1] > last, "the job does not go on", cluster)
    said("scancel", job)
    assert steps(folder) == [*range(1, steps(folder)[-1] + 1)]
    assert "TIME LIMIT" not in (cluster.folder / f"out-{job}").read_text()


def test_the_script_of_the_exercise_starts_here_what_its_check_sees(cluster):
    text = from_notebook("batch_script")("lab1", "main", 2, 3, 5, 60)
    programs, script, log = (cluster.folder / name for name in ("programs", "exercise.sbatch", "starts"))
    programs.mkdir()
    (programs / "torchrun").write_text(f'#!/bin/sh\necho "$(hostname) $*" >> {log}\n')
    (programs / "torchrun").chmod(0o755)
    script.write_text(text)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["sbatch", "--parsable", "--wait", f"--output={cluster.folder}/out-%j", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    expected = rehearsed(text, ["n1", "n2"], "n[1-2]").starts
    said = [" ".join([start["host"], *start["words"]]).replace("--rdzv-id=7", f"--rdzv-id={job}") for start in expected]
    assert sorted(log.read_text().splitlines()) == sorted(said) and len(said) == 2
    assert slurms_own_word(text) == ""
    assert "nowhere" in slurms_own_word(text.replace("--requeue", "--nowhere"))


@pytest.mark.soak
def test_a_job_that_was_put_back_goes_on_and_ends_with_the_steps_of_an_undisturbed_one(cluster):
    folders = [cluster.folder / name for name in ("whole", "parts")]
    jobs = [submitted(cluster, folder, "--steps", "40") for folder in folders]
    wait(lambda: 1 < len(steps(folders[1])) < 30, "no step was made", cluster)
    said("scancel", "--signal=USR1", "--batch", jobs[1])
    wait(lambda: all(40 in steps(folder) for folder in folders), "a job has not ended", cluster)
    whole, parts = ((folder / "logs" / "steps.jsonl").read_text().splitlines() for folder in folders)
    losses = [[json.loads(line)["loss"] for line in lines] for lines in (whole, parts)]
    assert losses[0] == losses[1]
    assert "Restarts=1" in said("scontrol", "show", "job", jobs[1])


def test_a_class_reads_its_reservation_from_one_file_and_edits_no_script(cluster, tmp_path):
    said(
        "scontrol",
        "create",
        "reservation",
        "reservationname=class",
        "starttime=now",
        "duration=60",
        "nodes=ALL",
        "users=root",
    )
    text = (ROOT / "teaching/reservation.sh").read_text()
    for word, own in {"=ACCOUNT": "=lab1", "=PARTITION": "=main", "=RESERVATION": "=class"}.items():
        text = text.replace(word, own)
    (tmp_path / "reservation.sh").write_text(text)
    command = f". {tmp_path}/reservation.sh && sbatch --parsable --hold --nodes 2 {SCRIPT} configs/fsdp.toml"
    job = subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    try:
        told = said("scontrol", "show", "job", job).split()
        assert {"Account=lab1", "Partition=main", "Reservation=class", "TimeLimit=00:10:00"} <= {*told}
    finally:
        said("scancel", job)
        said("scontrol", "delete", "reservationname=class")
