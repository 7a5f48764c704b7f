"""A small Slurm for tests: slurmctld and one slurmd per node on this machine, each with its own host name.

    with small_slurm() as cluster:                        # also sets SLURM_CONF, by which sbatch finds the cluster
        run(fn, ranks=4, on=Slurm(nodes=2, folder=cluster.folder))

Everything is in one temporary folder, on ports of 127.0.0.1 that are free, and ends with the `with` statement.  Each
node is a namespace of its own, so that `hostname` says n1 or n2, and mounts differ: n2 alone does not see what others
put into `cluster.unshared["n2"]`.  That takes root.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "setpriv")
STARTING = 20.0  # seconds until all nodes must be idle
ENDING = 10.0  # seconds for jobs, and then for daemons, to end
CONFIGURATION = """
ClusterName=small
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock,cred_expire=10
CredType=cred/munge
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=2
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000 State=UNKNOWN\n"
# All nodes share one machine, which has none of their names.
NAMESPACE = (
    "mount --bind {home}/hosts /etc/hosts && mount -t tmpfs -o mode=755,size=1m none {home}/unshared-{name} && "
    "hostname {name} && "
)


@dataclass(frozen=True)
class Cluster:
    """A running cluster: a folder that all of its nodes share, and for each node one that it alone does not share."""

    folder: Path
    unshared: dict[str, Path]


def missing() -> str:
    """Return the reason why no cluster can be started here, or ""."""
    if os.getuid() != 0:
        return "a small Slurm gives each node a host name and mounts of its own, which only root can do"
    if absent := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"not installed: {', '.join(absent)}; in Debian, slurm-wlm and munge have them"
    return "" if find_spec("submitit") else "submitit is not installed: `make learn EXTRA=clusters` adds it"


@contextmanager
def small_slurm(nodes: int = 2) -> Iterator[Cluster]:
    """Start a cluster, set SLURM_CONF, and stop everything at the end."""
    before = os.environ.get("SLURM_CONF")
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="labs-slurm-", ignore_cleanup_errors=True)))
        names = tuple(f"n{number + 1}" for number in range(nodes))
        configure(home, names)
        os.environ["SLURM_CONF"] = str(home / "slurm.conf")
        stack.callback(restore, before)
        daemons: list[subprocess.Popen] = []
        stack.callback(stop, daemons)
        files = [f"--{what}-file={home}/munge.{what}" for what in ("key", "seed", "log", "pid")]
        daemons += [start("munged", "--foreground", "--force", f"--socket={home}/munge.sock", *files)]
        wait((home / "munge.sock").exists, STARTING, "munged has not started")
        daemons += [start("slurmctld", "-D", "-c")]
        for name in names:
            slurmd = (NAMESPACE + "exec slurmd -D -N {name}").format(home=home, name=name)
            daemons += [start("unshare", "-m", "-u", "sh", "-c", slurmd)]
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        wait(lambda: said(*idle) == str(nodes), STARTING, "the nodes are not idle")
        yield Cluster(home / "shared", {name: home / f"unshared-{name}" for name in names})


def configure(home: Path, names: tuple[str, ...]) -> None:
    each = [f"{folder}-{name}" for folder in ("spool", "unshared") for name in names]
    for folder in ("state", "shared", *each):
        (home / folder).mkdir(mode=0o755)
    host = socket.gethostname()
    (home / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", host, *names)))
    ports = free_ports(1 + len(names))
    text = CONFIGURATION.format(home=home, host=host, user=getpass.getuser(), ports=ports)
    text += "".join(NODE.format(name=name, port=port) for name, port in zip(names, ports[1:], strict=True))
    text += f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=60 State=UP\n"
    (home / "slurm.conf").write_text(text)
    (home / "munge.key").touch(mode=0o600)
    (home / "munge.key").write_bytes(os.urandom(128))


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def start(*command: str) -> subprocess.Popen:
    """Run a daemon in the foreground; the kernel ends it if this process is killed."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], **quiet)


def stop(daemons: list[subprocess.Popen]) -> None:
    """End all jobs, then all daemons, which are told at once."""
    said("scancel", "--signal=KILL", "--user", getpass.getuser())
    said("scancel", "--user", getpass.getuser())
    try:
        wait(lambda: not jobs(), ENDING, "jobs have not ended")
    finally:
        for process in reversed(daemons):
            process.terminate()
        for process in daemons:
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in left_of_jobs(os.environ["SLURM_CONF"]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def left_of_jobs(configuration: str) -> list[int]:
    """Return the processes of this cluster's jobs that are still there, as after a node was taken down.

    psutil does not read the environment of slurmstepd, which writes its title over the first bytes.
    """
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            environment = (folder / "environ").read_bytes().split(b"\0")
            is_step = (folder / "comm").read_text() == "slurmstepd\n"
            in_a_job = is_step or any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)
            if in_a_job and f"SLURM_CONF={configuration}".encode() in environment:
                left.append(int(folder.name))
    return left


def restore(before: str | None) -> None:
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before


def jobs() -> list[str]:
    """Return the numbers of the jobs that wait, run, or are ending."""
    return said("squeue", "-h", "-o", "%A").split()


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def wait(true: object, seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} after {seconds:g} s")
        time.sleep(0.02)
