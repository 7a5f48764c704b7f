"""The sandbox of a submission: Bubblewrap without network, without files but the course's `labs`, and with limits.

    missing()             the reason why a submission cannot be isolated here, or ""
    verdicts(exercises)   {name: verdict} of the judge, which runs the checks in the sandbox

Inside there are Python, `labs` and the judge, all read-only, an empty folder of FOLDER bytes, and a loopback of its
own.  `solutions/`, `tests/`, other submissions and the gradebook are not there.  A process that the submission starts
ends with the sandbox.
"""

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
GB = 1 << 30
SECONDS = 180  # for one check, start included; on a busy machine up to four times as many
FOLDER = 256 << 20  # bytes of the submission's folder
MEMORY = 5 * GB  # of all processes of a sandbox; for one process, a check's own limit is lower
LEFT = 0.1  # of the machine's memory, which a submission must leave
LOOK = 0.25  # seconds between two looks at the memory
LIMITS = {
    "RLIMIT_NPROC": 400,
    "RLIMIT_DATA": 4 * GB,
    "RLIMIT_FSIZE": FOLDER,
    "RLIMIT_NOFILE": 4096,
    "RLIMIT_CORE": 0,
}
USER = 61_000  # as root, each sandbox gets a user of its own: this number and the ones after it


def missing() -> str:
    """Return the reason why submissions cannot be isolated on this machine, or ""."""
    if not shutil.which("bwrap"):
        return "bwrap is not installed here (Debian and Ubuntu: apt-get install bubblewrap; macOS has none)"
    probe = subprocess.run([*bubblewrap(), "true"], capture_output=True, text=True)
    return f"bwrap cannot start here ({probe.stderr.strip()})" if probe.returncode else ""


def bubblewrap() -> list[str]:
    """Return the command that starts another one in the sandbox."""
    root = os.getuid() == 0
    python, course = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()], Path("/course")
    binds = {path: path for path in (Path("/usr"), *python)} | {
        ROOT / name: course / name for name in ("labs", "tools/marking")
    }
    command = ["bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--clearenv"]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    made: list[Path] = []
    for source, target in binds.items():
        for folder in [parent for parent in reversed(target.parents) if parent != Path("/")]:
            if folder not in made and not any(folder.is_relative_to(bound) for bound in binds.values()):
                made.append(folder)
                command += ["--perms", "0755", "--dir", str(folder)]
        command += ["--ro-bind", str(source), str(target)]
    for name in ("bin", "lib", "lib64", "sbin"):  # part of /usr on most systems, folders of their own on others
        path = Path("/") / name
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    for folder, size in {"/dev/shm": FOLDER // 4, "/submission": FOLDER}.items():
        command += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/submission"]
    for name, value in environment("/submission", course).items():
        command += ["--setenv", name, value]
    return command


def environment(folder: str, course: Path) -> dict[str, str]:
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(course),
        "PYTHONSAFEPATH": "1",  # nothing is imported from the submission's folder ...
        "PYTHONNOUSERSITE": "1",  # ... nor from its HOME
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "LABS_DEVICE": "cpu",
    }


def verdicts(exercises: Sequence[dict[str, Any]], slot: int = 0, isolated: bool = True) -> dict[str, dict[str, Any]]:
    """Return the verdict on each exercise, by its name.

    exercises: what the judge is given.
    slot: a number that no other running sandbox has.
    If the sandbox ends too early, the other exercises are judged in a new one.  The verdict says how the sandbox ended
    if this was the first exercise in it, so that none suffers from what an earlier one has left behind.
    """
    found: dict[str, dict[str, Any]] = {}
    while rest := [each for each in exercises if each["name"] not in found]:
        reason, name = in_sandbox(rest, found, slot, isolated), rest[0]["name"]
        found.setdefault(name, {"ok": False, "lines": [f"✗ {name}: {reason}"], "measured": False})
    return found


def in_sandbox(rest: Sequence[dict[str, Any]], found: dict[str, dict[str, Any]], slot: int, isolated: bool) -> str:
    """Run these checks in a sandbox, and add their verdicts to `found`; return how the sandbox ended.

    Raises RuntimeError if the judge cannot start: this is nobody's mistake.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        python = Path(sys.prefix).resolve() / Path(sys.executable).relative_to(sys.prefix)
        judge = [str(python), "-m", "tools.marking.judge"]
        request = {"exercises": rest, "limits": dict(LIMITS)}
        if isolated:
            request["user"] = USER + slot
            process = start([*bubblewrap(), *judge])
        else:
            del request["limits"]["RLIMIT_NPROC"]  # it would count all processes of whoever marks
            process = start(judge, cwd=folder, env=environment(folder, ROOT))
        stack.callback(end, process)
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(request).encode())
        patience = SECONDS * min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        text, ready, deadline = b"", False, time.monotonic() + patience
        while True:
            if select.select([process.stdout], [], [], LOOK)[0]:
                if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                *lines, text = (text + data).split(b"\n")
                for verdict in map(json.loads, lines):
                    if "failed" in verdict:
                        raise RuntimeError(f"the judge cannot start: {verdict['failed']}")
                    ready, deadline = True, time.monotonic() + patience
                    if name := verdict.pop("name", None):
                        found[name] = verdict
            if time.monotonic() > deadline:
                return f"it did not come to an end in {patience:.0f} s, and was ended"
            machine, held = psutil.virtual_memory(), memory_of(process)
            if held > MEMORY or machine.available < LEFT * machine.total:
                return f"its processes held {held / GB:.1f} GB of memory, and were ended"
        if not ready:
            raise RuntimeError("the sandbox does not start")
        return "the submission ended the process that marks it"


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, **options)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """Return the bytes that all processes of a sandbox hold, files without a name (memfd) included."""
    total, files = 0, {}
    for each in family(process):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            proc = Path(f"/proc/{each.pid}")
            total += 1024 * int(re.search(r"^Pss: +(\d+)", (proc / "smaps_rollup").read_text(), re.MULTILINE)[1])
            for file in (proc / "fd").iterdir():
                if os.readlink(file).startswith("/memfd:"):
                    found = file.stat()
                    files[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return total + sum(files.values())


def end(process: subprocess.Popen[bytes]) -> None:
    """End the sandbox, and all processes in it."""
    rest = family(process)
    for each in (process, *rest):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            each.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs(rest, timeout=10)
