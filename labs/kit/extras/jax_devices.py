"""Functions that run in another process, in which JAX has any number of devices: virtual ones, all on this CPU.

    losses = on_devices(train, batches, devices=8)
    losses = on_processes(train, batches, processes=2, devices=2)[0]      two connected processes: 4 devices in all

JAX counts its devices once, when it is first used, and starts threads.  A notebook's kernel must do neither, since it
may start jobs at any time.  So JAX runs in a job of one rank, which ends with the call: import JAX within `fn`, and
never at the top of a cell.  Errors, output and the timeout are those of `run`.  JAX catches SIGTERM, so a rank with JAX
is stopped by SIGKILL.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from labs.kit.ranks.run import run

OLDEST = (0, 10)  # the oldest JAX with the make_mesh, set_mesh, shard_map and pcast that this course uses
MOST_DEVICES = 256
T = TypeVar("T")


def jax_missing() -> str:
    """Return a sentence that says why JAX cannot be used, and what to do; "" if it can be used."""
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed: `make learn EXTRA=gspmd` adds it"
    version = importlib.metadata.version("jax")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"JAX {version} is older than {'.'.join(map(str, OLDEST))}: `make learn EXTRA=gspmd` brings a newer one"
    return ""


def on_devices(
    fn: Callable[..., T], *args: Any, devices: int = 8, timeout: float = 120.0, tell: str = "", **kwargs: Any
) -> T:
    """Return the value of `fn(*args, **kwargs)` in a process in which JAX has this many virtual devices.

    timeout, tell: the arguments of `run`.
    Raises ImportError if JAX is missing or too old, ValueError for a number of devices outside 1 to 256, and RankError
    if `fn` fails.
    """
    require(devices)
    return run(with_devices, devices, fn, args, kwargs, ranks=1, device="cpu", timeout=timeout, tell=tell)[0]


def on_processes(
    fn: Callable[..., T], *args: Any, processes: int = 2, devices: int = 2, timeout: float = 120.0, **kwargs: Any
) -> list[T]:
    """Return the values of `fn(*args, **kwargs)` in several processes, each with this many JAX devices.

    Every process sees the devices of all processes, and the processes communicate with gloo.  Raises the same errors as
    `on_devices`.  If a process waits for a process that has ended, all are stopped at the timeout.
    """
    require(devices)
    port = free_port()
    return run(as_one_of, port, devices, fn, args, kwargs, ranks=processes, device="cpu", timeout=timeout)


def require(devices: int) -> None:
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices={devices!r}: give a number from 1 to {MOST_DEVICES}")
    if reason := jax_missing():
        raise ImportError(reason)


def as_one_of(port: int, devices: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    # A collective of JAX blocks one thread per device, in a pool of one thread per core: on few cores, it would hang.
    os.environ["NPROC"] = str(4 * devices)
    return with_devices(devices, connected, (port, fn, args, kwargs), {})


def connected(port: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    import jax

    # gloo's C++ code prints its connections on stdout: send that to /dev/null, and only Python's output to the caller.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", dist.get_world_size(), dist.get_rank())
    return fn(*args, **kwargs)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def with_devices(devices: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    flags = os.environ.get("XLA_FLAGS", "")
    # Optimizing a small compiled program would take longer than running it, and would not change its communication.
    ours = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{ours} {flags}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    return fn(*args, **kwargs)
