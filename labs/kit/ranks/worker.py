"""One rank, from its first instant to its last: forked by the fork server, or started by torchrun.

    job arrives -> stdout and stderr become the caller's lines -> process group -> function -> value goes back -> end

The value is handed back before anything is taken down, and the rank stays until every value has arrived: a rank that
leaves early would break its peers' last messages.  It ends by `os._exit`: torch's own teardown sometimes aborts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import linecache
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from labs.kit.ranks import settings
from labs.kit.ranks.flight_recorder import FlightRecorder
from labs.kit.ranks.link import Link
from labs.kit.ranks.payload import pack
from labs.kit.ranks.wire import Wire

YEAR = 365 * 24 * 3600.0  # seconds; for whoever gives a timeout of infinity
UNHEARD = 113  # exit code of a rank that cannot answer: the function has closed the way to the caller
MOST_TEXT = 1 << 16  # characters of an error or a warning; of a longer one its ends


@dataclass(frozen=True)
class Job:
    """What a rank is told, besides the function and its arguments, which are in a file for all."""

    rank: int
    ranks: int
    backend: str  # "gloo", or "cpu:gloo,cuda:nccl"
    device: str  # "cpu" or "cuda:3"
    store: str  # the file in which the ranks find each other
    timeout: float
    record: str | None
    link: Link | None
    environment: dict[str, str]
    path: list[str]
    folder: str
    sources: dict[str, str] = field(default_factory=dict)  # the cells' text, for tracebacks
    settings: dict[str, Any] = field(default_factory=dict)  # of PyTorch, see settings.py


def main(
    control_fd: int, output_fd: int, payload_fd: int, flight_fd: int, stack_fd: int, value_fd: int, wires_fd: int
) -> NoReturn:
    """The body of a forked rank; never returns."""
    for target in (1, 2):
        os.dup2(output_fd, target)
    os.close(output_fd)
    for stream, target in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(target, "w", closefd=False)
        lines = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, stream, lines)
    control, door = Connection(control_fd), os.fstat(control_fd)
    job: Job = cloudpickle.loads(control.recv_bytes())
    finished = threading.Event()
    threading.Thread(target=obey, args=(control, finished), daemon=True).start()
    faulthandler.enable(file=stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
    sending = threading.Lock()  # a thread may warn while the value is on its way
    with FlightRecorder(flight_fd).listening():
        answer = work(job, payload_fd, value_fd, wires_fd, control, sending)
    flush()
    try:
        if not os.path.samestat(door, os.fstat(control_fd)):  # closed, and its number given to another file
            raise OSError
        with sending:
            control.send_bytes(answer)
    except OSError:
        os._exit(UNHEARD)
    finished.wait()
    flush()
    if "nccl" in job.backend and dist.is_initialized():
        dist.destroy_process_group()  # gives the GPU's memory back in order; gloo has nothing to give back
    os._exit(0)


def obey(control: Connection, finished: threading.Event) -> None:
    """Wait for the caller's word to end; a caller that is gone ends this rank at once."""
    try:
        control.recv_bytes()
    except (EOFError, OSError):
        os.killpg(os.getpid(), signal.SIGKILL)  # and what this rank has started
    finished.set()


class NoKeyboard(io.TextIOBase):
    """A rank's standard input."""

    def readline(self, size: int = -1, /) -> str:
        raise RuntimeError("a rank has no keyboard: call input() before run(), and pass on what it returned")

    def read(self, size: int | None = -1, /) -> str:
        return self.readline()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed or replaced it
            stream.flush()


def settle_in(job: Job, control: Connection, sending: threading.Lock) -> None:
    """Make this process look like the caller's: environment, imports, folder, cell sources, warnings, PyTorch."""
    rank = str(job.rank)
    wanted = job.environment | {"RANK": rank, "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": rank, "LABS_RANK": rank}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - os.environ.items())  # most are as in the fork server: 1 ms
    sys.path[:] = job.path
    os.chdir(job.folder)
    for name, source in job.sources.items():
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)

    me, usual = os.getpid(), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, line: int, *rest: Any) -> None:
        if os.getpid() != me:  # a process that the function has forked: the way to the caller is not its own
            return usual(message, category, filename, line, *rest)
        try:
            kind = cloudpickle.dumps(category)
        except Exception:  # a class that cannot travel: the caller then issues its text as a plain warning
            kind = b""
        warning = (cut(str(message)), category.__name__, kind, filename, line)
        with sending:
            control.send_bytes(cloudpickle.dumps(("warning", warning)))

    warnings.showwarning = show
    torch.default_generator.seed()  # not the fork server's numbers, which all ranks would share
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(int.from_bytes(os.urandom(4)))  # seed() alone takes 0.6 ms
    sys.stdin = NoKeyboard()
    torch.set_num_threads(1)  # a rank stands for a device: one core each, the same on every machine
    settings.apply(job.settings)


def work(
    job: Job, payload_fd: int, value_fd: int, wires_fd: int, control: Connection, sending: threading.Lock
) -> bytes:
    """Run the function; pickled ("value", sizes of what is in the file) or ("error", (when, type, sentence, trace))."""
    value, me = None, os.getpid()
    try:
        settle_in(job, control, sending)
        join_world(job)
        with mmap.mmap(payload_fd, 0, access=mmap.ACCESS_READ) as payload:
            function, args, kwargs = cloudpickle.loads(payload)
        slow = Wire(job.link, job.ranks, wires_fd).slowing() if job.link else contextlib.nullcontext()
        with slow:
            try:
                value = watched(job.record, function, args, kwargs)
            finally:
                if os.getpid() != me:
                    end_child(sys.exception())
    except SystemExit as stop:
        return failure(RuntimeError(f"the function called exit({stop.code}): let it return instead"), stop)
    except BaseException as error:
        return failure(error, error)
    try:
        return cloudpickle.dumps(("value", pack(value, value_fd)))
    except BaseException as error:  # the value's own class may raise anything
        told = f"the value that it returned ({type(value[0]).__name__}) cannot be sent to the caller: {error}"
        if "ProcessGroup" in str(error):
            told += " (it ends with the job): return what has none, such as full_tensor() of each DTensor"
        return failure(TypeError(told), error)


def end_child(error: BaseException | None) -> NoReturn:
    """End a process that the function has forked and let return, or raise: it is its parent that answers."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    flush()
    os._exit(error is not None and getattr(error, "code", 1) not in (None, 0))


def join_world(job: Job) -> None:
    use_device(job.device)
    store = dist.FileStore(job.store, job.ranks)
    limit = patience(job.timeout)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.ranks, timeout=limit)


def patience(timeout: float) -> timedelta:
    """How long the backend waits: the caller's own limit comes first, with a diagnosis."""
    return timedelta(seconds=min(timeout + 60, YEAR))


def use_device(name: str) -> None:
    """Make this process compute on `name`, without a line in the function that it runs."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_default_device(device)


def watched(record: str | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The function's value, and what the pass `record` saw of it."""
    if record is None:
        return function(*args, **kwargs), None
    from labs.kit.record import PASSES

    watch = PASSES[record]()
    with watch:
        value = function(*args, **kwargs)
    return value, watch.tape


def failure(error: BaseException, origin: BaseException) -> bytes:
    when = time.monotonic()
    trace = origin.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the learner's own frames are what helps
    text = "".join(traceback.format_exception(type(error), error, trace))
    sentence = "".join(traceback.format_exception_only(type(error), error)).strip()
    return cloudpickle.dumps(("error", (when, type(error).__name__, cut(sentence), cut(text))))


def cut(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair can be neither printed nor sent
    if len(text) <= MOST_TEXT:
        return text
    end = MOST_TEXT // 2
    return f"{text[:end]} … {len(text) - 2 * end:,} characters are not shown … {text[-end:]}"
