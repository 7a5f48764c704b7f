"""A job in the queue of a Slurm cluster, as its caller follows it to the end (slurm.py lists the files that it reads).

to_the_end    shows the job's state and the ranks' output, and returns their values
take_answers  reads what ranks have answered, from files that only this user can have written
watch_queue   asks squeue now and then; what waits for too long is refused
error         finds the first cause of a failure, with the host's name
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from labs.kit.ranks.diagnosis import Problem, RankError, make_error, name
from labs.kit.ranks.output import Lines, say
from labs.kit.ranks.payload import Unpickler
from labs.kit.ranks.shared_folder import REFUSED, check_ours
from labs.kit.ranks.team import Failure, caused

POLL = 0.1  # seconds between two looks into the job's folder
GRACE = 0.5  # seconds after the first failure in which other ranks may still report theirs
SELDOM = 10.0  # seconds between two calls of squeue, at most
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}
RUNS = {"RUNNING", "COMPLETING"}
LAST = 10  # lines of the log that an error shows
DIED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
SLURM_SAYS = re.compile(r"(srun|slurmstepd\S*): ")
CANCELLED = re.compile(r"\*\*\* JOB \d+ (ON \S+ CANCELLED AT .+?) \*\*\*")


class Following:
    """A submitted job as its caller sees it: its state in the queue, the ranks' output, values and failures.

    job      submitit's handle
    folder   the job's own folder, in which the ranks write
    ranks, nodes   how many there are
    minutes  Slurm's limit of the job's time
    queue    seconds that the job may wait for its nodes
    """

    def __init__(self, job: Any, folder: Path, ranks: int, nodes: int, minutes: int, queue: float) -> None:
        self.job, self.folder, self.ranks, self.nodes = job, folder, ranks, nodes
        self.minutes, self.queue = minutes, queue
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
                all_said = len(self.values) + len(self.failures) == self.ranks or len(self.problems) == self.nodes
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
        late = self.state in WAITS and now - self.began > self.queue
        if late or now - self.asked > min(SELDOM, (now - self.began) / 5):
            self.ask_squeue()
        if late and self.state in WAITS:
            why = f"it is {self.state} ({self.reason}), and is cancelled"
            text = f"Slurm job {self.job.job_id} has not started within {self.queue:g} s: {why}"
            raise RankError("refused", (), text, [])

    def ask_squeue(self) -> None:
        """Ask for the job's state, and show it: one line that changes while the job waits, and one when it runs."""
        self.asked = time.monotonic()
        command = ["squeue", "--noheader", "--states=all", f"--jobs={self.job.job_id}", "--format=%T|%r|%N|%B"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            said, problem = process.communicate()
        except KeyboardInterrupt:  # communicate() does not wait for the end of squeue then
            process.communicate()
            raise
        if "Invalid job id" in problem:  # Slurm forgets a job some minutes after its end
            self.state = "ENDED"
        if process.returncode:  # slurmctld is busy: ask again later
            return
        self.state, self.reason, nodes, self.first_host = said.strip().split("|")
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
            limit = f" (Slurm(time={self.minutes}), in minutes)" if "TIME LIMIT" in ended[1] else ""
            return RankError("died", (), f"Slurm ended job {self.job.job_id}: {ended[1]}{limit}", [])
        if died := DIED.search(log):  # srun itself ends the other ranks
            # srun may write its own line before the last that a rank said
            lines = [line for line in log.splitlines() if not SLURM_SAYS.match(line)]
            said = "".join(f"\n  {line}" for line in lines[-LAST:])
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
