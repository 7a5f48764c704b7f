"""The program inside the sandbox: it runs the checks on a submission, and writes a line of JSON for each verdict.

    standard input    {"exercises": [{"name": …, "functions": ["gather", "drop"], "cells": […]}, …],
                       "limits": {"RLIMIT_NPROC": 400, …}, "user": 61000}
    standard output   {"name": …, "ok": true, false or null, "lines": [the check's words], "measured": …}, one a line

The judge runs no line of a submission: ranks do, which are other processes.  What they send back is data, and a pickle
that names anything else than the classes in DATA is refused.  The ranks can neither read the judge's memory nor open
its descriptors (`PR_SET_DUMPABLE`).  If a submission kills the judge, the verdict is missing, which counts as wrong.
"""

import ctypes
import json
import os
import resource
import sys
from importlib import import_module
from typing import Any

PR_SET_DUMPABLE = 4  # <sys/prctl.h>
DATA = {
    ("labs.exercises.engine.on_paper", "Sheet"),
    ("labs.exercises.engine.on_paper", "Written"),
    ("labs.exercises.engine.scripts", "Done"),
    ("labs.kit.ranks.payload", "tensor_of"),
    ("torch", "Size"),
    ("torch", "device"),
    ("builtins", "range"),
}
# Tables of mistakes about bytes, messages and time: an answer to which one of them applies has the right numbers.
MEASURED = ("SENT", "HELD", "TRAFFIC", "GRAPHS", "COSTS", "EARLY")
FORGED = "less than the least possible"


def main() -> None:
    request = json.load(sys.stdin)
    verdicts = alone(request)

    def say(**verdict: Any) -> None:
        verdicts.write(json.dumps(verdict) + "\n")
        verdicts.flush()

    try:
        from labs.exercises import found
        from labs.kit import check
        from tools.marking.learned import Learned
        from tools.marking.slices import slice_of

        found()  # imports all checks
    except Exception as error:
        return say(failed=f"{type(error).__name__}: {error}")
    say(ready=True)
    sys.addaudithook(only_data)
    for each in request["exercises"]:
        name = each["name"]
        try:
            source = slice_of(each["cells"], name, each["functions"])
            functions = [Learned(source, fn) for fn in each["functions"]]
            answer = getattr(check, name)(*functions)
        except SyntaxError as error:
            say(name=name, ok=False, lines=[f"✗ {name}: the cell is not valid Python: {error}"], measured=False)
        except Exception as error:
            # The ranks sent what no check understands, or filled the folder. Another judge goes on in a new sandbox.
            if each is request["exercises"][0]:
                line = f"✗ {name}: the check cannot go on: {type(error).__name__}: {error}"
                say(name=name, ok=False, lines=[line], measured=False)
            return
        else:
            measured = answer.ok is False and answer.mistake in measured_by(name)
            say(name=name, ok=answer.ok, lines=answer.lines(), measured=measured)


def alone(request: dict[str, Any]) -> Any:
    """Give up all rights, keep the standard output for verdicts, set the limits, and return the verdicts' file."""
    verdicts = os.fdopen(os.dup(1), "w")  # no other process inherits it
    for target in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), target)
    for name, value in request["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    if os.getuid() == 0 and (user := request.get("user")):  # root could leave, and no limit of processes holds for it
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    return verdicts


def only_data(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to unpickle anything but data."""
    if event == "pickle.find_class" and arguments not in DATA:
        import torch

        module, name = arguments
        if module != "torch" or not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"a rank sent {module}.{name} instead of numbers, text and tensors")


def measured_by(name: str) -> set[str]:
    """Return the names of the mistakes in this exercise that are about bytes, messages or time, not about values."""
    check = import_module("labs.kit.check")
    chapter = getattr(check, name).__module__.rsplit(".", 1)[0]
    files = [each for path, each in sys.modules.items() if path.startswith((f"{chapter}.", "labs.exercises.engine."))]
    tables = [getattr(file, table, ()) for file in files for table in MEASURED]
    own = getattr(sys.modules[getattr(check, name).__module__], "EXERCISE", None)
    tables += [
        getattr(getattr(own, "mistakes", None), "sent", ()),
        getattr(getattr(own, "memory", None), "mistakes", ()),
    ]
    rows = [row for table in tables for row in (table if isinstance(table, tuple) else (table,))]
    return {getattr(row, "name", "") for row in rows} - {"", FORGED}


if __name__ == "__main__":
    main()
