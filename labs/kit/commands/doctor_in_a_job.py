"""The doctor of a job: `python -m labs doctor`, started by torchrun on every host of a shared machine.

$ torchrun --nnodes 2 --nproc-per-node 2 ... -m labs doctor
ok    versions   PyTorch 2.13.0, gloo, on node1, node2
ok    names      every host resolves the names of all hosts
warn  clock      node2 is 3.2 s ahead of node1
...

Each rank collects what it sees (`survey`), and all ranks send it to the first, which compares and prints.
"""

import os
import resource
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist

from labs.collectives import all_reduce
from labs.cost import LINKS
from labs.kit.commands.doctor import GiB, ReportLine
from labs.kit.launch import run

SMALL, LARGE, TIMES = 1, 2**20, 10  # numbers of a message, and messages of each size
CLOCK = 1.0  # seconds by which hosts may differ, before logs of two hosts are hard to compare
FILES, SHARED = 1024, GiB // 4  # open files, and bytes of /dev/shm, below which jobs of several ranks fail


@dataclass(frozen=True)
class Survey:
    """A rank's view of its host; unresolved: the hosts whose names it cannot resolve."""

    host: str
    versions: str
    gpus: tuple[str, ...]
    interfaces: tuple[str, ...]
    unresolved: tuple[str, ...]
    files: int
    locked: int
    shared: int
    folder: bool
    ahead: float


def survey(folder: str) -> tuple[list[Survey], dict[str, tuple[float, float]]]:
    """Return what each rank sees, and {"inside a host" or "between hosts": (seconds of latency, bytes per second)}."""
    rank, host = dist.get_rank(), socket.gethostname()
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    probe = Path(folder, f".doctor-{os.environ['TORCHELASTIC_RUN_ID']}")
    if rank == 0:
        probe.touch()
    dist.barrier()
    count = torch.cuda.device_count()
    mine = Survey(
        host,
        f"PyTorch {torch.__version__}, {dist.get_backend()}",
        tuple(torch.cuda.get_device_name(number) for number in range(count)),
        tuple(name for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"),
        tuple(name for name in dict.fromkeys(hosts) if not resolves(name)),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else -1,  # macOS has none, and needs none
        probe.exists(),
        ahead(),
    )
    seen: list[Survey] = [mine] * len(hosts)
    dist.all_gather_object(seen, mine)
    if rank == 0:
        probe.unlink()
    inside = next(([0, other] for other in range(1, len(hosts)) if hosts[other] == hosts[0]), None)
    between = next(([0, other] for other in range(1, len(hosts)) if hosts[other] != hosts[0]), None)
    links = {"inside a host": inside, "between hosts": between}
    return seen, {name: measured(pair) for name, pair in links.items() if pair}


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def ahead() -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's, known to half of a message's way and back."""
    dist.barrier()
    began = time.time()
    first = [began]
    dist.broadcast_object_list(first)
    return (began + time.time()) / 2 - first[0]


def measured(pair: list[int]) -> tuple[float, float]:
    """Return latency and bandwidth between two ranks, by the course's all-reduce; all ranks call this function."""
    group = dist.new_group(pair)
    found = (0.0, 0.0)
    if dist.get_rank() in pair:
        small, large = (seconds(torch.zeros(size), group) for size in (SMALL, LARGE))
        found = small, 4 * LARGE / max(large - small, 1e-9)  # each of two ranks sends as many bytes as the tensor has
    dist.barrier()
    return found


def seconds(x: torch.Tensor, group: dist.ProcessGroup) -> float:
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        all_reduce(x, group=group)
        float(x[0])  # waits for a GPU
        times.append(time.perf_counter() - began)
    return median(times)


def report(seen: list[Survey], links: dict[str, tuple[float, float]]) -> Iterator[ReportLine]:
    by_host = {each.host: each for each in seen}
    hosts = ", ".join(by_host)
    versions = grouped(by_host, lambda each: each.versions)
    same = (
        "" if len(versions) == 1 else "all hosts need the same environment: set it up in a folder that all of them see"
    )
    yield ReportLine("FAIL" if same else "ok", "versions", told(versions), same)
    yield ReportLine("ok", "GPUs", told(grouped(by_host, lambda each: ", ".join(each.gpus) or "none")))
    yield ReportLine("ok", "interfaces", told(grouped(by_host, lambda each: ", ".join(each.interfaces) or "none")))
    chosen = {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name in os.environ}
    yield ReportLine("ok", "chosen", str(chosen or "no interface by name: the backends take one themselves"))
    lost = {each.host: each.unresolved for each in seen if each.unresolved}
    how = "ask for the names in DNS or /etc/hosts, or give torchrun --local-addr with each host's own address"
    yield line("warn", "names", lost and f"not resolved: {lost}", "every host resolves the names of all hosts", how)
    blind = ", ".join(dict.fromkeys(each.host for each in seen if not each.folder))
    how = "start the job in a folder that all hosts see"
    yield line(
        "FAIL", "folder", blind and f"{blind} does not see rank 0's folder", "every host sees the job's folder", how
    )
    late = {host: round(each.ahead, 1) for host, each in by_host.items() if abs(each.ahead) > CLOCK}
    how = "ask for NTP: the logs of hosts whose clocks differ mislead"
    yield line("warn", "clock", late and f"seconds ahead of rank 0: {late}", f"within {CLOCK:g} s of each other", how)
    for what, least, unit in (("files", FILES, "open files"), ("shared", SHARED, "bytes of /dev/shm")):
        values = {host: getattr(each, what) for host, each in by_host.items()}
        low = {host: value for host, value in values.items() if 0 <= value < least}
        yield line("warn", what, low and f"{low}", f"{min(values.values()):,} {unit}", f"ask for {least:,} {unit}")
    locked = min(each.locked for each in seen)
    yield ReportLine("ok", "memlock", "unlimited" if locked < 0 else f"{locked:,} bytes; InfiniBand needs more")
    assumed = "; ".join(f"{name} {link.bandwidth / 1e9:g} GB/s" for name, link in LINKS.items())
    for name, (latency, bandwidth) in links.items():
        yield ReportLine("ok", "link", f"{name}: {1e6 * latency:,.0f} µs, {bandwidth / 1e9:.2f} GB/s")
    yield ReportLine("ok", "assumed", f"labs.cost knows {assumed} (on {hosts} nothing of that is promised)")


def line(status: str, what: str, problem: object, fine: str, remedy: str) -> ReportLine:
    """Return the line of a problem, if there is one, or else the line that says that all is fine."""
    return ReportLine(status, what, str(problem), remedy) if problem else ReportLine("ok", what, fine)


def grouped(by_host: dict[str, Survey], value: Callable[[Survey], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for host, each in by_host.items():
        found[value(each)].append(host)
    return found


def told(values: dict[str, list[str]]) -> str:
    return "; ".join(f"{value}, on {', '.join(hosts)}" for value, hosts in values.items())


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report on rank 0; return 1 if a host cannot take part."""
    [(seen, links), *others] = run(survey, os.getcwd())
    links |= {name: found for _, each in others for name, found in each.items() if found != (0.0, 0.0)}
    lines = list(report(seen, links))
    if os.environ["RANK"] == "0":
        for each in lines:
            print(f"{each.status:<5} {each.what:<10} {each.found}")
            if each.remedy:
                print(f"{'':<17}{each.remedy}")
        sys.stdout.flush()
    return int(any(each.status == "FAIL" for each in lines))
