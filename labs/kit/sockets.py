"""What really went over the wire: the bytes that this process's TCP connections have delivered.

    before = delivered()
    dist.all_reduce(x)
    dist.barrier()
    delivered() - before        # with headers of the backend, without those of TCP

A recording (record.py) books what an algorithm has to send; this is what the operating system counted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path

BYTES_ACKED = 120  # where `struct tcp_info` of linux/tcp.h has tcpi_bytes_acked, 8 bytes


def delivered() -> int | None:
    """Bytes sent by this process and acknowledged by the other side, over all its open TCP connections.

    None where the system does not count them in this way: anywhere but on Linux.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # one that was closed since, or has no counter
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    total += acknowledged(connection)
    return total


def acknowledged(connection: socket.socket) -> int:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
    return struct.unpack_from("=Q", info, BYTES_ACKED)[0]
