"""Tests that a job leaves nothing behind, however it ends: no process, file or thread.

test_worker.py tests a job whose caller ends.
"""

import contextlib
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from labs.kit.launch import RankError, run
from labs.kit.ranks import forkserver
from labs.kit.ranks.devices import devices_for
from labs.kit.ranks.payload import pickled
from labs.kit.ranks.team import FORKSERVER, Team


def possessions():
    """Return what this process owns that a launch could leak, and the files of jobs in the temporary folder."""
    me = psutil.Process()
    files = os.listdir(tempfile.gettempdir())
    ranks = [p for p in psutil.Process(FORKSERVER.process.pid).children(recursive=True)]
    return me.num_fds(), me.num_threads(), len(ranks), len(files)


def come_back_to(before, seconds):
    deadline = time.monotonic() + seconds
    while possessions() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return possessions() == before


def soak_launches(times):
    def good():
        x = torch.ones(2)
        dist.all_reduce(x)
        return x[0].item()

    def bad():
        raise ValueError

    run(good, ranks=2)
    with pytest.raises(RankError):
        run(bad, ranks=2)
    before = possessions()
    for i in range(times):
        if i % 5 == 4:
            with pytest.raises(RankError):
                run((bad, dies, leaves)[i // 5 % 3], ranks=2)
        else:
            assert run(good, ranks=2) == [2.0, 2.0]
    assert possessions() == before


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    if dist.get_rank() == 0:
        dist.barrier()


def test_launches_leave_nothing_behind(own_folder):
    soak_launches(20)


@pytest.mark.soak
def test_500_launches_leave_nothing_behind(own_folder):
    soak_launches(500)


def spurious(times):
    """Run good jobs that end with DDP, where torch's own teardown aborts now and then: all must succeed."""

    def job():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        return dist.get_rank()

    for _ in range(times):
        assert run(job) == [0, 1, 2, 3]


def test_good_launches_never_fail():
    spurious(10)


@pytest.mark.soak
def test_1000_good_launches_never_fail():
    spurious(1000)


def test_an_interrupt_while_ranks_start_does_not_confuse_the_next_job(own_folder):
    """Stop the process that forks: it is then as slow to answer as in its first two seconds."""
    forks = psutil.Process(FORKSERVER.process.pid)
    before = possessions()
    heard = threading.Event()

    def interrupt():
        """Interrupt again if Python was in a finalizer, where it ignores what is raised."""
        seconds = 0.2
        while not heard.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)
            seconds = 10

    forks.suspend()
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run(time.sleep, 60, ranks=2)
    finally:
        heard.set()
        forks.resume()
    with Team(devices_for("cpu", 2), pickled(os.getpid, (), {}), 2, 60, None) as team:
        assert [value for value, _ in team.finish()] == [team.pids[0], team.pids[1]]
    assert come_back_to(before, 2)


def test_a_second_interrupt_leaves_nothing_behind(own_folder, monkeypatch):
    run(dist.get_rank, ranks=2)
    before = possessions()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Team, "hear", interrupted)
        run(time.sleep, 60, ranks=2)
    assert come_back_to(before, 2)


def test_when_the_process_that_forks_is_killed_an_error_says_so_and_the_next_job_runs():
    threading.Timer(0.3, lambda: FORKSERVER.process.kill()).start()
    with pytest.raises(RankError, match="the process that starts ranks was killed"):
        run(time.sleep, 60, ranks=2)
    assert run(dist.get_rank, ranks=2) == [0, 1]


@pytest.mark.soak
def test_thirty_launches_side_by_side():
    """Launch thirty at once; test_kernel.py launches two."""
    code = """
import torch, torch.distributed as dist
from labs.kit.launch import run
def job():
    x = torch.ones(100)
    for _ in range(10):
        dist.all_reduce(x)
    return x[0].item()
assert run(job, ranks=2) == [2.0**10] * 2
"""
    started = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(30)]
    for process in started:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err


def test_jobs_from_threads_of_one_process():
    answers = {}

    def one(k):
        answers[k] = run(lambda: k + dist.get_rank(), ranks=2)

    threads = [threading.Thread(target=one, args=(10 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {10 * k: [10 * k, 10 * k + 1] for k in range(4)}


def test_only_loopback_and_no_fixed_port():
    def job():
        dist.barrier()
        return [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]

    listening = [address for value in run(job) for address in value]
    assert listening and {a.ip for a in listening} <= {"127.0.0.1", "::1"}
    assert len({a.port for a in listening}) == len(listening)


def in_large_pages(pid):
    """Return the kB of a process in large pages."""
    return int(re.search(r"AnonHugePages:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[1])


def a_large_page_can_be_had():
    if not Path("/proc/self/smaps_rollup").exists():
        return False
    memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(8 << 20))
    with contextlib.suppress(OSError):
        memory.madvise(forkserver.MADV_COLLAPSE)
    return in_large_pages(os.getpid()) > 0


@pytest.mark.skipif(not a_large_page_can_be_had(), reason="needs Linux 6.1, with huge pages")
def test_what_ranks_begin_with_lies_in_large_pages():
    """Check large pages, with which a launch takes about half of the kernel's time."""
    run(dist.get_rank, ranks=1)
    assert in_large_pages(FORKSERVER.process.pid) > 0
