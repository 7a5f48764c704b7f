"""What scores nothing: the course's own answer, and means that the judge cannot see through.

    replaced()                         "time.perf_counter", if something else stands for it in this process
    altered()                          "slow_wire.LATENCY", if a constant of a challenge is not what its file says
    copied_from(course, "02", fn)      whether fn is the course's own answer, whatever its names are
    hidden(results, recording)         whether more went over the connections than the recording knows of
    Emptied()                          while it is entered, messages carry zeros

What a rank brings is drawn on the rank, from the system's chance (`chance`): no seed tells the others' numbers.
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
    "<string>",  # what dataclasses write
)
GUARDED = "labs", "torch.distributed", "torch", "time"  # the first two with all that is below them
HEADER = 256  # bytes: of a message on a connection, besides its own
SETTING_UP = 64 << 10
MARK = "### BEGIN SOLUTION"  # in an answer; what stands in the notebook without one is everybody's


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "big"))


# ---- names that stand for something else -----------------------------------------------------------------


def replaced() -> str:
    """The first name of the course, of PyTorch's communication or of the clock that is not theirs; "" for none."""
    return next((".".join(name) for *name, value in names() if not at_home(value)), "")


def altered() -> str:
    """The same of the challenges' constants, by what their files define anew."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith("labs.kit.challenges."):
            for name, value in runpy.run_path(module.__file__).items():
                if name.isupper() and getattr(module, name, None) != value:
                    return f"{module_name}.{name}"
    return ""


def names() -> Iterator[tuple[Any, ...]]:
    """(module, name, value), and (module, class, name, value)."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name in GUARDED or module_name.startswith(("labs.", "torch.distributed.")):
            for name, value in list(vars(module).items()):
                yield module_name, name, value
                if type(value) is type and value.__module__ == module_name:
                    yield from ((module_name, name, inner, each) for inner, each in list(vars(value).items()))


def at_home(value: Any) -> bool:
    kind = type(value)  # and not isinstance, which would ask some of PyTorch's objects what they are
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
    """Whether it is the answer that learners do not see."""
    try:
        mine = shape(ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0])
    except (OSError, TypeError, SyntaxError):
        return False
    sources = [path.read_text(encoding="utf-8") for path in (course / "solutions").glob(f"{notebook}_*.py")]
    nodes = ((text, node) for text in sources for node in ast.walk(ast.parse(text)))
    theirs = (each for each in nodes if isinstance(each[1], ast.FunctionDef))
    return any(shape(node) == mine for text, node in theirs if MARK in ast.get_source_segment(text, node))


def shape(function: ast.AST) -> str:
    """A function without its docstring and its names, each of which is only the first, the second, … here."""
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
    """While it is entered, what this rank sends becomes zeros: what is right even then has come by another way."""

    def issued(self, call: tap.Call) -> None:
        for each in call.inputs:
            each.data.zero_()


def hidden(delivered: Sequence[int | None], recording: Recording) -> bool:
    """delivered: by rank, bytes on its connections (labs.kit.sockets) in all of the job; None where nobody counts."""
    if None in delivered:
        return False
    known = sum(event.sent for event in recording.events)
    return sum(delivered) > 2 * known + HEADER * len(recording.events) + SETTING_UP
