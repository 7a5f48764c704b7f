"""A process that has imported torch and the course, and forks ranks in milliseconds.

    caller                            fork server (has torch)                    rank
    Forkserver.fork(fds)   ------->   fork                            ------->   worker.main(*fds)
                           <-------   pid of the rank; later its exit status
    Forkserver.kill(pid)   ------->   SIGKILL to the rank, if it is still a child, and to the rank's children
    (the caller is gone)              SIGKILL to every rank and its children; deletes their files; ends

On Linux, the fork server inherits the processes that a rank leaves behind, even those in a session of their own
(setsid), and ends these processes.  On macOS, a process that has left its rank's process group is not ended.

The forkserver of `multiprocessing` cannot be used: it imports the caller's main module again in every rank (so a script
needs the `if __name__ == "__main__"` guard), keeps a socket file that a killed kernel leaves behind, and forgets its
ranks when the caller dies.  A `fork` of the caller cannot be used either: a kernel that has used its compute threads
hangs in the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from labs.kit.ranks.forkserver_preload import COURSE, edited, forget, import_course

# DDP and FSDP import these modules at their first use, which takes 2 s: the fork server does so once for all ranks.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
    "cloudpickle",
]
OPEN_FILES = 4096
LOOK = 0.25  # seconds between two checks that the caller is alive
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
MADV_COLLAPSE = 25  # <linux/mman.h>
MESSAGE = 1024  # bytes; every request has this size, so that one read is one request
ANSWER = struct.Struct("!qq")  # number of the request, pid
ENVIRONMENT = {
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch resolves loopback names; a lost DNS answer would cost 5 s
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch would warn in C++ when a name is not found
    "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "",  # PyTorch warns during its import: "error" would end this process; ranks get the caller's
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS
    "LABS_RANK": "",  # if this is set, run.py, which the course imports, starts no fork server here
}


class Forkserver:
    """The caller's end of the fork server; `start()` returns at once, while the fork server imports torch."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()
        self.owner = 0
        self.number = 0  # the number of the newest request for a rank

    def start(self) -> None:
        """Start the fork server unless it already runs; a forked copy of the caller starts its own."""
        if self.process is not None and self.owner == os.getpid() and self.process.poll() is None:
            return
        if self.socket:
            self.socket.close()  # the earlier fork server was killed
        self.socket, theirs = socket.socketpair()
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python, too, ignores other entries
        arguments = f"{theirs.fileno()}, {COURSE!r}"
        code = f"import sys; sys.path[:] = {path!r}; from labs.kit.ranks.forkserver import serve; serve({arguments})"
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
        """Fork one rank, which owns copies of the descriptors `fds`; return its pid.

        cleanup: path of a file that the fork server deletes when the rank has ended.
        """
        with self.lock:
            for _ in range(2):  # if the fork server was killed since the last job, start another one
                self.start()
                try:
                    return self._ask(fds, cleanup)
                except (OSError, EOFError) as error:
                    self.socket.close()
                    code, cause = self.process.wait(), error
            raise RuntimeError(
                f"the process that starts ranks has ended (exit code {code}); its own message is above, in the "
                "terminal or the server's log: run the same line again; if that does not help, `python -m labs doctor`"
            ) from cause

    def _ask(self, fds: list[int], cleanup: str) -> int:
        self.number += 1
        self._send({"do": "fork", "cleanup": cleanup, "number": self.number}, fds)
        number = pid = 0
        while number != self.number:  # an answer to an earlier request, which an interrupt has cut off, is skipped
            while not wait([self.socket], LOOK):  # an interrupt that comes just before the wait is raised after it
                pass
            number, pid = ANSWER.unpack(receive_exactly(self.socket, ANSWER.size))
        return pid

    def kill(self, pid: int) -> None:
        with self.lock, contextlib.suppress(OSError):  # a fork server that is gone has ended its ranks
            self._send({"do": "kill", "pid": pid}, [])

    def _send(self, request: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(request).encode().ljust(MESSAGE)], fds)

    def stop(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.socket.close()
            self.process.terminate()  # the fork server obeys this only during its imports, before the first rank
            self.process.wait()
            self.process = None


def serve(fd: int, course: Sequence[str]) -> None:
    """Run the fork server's loop: read requests, fork ranks and send exit statuses, until the caller is gone."""
    caller = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imported objects are not garbage: collecting again and again took a sixth of the time
    with ended_with(caller):
        for module in PRELOAD:
            importlib.import_module(module)
        files = import_course(course)
    gc.freeze()  # otherwise each rank's garbage collector would walk through all these objects, and copy their pages
    gc.enable()
    in_huge_pages()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on, only the caller's end ends the ranks and this process
    inherit_orphans()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES and soft != resource.RLIM_INFINITY:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))  # a rank needs a socket per peer in each group
    requests = socket.socket(fileno=fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    children: dict[int, tuple[int, str]] = {}  # pid: (the pipe for its exit status, the file to delete)
    job, anew = "", False  # the newest job's file, and whether its ranks import the course again
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [], LOOK)
        if os.getppid() != caller:  # the caller has ended, though another child of it may hold the socket open
            break
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
            if request["cleanup"] != job:
                job, anew = request["cleanup"], edited(files)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                not_mine = [fd, wake_read, wake_write, fds[-1]] + [other for other, _ in children.values()]
                become_rank(fds[:-1], not_mine, anew)
            children[pid] = (fds[-1], request["cleanup"])
            for rank_fd in fds[:-1]:
                os.close(rank_fd)
            requests.sendall(ANSWER.pack(request["number"], pid))
    for pid, (_, path) in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        clear_up(pid, path)
    if end_orphans(signal.SIGTERM):
        time.sleep(LOOK)
    while end_orphans(signal.SIGKILL):
        reap({})
        time.sleep(0.01)
    os._exit(0)  # an orderly teardown of torch would take a second


@contextlib.contextmanager
def ended_with(caller: int) -> Iterator[None]:
    """End this process if its caller ends during the body of the with statement.

    The thread that watches the caller ends with the body, since a later fork would break this thread.
    """
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK):
            if os.getppid() != caller:
                os._exit(0)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def inherit_orphans() -> None:
    """Make this process the parent of every process that its descendants leave behind (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def in_huge_pages() -> None:
    """Move this process' memory into pages of 2 MiB if Linux can, so that a fork copies fewer page-table entries.

    Copying page-table entries took half of the kernel's time for starting a rank.  A rank that writes to a page of 2
    MiB still gets a small page of its own.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, _, _, inode, *name = line.split()
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, end = (int(address, 16) for address in addresses.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)  # may fail


def end_orphans(sign: signal.Signals, ranks: Collection[int] = ()) -> bool:
    """Send a signal to every child process that is not a rank; return whether there was such a child."""
    try:
        children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except FileNotFoundError:  # macOS has no such file
        return False
    orphans = set(map(int, children)).difference(ranks)
    for pid in orphans:
        os.kill(pid, sign)  # a child that has ended still exists until somebody waits for it
    return bool(orphans)


def become_rank(fds: list[int], not_mine: list[int], anew: bool) -> None:
    for other in not_mine:
        os.close(other)
    os.setpgid(0, 0)  # every process that the rank starts is in its group, and ends with it
    inherit_orphans()  # otherwise the fork server would inherit the rank's orphans, and end them with another rank
    let_the_other_finish()
    try:
        if anew:
            forget()
        from labs.kit.ranks import worker  # imported after the fork, so that the next job sees an edit of the course

        worker.main(*fds)
    except BaseException:  # nothing may return into the fork server's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def let_the_other_finish() -> None:
    """Keep the kernel from preempting this process for a process that it has just woken (only on Linux).

    Where ranks share cores, the rank that gloo's sender has just woken often preempts the sender.  The sender still
    holds a lock for which another thread spins (transport/tcp/pair.cc, Pair::handleEvents).  With four ranks on two
    cores, a small all-reduce took 2.4 times as long.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(PermissionError):  # a sandbox may forbid this call, which costs only speed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def clear_up(pid: int, path: str) -> None:
    """End the processes that a rank has left behind (workers of a DataLoader, say), and delete the file of its job.

    The signal is SIGTERM, which the resource tracker of multiprocessing survives: the tracker must still remove shared
    memory.  The caller deletes the file, too, but a rank that is just starting would create the file again.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
        os.killpg(pid, signal.SIGTERM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def reap(children: dict[int, tuple[int, str]]) -> None:
    """Send the caller the exit status of every rank that has ended: the exit code, or minus the signal's number."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            fd, path = children.pop(pid)
            clear_up(pid, path)
            with contextlib.suppress(BrokenPipeError):  # the caller has stopped listening
                os.write(fd, struct.pack("!q", os.waitstatus_to_exitcode(status)))
            os.close(fd)
        end_orphans(signal.SIGTERM, children)  # of this rank, or of an orphan that has ended


def receive_exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
