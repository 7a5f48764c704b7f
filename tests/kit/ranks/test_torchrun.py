"""Under torchrun: the same words for the same faults, the timeout, and an end without an abort.

Reference: torchrun's own exit status, and faults planted in a known rank.
"""

import os
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import sys, time, torch, torch.distributed as dist
from labs.kit.launch import run
"""


def torchrun(folder, body, ranks=2):
    """Run a script under torchrun; what has ended, its temporary files in `folder`."""
    file = folder / "job.py"
    file.write_text(HEAD + textwrap.dedent(body))
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(file)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )


def left_in(folder):
    return [path.name for path in (folder / "temporary").iterdir() if path.name.startswith("labs-")]


def test_the_timeout_counts_and_says_where_each_rank_stands(tmp_path):
    body = """
    def job():
        if dist.get_rank() == 1:
            while True:
                time.sleep(0.01)  # planted loop
        dist.all_reduce(torch.ones(2))
    run(job, timeout=3)
    """
    done = torchrun(tmp_path, body)
    assert done.returncode and "RankError: the job was not done after 3 s: rank 1 is still at work" in done.stderr
    assert "rank 0 waits in all_reduce float32[2]   job.py line 9: dist.all_reduce(torch.ones(2))" in done.stderr
    assert "# planted loop" in done.stderr and left_in(tmp_path) == []


def test_a_disagreement_is_told(tmp_path):
    """One that gloo completes; over different sizes it may abort the process before anybody looks."""
    body = """
    def job():
        dist.barrier()
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32))
        time.sleep(60)
    run(job)
    """
    done = torchrun(tmp_path, body)
    told = "rank 0 called all_reduce float32[2], rank 1 called all_reduce int32[2]"
    assert done.returncode and f"the ranks do not agree on collective number 2 of all ranks: {told}" in done.stderr


def test_a_rank_that_returns_is_told(tmp_path):
    body = """
    def job():
        if dist.get_rank() == 0:
            dist.barrier()
    run(job)
    """
    done = torchrun(tmp_path, body)
    told = "RankError: rank 1 returned without joining collective number 1 of all ranks, barrier, which rank 0 called"
    assert done.returncode and told in done.stderr


def test_several_jobs_one_after_another(tmp_path):
    body = """
    from labs.kit.watch import tap
    def job(k):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(k), group=group)
        return dist.get_rank() + k
    for k in range(3):
        assert run(job, k) == [k, k + 1]
        assert not tap.listeners and not tap._outstanding and not tap._by_storage
    print("done")
    """
    done = torchrun(tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
    assert left_in(tmp_path) == []


ENDS = """
def job():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(2), async_op=True)
    dist.barrier()
run(job, record="communication")
"""


def ends_well(folder, times):
    for _ in range(times):
        done = torchrun(folder, ENDS)
        assert done.returncode == 0, done.stderr


def test_a_recorded_job_ends_without_an_abort(tmp_path):
    ends_well(tmp_path, 1)


@pytest.mark.soak
def test_50_recorded_jobs_end_without_an_abort(tmp_path):
    ends_well(tmp_path, 50)
