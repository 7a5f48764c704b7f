"""Guards against answers that score nothing: the course's own answer, and means that the judge cannot see through.

    replaced()                         "time.perf_counter", if it was replaced in this process
    altered()                          "slow_wire.LATENCY", if a constant of a challenge differs from its file's
    copied_from(course, "02", fn)      whether fn is the course's own answer, whatever its names are
    hidden(delivered, recording)       whether the connections carried more bytes than were recorded
    Emptied()                          a context in which all messages carry zeros

Each rank draws its own input from the system's random source (`chance`), so no seed tells a rank the others' numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import runpy
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

import labs
from labs.kit.record import Recording
from labs.kit.watch import tap
from labs.kit.watch.frames import TORCH

HOMES = (
    *labs.__path__,
    os.path.dirname(TORCH[:-1]),
    *site.getsitepackages(),
    site.getusersitepackages(),
    sysconfig.get_path("stdlib"),
    "<frozen",
    "<string>",  # the code that dataclasses generate
)
GUARDED = "labs", "torch.distributed", "torch", "time"  # the first two with all their submodules
HEADER = 256  # bytes that a connection adds to each message
SETTING_UP = 64 << 10  # bytes that the connections of a job need before any message
MARK = "### BEGIN SOLUTION"  # stands in answers that learners do not see; all other functions are in their notebook


def chance() -> torch.Generator:
    """Return a generator that the system's random source has seeded."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))


# ---- names that stand for something else -----------------------------------------------------------------


def replaced() -> str:
    """Return the first guarded name whose value was defined elsewhere, or "" if there is none."""
    return next((".".join(name) for *name, value in names() if not at_home(value)), "")


def altered() -> str:
    """Return the first constant of a challenge that differs from a fresh run of its file, or "" if there is none."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("labs.kit.challenges."):
            for name, value in runpy.run_path(module.__file__).items():
                if name.isupper() and getattr(module, name, None) != value:
                    return f"{module_name}.{name}"
    return ""


def names() -> Iterator[tuple[Any, ...]]:
    """Yield (module, name, value), and (module, class, name, value), of the guarded modules."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name in GUARDED or module_name.startswith(("labs.", "torch.distributed.")):
            for name, value in list(vars(module).items()):
                yield module_name, name, value
                if type(value) is type and value.__module__ == module_name:
                    yield from ((module_name, name, inner, each) for inner, each in list(vars(value).items()))


def at_home(value: Any) -> bool:
    kind = type(value)  # not isinstance, which would run code of some of PyTorch's objects
    if kind in (staticmethod, classmethod):
        return at_home(value.__func__)
    if kind is functools.partial:
        return at_home(value.func)
    if kind is property:
        return at_home(value.fget)
    if kind is FunctionType:
        return value.__code__.co_filename.startswith(HOMES)
    return kind is not type or value.__module__ != "__main__"


# ---- the course's own answer -----------------------------------------------------------------------------


def copied_from(course: Path, notebook: str, fn: Callable[..., Any]) -> bool:
    """Return whether fn is the notebook's hidden answer, whatever its names are."""
    try:
        mine = shape(ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0])
    except (OSError, TypeError, SyntaxError):
        return False
    sources = [path.read_text(encoding="utf-8") for path in (course / "solutions").glob(f"{notebook}_*.py")]
    nodes = ((text, node) for text in sources for node in ast.walk(ast.parse(text)))
    theirs = (each for each in nodes if isinstance(each[1], ast.FunctionDef))
    return any(shape(node) == mine for text, node in theirs if MARK in ast.get_source_segment(text, node))


def shape(function: ast.AST) -> str:
    """Return the syntax of a function without its docstring, with each name replaced by the number of its first use."""
    seen: dict[str, str] = {}
    function = ast.parse(ast.unparse(function)).body[0]
    if ast.get_docstring(function):
        del function.body[0]
    for node in ast.walk(function):
        for field in ("id", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, seen.setdefault(name, str(len(seen))))
    return ast.dump(function)


# ---- what is sent ----------------------------------------------------------------------------------------


class Emptied(tap.Listener):
    """A context in which this rank sends only zeros: a result that is right even so came by another way."""

    def issued(self, call: tap.Call) -> None:
        for each in call.inputs:
            each.data.zero_()


def hidden(delivered: Sequence[int | None], recording: Recording) -> bool:
    """Return whether the connections carried more bytes than the recorded messages explain.

    delivered: for each rank, the bytes that its connections delivered in the whole job (labs.kit.sockets); None where
        the system does not count them.
    """
    if None in delivered:
        return False
    known = sum(event.sent for event in recording.events)
    return sum(delivered) > 2 * known + HEADER * len(recording.events) + SETTING_UP
