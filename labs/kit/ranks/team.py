"""The ranks of one job, as their caller sees them: connections to the ranks, their values, and their failures.

    with Team(devices, payload, ranks, timeout, record, link, restarted, settings) as team:
        values = team.finish()

For each rank, the caller has a control connection (the job goes to the rank; warnings, the value or the failure come
back), a pipe for the rank's output, and a pipe from the fork server for the rank's exit status.  The caller and its
ranks share files without a name: the function with its arguments, the flight records, the stacks, the values, and the
state of the links between nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import pickle
import re
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from labs.kit.ranks import diagnosis, flight_recorder, link_delay, worker
from labs.kit.ranks.devices import Devices
from labs.kit.ranks.diagnosis import PEER_IS_GONE, RankError, Watch, Where, in_the_past, innermost, make_error, name
from labs.kit.ranks.forkserver import Forkserver
from labs.kit.ranks.link import Link
from labs.kit.ranks.output import Lines
from labs.kit.ranks.payload import cell_sources, shared_file, unpack

POLL = 0.05  # seconds between two looks at the flight recorders
GRACE = 0.25  # seconds after the first failure in which other ranks may still report their failures
ENDING = 10.0  # seconds that a rank may take to end after it sent its value; then it is killed
MOST_BYTES = 1 << 28  # bytes of a rank's message; a larger size cannot be a rank's, and the rest would never arrive
MOST_WARNINGS = 100  # warnings that are shown per job, so that a warning in each step does not fill the notebook
STORE_BYTES = 1 << 16  # bytes that the ranks write to find each other
FILES = 7  # files that the caller has open for each rank while it starts the ranks
MORE_FILES = 64  # files that the caller may open for other purposes meanwhile
ITS_FILES_ARE_GONE = "nfds != -1"  # words in gloo's error if the process has closed gloo's files
RESTARTED = "TORCHELASTIC_RESTART_COUNT"  # torchrun's variable: how often it has restarted all ranks
CELL_PATH = re.compile(r'File "[^"]*(?:ipykernel_\d+|<ipython-input)[^"]*", line')

FORKSERVER = Forkserver()
atexit.register(FORKSERVER.stop)


class Failure(NamedTuple):
    """The failure of one rank: its time (seconds of time.monotonic), its kind, one sentence, and the traceback."""

    when: float
    kind: str
    sentence: str
    trace: str


class Team:
    """The ranks of one job: connections to the ranks, their values, and their failures.

    As a context manager, a Team leaves no process, file or descriptor behind, however the job ends.
    """

    def __init__(
        self,
        devices: Devices,
        payload: bytes,
        ranks: int,
        timeout: float,
        record: str | None = None,
        link: Link | None = None,
        restarted: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.devices, self.payload, self.ranks, self.timeout = devices, payload, ranks, timeout
        self.record, self.link, self.restarted = record, link, restarted
        self.settings = settings or {}
        self.lines = Lines(ranks)
        self.values: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self.warnings: dict[tuple[str, str, str, int], bytes] = {}  # (text, class name, file, line): the pickled class
        self.unshown = 0  # the number of warnings beyond MOST_WARNINGS
        self.pids: dict[int, int] = {}
        self.alive: set[int] = set()
        self.controls: list[Connection] = []
        self.outputs: list[int] = []

    def __enter__(self) -> Team:
        self.stack = contextlib.ExitStack()
        self.stack.push(self.warn)
        self.selector = self.stack.enter_context(selectors.DefaultSelector())
        try:
            self.start()
        except BaseException as error:  # an interrupt, too, must not leave the started ranks behind
            self.__exit__(type(error), error, None)
            if isinstance(error, KeyboardInterrupt):
                raise interruption("interrupted while the ranks were starting") from None
            raise
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            for rank in self.alive:
                FORKSERVER.kill(self.pids[rank])
            while self.alive:
                self.hear(None)
        finally:  # even after a second interrupt; a rank whose control connection is closed ends itself
            self.stack.__exit__(*failure)

    def start(self) -> None:
        if self.devices.note:
            print(self.devices.note)
        allow_open_files(self.ranks)
        store = self.store()
        sizes = {"flight": flight_recorder.SIZE, "stack": 0, "value": 0}
        try:
            self.payload_file = shared_file(self.stack)
            self.wires_file = shared_file(self.stack, link_delay.SIZE if self.link else 0)
            with open(self.payload_file, "wb", closefd=False) as file:
                file.write(self.payload)
            self.files = {
                kind: {rank: shared_file(self.stack, size) for rank in range(self.ranks)}
                for kind, size in sizes.items()
            }
        except OSError as error:
            raise no_room(error) from error
        for rank in range(self.ranks):
            self.fork(rank, store)
        readers = {rank: flight_recorder.Reader(fd) for rank, fd in self.files["flight"].items()}
        for reader in readers.values():
            self.stack.callback(reader.close)
        self.watch = Watch(readers, self.ranks)
        self.folder, sources = working_folder(), cell_sources()
        for rank, control in enumerate(self.controls):
            job = cloudpickle.dumps(self.job(rank, store, sources))
            with contextlib.suppress(OSError):  # the rank has already died, as its exit status will report
                control.send_bytes(job)

    def store(self) -> str:
        """Create the file in which the ranks will find each other (FileStore) if the disk has room; return the path."""
        try:
            handle, store = tempfile.mkstemp(prefix="labs-store-")
            self.stack.callback(self.remove, pathlib.Path(store))
            with open(handle, "wb") as file:
                file.write(bytes(STORE_BYTES))
                file.flush()
                file.truncate(0)
        except OSError as error:
            raise no_room(error) from error
        return store

    def remove(self, store: pathlib.Path) -> None:
        """Delete the file `store`; if the fork server was killed, wait for its ranks, which might create it again."""
        deadline = time.monotonic() + 1
        process = FORKSERVER.process
        while process and process.poll() is not None and self.any_left() and time.monotonic() < deadline:
            time.sleep(0.005)
        store.unlink(missing_ok=True)

    def any_left(self) -> bool:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                return True
        return False

    def fork(self, rank: int, store: str) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        status_read, status_write = os.pipe()
        control = self.stack.enter_context(Connection(ours.detach()))
        self.stack.callback(os.close, output_read)
        self.stack.callback(os.close, status_read)
        files = [self.payload_file, *(each[rank] for each in self.files.values()), self.wires_file]
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
            backend=self.devices.backend,
            device=self.devices.names[rank],
            store=store,
            timeout=self.timeout,
            record=self.record,
            link=self.link,
            environment={**os.environ, **self.devices.environment(rank), RESTARTED: str(self.restarted)},
            path=list(sys.path),
            folder=self.folder,
            sources=sources,
            settings=dict(self.settings),
        )

    def finish(self) -> list[Any]:
        """Wait until every rank has answered; return the values that the function returned, by rank.

        Raises RankError for the failure of a rank, and KeyboardInterrupt.
        """
        try:
            self.listen()
        except KeyboardInterrupt:
            raise interruption(f"interrupted; {self.standing()}") from None
        return [self.values[rank] for rank in range(self.ranks)]

    def listen(self) -> None:
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
                    raise self.first_cause() if self.failures else make_error(problem)
            if now > deadline:
                raise self.timed_out()
        if problem := self.watch.poll():
            raise make_error(problem)
        for control in self.controls:
            with contextlib.suppress(OSError):  # a rank that was killed after it sent its value has succeeded
                control.send_bytes(b"end")
        deadline = time.monotonic() + ENDING
        while self.alive and time.monotonic() < deadline:
            self.hear(POLL)

    # ---- messages from the ranks ----------------------------------------------------------

    def hear(self, timeout: float | None) -> None:
        """Receive the ranks' output, messages and exit statuses; wait up to `timeout` seconds for the first one."""
        for key, _ in self.selector.select(timeout):
            if key.fileobj in self.selector.get_map():  # an exit status unregisters the rank's other files
                handler, rank = key.data
                handler(rank, key.fileobj)

    def on_output(self, rank: int, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self.selector.unregister(fd)
        self.lines.feed(rank, data, last=not data)

    def last_output(self, rank: int, fd: int) -> None:
        """Show the last output of a rank that has ended.

        Do not wait for the end of the rank's pipe, since a process that the rank started may hold the pipe open.
        """
        if fd in self.selector.get_map():
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                self.lines.feed(rank, os.read(fd, 1 << 20))
            self.lines.feed(rank, b"", last=True)
            self.selector.unregister(fd)

    def on_control(self, rank: int, control: Connection) -> None:
        try:
            kind, content = cloudpickle.loads(control.recv_bytes(MOST_BYTES))
            if kind == "value":
                content = unpack(self.files["value"][rank], content)
        except (EOFError, ConnectionError):
            self.selector.unregister(control)
            return
        except (Exception, SystemExit) as error:  # the class of the value may fail to load here
            kind, content = (
                "error",
                (time.monotonic(), type(error).__name__, f"its value cannot be read here: {error}", ""),
            )
        if kind == "warning":
            text, category, kind, filename, line = content
            if len(self.warnings) < MOST_WARNINGS:
                self.warnings.setdefault((text, category, filename, line), kind)
            elif (text, category, filename, line) not in self.warnings:
                self.unshown += 1
        elif kind == "error":
            self.failures.setdefault(rank, Failure(*content))
        else:
            self.values[rank] = content
            self.watch.returned.add(rank)

    def on_status(self, rank: int, fd: int) -> None:
        """Receive the last messages of a rank that has ended; if the rank sent no value, note how the rank ended."""
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
            where = innermost(diagnosis.read_all(self.files["stack"][rank]))
            sentence = how_it_ended(status, self.lines.aborts[rank]) + (f"   {where}" if where else "")
            self.failures[rank] = Failure(time.monotonic(), "died", sentence, "")

    # ---- failures -------------------------------------------------------------------------

    def first_cause(self) -> RankError:
        """Return the job's error: the first cause among the failures, or a diagnosis that explains it better."""
        first = earliest(self.failures)
        gone = PEER_IS_GONE.search(first.sentence)
        if first.kind == "died" or "gloo" in first.sentence.lower() or gone:
            # The backend reports a mismatch in its own words, or aborts the process.
            better = {"mismatch", "nobody", *(["returned"] if gone else [])}
            if (problem := self.watch.poll()) and problem.kind in better:
                return make_error(problem)
        error = caused(self.failures, self.ranks, self.lines.aborts)
        error.where = self.watch.complete(error.where)
        return error

    def late(self) -> dict[int, int]:
        """Return the ranks that have not returned, as {rank: pid}."""
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.values and rank in self.alive}

    def timed_out(self) -> RankError:
        return make_error(self.watch.overdue(self.timeout, self.late(), self.files["stack"]))

    def standing(self) -> str:
        """Return the state of all ranks in words.

        "ranks 0 and 1 were in barrier   cell line 3: dist.barrier(); rank 2 had returned"
        """
        places: dict[str, list[int]] = {}
        for where in self.watch.complete(self.watch.standing(self.late(), self.files["stack"])):
            places.setdefault(str(where).split(" ", 2)[2], []).append(where.rank)
        return "; ".join(f"{name(ranks)} {in_the_past(place, len(ranks))}" for place, ranks in places.items())

    def warn(self, error: Any, failure: BaseException | None, trace: Any) -> None:
        """Issue each warning of the ranks once in the caller; if warnings are errors, a failure takes precedence."""
        if self.unshown:
            more = f"the ranks gave {self.unshown:,} warnings more, which are not shown", "UserWarning", __file__, 1
            self.warnings[more] = pickle.dumps(UserWarning)
        for (text, _, filename, line), kind in self.warnings.items():
            try:
                category = pickle.loads(kind)
            except Exception:  # the class of the warning cannot be loaded here
                category = UserWarning
            try:
                warnings.warn_explicit(text, category, filename, line)
            except Warning as escalated:
                if failure is None:
                    raise
                failure.add_note(f"{type(escalated).__name__}: {escalated}")


def earliest(failures: Mapping[int, Failure]) -> Failure:
    """Return the first failure in time; a failure that only says that a peer is gone counts if there is no other."""
    return min(failures.values(), key=lambda f: (bool(PEER_IS_GONE.search(f.sentence)), f.when))


def caused(failures: Mapping[int, Failure], ranks: int, aborts: Sequence[str] = ()) -> RankError:
    """Return the error of a job in which ranks have failed.

    failures   the failures, as {rank: failure}
    ranks      number of ranks of the job
    aborts     the lines that gloo wrote as it aborted each rank, by rank
    """
    first = earliest(failures)
    same = tuple(sorted(r for r, failure in failures.items() if failure.sentence == first.sentence))
    where = [Where(r, failures[r].kind) for r in same]
    others = [r for r in range(ranks) if r not in same]
    because = f"\n{name(others)} then had to stop." if others else ""
    if first.kind == "died":
        return RankError("died", same, f"{name(same)} {first.sentence}{aborts[same[0]]}{because}", where)
    trace = CELL_PATH.sub("Cell, line", first.trace).rstrip()
    text = f"{name(same)} of {ranks} failed: {first.sentence}\n\n{trace}\n{because}".rstrip()
    return RankError("interrupted" if first.kind == KeyboardInterrupt.__name__ else "raised", same, text, where)


def interruption(text: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that IPython shows in one line; shells expect exactly this class of Python."""
    error = KeyboardInterrupt(text)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {text}"]  # type: ignore[attr-defined]
    return error


def no_room(error: OSError) -> OSError:
    text = f"{error.strerror} for temporary files in {tempfile.gettempdir()}: free some, or set TMPDIR"
    return OSError(error.errno, text)


def allow_open_files(ranks: int) -> None:
    """Raise this process' soft limit of open files if a job of `ranks` ranks needs more.

    Raises RuntimeError if the job needs more open files than the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + MORE_FILES
    need = taken + FILES * ranks
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        most = max(0, (hard - taken) // FILES)
        raise RuntimeError(
            f"{ranks} ranks take {need} open files, and this process may have {hard} (ulimit -Hn): "
            f"start at most {most} ranks, or raise the limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def how_it_ended(status: bytes, gloo: str) -> str:
    if not status:
        return "had to stop: the process that starts ranks was killed. Run the same line again"
    code = struct.unpack("!q", status)[0]
    if code == worker.UNHEARD or ITS_FILES_ARE_GONE in gloo:
        return "can neither answer nor hear the others: something closed files that it had not opened (os.closerange?)"
    if code >= 0:
        return f"ended with exit code {code} before it returned: something called os._exit({code}), or os.exec"
    sign = signal.Signals(-code).name
    hint = " (if nobody did that, the machine ran out of memory)" if sign == "SIGKILL" else ""
    return f"died of {sign}{hint}"


def working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise RuntimeError("the working directory has been deleted: call os.chdir(one that exists)") from error


def read_all(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")
