"""The folder through which a caller and its ranks on other hosts exchange pickles, and a rank's first steps with it.

check_ours    raises PermissionError for what another user could change: unpickling a file runs code that its author
              has put there.  The rule is that by which ssh trusts a file of keys.
write_ticket  writes what the caller's host has: the versions of Python, PyTorch and the course
refusal       says why a rank's host cannot take part: it sees another folder, or has another version
main          runs on each rank: only where nothing is refused may submitit unpickle the task
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import stat
import sys
import time
from pathlib import Path
from typing import NoReturn

REFUSED = "labs refuses: "  # begins the line by which a rank says that it cannot take part
TICKET = "ticket.json"  # never unpickled
LAG = 60.0  # seconds that the function may arrive later than its ticket
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_ours(path: Path) -> None:
    """Raise PermissionError if another user could change the file or folder `path`, or a folder above it.

    A folder above may be open to all if it is sticky, as /tmp is: others cannot replace what is ours there.
    """
    for place in (path, *path.parents):
        status = place.lstat()
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} belongs to user {status.st_uid}, who could put any code there")
        if status.st_mode & OTHERS_WRITE and (place == path or not status.st_mode & stat.S_ISVTX):
            mode = stat.filemode(status.st_mode)
            raise PermissionError(f"{place} is {mode}, so that others could put any code there: chmod go-w {place}")


def versions() -> dict[str, str]:
    """Return what must be the same on all hosts, as {name: version}."""
    import torch

    course, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(course.rglob("*.py")):
        digest.update(file.read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])  # bytecode differs between these
    return {"Python": python, "PyTorch": torch.__version__, "the course (digest of labs)": digest.hexdigest()[:8]}


def write_ticket(folder: Path) -> None:
    """Write into `folder` what the caller's host has, for the ranks to compare."""
    (folder / TICKET).touch(mode=0o600)
    (folder / TICKET).write_text(json.dumps({"host": socket.gethostname(), "versions": versions()}))


def refusal(folder: Path, task: str) -> str:
    """Return a sentence that says why this host cannot work with the caller's folder, or "".

    task: the name of the file that would be unpickled next, which the caller may be about to write
    """
    host = socket.gethostname()
    try:
        ticket = json.loads((folder / TICKET).read_text())
        deadline = time.monotonic() + LAG
        while not (folder / task).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        check_ours(folder / task)
    except PermissionError as error:
        return f"{host} does not trust the shared folder: {error}"
    except OSError as error:
        return (
            f"{host} does not see {folder}, which the caller has made ({error.strerror}): name a folder that all hosts "
            "share, such as one in your home"
        )
    here = versions()
    for name, there in ticket["versions"].items():
        if here[name] != there:
            return f"{host} has {name} {here[name]}, and {ticket['host']}, which has called run(), {there}: use one"
    return ""


def main() -> NoReturn:
    """Run a rank that `srun` has started; submitit has written the folder as the last argument.

    Until a rank has seen the folder, its output goes through srun to the log of the batch script.
    """
    folder = Path(sys.argv[-1])
    if problem := refusal(folder, f"{os.environ['SLURM_JOB_ID']}_submitted.pkl"):
        print(REFUSED + problem, flush=True)
        sys.exit(1)
    os.environ |= {"SUBMITIT_LOG_LEVEL": "CRITICAL", "LABS_RANK": os.environ["SLURM_PROCID"]}
    from submitit.core.submission import process_job

    process_job(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's own teardown sometimes aborts the process


if __name__ == "__main__":
    main()
