"""Jobs under torchrun, where each process already is a rank.

    join    runs the function in this process, and returns every rank's value to every rank
    Patrol  on the first rank of each machine, compares the flight records of that machine's ranks, and watches the
            time and their launcher; ranks that Slurm has started have one, too (slurm_rank.py)
    end     reports a failure on stderr and exits, whereupon torchrun ends all other ranks

torchrun itself reports and restarts a rank that raises or dies, even a rank that the backend aborts over different
sizes.  A Patrol does not see the ranks of other machines: each machine reports its own ranks, and a mismatch between
the ranks of two machines shows only at the timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import math
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

import torch.distributed as dist

from labs.kit.ranks import flight_recorder, worker
from labs.kit.ranks.devices import devices_for
from labs.kit.ranks.diagnosis import Problem, Watch, make_error, name
from labs.kit.ranks.flight_recorder import FlightRecorder, Reader

POLL = 0.1  # seconds between two looks at the flight records
GRACE = 1.0  # seconds in which other machines, whose time is also up, may still report their failures
ELASTIC = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", *ELASTIC)  # variables that torchrun sets


def world() -> int | None:
    """Return the number of ranks if torchrun has started this process, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if missing := [name for name in GIVEN if name not in os.environ]:
        raise RuntimeError(
            f"TORCHELASTIC_RUN_ID is set, as torchrun does, but not {missing[0]}: start this with torchrun, "
            "or unset TORCHELASTIC_RUN_ID"
        )
    if os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RuntimeError(
            "torchrun --max-restarts keeps one store for all restarts, in which ranks find the addresses of those that "
            "died (pytorch#135712): give it TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d"
        )
    return int(os.environ["WORLD_SIZE"])


def join(
    fn: Callable[..., Any], args: Any, kwargs: Any, device: str, timeout: float, longest: float, record: str | None
) -> list[tuple[Any, Any]]:
    """Call `fn` in this process, which is a rank under torchrun; return (value, recording) of every rank, by rank."""
    devices = devices_for(device, int(os.environ["LOCAL_WORLD_SIZE"]))
    if not dist.is_initialized():
        worker.use_device(devices.names[int(os.environ["LOCAL_RANK"])])
        dist.init_process_group(devices.backend, timeout=worker.patience(timeout))
        atexit.register(leave)
    values: list[Any] = [None] * dist.get_world_size()
    with Patrol(timeout, end, longest) as patrol:
        with patrol.recorder.listening():
            mine = worker.watched(record, fn, args, kwargs)
        dist.all_gather_object(values, mine)
    return values


def leave() -> None:
    """Destroy the process group before the interpreter ends, since a later destruction sometimes aborts the process."""
    if dist.is_initialized():
        if not hasattr(sys, "last_value"):  # after a failure of this rank, other ranks may never come
            dist.barrier()
        gc.collect()  # frees reference cycles that hold the group, as DDP's modules do
        dist.destroy_process_group()


class Patrol:
    """A flight recorder of this rank and, on a machine's first rank, a thread that reads the records of its ranks.

    report: the function that the thread calls with a problem, and that ends this process
    longest: the seconds for which ranks of this machine may wait without making a call
    """

    def __init__(self, timeout: float, report: Callable[[Problem], NoReturn], longest: float = math.inf) -> None:
        self.timeout, self.report, self.longest = timeout, report, longest
        self.launcher = os.getppid()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self) -> Patrol:
        with contextlib.ExitStack() as stack:
            (flight, flight_path), (stacks, stacks_path) = named_file(stack), named_file(stack)
            flight.write(bytes(flight_recorder.SIZE))
            self.recorder = FlightRecorder(flight.fileno())
            chained = callable(signal.getsignal(signal.SIGUSR1))
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=chained)
            stack.callback(faulthandler.unregister, signal.SIGUSR1)
            of_all: list[Any] = [None] * dist.get_world_size()
            machine = os.environ["GROUP_RANK"]
            dist.all_gather_object(of_all, (machine, dist.get_rank(), os.getpid(), flight_path, stacks_path))
            if os.environ["LOCAL_RANK"] == "0":
                here = [rest for theirs, *rest in of_all if theirs == machine]
                self.pids = {rank: pid for rank, pid, _, _ in here}
                flights = {rank: stack.enter_context(open(path, "rb")) for rank, _, path, _ in here}
                self.stacks = {rank: stack.enter_context(open(path, "rb")).fileno() for rank, _, _, path in here}
                readers = {rank: Reader(file.fileno()) for rank, file in flights.items()}
                self.watch = Watch(readers, len(of_all))
                self.thread.start()
            dist.barrier()  # after this, every reader has opened its files, so their names can be deleted
            pathlib.Path(flight_path).unlink()
            pathlib.Path(stacks_path).unlink()
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.over.set()
        if self.thread.ident:
            self.thread.join()
        self.recorder.groups.clear()  # see leave()
        self.stack.close()

    def look(self) -> None:
        deadline = time.monotonic() + self.timeout
        host = socket.gethostname()
        while not self.over.wait(POLL):
            self.watch.returned |= {rank for rank, reader in self.watch.readers.items() if reader.is_over()}
            if problem := self.watch.poll():
                self.report(problem)
            if problem := self.watch.stranded(self.longest, host):
                self.end_all(problem)
            if os.getppid() != self.launcher:
                sentence = f"on {host}, the launcher of {name(tuple(self.pids))} has ended, so the ranks end, too"
                self.end_all(Problem("died", sentence, tuple(self.pids)))
            late = {rank: pid for rank, pid in self.pids.items() if rank not in self.watch.returned}
            if late and time.monotonic() > deadline:
                self.report(self.watch.overdue(self.timeout, late, self.stacks))

    def end_all(self, problem: Problem) -> None:
        """Report a problem and end all ranks of this machine: torchrun has ended, or waits for the other machine."""
        for pid in self.pids.values():
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended just now
                    os.kill(pid, signal.SIGKILL)
        self.report(problem)


def named_file(stack: contextlib.ExitStack) -> tuple[IO[bytes], str]:
    """Return a temporary file and the path by which other processes can open it; `stack` deletes the file."""
    handle, path = tempfile.mkstemp(prefix="labs-rank-")
    stack.callback(pathlib.Path(path).unlink, missing_ok=True)
    return stack.enter_context(open(handle, "r+b", buffering=0)), path


def end(problem: Problem) -> NoReturn:
    """Report a failure on stderr and exit, whereupon torchrun ends all other ranks.

    os._exit is needed, since the main thread may wait in C for ever.
    """
    print(f"RankError: {make_error(problem)}", file=sys.stderr, flush=True)
    time.sleep(GRACE)
    os._exit(1)
