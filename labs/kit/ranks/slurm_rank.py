"""The code of a rank that Slurm has started, once its host has seen the shared folder (shared_folder.py).

    Task    what a rank needs besides the function and its arguments
    work    joins the process group, calls the function, and returns its value or its failure, which submitit writes

What the function prints goes into a file of the rank's own, which the caller reads as it grows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch.distributed as dist

from labs.kit.ranks import worker
from labs.kit.ranks.devices import devices_for
from labs.kit.ranks.diagnosis import Problem
from labs.kit.ranks.payload import dumps
from labs.kit.ranks.torchrun import GRACE, Patrol

MEETING = 60.0  # seconds in which all ranks must have found the first host
POLL = 0.05
OURS = 0o077  # the mask of a file that only this user may read or write, as the caller demands


@dataclass(frozen=True)
class Task:
    """The description of a job for all ranks, without the function and its arguments."""

    device: str
    timeout: float
    record: str | None
    folder: str  # the job's own folder, which all hosts share
    path: list[str]  # the caller's import path
    sources: dict[str, str]  # the text of the notebook's cells, for tracebacks
    settings: dict[str, Any]  # the caller's settings of PyTorch
    umask: int  # the caller's; Slurm would take that of the submission


def work(payload: bytes, task: Task) -> tuple[str, Any]:
    """Call the function; return ("value", pickle) or ("error", (time, type, sentence, traceback, host))."""
    # submitit's handlers would keep the rank alive, or put the job into the queue again.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.umask(task.umask)
    try:
        return "value", value_of(payload, task)
    except BaseException as error:
        return "error", (time.time(), *worker.described(error, error, __file__), socket.gethostname())
    finally:
        os.umask(OURS)


def value_of(payload: bytes, task: Task) -> bytes:
    me, store = join(task)
    function, args, kwargs = cloudpickle.loads(payload)
    with Patrol(task.timeout, report) as patrol:
        with patrol.recorder.listening():
            value = worker.watched(task.record, function, args, kwargs)
        try:
            answer = dumps(value)
        except BaseException as error:  # the class of the value may raise any exception
            raise worker.unsendable(value[0], error) from error
        stay(store, me)
    if "nccl" in dist.get_backend_config():
        dist.destroy_process_group()  # releases the GPU's memory in order; gloo has nothing to release
    return answer


def join(task: Task) -> tuple[Any, dist.TCPStore]:
    """Make this process a rank of the process group; return what it is told of its place, and the ranks' store."""
    from submitit.helpers import TorchDistributedEnvironment  # not installed with the course

    me = TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    os.environ |= {"GROUP_RANK": os.environ["SLURM_NODEID"], "TORCHELASTIC_RESTART_COUNT": "0"}
    worker.write_to(os.open(Path(task.folder, f"output-{me.rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    sys.path += [place for place in task.path if place not in sys.path]
    worker.behave(task.sources, task.settings)
    devices = devices_for(task.device, me.local_world_size)
    worker.use_device(devices.names[me.local_rank])
    store, limit = meet(me), worker.patience(task.timeout)
    first = store.compare_set("backend", "", devices.backend).decode()
    if first != devices.backend:
        raise ValueError(f'{devices.backend} fits here, and {first} on another host: give run() device="cpu" or "cuda"')
    dist.init_process_group(devices.backend, store=store, rank=me.rank, world_size=me.world_size, timeout=limit)
    return me, store


def meet(me: Any) -> dist.TCPStore:
    """Return the store in which all ranks find each other, in the process of rank 0.

    Raises ConnectionError, naming both hosts, if the first host cannot be found or reached.
    """
    here, head = socket.gethostname(), me.master_addr
    try:
        socket.getaddrinfo(head, me.master_port)
        limit = timedelta(seconds=MEETING)
        return dist.TCPStore(head, me.master_port, me.world_size, me.rank == 0, timeout=limit)
    except OSError as error:
        raise ConnectionError(f"{here} cannot resolve {head}, the job's first host: {error.strerror}") from None
    except RuntimeError as error:
        what = str(error).partition("\n")[0]
        raise ConnectionError(f"{here} has not met all {me.world_size} ranks at {head}: {what}") from None


def stay(store: dist.TCPStore, me: Any) -> None:
    """Wait until every rank has its answer: a rank that leaves early breaks the last messages of its peers."""
    with contextlib.suppress(RuntimeError):  # rank 0 has failed, and its store with it: the caller ends the job
        store.add("answered", 1)
        while store.add("answered", 0) < me.world_size:
            time.sleep(POLL)
        store.add("left", 1)
        while me.rank == 0 and store.add("left", 0) < me.world_size:
            time.sleep(POLL)


def report(problem: Problem) -> NoReturn:
    """Write a diagnosis in the place of this rank's answer, and end the rank, whose main thread may wait for ever."""
    from submitit import JobEnvironment
    from submitit.core import utils

    os.umask(OURS)
    with utils.temporary_save_path(JobEnvironment().paths.result_pickle) as path:
        utils.cloudpickle_dump(("success", ("problem", problem)), path)
    time.sleep(GRACE)
    os._exit(1)
