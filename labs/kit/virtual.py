"""A function in a process of its own, where JAX has as many devices as are asked for: virtual ones, all of this CPU.

    losses = on_devices(train, batches, devices=8)
    losses = on_processes(train, batches, processes=2, devices=2)[0]      two that know of each other: 4 devices in all

JAX counts its devices once, when it is first used, and starts threads; a notebook's kernel, from which jobs are started
at any time, is to have neither.  So JAX is imported in a job of one rank, which ends with its call: within `fn`, then,
and never at the top of a cell.  What holds for `run` holds here: errors, output, time limit (JAX catches SIGTERM; a
rank gets SIGKILL).
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

from labs.kit import optional
from labs.kit.launch import run

OLDEST = (0, 10)  # of JAX: it has make_mesh, set_mesh, shard_map and pcast as they are used here
MOST_DEVICES = 256
T = TypeVar("T")


def missing() -> str:
    """What keeps JAX from being used, and the way out, in a sentence; nothing where it is there."""
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed: `make learn EXTRA=gspmd` adds it"
    version = importlib.metadata.version("jax")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"JAX {version} is older than {'.'.join(map(str, OLDEST))}: `make learn EXTRA=gspmd` brings a newer one"
    return ""


def or_skip() -> None:
    """In a notebook: where JAX is missing, say so, and let all cells from the next one on do nothing."""
    optional.or_skip(missing())


def on_devices(
    fn: Callable[..., T], *args: Any, devices: int = 8, timeout: float = 120.0, tell: str = "", **kwargs: Any
) -> T:
    """`fn(*args, **kwargs)` where JAX has this many virtual devices: its value.

    timeout, tell: as of `run`.  Raises ImportError where JAX is missing or too old, ValueError for a number of devices
    that cannot be, RankError where `fn` fails.
    """
    require(devices)
    return run(with_devices, devices, fn, args, kwargs, ranks=1, device="cpu", timeout=timeout, tell=tell)[0]


def on_processes(
    fn: Callable[..., T], *args: Any, processes: int = 2, devices: int = 2, timeout: float = 120.0, **kwargs: Any
) -> list[T]:
    """`fn(*args, **kwargs)` in each of several processes, of which each has so many devices, and sees those of all.

    They communicate by gloo.  Raises as `on_devices` does; one that waits for a process that is not there any more
    ends at the time limit, with all the others.
    """
    require(devices)
    port = free_port()
    return run(as_one_of, port, devices, fn, args, kwargs, ranks=processes, device="cpu", timeout=timeout)


def require(devices: int) -> None:
    if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices={devices!r}: give a number from 1 to {MOST_DEVICES}")
    if told := missing():
        raise ImportError(told)


def as_one_of(port: int, devices: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    # A collective blocks a thread for each device, of a pool as large as the machine has cores: on few, for ever.
    os.environ["NPROC"] = str(4 * devices)
    return with_devices(devices, connected, (port, fn, args, kwargs), {})


def connected(port: int, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
    import jax

    # gloo prints in C++ with whom it is connected; what Python prints goes where it did.
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
    # Programs here run for less time than it would take to make them quicker; what they communicate is the same.
    ours = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{ours} {flags}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    return fn(*args, **kwargs)
