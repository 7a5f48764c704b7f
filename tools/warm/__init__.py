"""Pythons that have torch and the course imported as they begin: for the notebooks of a suite, on Linux.

    pythons(folder)     writes folder/python, to be started as Python is
    python()            the path of the suite's, for what else would import torch anew: scripts, torchrun
    client.py           what folder/python runs: it has a process made, and stands for it: files, signals, exit status
    origin.py           the one that imports, and forks; one for each set of variables that imports may read
    once.py             in kernels: a job that a notebook has run is not run again by another

A suite starts some 30 kernels, as many fork servers, and ranks of torchrun, and each took 2 to 7 s of processor time to
import what the one before it had.  What runs is otherwise the same: a process for each, with a `__main__` of its own.
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
    """Write folder/python and a kernel `python3` for JUPYTER_PATH; the origins end when what is returned is closed."""
    alive = socket.socket(socket.AF_UNIX)
    alive.bind(str(folder / "alive"))
    alive.listen()
    python = folder / "python"
    python.write_text(CLIENT.format(python=sys.executable, root=str(ROOT)))
    python.chmod(0o755)
    kernel = folder / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    from ipykernel.kernelspec import get_kernel_dict  # here, since the client has no site-packages

    usual = get_kernel_dict()
    kernel.write_text(json.dumps(usual | {"argv": [str(python), *usual["argv"][1:]]}))
    return alive


def python() -> str:
    """The suite's own; where it has none, the usual one."""
    warm = Path(os.environ.get("JUPYTER_PATH", "")) / "python"
    return str(warm) if warm.exists() else sys.executable
