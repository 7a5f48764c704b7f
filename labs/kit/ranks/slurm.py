"""Jobs in the queue of a Slurm cluster: run(train, ranks=16, on=Slurm(nodes=2, folder="~/jobs")).

submitit writes the batch script and submits it, and `srun` starts the ranks (slurm_rank.py).  The caller follows the
job through squeue and through files in a folder of the job's own, in the shared folder:

    ticket.json        what the caller's host has, which each rank compares first (shared_folder.py)
    N_submitted.pkl    the function and its arguments
    N_0_log.out        what srun says, and a rank that cannot take part
    output-3           what rank 3 prints
    N_3_result.pkl     the value of rank 3, or its failure

Whoever can write there could run any code here, so owner and mode of each file and of the folders above it are checked
before it is unpickled.  When the cell ends, however it ends, the job has ended or is cancelled, and its folder is gone.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labs.kit.ranks import slurm_rank
from labs.kit.ranks.diagnosis import Problem, RankError, make_error, name
from labs.kit.ranks.output import Lines, say
from labs.kit.ranks.payload import Unpickler, cell_sources
from labs.kit.ranks.shared_folder import REFUSED, check_ours, write_ticket
from labs.kit.ranks.slurm_rank import Task
from labs.kit.ranks.team import Failure, caused, interruption

POLL = 0.1  # seconds between two looks into the job's folder
GRACE = 0.5  # seconds after the first failure in which other ranks may still report theirs
SELDOM = 10.0  # seconds between two calls of squeue, at most
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}
RUNS = {"RUNNING", "COMPLETING"}
LAST = 10  # lines of the log that an error shows
DIED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
CANCELLED = re.compile(r"\*\*\* JOB \d+ (ON \S+ CANCELLED AT .+?) \*\*\*")
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
        following = Following(job, on, ranks, folder)
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


class Following:
    """A submitted job as its caller sees it: its state in the queue, the ranks' output, values and failures."""

    def __init__(self, job: Any, on: Slurm, ranks: int, folder: Path) -> None:
        self.job, self.on, self.ranks, self.folder = job, on, ranks, folder
        self.lines, self.read = Lines(ranks), [0] * ranks
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.hosts: dict[int, str] = {}
        self.problems: dict[int, Problem] = {}
        self.state, self.reason, self.first_host, self.shown = "PENDING", "", "the first host", ""
        self.began, self.asked = time.monotonic(), 0.0

    def to_the_end(self) -> list[tuple[Any, Any]]:
        """Return the values of all ranks, by rank, once they are there.  Raises RankError for the first failure."""
        wrong = None
        while len(self.values) < self.ranks:
            time.sleep(POLL)
            self.show_output()
            self.take_answers()
            self.watch_queue()
            log = self.log()
            if refused := re.search(REFUSED + "(.*)", log):
                raise RankError("refused", (), refused[1], [])
            if self.failures or self.problems or DIED.search(log) or self.state not in WAITS | RUNS:
                wrong = wrong or time.monotonic()
                all_said = len(self.values) + len(self.failures) == self.ranks or len(self.problems) == self.on.nodes
                if len(self.values) < self.ranks and (all_said or time.monotonic() > wrong + GRACE):
                    self.show_output(last=True)
                    raise self.error(log)
        self.show_output(last=True)
        return [self.values[rank] for rank in range(self.ranks)]

    # ---- what the job's folder has --------------------------------------------------------

    def show_output(self, last: bool = False) -> None:
        for rank in range(self.ranks):
            with contextlib.suppress(FileNotFoundError), open(self.folder / f"output-{rank}", "rb") as file:
                file.seek(self.read[rank])
                data = file.read()
                self.read[rank] += len(data)
                if data and "runs" not in self.shown:
                    self.ask_squeue()
                if data or last:
                    self.lines.feed(rank, data, last)

    def take_answers(self) -> None:
        self.folder.chmod(0o700)  # on NFS, this refreshes what is known of the folder
        for rank in set(range(self.ranks)) - self.values.keys() - self.failures.keys() - self.problems.keys():
            path = self.job.task(rank).paths.result_pickle if self.ranks > 1 else self.job.paths.result_pickle
            if not path.exists():
                continue
            check_ours(path)
            outcome, answer = pickle.loads(path.read_bytes())
            if outcome == "error":  # submitit's own: the task cannot be unpickled there
                self.failures[rank] = Failure(time.time(), outcome, answer.splitlines()[-1], answer)
                continue
            kind, content = answer
            if kind == "problem":
                self.problems[rank] = content
            elif kind == "error":
                *failure, self.hosts[rank] = content
                self.failures[rank] = Failure(*failure)
            else:
                self.take_value(rank, content)

    def take_value(self, rank: int, content: bytes) -> None:
        try:
            self.values[rank] = Unpickler(io.BytesIO(content)).load()
        except (Exception, SystemExit) as error:  # the class of the value may fail to load here
            sentence = f"its value cannot be read here: {error}"
            self.failures[rank] = Failure(time.time(), type(error).__name__, sentence, "")

    def log(self) -> str:
        try:
            return self.job.paths.stdout.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    # ---- what the queue says --------------------------------------------------------------

    def watch_queue(self) -> None:
        """Ask squeue now and then; raise RankError if the job has waited for too long."""
        now = time.monotonic()
        late = self.state in WAITS and now - self.began > self.on.queue
        if late or now - self.asked > min(SELDOM, (now - self.began) / 5):
            self.ask_squeue()
        if late and self.state in WAITS:
            why = f"it is {self.state} ({self.reason}), and is cancelled"
            text = f"Slurm job {self.job.job_id} has not started within {self.on.queue:g} s: {why}"
            raise RankError("refused", (), text, [])

    def ask_squeue(self) -> None:
        """Ask for the job's state, and show it: one line that changes while the job waits, and one when it runs."""
        self.asked = time.monotonic()
        command = ["squeue", "--noheader", "--states=all", f"--jobs={self.job.job_id}", "--format=%T|%r|%N|%B"]
        done = subprocess.run(command, capture_output=True, text=True)
        if "Invalid job id" in done.stderr:  # Slurm forgets a job some minutes after its end
            self.state = "ENDED"
        if done.returncode:  # slurmctld is busy: ask again later
            return
        self.state, self.reason, nodes, self.first_host = done.stdout.strip().split("|")
        waited = f"({self.reason}) … {time.monotonic() - self.began:.0f} s"
        what = f"is queued {waited}" if self.state in WAITS else f"runs on {nodes}"
        if "runs" not in self.shown and what != self.shown:
            say(f"\rSlurm job {self.job.job_id} {what:<{len(self.shown)}}" + "\n" * ("runs" in what))
            self.shown = what

    def error(self, log: str) -> RankError:
        """Return the first cause: a diagnosis, Slurm's end of the job, a rank's failure, or how the job ended."""
        if self.problems:
            first, *others = self.problems.values()
            alike = [first, *(other for other in others if other.kind == first.kind)]  # each host sees its own ranks
            sentence = "; ".join(dict.fromkeys(problem.sentence for problem in alike))
            where = sorted((each for problem in alike for each in problem.where), key=lambda each: each.rank)
            return make_error(Problem(first.kind, sentence, sum((each.ranks for each in alike), ()), where))
        if ended := CANCELLED.search(log):
            limit = f" (Slurm(time={self.on.time}), in minutes)" if "TIME LIMIT" in ended[1] else ""
            return RankError("died", (), f"Slurm ended job {self.job.job_id}: {ended[1]}{limit}", [])
        if died := DIED.search(log):  # srun itself ends the other ranks
            said = "".join(f"\n  {line}" for line in log[: died.start()].splitlines()[-LAST:])  # before its own output
            sentence = f"ended before it returned: {died[3]}{said}"
            for rank in numbers_in(died[2]):
                self.hosts[rank] = died[1]
                self.failures.setdefault(rank, Failure(time.time(), "died", sentence, ""))
        if self.failures:
            error = caused(self.failures, self.ranks, self.lines.aborts)
            hosts = " and ".join(sorted({self.hosts[rank] for rank in error.ranks if rank in self.hosts}))
            return RankError(error.kind, error.ranks, f"{error}\n{name(error.ranks)} ran on {hosts}.", error.where)
        unseen = f"no log: {self.first_host} does not see {self.folder}; name a folder that all hosts share"
        end = "\n".join(log.splitlines()[-LAST:]) or unseen
        return RankError("died", (), f"Slurm job {self.job.job_id} ended ({self.state}, {self.reason}): {end}", [])


def numbers_in(tasks: str) -> list[int]:
    """Return [0, 1, 3] for "0-1,3", as srun writes numbers of tasks."""
    spans = [part.partition("-")[::2] for part in tasks.split(",")]
    return [number for first, last in spans for number in range(int(first), int(last or first) + 1)]
