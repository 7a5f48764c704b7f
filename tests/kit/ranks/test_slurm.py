"""Tests of run(on=Slurm(...)) on a small cluster: values, output, failures, an interrupt, and what is refused.

References: what the same call returns on this machine, and faults planted on a known rank and host.  A job's ranks each
import PyTorch, which takes most of its time, so a job has as few ranks as show the claim.
"""

import os
import signal
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labs.kit.launch import RankError, Slurm, run
from labs.kit.ranks import shared_folder, slurm, slurm_job, slurm_rank
from labs.kit.ranks.diagnosis import Problem, Where
from tests.clusters import small_slurm
from tests.kit.ranks import slurm_jobs as jobs


@pytest.fixture(scope="module")
def cluster():
    if reason := small_slurm.missing():
        pytest.skip(reason)
    with small_slurm.small_slurm() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Check that no test leaves a job's folder in the shared folder."""
    yield
    if "cluster" in request.fixturenames:
        assert not list(request.getfixturevalue("cluster").folder.glob("labs-*"))


def refused(match, error=RankError, ranks=2, **fields):
    with pytest.raises(error, match=match) as caught:
        run(os.getpid, ranks=ranks, on=Slurm(**{"nodes": 2, **fields}))
    return caught.value


# ---- jobs that run ---------------------------------------------------------------------------------------


def test_values_come_in_order_of_rank_with_output_and_settings(cluster, tmp_path, capsys, monkeypatch):
    for name in ("SBATCH_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # as a notebook has them that itself runs in a job
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        add = lambda rank: rank + 10  # noqa: E731 (a function that only cloudpickle can send)
        values = run(jobs.sums, add, tmp_path, ranks=4, on=Slurm(2, cluster.folder))
    finally:
        torch.set_default_dtype(before)
    assert [value[0] for value in values] == [10, 11, 12, 13]
    assert all(torch.equal(value[1], torch.full((3,), 6.0, dtype=torch.float64)) for value in values)
    assert [value[2] for value in values] == [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert [value[3] for value in values] == [1] * 4
    printed = capsys.readouterr().out
    for rank, host in enumerate(["n1", "n1", "n2", "n2"]):
        assert f"[rank {rank}] at {host}\n" in printed
    assert "runs on n[1-2]" in printed
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("written-*")} == {0o666 & ~umask}


def test_the_first_failed_rank_is_named_with_its_traceback_and_host(cluster):
    with pytest.raises(RankError) as caught:
        run(jobs.rank_1_raises, ranks=2, on=Slurm(2, cluster.folder))
    text = str(caught.value)
    assert caught.value.kind == "raised" and caught.value.ranks == (1,)
    assert text.startswith("rank 1 of 2 failed: ValueError: planted\n")
    assert 'raise ValueError("planted")' in text and "labs/kit" not in text
    assert text.endswith("rank 0 then had to stop.\nrank 1 ran on n2.")


@pytest.mark.depth
def test_a_rank_that_dies_is_named_with_its_host(cluster):
    with pytest.raises(RankError) as caught:
        run(jobs.dies, ranks=1, on=Slurm(1, cluster.folder))
    assert caught.value.kind == "died" and caught.value.ranks == (0,)
    assert str(caught.value) == "rank 0 ended before it returned: Killed\nrank 0 ran on n1."


def test_a_rank_that_cannot_start_is_named_with_what_it_said(cluster):
    with pytest.raises(RankError) as caught:
        run(os.getpid, ranks=2, on=Slurm(1, cluster.folder, setup=["export PYTHONHOME=/nowhere"]))
    text = str(caught.value)
    assert caught.value.kind == "died" and "No module named 'encodings'" in text and text.endswith("ran on n1.")


@pytest.mark.depth
def test_a_recording_comes_back(cluster):
    results = run(jobs.sums, abs, None, ranks=2, on=Slurm(2, cluster.folder), record="communication")
    assert results.recording.sent(0) == results.recording.sent(1) > 0


def test_ranks_that_hang_are_diagnosed_on_their_host(cluster, tmp_path):
    with pytest.raises(RankError, match=r"not done after 0\.5 s: rank 0 is still at work\n.*slurm_jobs\.py") as caught:
        run(jobs.hangs, tmp_path / "log", ranks=1, timeout=0.5, on=Slurm(1, cluster.folder))
    assert caught.value.kind == "timeout"


def test_an_interrupt_cancels_the_job(cluster, tmp_path, capsys):
    def interrupt():
        small_slurm.wait(log.exists, 60, "the job has not started")
        os.kill(os.getpid(), signal.SIGINT)

    log = tmp_path / "log"
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"interrupted; Slurm job \d+ is cancelled"):
        run(os.getpid, ranks=2, on=Slurm(2, cluster.folder, setup=[f"touch {log}; exec sleep 60"]))
    thread.join()
    small_slurm.wait(lambda: not small_slurm.jobs(), 10, "the job has not ended")


@pytest.mark.depth
def test_a_node_that_fails_is_named_and_leaves_nothing(tmp_path):
    def fail():
        small_slurm.wait(log.exists, 60, "the job has not started")
        small_slurm.said("scontrol", "update", "nodename=n1", "state=down", "reason=test")

    if reason := small_slurm.missing():
        pytest.skip(reason)
    log, thread = tmp_path / "log", threading.Thread(target=fail)
    with small_slurm.small_slurm(nodes=1) as cluster:
        thread.start()
        with pytest.raises(RankError, match=r"n1.* DUE TO NODE FAILURE|NODE_FAIL.* n1"):
            run(os.getpid, ranks=1, on=Slurm(1, cluster.folder, setup=[f"touch {log}; sleep 60"]))
        thread.join()
        configuration = os.environ["SLURM_CONF"]
    small_slurm.wait(lambda: not small_slurm.left_of_jobs(configuration), 5, "a process is left")


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_host_that_does_not_see_the_folder_is_named(cluster):
    error = refused("n2 does not see .*: name a folder that all hosts share", folder=cluster.unshared["n2"])
    assert error.kind == "refused"
    refused("no log: n1 does not see .*; name a folder that all hosts share", folder=cluster.unshared["n1"])


@pytest.mark.depth
def test_a_host_with_another_course_is_named_with_both_versions(cluster, monkeypatch):
    here = shared_folder.versions()
    monkeypatch.setattr(shared_folder, "versions", lambda: {**here, "the course (digest of labs)": "another"})
    digest = here["the course (digest of labs)"]
    refused(
        f"^n1 has the course .*{digest}, and {socket.gethostname()}, .* another: use one",
        ranks=1,
        nodes=1,
        folder=cluster.folder,
    )


def test_a_queue_that_refuses_or_never_starts_is_quoted(cluster):
    error = refused("sbatch does not accept the job: ", folder=cluster.folder, partition="nowhere")
    assert str(error).endswith("Batch job submission failed: Invalid partition name specified")
    refused(
        r"has not started within 1 s: it is PENDING \(Partition\w+\), and is cancelled",
        folder=cluster.folder,
        time=600,
        queue=1,
    )
    small_slurm.wait(lambda: not small_slurm.jobs(), 10, "the job has not ended")


def test_what_cannot_work_is_refused_before_anything_is_submitted(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "find_spec", lambda package: None)
    monkeypatch.setattr(slurm.shutil, "which", lambda program: "/usr/bin/" + program)
    refused("needs submitit: `make learn EXTRA=clusters`", ModuleNotFoundError, folder=tmp_path)
    monkeypatch.setattr(slurm, "find_spec", lambda package: package)
    refused(r"ranks=5 on Slurm\(nodes=2\): .* give a multiple of 2 ranks", ValueError, ranks=5, folder=tmp_path)
    refused(r"Slurm\(folder='/nowhere'\): No such file or directory", ValueError, folder="/nowhere")
    if Path("/proc/self").exists():
        refused(r"Slurm\(folder='/proc'\): .*: name a folder", ValueError, folder="/proc")
    for fields in ({"nodes": 0}, {"time": 1.5}, {"queue": float("nan")}, {"nodes": True}):
        refused(r"Slurm\(\w+=.*\): give a number of .*, 1 or more", ValueError, folder=tmp_path, **fields)
    on = Slurm(2, tmp_path)
    with pytest.raises(ValueError, match="link= with on="):
        run(os.getpid, ranks=2, on=on, link=slurm_link())
    with pytest.raises(ValueError, match="restarts=1 with on="):
        run(os.getpid, ranks=2, on=on, restarts=1)
    with pytest.raises(TypeError, match="on=2 is not a Slurm"):
        run(os.getpid, ranks=2, on=2)
    with pytest.raises(ValueError, match="ranks=129: a job has 1 to 128 ranks"):
        run(os.getpid, ranks=129, on=on)
    monkeypatch.setattr(slurm.shutil, "which", lambda program: None)
    refused("there is no sbatch here: call this on a login node", RuntimeError, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def slurm_link():
    from labs.kit.launch import Link

    return Link(nodes=2, bandwidth="1 Gbit/s")


def test_another_version_on_the_host_is_named(tmp_path, monkeypatch):
    here = shared_folder.versions()
    assert here["PyTorch"] == torch.__version__
    tmp_path.chmod(0o700)
    shared_folder.write_ticket(tmp_path)
    assert shared_folder.refusal(tmp_path, shared_folder.TICKET) == ""
    host = socket.gethostname()
    for name in here:
        monkeypatch.setattr(shared_folder, "versions", lambda name=name: {**here, name: "0.1"})
        assert shared_folder.refusal(tmp_path, shared_folder.TICKET) == (
            f"{host} has {name} 0.1, and {host}, which has called run(), {here[name]}: use one"
        )


def test_a_first_host_that_cannot_be_found_or_reached_is_named(monkeypatch):
    me = SimpleNamespace(master_addr="localhost", master_port=9, world_size=2, rank=1)
    monkeypatch.setattr(slurm_rank, "MEETING", 0.3)
    with pytest.raises(ConnectionError, match=f"^{socket.gethostname()} has not met all 2 ranks at localhost: "):
        slurm_rank.meet(me)

    def unknown(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(slurm_rank.socket, "getaddrinfo", unknown)
    with pytest.raises(
        ConnectionError, match=f"^{socket.gethostname()} cannot resolve localhost, the job's first host: "
    ):
        slurm_rank.meet(me)


# ---- who may write where values travel -------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_a_file_or_folder_of_another_user_is_not_trusted(tmp_path):
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    shared_folder.write_ticket(folder)
    for place in (folder / shared_folder.TICKET, folder, folder.parent):
        os.chown(place, 12345, -1)
        with pytest.raises(PermissionError, match=f"{place} belongs to user 12345"):
            shared_folder.check_ours(folder / shared_folder.TICKET)
        assert "does not trust the shared folder" in shared_folder.refusal(folder, shared_folder.TICKET)
        os.chown(place, 0, -1)
    os.chown(folder.parent, 12345, -1)
    with (
        pytest.raises(ValueError, match="belongs to user 12345, who could put any code there"),
        slurm.own_folder(folder),
    ):
        pass
    assert [path.name for path in folder.iterdir()] == [shared_folder.TICKET]


def test_what_others_can_write_is_not_trusted(tmp_path):
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    file = folder / "value.pkl"
    file.write_bytes(b"")
    for place, mode in ((file, 0o602), (file, 0o660), (folder, 0o770), (folder.parent, 0o702)):
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)
        with pytest.raises(PermissionError, match=f"could put any code there: chmod go-w {place}"):
            shared_folder.check_ours(file)
        place.chmod(before)
    folder.parent.chmod(0o1777)  # as /tmp
    shared_folder.check_ours(file)
    link = folder.parent / "link"
    link.symlink_to(file)
    with pytest.raises(PermissionError):
        shared_folder.check_ours(link)


def test_an_answer_is_not_read_before_its_file_is_trusted(tmp_path, monkeypatch):
    following = slurm_job.Following(FakeJob(tmp_path / "answer"), tmp_path, ranks=1, nodes=1, minutes=3, queue=9)
    (tmp_path / "answer").write_bytes(b"not a pickle")
    (tmp_path / "answer").chmod(0o666)
    with pytest.raises(PermissionError, match="could put any code there"):
        following.take_answers()


def test_a_rank_does_not_read_a_function_that_others_could_have_written(cluster, monkeypatch):
    monkeypatch.setattr(slurm_rank, "OURS", 0)  # the mask of the files that the caller writes
    error = refused(
        "n1 does not trust the shared folder: .*_submitted.pkl is -rw-rw-rw-", nodes=1, folder=cluster.folder
    )
    assert error.kind == "refused"


# ---- what the log and the hosts say ----------------------------------------------------------------------


class FakeJob:
    """A handle of submitit's whose answer is in a file of the test's."""

    job_id = "7"

    def __init__(self, answer):
        self.paths = type("Paths", (), {"result_pickle": answer, "stdout": answer})()


def test_the_cause_of_a_failure_is_found(tmp_path):
    def cause(log, **state):
        following = slurm_job.Following(FakeJob(tmp_path / "none"), tmp_path, ranks=4, nodes=2, minutes=3, queue=9)
        for name, value in state.items():
            setattr(following, name, value)
        return following.error(log)

    late = "srun: error: n1: tasks 0-1: Terminated\n"
    error = cause(
        f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T16:15:21 DUE TO TIME LIMIT ***\n{late}"
    )
    assert str(error) == (
        "Slurm ended job 7: ON n1 CANCELLED AT 2026-11-29T16:15:21 DUE TO TIME LIMIT (Slurm(time=3), in minutes)"
    )
    error = cause(f"srun: error: n2: tasks 2-3: Out Of Memory\n{late}")
    assert error.ranks == (2, 3) and "ranks 2 and 3 ended before it returned: Out Of Memory" in str(error)
    for log in ("no module\nsrun: error: n1: task 3: Exited\n", "srun: error: n1: task 3: Exited\nno module\n"):
        assert "rank 3 ended before it returned: Exited\n  no module\nranks 0, 1 and 2" in str(cause(log))
    halves = {
        0: Problem("timeout", "rank 1 is late", (1,), [Where(1, "runs"), Where(0, "waits")]),
        2: Problem("timeout", "rank 3 is late", (3,), [Where(2, "waits"), Where(3, "runs")]),
    }
    error = cause("", problems=halves)
    assert error.ranks == (1, 3) and str(error).startswith(
        "rank 1 is late; rank 3 is late\n  rank 0 waits\n  rank 1 runs"
    )
    error = cause("python: not found\n", state="FAILED", reason="NonZeroExitCode")
    assert str(error) == "Slurm job 7 ended (FAILED, NonZeroExitCode): python: not found"
    assert slurm_job.numbers_in("0-2,5") == [0, 1, 2, 5]
