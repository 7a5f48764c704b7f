"""Tests of sockets against a socket pair with a known number of bytes, and against what gloo is known to send.

gloo's reduce_scatter is an all_reduce that keeps one piece.
"""

import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist

from labs import collectives
from labs.kit import sockets
from labs.kit.launch import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")


def test_what_a_connection_delivers_is_counted_once_it_is_there():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            before = sockets.delivered()
            ours.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(theirs.recv(1 << 16))
            theirs.sendall(b"done")  # carries the acknowledgement of everything before
            ours.recv(4)
            assert 100_000 <= sockets.delivered() - before <= 100_004


def test_it_leaves_everything_open_and_nothing_more():
    with open(__file__) as file, socket.socket() as idle:
        before = os.listdir("/proc/self/fd")
        sockets.delivered()
        assert os.listdir("/proc/self/fd") == before
        assert file.read(3) == '"""' and idle.fileno() >= 0


def wire():
    """Return the bytes that this rank delivers for tensors of 1 MiB, in each of three collectives."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    x = torch.ones(2**18)
    piece = torch.empty(2**16)
    ways = {
        "all_reduce": lambda: dist.all_reduce(x),
        "reduce_scatter": lambda: scatter(piece, x),
        "our reduce_scatter": lambda: collectives.reduce_scatter(x),
    }
    sent = {}
    for name, way in ways.items():
        way()  # the first call also connects
        dist.barrier()
        before = sockets.delivered()
        way()
        dist.barrier()
        sent[name] = (sockets.delivered() - before) / 2**20
    return sent


def test_gloo_sends_an_all_reduce_for_a_reduce_scatter():
    for sent in run(wire, ranks=4, device="cpu"):
        assert sent == pytest.approx({"all_reduce": 1.5, "reduce_scatter": 1.5, "our reduce_scatter": 0.75}, rel=0.02)
