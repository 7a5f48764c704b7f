"""The stack frames that belong to the user's code, not to torch, the kit or Python, and a source line as text."""

from __future__ import annotations

import linecache
import os
import re
from functools import lru_cache
from types import FrameType

import torch
import typing_extensions

PYTHON = os.path.dirname(os.__file__) + os.sep  # the standard library
INSTALLED = (
    PYTHON + "site-packages" + os.sep,
    PYTHON + "dist-packages" + os.sep,
)  # the standard library's folder holds installed packages, too
TORCH = os.path.dirname(torch.__file__) + os.sep
KIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LABS = os.path.dirname(KIT[:-1]) + os.sep
EXERCISES = LABS + "exercises" + os.sep
CLINIC = EXERCISES + "bug_clinic" + os.sep  # its faulty programs are read line by line, as a user's are
WARM = os.path.dirname(LABS[:-1]) + os.sep + os.path.join("tools", "warm", "")  # forks the ranks of the tests
WRAPPERS = typing_extensions.__file__  # wraps the functions that torch deprecates
CELL = re.compile(r".*(ipykernel_\d+|<ipython-input).*")


def learner_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code on the stack that ends in `frame`, or None."""
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@lru_cache(4096)
def is_machinery(filename: str) -> bool:
    if filename.startswith((TORCH, KIT, EXERCISES, WARM, WRAPPERS, "<frozen", "<string>")):
        return not filename.startswith(CLINIC)
    return filename.startswith(PYTHON) and not filename.startswith(INSTALLED)


def source_line(frame: FrameType | None) -> str:
    if frame is None:
        return "(inside torch)"
    return show_line(frame.f_code.co_filename, frame.f_lineno)


def show_line(filename: str, line: int) -> str:
    """Return a source line as text, "ddp.py line 57: work = all_reduce(flat)"; a notebook's cell is called "cell"."""
    source = linecache.getline(filename, line).strip()
    return f"{short_name(filename)} line {line}" + (f": {source[:120]}" if source else "")


def short_name(filename: str) -> str:
    return "cell" if CELL.match(filename) else os.path.basename(filename)
