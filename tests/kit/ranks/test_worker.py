"""Tests of a rank's process: its random numbers, keyboard and limits, and its end.

References: what a process started by hand would do, and the operating system's list of processes.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from labs.kit.launch import RankError, run
from tests.kit.ranks.jobs import gone_within

# ---- random numbers -----------------------------------------------------------------------------


def numbers():
    return torch.rand(1).item(), float(numpy.random.rand()), random.random()


def test_unseeded_random_numbers_differ_by_rank_and_by_job():
    """Check that numbers differ, as under torchrun, so that a forgotten broadcast, or equal dropout everywhere, shows
    here.
    """
    values = run(numbers, ranks=3) + run(numbers, ranks=3)
    for drawn in zip(*values, strict=True):
        assert len(set(drawn)) == 6


def test_seeded_random_numbers_are_those_of_the_seed():
    def seeded():
        torch.manual_seed(3)
        return torch.rand(1).item()

    torch.manual_seed(3)
    assert run(seeded, ranks=2) == [torch.rand(1).item()] * 2


# ---- a sentence at once -------------------------------------------------------------------------


@pytest.mark.parametrize("read", [input, lambda: sys.stdin.read(), lambda: next(sys.stdin)])
def test_a_rank_has_no_keyboard(read):
    with pytest.raises(RankError, match=r"a rank has no keyboard: call input\(\) before run\(\)"):
        run(lambda: read(), ranks=2)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this")
def test_a_rank_is_not_interrupted_by_what_it_wakes():
    def policies():
        in_a_thread = []
        threading.Thread(target=lambda: in_a_thread.append(os.sched_getscheduler(0))).start()
        dist.barrier()
        return in_a_thread + [os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")]

    for of_rank in run(policies, ranks=2):
        assert len(of_rank) > 3 and set(of_rank) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # the caller, a notebook's kernel, has priority over its ranks


def test_a_coroutine_function_is_refused():
    async def train():
        await asyncio.sleep(0)

    with pytest.raises(TypeError, match=r"train is a coroutine function.*asyncio\.run\(train\(\)\)"):
        run(train)


@pytest.mark.parametrize("timeout", ["5", None, float("nan"), -1])
def test_a_timeout_must_be_a_number(timeout):
    with pytest.raises(ValueError, match=f"timeout={timeout!r}: give a number of seconds above 0"):
        run(print, timeout=timeout)


def test_an_environment_that_is_half_torchruns(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "left over")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="TORCHELASTIC_RUN_ID is set, as torchrun does, but not RANK"):
        run(print)


@pytest.fixture
def full_disk(tmp_path):
    """Mount a folder for temporary files on a disk without room."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(tmp_path)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root on Linux")
    (tmp_path / "all").write_bytes(bytes(4096))
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_reported(full_disk, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(full_disk))
    with pytest.raises(OSError, match=rf"No space left on device for temporary files in {full_disk}: .*set TMPDIR"):
        run(print, ranks=2)


# ---- the end ------------------------------------------------------------------------------------


def test_a_forked_process_that_returns_does_not_answer_for_its_rank(capsys):
    def job():
        children = []
        for child in ("returns", "exits", "raises"):
            if not (pid := os.fork()):
                assert child != "raises", "in the child"
                return sys.exit(3) if child == "exits" else child
            children.append(pid)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]

    assert run(job, ranks=1) == [[0, 1, 1]]
    assert "[rank 0] AssertionError: in the child" in capsys.readouterr().out


def test_a_stopped_process_is_reported():
    def job():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(RankError, match="after 2 s: rank 0 is stopped, by SIGSTOP or a debugger") as caught:
        run(job, ranks=2, timeout=2)
    assert [str(where).split("   ")[0] for where in caught.value.where] == [
        "rank 0 is stopped",
        "rank 1 waits in barrier",
    ]


@pytest.mark.parametrize("taken", [False, True])
def test_a_function_that_closes_what_it_had_not_opened(taken):
    """Close descriptors: gloo may end the process first, or a new file may get the number of the way to the caller."""

    def job():
        os.closerange(3, 256)
        return [os.open(os.devnull, os.O_RDWR) for _ in range(64)] if taken else None

    with pytest.raises(RankError, match="can neither answer nor hear the others: something closed files") as caught:
        run(job, ranks=2)
    assert caught.value.kind == "died"


linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS hands no orphans on")
DETACHED = "import os, time; os.setsid(); print('pid', os.getpid(), flush=True); time.sleep(600)"


@linux
def test_a_process_that_left_its_ranks_session_ends_with_the_rank():
    def job():
        process = subprocess.Popen([sys.executable, "-c", DETACHED], stdout=subprocess.PIPE)
        process.stdout.readline()  # the process has a session of its own by now
        return process.pid

    assert gone_within(run(job, ranks=1), 20)


@linux
def test_a_detached_process_of_a_living_rank_outlives_another_job(tmp_path):
    def job():
        shell = subprocess.run(["sh", "-c", "setsid sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE, text=True)
        (tmp_path / "started").touch()
        while not (tmp_path / "others ended").exists():
            time.sleep(0.01)
        return psutil.Process(int(shell.stdout)).status()

    states = []
    thread = threading.Thread(target=lambda: states.extend(run(job, ranks=1)))
    thread.start()
    while thread.is_alive() and not (tmp_path / "started").exists():
        time.sleep(0.01)
    for _ in range(3):
        run(int, ranks=1)
    (tmp_path / "others ended").touch()
    thread.join()
    assert states == [psutil.STATUS_SLEEPING]


# ---- the caller's end ---------------------------------------------------------------------------


def script(folder, body):
    """Start a caller with its own process that forks, which takes most of such a test, and with files in `folder`."""
    file, temporary = folder / "script.py", folder / "temporary"
    temporary.mkdir()
    head = "import os, resource, subprocess, sys, time\nimport torch.distributed as dist\n"
    file.write_text(head + "from labs.kit.launch import run\n" + textwrap.dedent(body))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)})
    return subprocess.Popen([sys.executable, file], text=True, **pipes)


def pid_from(process):
    line = process.stdout.readline()
    assert "pid" in line, process.stderr.read()
    return int(line.split()[-1])


def assert_nothing_is_left(folder, pids, seconds=20):
    assert gone_within(pids, seconds)
    left = [path.name for path in (folder / "temporary").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == [], "that one is PyTorch's own cache"


def test_an_interrupt_says_where_the_ranks_were(tmp_path):
    body = """
    def job():
        print("pid", os.getpid(), flush=True)
        dist.barrier()
        if dist.get_rank() < 2:
            dist.barrier()
        time.sleep(60)
    run(job, ranks=3)
    """
    with script(tmp_path, body) as process:
        pids = [pid_from(process) for _ in range(3)]
        pids.append(psutil.Process(pids[0]).ppid())
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGINT, "as for any interrupted script"
    assert "KeyboardInterrupt: interrupted; ranks 0 and 1 were in barrier   " in err and "; rank 2 was at   " in err
    assert len(err.splitlines()) < 8, err
    assert_nothing_is_left(tmp_path, pids)


def test_limits_on_open_files_are_raised_or_reported_and_nothing_outlives_sigterm(tmp_path):
    body = """
    def job():
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert len(run(int, ranks=8)) == 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    try:
        run(int, ranks=16)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    run(job)
    """
    with script(tmp_path, body) as process:
        pids = [pid_from(process) for _ in range(4)]
        pids.append(psutil.Process(pids[0]).ppid())
        process.terminate()
        err = process.communicate(timeout=300)[1]
    assert "16 ranks take" in err and "and this process may have 128 (ulimit -Hn): start at most" in err
    assert_nothing_is_left(tmp_path, pids)


@linux
@pytest.mark.alone
@pytest.mark.parametrize("seconds", [20, pytest.param(1, marks=pytest.mark.soak)])
def test_everything_is_gone_soon_after_the_caller_is_killed(tmp_path, seconds):
    """Check processes that ignore SIGTERM in a session of their own, and a child of the caller that holds its
    descriptors.
    """
    body = f"""
    def job():
        ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + {DETACHED!r}
        subprocess.Popen([sys.executable, "-c", ignoring], stdout=1)
        time.sleep(600)
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        time.sleep(600)
    print("pid", child, flush=True)
    run(job, ranks=2)
    """
    with script(tmp_path, body) as process:
        child, *detached = (pid_from(process) for _ in range(3))
        ranks = [psutil.Process(pid).ppid() for pid in detached]
        forkserver = psutil.Process(ranks[0]).ppid()
        process.kill()
        process.wait()
        assert_nothing_is_left(tmp_path, [*detached, *ranks, forkserver], seconds)
        os.kill(child, signal.SIGKILL)
