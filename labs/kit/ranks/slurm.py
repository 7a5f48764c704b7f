"""Jobs in the queue of a Slurm cluster: run(train, ranks=16, on=Slurm(nodes=2, folder="~/jobs")).

submitit writes the batch script and submits it, and `srun` starts the ranks (slurm_rank.py).  The caller follows the
job (slurm_job.py) through squeue and through files in a folder of the job's own, in the shared folder:

    ticket.json        what the caller's host has, which each rank compares first (shared_folder.py)
    N_submitted.pkl    the function and its arguments
    N_0_log.out        what srun says, and a rank that cannot take part
    output-3           what rank 3 prints
    N_3_result.pkl     the value of rank 3, or its failure

Whoever can write there could run any code here, so owner and mode of each pickle, and of the folders above it, are
checked before it is read.  When the cell ends, however it ends, the job has ended or is cancelled, and its folder is
gone.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labs.kit.ranks import slurm_rank
from labs.kit.ranks.diagnosis import RankError
from labs.kit.ranks.output import say
from labs.kit.ranks.payload import cell_sources
from labs.kit.ranks.shared_folder import check_ours, write_ticket
from labs.kit.ranks.slurm_job import Following
from labs.kit.ranks.slurm_rank import Task
from labs.kit.ranks.team import interruption

UNITS = {"nodes": "nodes", "time": "whole minutes", "queue": "seconds"}
COURSE = Path(__file__).parents[3]


@dataclass(frozen=True)
class Slurm:
    """Nodes of a Slurm cluster, for run(..., on=).

    nodes        number of nodes, among which the ranks are divided evenly
    folder       a folder that all hosts share and only this user can write, such as one in the home
    partition, account, reservation   as `sbatch` takes them
    time         minutes after which Slurm ends the job
    queue        seconds that the job may wait for its nodes, after which it is cancelled
    setup        lines of shell that run before the ranks start: ("module load cuda",)
    options      further options of `sbatch`: {"gpus-per-node": 4}

    Raises ValueError for a value that cannot work.
    """

    nodes: int
    folder: str | Path
    partition: str | None = None
    account: str | None = None
    reservation: str | None = None
    time: int = 10
    queue: float = 600.0
    setup: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, kind in (("nodes", int), ("time", int), ("queue", int | float)):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, kind) or not value >= 1:
                raise ValueError(f"Slurm({what}={value!r}): give a number of {UNITS[what]}, 1 or more")

    def share(self, ranks: int) -> int:
        """Return the number of ranks per node.  Raises ValueError if the nodes do not divide the ranks."""
        if ranks % self.nodes:
            raise ValueError(
                f"ranks={ranks} on Slurm(nodes={self.nodes}): every node has the same number of ranks, so give a "
                f"multiple of {self.nodes} ranks, or as many nodes as divide {ranks}"
            )
        return ranks // self.nodes


def run_on(
    on: Slurm, payload: bytes, ranks: int, device: str, timeout: float, record: str | None, settings: dict[str, Any]
) -> list[tuple[Any, Any]]:
    """Submit a job, follow it to its end, and return (value, recording) of every rank, by rank.

    Raises RuntimeError where there is no Slurm, ValueError for a folder that cannot be used, and RankError otherwise.
    """
    per_node = on.share(ranks)
    if not shutil.which("sbatch"):
        raise RuntimeError(
            "on=Slurm(...): there is no sbatch here: call this on a login node of a cluster with Slurm, or leave `on` "
            "out, or start a script with torchrun"
        )
    if not find_spec("submitit"):
        raise ModuleNotFoundError("on=Slurm(...) needs submitit: `make learn EXTRA=clusters`, or pip install submitit")
    with own_folder(Path(on.folder)) as folder:
        before = os.umask(slurm_rank.OURS)
        try:
            task = Task(device, timeout, record, str(folder), list(sys.path), cell_sources(), settings, before)
            job = submit(on, folder, per_node, payload, task)
        finally:
            os.umask(before)
        following = Following(job, folder, ranks, on.nodes, on.time, on.queue)
        try:
            return following.to_the_end()
        except BaseException as error:
            job.cancel(check=False)
            if "runs" not in following.shown:
                say("\n")
            if isinstance(error, KeyboardInterrupt):
                raise interruption(f"interrupted; Slurm job {job.job_id} is cancelled") from None
            raise


@contextlib.contextmanager
def own_folder(shared: Path) -> Iterator[Path]:
    """Make a folder for one job in the shared folder, with a ticket for the ranks to find; remove it at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="labs-", dir=shared.expanduser().resolve()))
    except OSError as error:
        raise ValueError(
            f"Slurm(folder={str(shared)!r}): {error.strerror}: name a folder that exists, that you can write, and that "
            "all hosts share"
        ) from None
    try:
        check_ours(folder)
        write_ticket(folder)
        yield folder
    except PermissionError as error:
        raise ValueError(f"Slurm(folder={str(shared)!r}): {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a rank that is being cancelled may still write


def submit(on: Slurm, folder: Path, per_node: int, payload: bytes, task: Task) -> Any:
    """Submit the job; return submitit's handle.  Raises RankError with sbatch's own words if the queue refuses it."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.helpers import clean_env

    executor = SlurmExecutor(folder, python=f"{shlex.quote(sys.executable)} -m labs.kit.ranks.shared_folder")
    wanted = {"partition": on.partition, "account": on.account, "reservation": on.reservation}
    executor.update_parameters(
        job_name="labs",
        nodes=on.nodes,
        ntasks_per_node=per_node,
        time=on.time,
        signal_delay_s=0,  # no signal before the time limit: run() saves nothing
        stderr_to_stdout=True,
        srun_args=["--output=all", "--kill-on-bad-exit=1"],
        setup=[f"export PYTHONPATH={shlex.quote(str(COURSE))}${{PYTHONPATH:+:$PYTHONPATH}}", *on.setup],
        additional_parameters={"no-requeue": True, **{what: of for what, of in wanted.items() if of}, **on.options},
    )
    cluster = {"SLURM_CONF": path} if (path := os.environ.get("SLURM_CONF")) else {}
    try:
        with clean_env(), contextlib.redirect_stderr(io.StringIO()):  # a notebook may itself run in a Slurm job
            os.environ.update(cluster)
            return executor.submit(slurm_rank.work, payload, task)
    except (FailedJobError, FailedSubmissionError) as error:
        words = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).splitlines())
        raise RankError("refused", (), f"sbatch does not accept the job: {words}", []) from None
