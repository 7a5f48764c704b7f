"""Run a command, then check that it left nothing behind: no process, no temporary file, no shared memory.

    python -m tools.leftovers pytest tests

The command runs with a mark in its environment, which every process that it starts inherits, and with a temporary
folder of its own.  The exit status is the command's, or 1 if that was 0 and something was left.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARK = "LABS_LEFTOVERS_MARK"
GRACE = 5.0  # seconds in which a process that was told to end may end
SHARED = Path("/dev/shm")
# Leftovers that others keep on purpose: pytest's last folders, PyTorch's compiler cache, torchrun's logs.
ALLOWED = ("pytest-of-", "torchinductor_", "torchelastic_")


def main(command: list[str]) -> int:
    mark = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="labs-"))
    shared = shared_memory()
    try:
        status = subprocess.run(command, env={**os.environ, MARK: mark, "TMPDIR": str(folder)}).returncode
        left = [f"process {process.pid}: {line}" for process, line in left_running(mark)]
        left += [f"temporary {path.name}" for path in folder.iterdir() if not path.name.startswith(ALLOWED)]
        left += [f"shared memory {path}" for path in sorted(shared_memory() - shared) if not in_use(path)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        print("Left behind:", *left, sep="\n  ", file=sys.stderr)
    return status or bool(left)


def left_running(mark: str) -> list[tuple[psutil.Process, str]]:
    """Return the marked processes that are still there after GRACE seconds, and their command lines."""
    deadline = time.monotonic() + GRACE
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def marked(mark: str):
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                yield process, " ".join(process.cmdline())[:200]
        except psutil.Error:  # somebody else's process, or one that has just ended
            continue


def shared_memory() -> set[Path]:
    return set(SHARED.iterdir()) if SHARED.is_dir() else set()


def in_use(path: Path) -> bool:
    """Return whether a live process has the file open or mapped: then it is in use, not left behind."""
    for process in psutil.process_iter():
        try:
            if any(entry.path == str(path) for entry in (*process.open_files(), *process.memory_maps())):
                return True
        except psutil.Error:
            continue
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
