"""A job is a function call with a value.

    losses = run(train, steps=20, ranks=4)     # losses[2] is what rank 2 returned

Every rank is a process with a process group.  The same line works in a notebook cell, a script and a test, and under
torchrun, where it joins the world that is there.  What the ranks print arrives live, with their number before it.

    a rank raises        RankError with that rank's traceback, naming the rank that failed first
    a rank dies          RankError with the signal
    ranks hang           RankError that tells, per rank, the collective, the group and the line (see diagnose)
    an interrupt         every rank is gone
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import copyreg
import importlib
import io
import linecache
import os
import pathlib
import pickle
import re
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import IO, Any, NamedTuple

import cloudpickle
import torch.distributed as dist

from labs.kit.ranks import flight_recorder, worker
from labs.kit.ranks.devices import Place, place
from labs.kit.ranks.diagnosis import PEER_IS_GONE, Problem, Watch, Where, innermost, name, stacks
from labs.kit.ranks.forkserver import Forkserver
from labs.kit.ranks.output import Lines
from labs.kit.watch import frames

MOST_RANKS = 64
POLL = 0.05  # seconds between two looks at the flight recorders
GRACE = 0.25  # seconds after the first failure in which other ranks may still tell theirs
ENDING = 10.0  # seconds for a rank to take itself down after its value came; then it is killed
RECORDS = ("time", "communication", "memory")
CELL_PATH = re.compile(r'File "[^"]*(?:ipykernel_\d+|<ipython-input)[^"]*", line')

FORKSERVER = Forkserver()
atexit.register(FORKSERVER.stop)


class RankError(RuntimeError):
    """A job failed.

    kind   "raised", "died", "mismatch", "returned", "deadlock" or "timeout"
    ranks  the ranks that are the cause
    where  what each rank was doing (`labs.kit.ranks.diagnosis.Where`), in order of rank
    """

    def __init__(self, kind: str, ranks: tuple[int, ...], text: str, where: list[Where]) -> None:
        super().__init__(text)
        self.kind, self.ranks, self.where = kind, ranks, where

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the launcher's own frames."""
        return f"RankError: {self}".splitlines()


class Results(list):
    """What the ranks returned, in order; `recording` is what was recorded of the job, if anything was."""

    recording: Any = None


class Failure(NamedTuple):
    """How one rank failed."""

    when: float
    kind: str
    sentence: str
    trace: str


def run(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    record: str | None = None,
    **kwargs: Any,
) -> Results:
    """Call `fn(*args, **kwargs)` on every rank, each a process in one process group, and return what each returned.

    ranks    how many, 1 to 64 (4 if left out; under torchrun, as many as it started)
    device   "cpu" (gloo), "cuda" (NCCL), or "auto": CUDA when there is a GPU for each rank.  On CUDA, tensors are made
             on the rank's GPU by default, so that the body of `fn` is the same everywhere
    timeout  seconds after which a job that is not done is stopped, and told where each rank stands
    record   "time", "communication" or "memory": what to watch; the result's `.recording` has it (see record.py)

    `fn`, its arguments and its value may be anything that cloudpickle can send, a function from a cell among them.
    Raises ValueError for arguments that cannot work, TypeError when `fn` cannot be sent, RankError when the job fails.
    """
    world = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
    check_arguments(fn, ranks, timeout, record, world)
    if world:
        return to_results(join(fn, args, kwargs, device, record), record)
    ranks = 4 if ranks is None else ranks
    payload = pickled(fn, args, kwargs)
    with Team(place(device, ranks), payload, ranks, timeout, record) as team:
        values = team.finish()
    return to_results(values, record)


def check_arguments(fn: Any, ranks: int | None, timeout: float, record: str | None, world: int | None) -> None:
    if not callable(fn):
        raise TypeError(f"run() calls its first argument on every rank; {fn!r:.80} is no function (is it a value?)")
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS):
        raise ValueError(f"ranks={ranks!r}: a job has 1 to {MOST_RANKS} ranks; more than that takes several machines")
    if world and ranks not in (None, world):
        raise ValueError(f"ranks={ranks}, but torchrun started {world}: leave ranks out, or start as many")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0")
    if record is not None and record not in RECORDS:
        raise ValueError(f"record={record!r}: one of {', '.join(map(repr, RECORDS))}, or None")
    if "LABS_RANK" in os.environ:
        raise RuntimeError("run() was called inside a rank: a job cannot start another job")


def to_results(values: list[tuple[Any, Any]], record: str | None) -> Results:
    results = Results(value for value, _ in values)
    if record:
        from labs.kit.record import join as join_tapes

        results.recording = join_tapes(record, [tape for _, tape in values])
    return results


def join(fn: Callable[..., Any], args: Any, kwargs: Any, device: str, record: str | None) -> list[tuple[Any, Any]]:
    """Under torchrun this process is a rank already: take part, and gather everybody's value on every rank."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    where = place(device, here)
    if not dist.is_initialized():
        worker.use_device(where.devices[local])
        dist.init_process_group(where.backend)
    mine = worker.watched(record, fn, args, kwargs)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


class Team:
    """The ranks of one job: their ends, what has come back, and what is known to be wrong.

    As a context manager it leaves nothing behind, however the job ends: no process, no file, no descriptor.
    """

    def __init__(self, where: Place, payload: bytes, ranks: int, timeout: float, record: str | None) -> None:
        self.where, self.payload, self.ranks, self.timeout, self.record = (
            where,
            payload,
            ranks,
            timeout,
            record,
        )
        self.lines = Lines(ranks)
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.warnings: dict[tuple[str, str, str, int], bytes] = {}  # and the pickled class
        self.pids: dict[int, int] = {}
        self.alive: set[int] = set()
        self.controls: list[Connection] = []
        self.outputs: list[int] = []

    def __enter__(self) -> Team:
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.warn)
        self.selector = self.stack.enter_context(selectors.DefaultSelector())
        try:
            self.start()
        except BaseException:  # an interrupt, too: what has started must not stay; raised again below
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for rank in self.alive:
                FORKSERVER.kill(self.pids[rank])
            while self.alive:
                self.hear(None)
        finally:  # a second interrupt, or an output that is closed; a rank whose control is closed ends itself
            self.stack.close()

    def start(self) -> None:
        if self.where.note:
            print(self.where.note)
        handle, store = tempfile.mkstemp(prefix="labs-store-")
        os.close(handle)
        self.stack.callback(pathlib.Path(store).unlink, missing_ok=True)
        self.flight_files = [self.temporary_file() for _ in range(self.ranks)]
        self.stacks = [self.temporary_file() for _ in range(self.ranks)]
        for rank in range(self.ranks):
            self.flight_files[rank].truncate(flight_recorder.SIZE)
            self.fork(rank, store)
        readers = [flight_recorder.Reader(file.fileno()) for file in self.flight_files]
        for reader in readers:
            self.stack.callback(reader.close)
        self.watch = Watch(readers)
        self.folder, sources = working_folder(), cell_sources()
        for rank, control in enumerate(self.controls):
            job = cloudpickle.dumps(self.job(rank, store, sources))
            with contextlib.suppress(OSError):  # a rank that died already: its status tells
                control.send_bytes(job)

    def temporary_file(self) -> IO[bytes]:
        return self.stack.enter_context(tempfile.TemporaryFile())  # has no name: the last descriptor takes it along

    def fork(self, rank: int, store: str) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        status_read, status_write = os.pipe()
        control = self.stack.enter_context(Connection(ours.detach()))
        self.stack.callback(os.close, output_read)
        self.stack.callback(os.close, status_read)
        files = [self.flight_files[rank].fileno(), self.stacks[rank].fileno()]
        try:
            self.pids[rank] = FORKSERVER.fork([theirs.fileno(), output_write, *files, status_write], store)
        finally:
            theirs.close()
            os.close(output_write)
            os.close(status_write)
        self.alive.add(rank)
        self.controls.append(control)
        self.outputs.append(output_read)
        self.selector.register(control, selectors.EVENT_READ, (self.on_control, rank))
        self.selector.register(output_read, selectors.EVENT_READ, (self.on_output, rank))
        self.selector.register(status_read, selectors.EVENT_READ, (self.on_status, rank))

    def job(self, rank: int, store: str, sources: dict[str, str]) -> worker.Job:
        return worker.Job(
            rank=rank,
            ranks=self.ranks,
            payload=self.payload,
            backend=self.where.backend,
            device=self.where.devices[rank],
            store=store,
            timeout=self.timeout,
            record=self.record,
            environment={**os.environ, **self.where.environment(rank)},
            path=list(sys.path),
            folder=self.folder,
            sources=sources,
        )

    def finish(self) -> list[Any]:
        """Listen until every rank has answered; their values by rank.  Raises RankError."""
        deadline, looked, wrong = time.monotonic() + self.timeout, 0.0, None
        while len(self.values) < self.ranks:
            self.hear(POLL)
            now = time.monotonic()
            problem = None
            if now - looked >= POLL:
                problem, looked = self.watch.poll(), now
            if self.failures or problem:
                wrong = wrong or now + GRACE
                if now > wrong or len(self.values) + len(self.failures) == self.ranks:
                    raise self.first_cause() if self.failures else told(problem)
            if now > deadline:
                raise self.timed_out()
        if problem := self.watch.poll():
            raise told(problem)
        for control in self.controls:
            with contextlib.suppress(OSError):  # killed by somebody after its value came: the value counts
                control.send_bytes(b"end")
        deadline = time.monotonic() + ENDING
        while self.alive and time.monotonic() < deadline:
            self.hear(POLL)
        return [self.values[rank] for rank in range(self.ranks)]

    # ---- what arrives ---------------------------------------------------------------------

    def hear(self, timeout: float | None) -> None:
        """Take what the ranks have sent."""
        for key, _ in self.selector.select(timeout):
            if key.fileobj in self.selector.get_map():  # not when the rank's end, heard just now, took the rest
                handler, rank = key.data
                handler(rank, key.fileobj)

    def on_output(self, rank: int, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self.selector.unregister(fd)
        self.lines.feed(rank, data, last=not data)

    def last_output(self, rank: int, fd: int) -> None:
        """What is in the pipe when a rank has ended; not its end, which a process that the rank started may hold."""
        if fd in self.selector.get_map():
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                self.lines.feed(rank, os.read(fd, 1 << 20))
            self.lines.feed(rank, b"", last=True)
            self.selector.unregister(fd)

    def on_control(self, rank: int, control: Connection) -> None:
        try:
            kind, content = cloudpickle.loads(control.recv_bytes())
        except (EOFError, OSError):
            self.selector.unregister(control)
            return
        except Exception as error:  # the value's own class may fail to build here
            kind, content = (
                "error",
                (time.monotonic(), type(error).__name__, f"its value cannot be read here: {error}", ""),
            )
        if kind == "warning":
            text, category, kind, filename, line = content
            self.warnings.setdefault((text, category, filename, line), kind)
        elif kind == "error":
            self.failures.setdefault(rank, Failure(*content))
        else:
            self.values[rank] = content
            self.watch.returned.add(rank)

    def on_status(self, rank: int, fd: int) -> None:
        """The rank has ended: take what it still had to say, and, if it gave no value, say how it ended."""
        status = os.read(fd, 8)
        self.selector.unregister(fd)
        self.alive.discard(rank)
        self.last_output(rank, self.outputs[rank])
        control = self.controls[rank]
        with contextlib.suppress(EOFError, OSError):
            while control in self.selector.get_map() and control.poll():
                self.on_control(rank, control)
        if control in self.selector.get_map():
            self.selector.unregister(control)
        if rank not in self.values and rank not in self.failures:
            where = innermost(read_all(self.stacks[rank].fileno()))
            self.failures[rank] = Failure(
                time.monotonic(), "died", how_it_ended(status) + (f"   {where}" if where else ""), ""
            )

    # ---- what is wrong --------------------------------------------------------------------

    def first_cause(self) -> RankError:
        """The failure that the others follow from: not one that only says that a peer is gone, then the earliest."""
        first = min(self.failures.values(), key=lambda f: (bool(PEER_IS_GONE.search(f.sentence)), f.when))
        if first.kind == "died" or "gloo" in first.sentence.lower() or PEER_IS_GONE.search(first.sentence):
            problem = self.watch.poll()
            if problem and problem.kind == "mismatch":  # over which the backend fails in its own words, or aborts
                return told(problem)
        same = tuple(sorted(r for r, failure in self.failures.items() if failure.sentence == first.sentence))
        others = [r for r in range(self.ranks) if r not in same]
        because = f"\n{name(others)} then had to stop." if others else ""
        where = self.watch.complete([Where(r, self.failures[r].kind) for r in same])
        if first.kind == "died":
            return RankError("died", same, f"{name(same)} {first.sentence}{because}", where)
        trace = CELL_PATH.sub("Cell, line", first.trace).rstrip()
        text = f"{name(same)} of {self.ranks} failed: {first.sentence}\n\n{trace}\n{because}".rstrip()
        return RankError("raised", same, text, where)

    def timed_out(self) -> RankError:
        late = {rank: pid for rank, pid in self.pids.items() if rank not in self.values and rank in self.alive}
        lines = stacks(late, {rank: self.stacks[rank].fileno() for rank in late})
        waits = self.watch.waited_for()
        where = [
            Where(r, "waits in", waits[r].what, waits[r].site) if r in waits else Where(r, "is at", "", line)
            for r, line in lines.items()
        ]
        busy = tuple(r for r in late if r not in waits) or tuple(late)
        told_ranks = (
            f"{name(busy)} {'is' if len(busy) == 1 else 'are'} still {'at work' if busy[0] not in waits else 'waiting'}"
        )
        sentence = f"the job was not done after {self.timeout:g} s: {told_ranks}"
        return told(Problem("timeout", sentence, busy, self.watch.complete(where)))

    def warn(self) -> None:
        """Issue the ranks' warnings here, each once."""
        for (text, _, filename, line), kind in self.warnings.items():
            try:
                category = pickle.loads(kind)
            except Exception:  # a class that cannot be had here
                category = UserWarning
            warnings.warn_explicit(text, category, filename, line)


def told(problem: Problem) -> RankError:
    lines = "".join(f"\n  {where}" for where in problem.where)
    return RankError(problem.kind, problem.ranks, f"{problem.sentence}{lines}", problem.where)


def how_it_ended(status: bytes) -> str:
    if not status:
        return "had to stop: the process that starts ranks was killed. Run the same line again"
    code = struct.unpack("!q", status)[0]
    if code >= 0:
        return f"ended with exit code {code} before it returned: something called os._exit({code})"
    sign = signal.Signals(-code).name
    hint = " (if nobody did that, the machine ran out of memory)" if sign == "SIGKILL" else ""
    return f"died of {sign}{hint}"


def pickled(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """(fn, args, kwargs) as bytes; a TypeError that names the variable that cannot be sent."""
    if autocall := sys.modules.get("IPython.core.autocall"):  # a notebook's exit() holds the kernel; a rank has its own
        for kind in (autocall.ExitAutocall, *autocall.ExitAutocall.__subclasses__()):
            copyreg.pickle(kind, lambda _: (getattr, (builtins, "exit")))
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:  # a class may refuse in its own way
        what = culprit(fn, args, kwargs)
        raise TypeError(f"{what} cannot be sent to the ranks ({error}): make it inside the function") from error


class Pickler(cloudpickle.Pickler):
    """By value, as cloudpickle does it; but modules of every class go by name, torch's `config` modules among them.

    cloudpickle sends these along with any function that uses both `torch.distributed` and a variable named `config`.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def culprit(fn: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """The name of what cannot be pickled: an argument, or a variable that the function uses."""
    used = {f"argument {i + 1}": value for i, value in enumerate(args)} | {
        f"argument {k!r}": v for k, v in kwargs.items()
    }
    code = getattr(fn, "__code__", None)
    if code is not None:
        cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=False))
        used |= {f"variable {k!r}": cell.cell_contents for k, cell in cells.items() if cell != types.CellType()}
        used |= {f"variable {k!r}": fn.__globals__[k] for k in code.co_names if k in fn.__globals__}
    for label, value in used.items():
        try:
            dumps(value)
        except Exception:  # any refusal will do: it is the one that is looked for, and gets named
            return f"{label} ({type(value).__name__}) of {getattr(fn, '__name__', 'the function')}"
    return f"{getattr(fn, '__name__', fn)!s}"


def cell_sources() -> dict[str, str]:
    """The text of the notebook's cells, so that a rank's traceback can show the line."""
    return {
        file: "".join(entry[2]) for file, entry in linecache.cache.items() if len(entry) > 2 and frames.CELL.match(file)
    }


def working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise RuntimeError("the working directory has been deleted: os.chdir() to one that is there") from error


def read_all(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")


if "LABS_RANK" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
    FORKSERVER.start()  # its imports take a second or two, in the background
