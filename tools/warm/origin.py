"""The Python that has imported, and forks: `python -m tools.warm.origin ALIVE PLACE` returns once it listens at PLACE.

client                                 origin
connects, sends what it needs   ---->  forks a process that takes over these
signals                         ---->  to the process
(the client is gone)                   SIGKILL to the process
                                <----  the exit status
(nobody listens at ALIVE)              SIGKILL to all, and ends
"""

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy

from labs.kit.ranks.forkserver import PRELOAD, in_huge_pages, receive_exactly
from labs.kit.ranks.forkserver_preload import COURSE, import_course
from tools.warm import once
from tools.warm.client import STATUS

MODULES = [*PRELOAD, "ipykernel.ipkernel", "ipykernel.kernelapp", "matplotlib.figure"]
MOST = 250  # most files of a client: the kernel takes 253 in one message
HIGH = 600  # higher than the number of any open file


def main(alive: str, place: str) -> None:
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    import_course(COURSE)
    gc.freeze()
    gc.enable()
    in_huge_pages()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    suite = socket.socket(socket.AF_UNIX)
    suite.connect(alive)
    become(*serve(listener, suite))


def serve(listener: socket.socket, suite: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Serve clients. Returns only in a forked process: its request, and its files."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    clients: dict[socket.socket, int] = {}  # the process of each client
    while True:
        ready, _, _ = select.select([listener, suite, wake, *clients], [], [])
        if wake in ready:
            os.read(wake, 4096)
            reap(clients)
        for client in clients.keys() & set(ready):
            pass_on(client, clients[client])
        if suite in ready:
            for pid in clients.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            client, _ = listener.accept()
            header, files, _, _ = socket.recv_fds(client, 8, MOST)
            request = json.loads(receive_exactly(client, *struct.unpack("!q", header)))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return request, files
            clients[client] = pid
            for fd in files:
                os.close(fd)


def reap(clients: dict[socket.socket, int]) -> None:
    for client, pid in list(clients.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del clients[client]
            with contextlib.suppress(BrokenPipeError):  # the client has not waited
                client.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
            client.close()


def pass_on(client: socket.socket, pid: int) -> None:
    try:
        signals = client.recv(64)
    except ConnectionResetError:
        signals = b""
    for number in signals or [signal.SIGKILL]:
        os.kill(pid, number)


def become(request: dict[str, Any], files: list[int]) -> None:
    """Do what Python does from its start to the first line of its program, then run that program."""
    os.setsid()
    files = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in files]
    os.closerange(0, HIGH)
    for fd, number in zip(files, request["files"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # TMPDIR may be another
    wanted = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [entry for entry in wanted if entry not in sys.path]
    random.seed()
    numpy.random.seed()
    sys.executable = request["executable"]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    output = io.FileIO(1, "w", closefd=False)
    if not request["unbuffered"]:
        output = io.BufferedWriter(output)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(output, write_through=request["unbuffered"])
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if request["arguments"][:2] == ["-m", "ipykernel_launcher"]:
        once.in_this_kernel(Path(sys.executable).parent / "jobs")
    run(*request["arguments"])


def run(first: str, *rest: str) -> None:
    """Run the arguments as Python does: -c code, -m module, or a script."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        module, *rest = rest
        sys.argv[:], sys.path[0] = ["-m", *rest], os.getcwd()
        runpy._run_module_as_main(module)
    elif first == "-c":
        code, *rest = rest
        sys.argv[:], sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv[:], sys.path[0] = [first, *rest], os.path.dirname(os.path.realpath(first))
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


if __name__ == "__main__":
    main(*sys.argv[1:])
