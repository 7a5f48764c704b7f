"""Tests under torchrun: the same words for the same faults, the timeout, and an end without an abort.

References: torchrun's own exit status, and faults planted in a known rank.
"""

import os
import re
import subprocess

import pytest

from tools import warm

JOBS = """
import torch, torch.distributed as dist
from labs.kit.launch import run
from labs.kit.watch import c10d_tap
def job(k):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(k), group=group)
    return dist.get_rank() + k
for k in range(3):
    assert run(job, k) == [k, k + 1]
    assert not c10d_tap.listeners and not c10d_tap._outstanding and not c10d_tap._by_storage
def last():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(2), async_op=True)
    dist.barrier()
run(last, record="communication")
print("done")
"""

# Starting torchrun takes longer than all these jobs, so each job runs in a fork of its ranks, with its own keys in
# their store. If one rank ends badly, the other is ended, as by torchrun. The last job, which must not return, is
# torchrun's own.
FAULTS = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch, torch.distributed as dist
from labs.kit.launch import run

def joins():
    def job():
        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_rank(), x.item()
    assert run(job) == [(0, 2.0), (1, 2.0)]
    try:
        run(job, ranks=3)
    except ValueError as error:
        print(error, file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()

def disagrees():
    def job():
        dist.barrier()
        # Over different sizes gloo may abort the process before anybody looks.
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32))
        time.sleep(60)
    run(job)

def returns():
    def job():
        if dist.get_rank() == 0:
            dist.barrier()
    run(job)

def loops():
    def job():
        if dist.get_rank() == 1:
            while True:
                time.sleep(0.01)  # planted loop
        dist.all_reduce(torch.ones(2))
    run(job, timeout=3)

def own_store(name):
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dict(store=dist.PrefixStore(name, agents), rank=rank, world_size=ranks)

def in_forks(test):
    name, failed = test.__name__, Path(f"{sys.argv[0]}.{test.__name__}")
    if (child := os.fork()) == 0:
        dist.init_process_group = partial(dist.init_process_group, **own_store(name))
        test()
        sys.exit()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if failed.exists():
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    if ended[1]:
        failed.touch()
    print(name, "ended badly" if ended[1] else "ended well", flush=True)

in_forks(joins)
in_forks(disagrees)
in_forks(returns)
loops()
"""


def torchrun(folder, script):
    """Run a script under torchrun, on two ranks, and return the ended process; none of its temporary files is left."""
    file, temporary = folder / "job.py", folder / "temporary"
    file.write_text(script)
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )
    assert [path.name for path in temporary.iterdir() if path.name.startswith("labs-")] == []
    return done


def jobs_end_well(folder, times):
    for _ in range(times):
        done = torchrun(folder, JOBS)
        assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_several_jobs_and_a_recorded_one_end_without_an_abort(tmp_path):
    jobs_end_well(tmp_path, 1)


@pytest.mark.soak
def test_50_recorded_jobs_end_without_an_abort(tmp_path):
    jobs_end_well(tmp_path, 50)


def test_a_fault_is_reported_and_the_timeout_counts_and_says_where_each_rank_stands(tmp_path):
    done = torchrun(tmp_path, FAULTS)
    assert done.returncode, "the last one's"
    assert sorted(re.findall(r"\w+ ended \w+", done.stdout)) == [
        *["disagrees ended badly"] * 2,
        *["joins ended well"] * 2,
        *["returns ended badly"] * 2,
    ], done.stderr
    assert done.stderr.count("ranks=3, but torchrun started 2") == 2
    for told in (
        "the ranks do not agree on collective number 2 of all ranks: "
        "rank 0 called all_reduce float32[2], rank 1 called all_reduce int32[2]",
        "rank 1 returned without joining collective number 1 of all ranks, barrier, which rank 0 called",
        "the job was not done after 3 s: rank 1 is still at work",
    ):
        assert f"RankError: {told}" in done.stderr
    assert re.search(r"rank 0 waits in all_reduce float32\[2\]   job.py line \d+: dist.all_reduce", done.stderr)
    assert "# planted loop" in done.stderr
