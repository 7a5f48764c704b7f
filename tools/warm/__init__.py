"""Pythons that start with torch and the course already imported: for the notebooks of a test suite, on Linux.

    pythons(folder)     writes folder/python, which is started like Python
    python()            the path of the suite's Python, for other programs that would import torch: scripts, torchrun
    client.py           what folder/python runs: it asks for a process, and passes on its files, signals, exit status
    origin.py           the process that imports and forks; one for each set of variables that imports may read
    once.py             in kernels: a job that one notebook has run is not run again by another

A suite starts some 40 kernels, as many fork servers, and ranks of torchrun.  A kernel took 5.9 s of processor time to
import what the one before it had imported, a rank 1.6 s: over 200 s in each `make test`.  A job that a notebook takes
from its solved twin saves more: without `once`, both of 03 took more than a quarter longer.  Everything else is as
usual: one process each, with a `__main__` of its own.
"""

import json
import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CLIENT = """#!{python} -IS
import sys
sys.path.insert(0, {root!r})
from tools.warm import client
client.main({python!r}, {root!r})
"""


def pythons(folder: Path) -> socket.socket:
    """Write folder/python and a kernel `python3` for JUPYTER_PATH.

    The origins end when the returned socket is closed.
    """
    alive = socket.socket(socket.AF_UNIX)
    alive.bind(str(folder / "alive"))
    alive.listen()
    python = folder / "python"
    python.write_text(CLIENT.format(python=sys.executable, root=str(ROOT)))
    python.chmod(0o755)
    kernel = folder / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    from ipykernel.kernelspec import get_kernel_dict  # imported here, since the client has no site-packages

    usual = get_kernel_dict()
    kernel.write_text(json.dumps(usual | {"argv": [str(python), *usual["argv"][1:]]}))
    return alive


def python() -> str:
    """Return the suite's own Python, or the usual one if the suite has none."""
    warm = Path(os.environ.get("JUPYTER_PATH", "")) / "python"
    return str(warm) if warm.exists() else sys.executable
