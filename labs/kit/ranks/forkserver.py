"""A process that has torch imported and forks ranks from it, in milliseconds.

    caller                            fork server (has torch)                    rank
    Forkserver.fork(fds)   ------->   fork                            ------->   worker.main(*fds)
                           <-------   its pid; later its exit status
    Forkserver.kill(pid)   ------->   SIGKILL, if that pid is still its child; what that rank has started goes too
    (the caller is gone)              SIGKILL to every rank, clears their files, ends

Why not `multiprocessing`'s forkserver: it imports the caller's main module again in every rank (so a script needs the
`if __name__ == "__main__"` guard), keeps a socket file that a killed kernel leaves behind, and forgets its ranks when
the caller dies.  Why not `fork` from the caller: a kernel that has used its compute threads hangs in the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from typing import Any

# DDP and FSDP import these at first use: 2 s in each rank, once here
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "cloudpickle",
]
MESSAGE = 1024  # bytes; every request has this size, so that one read is one request
ANSWER = struct.Struct("!qq")  # number of the request, pid
ENVIRONMENT = {
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch resolves loopback names; a lost answer would cost 5 s
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # and warns in C++ when the answer is no
    "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
    "OMP_NUM_THREADS": "1",
    "MKL_DISABLE_FAST_MM": "1",  # no buffers of a size that depends on the CPU: budget.py counts them
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS
}


class Forkserver:
    """The caller's end.  `start()` returns at once, the imports go on in the background."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()
        self.owner = 0
        self.number = 0  # of the newest request for a rank

    def start(self) -> None:
        """Start the fork server unless it runs already (a forked copy of the caller starts its own)."""
        if self.process is not None and self.owner == os.getpid() and self.process.poll() is None:
            return
        if self.socket:
            self.socket.close()  # of one that was killed
        self.socket, theirs = socket.socketpair()
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python skips any other, and so do we
        code = (
            f"import sys; sys.path[:] = {path!r}; from labs.kit.ranks.forkserver import serve; serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a notebook's interrupt goes to the kernel's whole process group
            env={**os.environ, **ENVIRONMENT},
        )
        self.owner = os.getpid()
        theirs.close()

    def fork(self, fds: list[int], cleanup: str) -> int:
        """Fork one rank that owns copies of `fds`; its pid.  `cleanup` is a file to delete when it ends."""
        with self.lock:
            for _ in range(2):  # one that was killed since the last job is replaced
                self.start()
                try:
                    return self._ask(fds, cleanup)
                except (OSError, EOFError) as error:
                    self.socket.close()
                    code, cause = self.process.wait(), error
            raise RuntimeError(
                f"the process that starts ranks has ended (exit code {code}); its own message is above, in the "
                "terminal or the server's log: run the same line again, and `python -m labs doctor` if it stays"
            ) from cause

    def _ask(self, fds: list[int], cleanup: str) -> int:
        self.number += 1
        self._send({"do": "fork", "cleanup": cleanup, "number": self.number}, fds)
        number = pid = 0
        while number != self.number:  # an earlier answer is to a caller that was interrupted here
            number, pid = ANSWER.unpack(receive_exactly(self.socket, ANSWER.size))
        return pid

    def kill(self, pid: int) -> None:
        with self.lock, contextlib.suppress(OSError):  # a fork server that is gone has taken its ranks along
            self._send({"do": "kill", "pid": pid}, [])

    def _send(self, request: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(request).encode().ljust(MESSAGE)], fds)

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.socket.close()
            self.process.terminate()  # it heeds this only while it imports, when there is no rank yet
            self.process.wait()
            self.process = None


def serve(fd: int) -> None:
    """The fork server's own loop: requests in, ranks and exit statuses out, until the caller is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in PRELOAD:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on it ends when the caller has gone, and its ranks first
    requests = socket.socket(fileno=fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    children: dict[int, tuple[int, str]] = {}  # pid: (where its status goes, the file to delete)
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            reap(children)
        if requests not in ready:
            continue
        try:
            data, fds, _, _ = socket.recv_fds(requests, MESSAGE, 8)
            request = json.loads(data + receive_exactly(requests, MESSAGE - len(data))) if data else None
        except (OSError, EOFError):
            request = None
        if request is None:
            break
        if request["do"] == "kill" and request["pid"] in children:
            os.kill(request["pid"], signal.SIGKILL)
        if request["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                become_rank(fds[:-1], [fd, wake_read, wake_write, fds[-1]] + [other for other, _ in children.values()])
            children[pid] = (fds[-1], request["cleanup"])
            for rank_fd in fds[:-1]:
                os.close(rank_fd)
            requests.sendall(ANSWER.pack(request["number"], pid))
    for pid, (_, path) in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        clear_up(pid, path)


def become_rank(fds: list[int], not_mine: list[int]) -> None:
    for other in not_mine:
        os.close(other)
    os.setpgid(0, 0)  # whatever it starts is in its group, and ends with it
    try:
        from labs.kit.ranks import worker  # after the fork: an edit of the course's files is seen by the next job

        worker.main(*fds)
    except BaseException:  # never back into the fork server's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def clear_up(pid: int, path: str) -> None:
    """After a rank: end what it has started and left (workers of a DataLoader, say), and delete its job's file.

    By SIGTERM, which multiprocessing's resource tracker outlives: it still has to remove shared memory.  The caller
    deletes the file, too; but a rank that is just beginning would make it anew.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says the latter
        os.killpg(pid, signal.SIGTERM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def reap(children: dict[int, tuple[int, str]]) -> None:
    """Send on the exit status of every rank that has ended: exit code, or minus the signal."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd, path = children.pop(pid)
        clear_up(pid, path)
        with contextlib.suppress(BrokenPipeError):  # the caller has stopped to listen
            os.write(fd, struct.pack("!q", os.waitstatus_to_exitcode(status)))
        os.close(fd)


def receive_exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
