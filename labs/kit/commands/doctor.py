"""Can this machine run the course?  One line for each requirement of the course, with a remedy if it is not met.

ok     the requirement is met
warn   the course runs, but some part of it is slower, or missing
FAIL   the course does not run

$ python -m labs doctor
ok    Python     3.11.7
warn  cores      1
                 four ranks take turns on it; everything works, but times mean little
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from labs.kit.launch import RankError, run

GiB = 2**30
PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 15))
PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "anywidget", "matplotlib", "cloudpickle", "tqdm", "tyro")
MEMORY = 2 * GiB  # enough for a kernel and four ranks
SCRATCH = GiB // 4
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_BROWSERS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
GET_BROWSER = "Debian: apt-get install chromium; Ubuntu: snap install chromium; macOS: brew install --cask chromium"


class ReportLine(NamedTuple):
    """One line of the report.

    status: "ok", "warn" or "FAIL".
    remedy: a sentence, or "" when there is nothing to do.
    """

    status: str
    what: str
    found: str
    remedy: str = ""


def versions() -> Iterator[ReportLine]:
    low, high = PYTHONS
    right = low <= sys.version_info[:2] <= high
    remedy = "" if right else "the course needs 3.11 to 3.13: make clean, then make learn PYTHON=python3.12"
    yield ReportLine("ok" if right else "FAIL", "Python", sys.version.split()[0], remedy)
    low, high = TORCHES
    right = low <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= high
    remedy = "" if right else "the course is made for 2.11 to 2.15: make learn installs the right one"
    yield ReportLine("ok" if right else "warn", "PyTorch", torch.__version__, remedy)
    found = {name: installed(name) for name in PACKAGES}
    missing = [name for name, number in found.items() if number is None]
    listed = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    remedy = f"{', '.join(missing)} missing: make learn installs what the course needs" if missing else ""
    yield ReportLine("FAIL" if missing else "ok", "packages", listed, remedy)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def course() -> Iterator[ReportLine]:
    """Check that a notebook imports the course of its own checkout; a copied environment points to the old checkout."""
    asking = "import labs; print(labs.__path__[0])"
    done = subprocess.run([sys.executable, "-c", asking], cwd=tempfile.gettempdir(), capture_output=True, text=True)
    found, here = done.stdout.strip(), Path(__file__).resolve().parents[2]
    right = bool(found) and Path(found).resolve() == here
    remedy = "" if right else f"a notebook would not run the code of {here}: make clean, then make learn"
    yield ReportLine("ok" if right else "FAIL", "course", found or "labs cannot be imported", remedy)


def cores() -> Iterator[ReportLine]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count()
    remedy = "" if count > 1 else "four ranks take turns on it; everything works, but times mean little"
    yield ReportLine("ok" if count > 1 else "warn", "cores", str(count), remedy)


def memory() -> Iterator[ReportLine]:
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    for limit, used in limits():
        free, total = min(free, limit - used), min(total, limit)
    found = f"{free / GiB:.1f} of {total / GiB:.1f} GiB free"
    remedy = "" if free >= MEMORY else f"four ranks need about {MEMORY / GiB:.0f} GiB: close something, or use 2 ranks"
    yield ReportLine("ok" if free >= MEMORY else "warn", "memory", found, remedy)


def limits(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes for each control group around this process that limits memory.

    Only Linux has control groups, such as that of a container.  Cached files do not count as used memory.
    """
    for line in proc.read_text().splitlines() if proc.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = groups / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            most, used, stat = (group / name for name in (*names, "memory.stat"))
            if group.is_relative_to(root) and most.exists() and (limit := most.read_text().strip()) != "max":
                cached = dict(line.split() for line in stat.read_text().splitlines())
                cached = int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
                yield int(limit), int(used.read_text()) - cached


def gpus() -> Iterator[ReportLine]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        yield ReportLine("ok", "GPUs", f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}")
    elif shutil.which("nvidia-smi") is None:
        yield ReportLine("ok", "GPUs", "none: ranks are processes on the CPU, and every notebook runs")
    elif torch.version.cuda is None:
        remedy = "make learn CUDA=1 installs the one with CUDA"
        yield ReportLine("warn", "GPUs", "there is an NVIDIA GPU, but this PyTorch is built without CUDA", remedy)
    else:
        remedy = f"the driver may be too old for CUDA {torch.version.cuda}: see what nvidia-smi says"
        yield ReportLine("warn", "GPUs", "there is an NVIDIA GPU, but PyTorch cannot use it", remedy)


def backends() -> Iterator[ReportLine]:
    there = [name for name, has in {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}.items() if has()]
    remedy = "" if "gloo" in there else "this PyTorch is built without gloo: make clean, then make learn"
    yield ReportLine("FAIL" if remedy else "ok", "backends", ", ".join(there) or "none", remedy)


def scratch() -> Iterator[ReportLine]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    remedy = "" if free >= SCRATCH else "free some, or set TMPDIR to a folder on a larger disk"
    yield ReportLine("ok" if free >= SCRATCH else "FAIL", "scratch", f"{free / GiB:.1f} GiB free in {folder}", remedy)


def names() -> Iterator[ReportLine]:
    """Time the look-up of the loopback address's name, which torchrun needs: a slow DNS delays every launch."""
    start = time.perf_counter()
    socket.getnameinfo(("::ffff:127.0.0.1", 0), socket.NI_NUMERICSERV)
    seconds = time.perf_counter() - start
    remedy = "" if seconds < 1 else "torchrun stalls for as long: put '::ffff:127.0.0.1 localhost' into /etc/hosts"
    yield ReportLine("warn" if remedy else "ok", "loopback", f"has its name in {seconds:.2f} s", remedy)


def ranks() -> Iterator[ReportLine]:
    """Run real jobs of 2 and 4 ranks, which all-reduce the numbers of the ranks."""
    for count in (2, 4):
        start = time.perf_counter()
        try:
            sums = run(sum_of_ranks, ranks=count, device="cpu", timeout=60)
        except (RankError, OSError) as error:
            remedy = "; ".join(str(error).splitlines()[:2])
            yield ReportLine("FAIL", f"{count} ranks", "cannot talk to each other", remedy)
            continue
        seconds = time.perf_counter() - start
        right = list(sums) == [sum(range(count))] * count
        found = f"started, summed and ended in {seconds:.2f} s" if right else f"summed wrongly: {list(sums)}"
        yield ReportLine("ok" if right else "FAIL", f"{count} ranks", found, "" if right else "please report this")


def sum_of_ranks() -> int:
    tensor = torch.tensor(dist.get_rank(), device="cpu")
    dist.all_reduce(tensor)
    return tensor.item()


def browser() -> Iterator[ReportLine]:
    path = find_browser()
    remedy = "" if path else f"only the course's own tests need one. {GET_BROWSER}"
    yield ReportLine("ok" if path else "warn", "browser", path or "no Chromium or Chrome found", remedy)


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome for the browser tests, or None."""
    found = [shutil.which(name) for name in BROWSERS]
    found += [path for path in MAC_BROWSERS if Path(path).exists()]
    return next(filter(None, found), None)


CHECKS = (versions, course, cores, memory, gpus, backends, scratch, names, ranks, browser)


@dataclass
class Doctor:
    """Check each requirement of the course on this machine, and print a remedy if it is not met."""


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report line by line; return 1 if the course does not run on this machine, else 0."""
    if arguments:  # without any, tyro is not imported, so that a missing tyro is reported below
        import tyro

        tyro.cli(Doctor, prog="python -m labs doctor", args=arguments)
    status = 0
    for check in CHECKS:
        for line in check():
            print(f"{line.status:<5} {line.what:<10} {line.found}", flush=True)
            if line.remedy:
                print(f"{'':<17}{line.remedy}")
            status |= line.status == "FAIL"
    return int(status)
