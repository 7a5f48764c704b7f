"""Stand in for a process that an origin forks: it gets the arguments, variables, folder and open files of this one.

Signals are passed on.  This process ends as the other does, and the other ends with this one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

READ_BY_IMPORTS = ("PYTHON", "LABS_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "ATEN_", "CUDA_")
ORIGIN = {
    "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # a kernel sets this
    # otherwise labs/kit/ranks/run.py would start a fork server, whose socket a forked process would close later
    "LABS_RANK": "",
}
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STATUS = struct.Struct("!i")
LOOK = 1.0  # seconds between two checks whether the parent is still there


def main(python: str, root: str) -> None:
    unbuffered = sys.argv[1:2] == ["-u"]  # torchrun starts its ranks so
    arguments = sys.argv[1 + unbuffered :]
    if not arguments or not (arguments[0] in ("-m", "-c") or arguments[0].endswith(".py")):
        os.execv(python, [python, *sys.argv[1:]])
    files = open_files()
    parent = os.getppid()
    folder = Path(sys.argv[0]).parent
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    for number in RELAYED:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waker)
    origin = connect(folder, python, root)
    request = {
        "arguments": arguments,
        "unbuffered": unbuffered,
        "executable": sys.argv[0],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
    }
    data = json.dumps(request).encode()
    socket.send_fds(origin, [struct.pack("!q", len(data))], files)
    origin.sendall(data)
    for fd in files:
        os.close(fd)
    while True:
        ready, _, _ = select.select([origin, wake], [], [], LOOK)
        if wake in ready:
            origin.sendall(os.read(wake, 64))
        if origin in ready:
            end(origin.recv(STATUS.size))
        if os.getppid() != parent:
            os._exit(1)


def open_files() -> list[int]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself was an open file
            os.fstat(int(name))
            files.append(int(name))
    return files


def connect(folder: Path, python: str, root: str) -> socket.socket:
    """Connect to the origin with the variables that matter, and start it if it does not run yet."""
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(READ_BY_IMPORTS) and item[0] != "PYTHONPATH"
    )
    place = folder / hashlib.sha256(repr(variables).encode()).hexdigest()[:8]
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            command = [python, "-m", "tools.warm.origin", str(folder / "alive"), str(place)]
            subprocess.run(command, cwd=root, env={**os.environ, **ORIGIN}, stdin=subprocess.DEVNULL, check=True)
    origin = socket.socket(socket.AF_UNIX)
    origin.connect(str(place))
    return origin


def end(status: bytes) -> None:
    if not status:
        os._exit(1)  # the origin is gone
    code = STATUS.unpack(status)[0]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
