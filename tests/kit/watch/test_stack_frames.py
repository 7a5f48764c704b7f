"""Tests that find the caller's line in stacks that go through Python's own library, torch and the kit."""

import concurrent.futures
import contextlib
import importlib.util
import os
import queue
import selectors
import subprocess
import sys
import threading

import numpy
import torch

import labs.ddp
from labs.kit import launch
from labs.kit.watch import stack_frames
from labs.kit.watch.stack_frames import is_machinery, learner_frame, source_line


def test_the_folders_are_those_of_the_course():
    assert os.path.dirname(launch.__file__) + os.sep == stack_frames.KIT
    assert os.path.dirname(labs.ddp.__file__) + os.sep == stack_frames.LABS
    assert os.path.dirname(torch.__file__) + os.sep == stack_frames.TORCH


def test_torch_the_kit_and_the_standard_library_are_machinery_and_all_else_is_not():
    library = contextlib, queue, selectors, subprocess, threading, concurrent.futures.thread, importlib.util
    assert all(is_machinery(module.__file__) for module in (torch, launch, torch.distributed, *library))
    assert is_machinery("<frozen importlib._bootstrap>") and is_machinery("<string>")
    assert not any(is_machinery(module.__file__) for module in (labs.ddp, sys.modules[__name__], numpy))
    assert not is_machinery("/tmp/ipykernel_12/34.py")


def here():
    """Return the line that is reported for the caller."""
    return source_line(learner_frame(sys._getframe(1)))


class Lines(queue.Queue):
    """A queue whose own methods ask, from inside the standard library."""

    def _put(self, item):
        super()._put(self.told())

    def told(self):
        return source_line(learner_frame(sys._getframe(2)))  # the frame of queue.put


def test_a_line_within_the_standard_library_is_reported_as_the_line_that_called_it():
    lines = Lines()
    lines.put(None)  # through queue.py
    assert lines.get() == f"test_stack_frames.py line {line_of('lines.put(None)')}: lines.put(None)  # through queue.py"


def test_a_thread_reports_its_own_line():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: here()).result().startswith("test_stack_frames.py line ")
        bare = pool.submit(sys._getframe).result()  # nobody's own code: only threading.py and concurrent.futures
    assert learner_frame(bare) is None and source_line(None) == "(inside torch)"


def line_of(text):
    with open(__file__) as source:
        return next(number for number, line in enumerate(source, 1) if line.strip().startswith(text))
