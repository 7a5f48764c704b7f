"""The bytes that this process's TCP connections have delivered, as the operating system counts them.

    delivered()    the bytes delivered so far, or None on a system that does not count them

    before = delivered()
    dist.all_reduce(x)
    dist.barrier()
    delivered() - before        # with the backend's headers, without TCP's

A recording (record.py) counts the bytes that an algorithm must send; `delivered` counts the bytes that were really
sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path

__all__ = ["delivered"]

BYTES_ACKED = 120  # the offset of tcpi_bytes_acked (8 bytes) in `struct tcp_info` of linux/tcp.h


def delivered() -> int | None:
    """Return the bytes that this process sent and the other side acknowledged, over all its open TCP connections.

    Returns None on every system but Linux, since only Linux counts acknowledged bytes per connection.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the connection may be closed by now, or have no counter
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    total += acknowledged(connection)
    return total


def acknowledged(connection: socket.socket) -> int:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
    return struct.unpack_from("=Q", info, BYTES_ACKED)[0]
