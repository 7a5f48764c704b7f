"""The doctor of a job: `python -m labs doctor`, started by torchrun on every host of a shared machine.

$ torchrun --nnodes 2 --nproc-per-node 2 ... -m labs doctor --mesh dp=2,tp=2
ok    versions   PyTorch 2.13.0, gloo, on node1, node2
ok    names      every host resolves the names of all hosts
warn  clock      node2 is 3.2 s ahead of node1
...

Each rank collects what it sees (`survey`), and all ranks send it to the first, which compares and prints.  The link of
each axis is measured by the course's all-reduce, in all groups of the axis at once, as in a training.
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
from math import isinf
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
import tyro

from labs.agree import everybodys
from labs.collectives import all_reduce
from labs.cost import LINKS, all_reduce_seconds
from labs.kit.commands.doctor import GiB, ReportLine
from labs.kit.commands.dryrun import mesh_of
from labs.kit.launch import run
from labs.mesh import Mesh

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


@dataclass(frozen=True)
class AxisLink:
    """The measured link of a mesh axis.

    crosses: whether the axis has ranks of several hosts in one group
    latency: seconds of an all-reduce of one number
    bandwidth: bytes per second that each rank sends in a large all-reduce
    """

    axis: str
    size: int
    crosses: bool
    latency: float
    bandwidth: float


def survey(folder: str, mesh: str = "") -> tuple[list[Survey], list[AxisLink]]:
    """Return what each rank sees, and the link of each axis of the mesh; by default, of hosts and of a host's ranks."""
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
    axes = {axis: size for axis, size in axes_of(mesh, hosts).items() if size > 1}
    grid = Mesh(tuple(axes.values()), tuple(axes)) if axes else None
    return seen, [measured(axis, grid.get_group(axis), hosts) for axis in axes]


def axes_of(mesh: str, hosts: list[str]) -> dict[str, int]:
    if mesh:
        return mesh_of(mesh, len(hosts))
    each = {hosts.count(host) for host in hosts}
    return {"hosts": len({*hosts}), "ranks": each.pop()} if len(each) == 1 else {"ranks": len(hosts)}


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


def measured(axis: str, group: dist.ProcessGroup, hosts: list[str]) -> AxisLink:
    """Return the link of an axis, by the times of its slowest rank; all ranks call this function."""
    ranks = dist.get_process_group_ranks(group)
    mine = [seconds(torch.zeros(size), group) for size in (SMALL, LARGE)]
    found = everybodys((len({hosts[rank] for rank in ranks}) > 1, *mine), None).values()
    crosses, small, large = (max(column) for column in zip(*found, strict=True))
    sent = 2 * (len(ranks) - 1) / len(ranks) * 4 * LARGE  # in a ring
    return AxisLink(axis, len(ranks), crosses, small, sent / max(large - small, 1e-9))


def assumed(link: AxisLink) -> str:
    """Return what labs.cost assumes of an axis, for each class of links that it may have."""
    fit = {name: each for name, each in LINKS.items() if isinf(each.reach) == link.crosses and each.reach >= link.size}
    times = {name: 1e6 * all_reduce_seconds(4 * SMALL, link.size, each) for name, each in fit.items()}
    return "; ".join(f"{times[name]:.0f} µs, {each.bandwidth / 1e9:g} GB/s by {name}" for name, each in fit.items())


def seconds(x: torch.Tensor, group: dist.ProcessGroup) -> float:
    times = []
    for _ in range(TIMES):
        began = time.perf_counter()
        all_reduce(x, group=group)
        float(x[0])  # waits for a GPU
        times.append(time.perf_counter() - began)
    return median(times)


def report(seen: list[Survey], links: Sequence[AxisLink] = ()) -> Iterator[ReportLine]:
    by_host = {each.host: each for each in seen}
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
    for link in links:
        where = f"{link.axis}, {link.size} ranks {'between hosts' if link.crosses else 'inside a host'}"
        speed = f"{1e6 * link.latency:,.0f} µs, {link.bandwidth / 1e9:.2f} GB/s"
        yield ReportLine("ok", "link", f"{where}: {speed}", f"labs.cost assumes {assumed(link)}")


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


@dataclass
class Doctor:
    """Say what a user of these hosts must know first."""

    mesh: str = ""  # the axes of a training, outermost first, whose links are measured, like dp=2,tp=2


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report on rank 0; return 1 if a host cannot take part, and 2 for a mesh of other ranks."""
    mesh = tyro.cli(Doctor, prog="python -m labs doctor", args=arguments).mesh
    speaks = os.environ["RANK"] == "0"
    try:
        axes_of(mesh, [""] * int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        if speaks:
            print(error, file=sys.stderr)
        return 2
    lines = list(report(*run(survey, os.getcwd(), mesh)[0]))
    for each in lines if speaks else ():
        print(f"{each.status:<5} {each.what:<10} {each.found}")
        if each.remedy:
            print(f"{'':<17}{each.remedy}")
    sys.stdout.flush()
    return int(any(each.status == "FAIL" for each in lines))
