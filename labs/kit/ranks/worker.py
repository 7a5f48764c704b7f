"""The code that one rank runs, from the fork to its exit.

    job arrives -> stdout and stderr become the caller's lines -> process group -> function -> value goes back -> end

A rank sends its value to the caller before it tears anything down, and stays until every rank's value has arrived: a
rank that leaves early would break the last messages of its peers.  A rank ends by `os._exit`, since torch's own
teardown sometimes aborts the process.
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

from labs.kit.ranks import torch_settings
from labs.kit.ranks.flight_recorder import FlightRecorder
from labs.kit.ranks.link import Link
from labs.kit.ranks.link_delay import Wire
from labs.kit.ranks.payload import pack

YEAR = 365 * 24 * 3600.0  # seconds; the timeout that the backend gets in place of infinity
UNHEARD = 113  # exit code of a rank that cannot send its value, since the function has closed the connection
MOST_TEXT = 1 << 16  # characters of an error or a warning; a longer text loses its middle


@dataclass(frozen=True)
class Job:
    """The description of a job for one rank, without the function and its arguments, which are in a shared file."""

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
    sources: dict[str, str] = field(default_factory=dict)  # the text of the notebook's cells, for tracebacks
    settings: dict[str, Any] = field(default_factory=dict)  # the caller's settings of PyTorch, see torch_settings.py


def main(
    control_fd: int, output_fd: int, payload_fd: int, flight_fd: int, stack_fd: int, value_fd: int, wires_fd: int
) -> NoReturn:
    """Run a forked rank from its start to its end; never return."""
    write_to(output_fd)
    control, door = Connection(control_fd), os.fstat(control_fd)
    job: Job = cloudpickle.loads(control.recv_bytes())
    finished = threading.Event()
    threading.Thread(target=obey, args=(control, finished), daemon=True).start()
    faulthandler.enable(file=stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=True)
    sending = threading.Lock()  # a thread may warn while the value is being sent
    with FlightRecorder(flight_fd).listening():
        answer = work(job, payload_fd, value_fd, wires_fd, control, sending)
    flush()
    try:
        if not os.path.samestat(door, os.fstat(control_fd)):  # the function closed it, another file has its number
            raise OSError
        with sending:
            control.send_bytes(answer)
    except OSError:
        os._exit(UNHEARD)
    finished.wait()
    flush()
    if "nccl" in job.backend and dist.is_initialized():
        dist.destroy_process_group()  # releases the GPU's memory in order; gloo has nothing to release
    os._exit(0)


def write_to(output_fd: int) -> None:
    """Make a file the standard output of this process, and its standard error, line by line."""
    for target in (1, 2):
        os.dup2(output_fd, target)
    os.close(output_fd)
    for stream, target in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(target, "w", closefd=False)
        lines = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, stream, lines)


def obey(control: Connection, finished: threading.Event) -> None:
    """Wait for the caller's message that tells this rank to end; if the caller is gone, end this rank at once."""
    try:
        control.recv_bytes()
    except (EOFError, OSError):
        os.killpg(os.getpid(), signal.SIGKILL)  # the signal also ends the processes that the rank has started
    finished.set()


class NoKeyboard(io.TextIOBase):
    """A rank's standard input, from which nothing can be read."""

    def readline(self, size: int = -1, /) -> str:
        raise RuntimeError("a rank has no keyboard: call input() before run(), and pass on what it returned")

    def read(self, size: int | None = -1, /) -> str:
        return self.readline()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed the stream
            stream.flush()


def settle_in(job: Job, control: Connection, sending: threading.Lock) -> None:
    """Give this process the caller's environment, import path, folder, cell sources, warnings and PyTorch settings."""
    rank = str(job.rank)
    wanted = job.environment | {"RANK": rank, "WORLD_SIZE": str(job.ranks), "LOCAL_RANK": rank, "LABS_RANK": rank}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - os.environ.items())  # setting only the changed ones saves 1 ms
    sys.path[:] = job.path
    os.chdir(job.folder)

    me, usual = os.getpid(), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, line: int, *rest: Any) -> None:
        if os.getpid() != me:  # a process that the function has forked has no connection of its own
            return usual(message, category, filename, line, *rest)
        try:
            kind = cloudpickle.dumps(category)
        except Exception:  # without the class, the caller issues the text as a UserWarning
            kind = b""
        warning = (cut(str(message)), category.__name__, kind, filename, line)
        with sending:
            control.send_bytes(cloudpickle.dumps(("warning", warning)))

    warnings.showwarning = show
    behave(job.sources, job.settings)


def behave(sources: dict[str, str], what_is_set: dict[str, Any]) -> None:
    """Make this process a rank like any other: one thread, no keyboard, random numbers of its own."""
    for name, source in sources.items():
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    torch.default_generator.seed()  # otherwise all ranks would share the fork server's random numbers
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(int.from_bytes(os.urandom(4)))  # seed() alone takes 0.6 ms
    sys.stdin = NoKeyboard()
    torch.set_num_threads(1)  # a rank stands for a device: it uses one core, on every machine
    torch_settings.apply(what_is_set)


def work(
    job: Job, payload_fd: int, value_fd: int, wires_fd: int, control: Connection, sending: threading.Lock
) -> bytes:
    """Run the job's function, and write its value into the file `value_fd`.

    Returns a pickled ("value", sizes of the file's parts) or ("error", (time, type, sentence, traceback)).
    """
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
    except BaseException as error:
        return failure(error, error)
    try:
        return cloudpickle.dumps(("value", pack(value, value_fd)))
    except BaseException as error:  # the class of the value may raise any exception
        return failure(unsendable(value[0], error), error)


def end_child(error: BaseException | None) -> NoReturn:
    """End a process that the function has forked once it leaves the function: only its parent answers the caller."""
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
    """Return the backend's timeout, which is longer than the caller's, so that the caller's diagnosis comes first."""
    return timedelta(seconds=min(timeout + 60, YEAR))


def use_device(name: str) -> None:
    """Make the device `name` this process' default device, so that the learner's function need not name a device."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_default_device(device)


def watched(record: str | None, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Call the learner's function; return its value, and a recording of kind `record`, or None without a kind."""
    if record is None:
        return function(*args, **kwargs), None
    from labs.kit.record import PASSES

    watch = PASSES[record]()
    with watch:
        value = function(*args, **kwargs)
    return value, watch.tape


def unsendable(value: Any, error: BaseException) -> TypeError:
    text = f"the value that it returned ({type(value).__name__}) cannot be sent to the caller: {error}"
    if "ProcessGroup" in str(error):
        text += " (a group ends with the job): return a value without one, such as full_tensor() of each DTensor"
    return TypeError(text)


def failure(error: BaseException, origin: BaseException) -> bytes:
    return cloudpickle.dumps(("error", (time.monotonic(), *described(error, origin))))


def described(error: BaseException, origin: BaseException, *files: str) -> tuple[str, str, str]:
    """Return an error's type, sentence and traceback.

    origin: the error whose traceback is shown, without its first frames in this file or in `files`
    """
    if isinstance(error, SystemExit):
        error = RuntimeError(f"the function called exit({error.code}): let it return instead")
    trace = origin.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, *files):
        trace = trace.tb_next  # only the frames of the learner's code help
    text = "".join(traceback.format_exception(type(error), error, trace))
    sentence = "".join(traceback.format_exception_only(type(error), error)).strip()
    return type(error).__name__, cut(sentence), cut(text)


def cut(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair can neither be printed nor sent
    if len(text) <= MOST_TEXT:
        return text
    end = MOST_TEXT // 2
    return f"{text[:end]} … {len(text) - 2 * end:,} characters are not shown … {text[-end:]}"
