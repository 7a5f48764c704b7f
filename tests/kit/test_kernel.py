"""Tests of jobs started from a notebook's cell, in a real kernel.

References: the operating system's list of processes, and what the kernel sends to its front end.
"""

import re

import pytest
from jupyter_client.manager import start_new_kernel

from tests.kit.ranks.jobs import gone_within, runs

IMPORTS = """
import os, time
import torch, torch.distributed as dist
from labs.kit.launch import run
def where():
    return os.getpid()
started = run(where, ranks=2)
"""
HANG = """
def hang():
    print("pid", os.getpid())
    dist.barrier()
    time.sleep(600)  # for ever
run(hang, ranks=2)
"""


@pytest.fixture(scope="module")
def kernel():
    manager, client = start_new_kernel()
    reply, _, _ = execute(client, IMPORTS)
    assert reply["status"] == "ok", reply
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def execute(client, code, until=None):
    """Run a cell. Returns its reply, its printed text and its error.

    until: return when that many "pid" lines came, with the number of the message in place of the reply
    """
    message = client.execute(code, stop_on_error=False)  # otherwise a request right after an error is dropped
    text, error = "", None
    while True:
        got = client.get_iopub_msg(timeout=300)
        if got["parent_header"].get("msg_id") != message:
            continue
        if got["msg_type"] == "stream":
            text += got["content"]["text"]
            if until and text.count("pid") == until:
                return message, text, None
        elif got["msg_type"] == "error":
            error = got["content"]
        elif got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
            return reply_to(client, message), text, error


def reply_to(client, message):
    """Return the reply to a message.

    A slow kernel's queue may still hold answers to earlier checks of whether it is ready.
    """
    while (reply := client.get_shell_msg(timeout=300))["parent_header"].get("msg_id") != message:
        pass
    return reply["content"]


def pids_in(text):
    return [int(line.split()[-1]) for line in text.splitlines() if "pid" in line]


def test_a_function_and_a_class_of_a_cell_travel(kernel):
    _, client = kernel
    code = """
class Answer:
    def __init__(self, rank):
        self.rank = rank
factor = 3
def job():
    return Answer(dist.get_rank() * factor)
answers = run(job, ranks=3)
print([a.rank for a in answers], all(isinstance(a, Answer) for a in answers))
"""
    reply, text, error = execute(client, code)
    assert reply["status"] == "ok", error
    assert text == "[0, 3, 6] True\n"


def test_a_class_of_a_cell_that_comes_back_is_still_the_cells(kernel):
    """Check that variables that cells change later count, here and in the next job; attributes set on a rank stay
    there.
    """
    _, client = kernel
    code = """
import dataclasses, enum
rate = 0.1
class Kind(enum.Enum):
    BIG = 1
@dataclasses.dataclass
class Trainer:
    kind: Kind = Kind.BIG
    count = 0
    def rate(self): return rate
def job():
    Trainer.count = 7
    class Own:
        kept = 3
    return Trainer(), Own()
before = Trainer
trainer, own = run(job, ranks=2)[1]
rate = 0.5
print(Trainer().rate(), trainer.rate(), run(lambda: Trainer().rate(), ranks=1)[0])
print(Trainer is before, type(trainer) is Trainer, trainer == Trainer(), trainer.kind is Kind.BIG)
print(Trainer.count, own.kept)
"""
    reply, text, error = execute(client, code)
    assert reply["status"] == "ok", error
    assert text == "0.5 0.5 0.5\nTrue True True True\n0 3\n"


def test_a_cached_function_of_a_cell_travels_and_a_magic_is_refused(kernel):
    _, client = kernel
    code = """
import functools
@functools.cache
def double(x): return x * factor
factor = 2
def job(): return double(dist.get_rank()), double.cache_info().hits
print(double(1), run(job, ranks=2))
factor = 3
print(run(double, 1, ranks=1))
"""
    reply, text, error = execute(client, code)
    assert reply["status"] == "ok", error
    assert text == "2 [(0, 0), (2, 0)]\n[3]\n"
    for line in ("!ls", "%time 3"):
        _, _, error = execute(client, f"def helper():\n    {line}\nrun(lambda: helper(), ranks=1)")
        assert (
            error["ename"] == "TypeError" and "a !command, which only the notebook can run: take it" in error["evalue"]
        )


def test_an_error_shows_the_cells_own_line_and_nothing_of_the_launcher(kernel):
    _, client = kernel
    code = """
def job():
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("no batch left")
run(job, ranks=2)
"""
    _, _, error = execute(client, code)
    assert error["ename"] == "RankError"
    shown = "\n".join(error["traceback"])
    assert 'Cell, line 4, in job\n    raise ValueError("no batch left")\nValueError: no batch left' in shown
    assert "labs/kit" not in shown and "ipykernel" not in shown
    assert error["evalue"].startswith("rank 1 of 2 failed: ValueError: no batch left")


def test_exit_in_a_cells_function_is_reported(kernel):
    """Call `exit`, which in a kernel is an object that holds the kernel."""
    _, client = kernel
    _, _, error = execute(client, "def job():\n    exit()\nrun(job, ranks=2)\n")
    assert "the function called exit(" in error["evalue"]


def test_a_hang_shows_the_cells_own_line(kernel):
    _, client = kernel
    code = """
def job():
    if dist.get_rank() == 1:
        return
    dist.all_reduce(torch.ones(2))
run(job, ranks=2)
"""
    _, _, error = execute(client, code)
    assert "rank 0 waits in all_reduce float32[2]   cell line 4: dist.all_reduce(torch.ones(2))" in error["evalue"]


def test_interrupting_the_kernel_stops_every_rank_and_the_next_job_runs(kernel):
    manager, client = kernel
    message, text, _ = execute(client, HANG, until=2)
    pids = pids_in(text)
    assert all(runs(pid) for pid in pids)
    manager.interrupt_kernel()
    assert gone_within(pids, 20)
    reply = reply_to(client, message)
    assert reply["ename"] == "KeyboardInterrupt" and len(reply["traceback"]) == 1
    assert re.match(r"interrupted; ranks? .* (was|were) (in|at) .*  cell line \d", reply["evalue"])
    reply, text, error = execute(client, "print(len(run(where, ranks=2)))")
    assert reply["status"] == "ok" and text == "2\n", error


def test_two_kernels_at_once_do_not_disturb_each_other(kernel):
    _, client = kernel
    other_manager, other = start_new_kernel()
    try:
        code = "def job():\n    x = torch.ones(1)\n    for _ in range(20): dist.all_reduce(x)\n    return x.item()\n"
        messages = [c.execute(f"{IMPORTS}{code}assert run(job, ranks=2) == [2.0**20] * 2") for c in (client, other)]
        for c, message in zip((client, other), messages, strict=True):
            reply = reply_to(c, message)
            assert reply["status"] == "ok", reply
    finally:
        other.stop_channels()
        other_manager.shutdown_kernel(now=True)
        other_manager.cleanup_resources()


def test_restarting_the_kernel_leaves_no_rank_and_no_fork_server(kernel):
    """Restart last: this ends the kernel that the tests share."""
    manager, client = kernel
    _, text, _ = execute(
        client, "from labs.kit.launch import FORKSERVER\nprint('pid', FORKSERVER.process.pid)\n" + HANG, until=3
    )
    pids = pids_in(text)
    manager.restart_kernel(now=True)
    assert gone_within(pids[1:], 20), "the ranks"
    assert gone_within(pids[:1], 20), "the process that forks them"
