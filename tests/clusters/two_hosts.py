"""Two hosts on one machine: namespaces with a network link between them, in which torchrun starts a job.

    with two_hosts() as hosts:                            # Linux, as root
        job = Torchrun(hosts, folder, "-m", "labs", "train", "--steps", "4")
        job.finish()                                      # the exit status of torchrun on each host
        job.said(hosts[1])                                # what torchrun and ranks there have printed

Each host has an address, a name that `hostname` says, and a file /etc/hosts that knows both.  A host is a process that
holds its namespaces: the kernel ends it and torchrun with this process, and removes namespaces and link with the last
process in them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ("ip", "nsenter", "setpriv", "tc", "unshare")
BOUND = ("setpriv", "--pdeathsig", "KILL")  # the kernel ends what these words start if this process is killed
LINK = "link0"  # the name of either end
PORT = 29400  # of the rendezvous; nothing else runs on the host
STARTING = 10.0  # seconds until the hosts must be there
ROOM = "2g"  # bytes of the hosts' disk, which is in memory
# Host 1 has the mounts of host 0, and so the same disk.
MOUNT = f'mount --bind "$1/names" /etc/hosts && mount -t tmpfs -o size={ROOM} disk "$1/disk" && '
HOLD = 'hostname "$2" && ip link set lo up && exec sleep infinity'
HEADS = 66  # bytes of the heads of Ethernet, IP and TCP, with its time stamps, in each packet that an interface counts
RANK = re.compile(rb"(?:^|\0)RANK=(\d+)\0")


@dataclass(frozen=True)
class Host:
    """One of the two hosts; holder: the process that has its namespaces; disk: a small disk that both hosts share."""

    name: str
    address: str
    holder: int
    disk: Path

    def command(self, *words: str) -> list[str]:
        """Return the command that runs these words on the host."""
        return [*BOUND, "nsenter", f"--target={self.holder}", "--net", "--uts", "--mount", f"--wdns={ROOT}", *words]

    @property
    def disk_from_outside(self) -> Path:
        """Return the path by which this process sees the disk."""
        return Path(f"/proc/{self.holder}/root{self.disk}")

    def do(self, *words: str) -> str:
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True).stdout

    def link(self, state: str) -> None:
        """Take the link up or down."""
        self.do("ip", "link", "set", LINK, state)

    def processes(self) -> list[int]:
        """Return the processes that run on the host, apart from its holder."""
        place = network(self.holder)
        numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in numbers if network(pid) == place and pid != self.holder]


def network(pid: int) -> str:
    """Return the network namespace of a process; "" if the process has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def crossed() -> dict[str, int]:
    """Return the bytes that have left this host and have come to it over the link, without the packets' heads.

    These are the interface's own counters; any process on the host can read them.
    """
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line.split() for line in lines if line.strip().startswith(f"{LINK}:"))
    return {way: int(counters[at]) - HEADS * int(counters[at + 1]) for way, at in (("in", 1), ("out", 9))}


def missing() -> str:
    """Return the reason why there cannot be two hosts here, or ""."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "two hosts on one machine are namespaces, which only Linux has, and only root may make"
    if absent := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"not installed: {', '.join(absent)}; in Debian, iproute2 and util-linux have them"
    made = subprocess.run(["unshare", "-nmu", "ip", "link", "add", "type", "veth"], capture_output=True, text=True)
    return f"two hosts cannot be linked here: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link between them; at the end, kill all that runs on them."""
    with tempfile.TemporaryDirectory(prefix="labs-hosts-") as folder:
        disk, addresses = Path(folder, "disk"), {"host0": "10.77.0.1", "host1": "10.77.0.2"}
        disk.mkdir()
        known = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        Path(folder, "names").write_text("\n".join([*known, ""]))
        hosts, holders = [], []
        try:
            for name, address in addresses.items():
                inside = ["nsenter", f"--target={hosts[0].holder}", "--mount"] if hosts else []
                script = HOLD if hosts else MOUNT + HOLD
                hold = [*inside, "unshare", "-nmu", "sh", "-c", script, "hold", folder, name]
                holders.append(subprocess.Popen([*BOUND, *hold]))
                hosts.append(Host(name, address, holders[-1].pid, disk))
                wait(lambda: is_up(hosts[-1]), STARTING, f"{name} has not started")
            other = ["peer", "name", LINK, "netns", str(hosts[1].holder)]
            hosts[0].do("ip", "link", "add", LINK, "type", "veth", *other)
            for host in hosts:
                host.do("ip", "addr", "add", f"{host.address}/24", "dev", LINK)
                host.link("up")
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                for pid in host.processes():
                    kill(pid)
            for holder in holders:
                holder.kill()
                holder.wait()


def is_up(host: Host) -> bool:
    return Path(f"/proc/{host.holder}/comm").read_text() == "sleep\n"


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):  # it has ended just now
        os.kill(pid, number)


def wait(true: Callable[[], object], seconds: float, problem: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} after {seconds:g} s")
        time.sleep(0.02)


class Torchrun:
    """A job on two hosts: torchrun, which meets the other host's by c10d's rendezvous, on each.

    program: what each rank runs, as after `python`
    ranks: the number of ranks on each host
    restarts: torchrun's --max-restarts
    join: the seconds in which the other host must come, at the start and after a failure
    """

    def __init__(
        self,
        hosts: tuple[Host, Host],
        folder: Path,
        *program: str,
        ranks: int = 2,
        restarts: int = 0,
        join: int = 60,
    ) -> None:
        self.hosts, self.folder = hosts, folder
        self.agents = {}
        for number, host in enumerate(hosts):
            settings = {"is_host": int(number == 0), "join_timeout": join, "last_call_timeout": 1}
            options = {
                "nnodes": 2,
                "nproc-per-node": ranks,
                "max-restarts": restarts,
                "rdzv-backend": "c10d",
                "rdzv-endpoint": f"{hosts[0].address}:{PORT}",
                "rdzv-id": "two-hosts",
                "rdzv-conf": ",".join(f"{key}={value}" for key, value in settings.items()),
                "local-addr": host.address,
                "monitor-interval": 0.1,
            }
            flags = [f"--{key}={value}" for key, value in options.items()]
            with self.file(host).open("w") as file:
                self.agents[host.name] = subprocess.Popen(
                    host.command(sys.executable, "-m", "torch.distributed.run", *flags, *program),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **ENVIRONMENT},
                )

    def file(self, host: Host) -> Path:
        return self.folder / f"{host.name}.txt"

    def said(self, host: Host) -> str:
        return self.file(host).read_text()

    def ranks(self) -> dict[int, int]:
        """Return {rank: process} of the ranks that run now."""
        found = {}
        for host in self.hosts:
            for pid in host.processes():
                with suppress(OSError):
                    is_child = f"\nPPid:\t{self.agents[host.name].pid}\n" in Path(f"/proc/{pid}/status").read_text()
                    if is_child and (rank := RANK.search(Path(f"/proc/{pid}/environ").read_bytes())):
                        found[int(rank[1])] = pid
        return found

    def finish(self, seconds: float) -> list[int]:
        """Wait until torchrun has ended on both hosts, and return its exit statuses."""
        wait(lambda: all(agent.poll() is not None for agent in self.agents.values()), seconds, "the job has not ended")
        return [agent.returncode for agent in self.agents.values()]


ENVIRONMENT: Mapping[str, str] = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": LINK,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see labs/kit/ranks/torchrun.py
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch would warn in C++ that no name is found for an address
}
