"""A budget of memory: a job that would take more ends with an error that says so.

    def job():
        with budget(64 * MiB):        # from here on this rank may allocate this many bytes more
            train()

    on a rank of    what limits it                        what counts
    a GPU           torch's allocator                     what it has taken from the GPU
    Linux           the system: RLIMIT_DATA, a hard       memory that is private and writable: tensors, but Python's
                    limit on the process                  objects, too, and the stack of each thread; no mapped files
    elsewhere       StorageWatch, seeing each operator    tensors that operators make

Whoever asks for more gets a MemoryError whose sentence states the budget, the request and its line, whichever allocator
was the first to fail, and in whatever words.  The limit ends with the block.

On Linux, large blocks go back to the system as soon as they are freed, where glibc would keep them for later and they
would go on counting.  That costs time: a budget is no place to measure speed.  And 1 MiB is set aside for small ones,
since some libraries end their process on the spot when they cannot have a few bytes.

Intel's MKL would keep buffers whose size depends on the CPU, and what fits on one machine would not on the next.  The
fork server of the ranks forbids it by MKL_DISABLE_FAST_MM, which MKL reads as torch is imported, and never again: under
torchrun whoever starts that has to set it.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from labs.kit.drawing.tables import short
from labs.kit.watch.frames import is_machinery, show_line
from labs.kit.watch.memory import StorageWatch
from labs.kit.watch.storages import storages_of

NO_MEMORY = re.compile(r"(can'?t|cannot) (allocate|start new thread)|bad_?alloc|out of memory", re.IGNORECASE)
ASKED_FOR = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # options of glibc's mallopt
LARGE, SPARE = 2**17, 2**20  # bytes


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Let this process allocate at most `size` bytes in the block, beyond what it holds as it enters.

    Raises MemoryError as soon as the process asks for more, and ValueError for a size below 1.
    """
    if size < 1:
        raise ValueError(f"a budget of {size} bytes: give it at least 1")
    limit, kind = limiter()
    try:
        with limit(size):
            yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        text = f"this process exceeded its budget of {short(size)} ({kind}): {request(error, size)}{place(error)}"
        raise MemoryError(text).with_traceback(error.__traceback__) from None


def limiter() -> tuple[Callable[[int], AbstractContextManager[Any]], str]:
    """Return what limits a process of this kind, and what to call it."""
    if torch.get_default_device().type == "cuda":
        return on_gpu, "a hard limit of its allocator on the GPU"
    if sys.platform == "linux":
        return by_the_system, "a hard limit of the system on the process"
    return Recorder, "counted by the recorder, which sees only tensors"


def request(error: BaseException, size: int) -> str:
    found = ASKED_FOR.search(str(error))
    if not found:
        return "it asked for more"
    asked = int(float(found[1]) * UNITS[found[2].lower()])
    if asked > size:
        return f"it asked for {short(asked)} at once"
    return f"it held more than {short(size - asked)} and asked for {short(asked)} more"


def place(error: BaseException) -> str:
    """Return the innermost line that is neither torch's nor the kit's, in words, or "" if there is none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [show_line(*line) for line in lines if not is_machinery(line[0])]
    return f" at {own[-1]}" if own else ""


# ---- the limits ------------------------------------------------------------------------------------------


@contextmanager
def by_the_system(size: int) -> Iterator[None]:
    """Set the soft RLIMIT_DATA, which Linux 4.7 and later checks whenever private writable memory would grow."""
    tune_malloc()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    held = int(re.search(r"VmData:\s*(\d+) kB", status)[1]) * 1024
    within = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]  # also that of an outer budget
    resource.setrlimit(resource.RLIMIT_DATA, (min([held + size, *within]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def tune_malloc() -> None:
    """Let glibc take large blocks from the system one by one, and small ones from some room that counts already.

    All threads share that room: a new thread would otherwise begin by asking for some of its own.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGE)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * SPARE)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.malloc_trim(0)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for block in [libc.malloc(LARGE // 2) for _ in range(2 * SPARE // LARGE)]:
        libc.free(block)


@contextmanager
def on_gpu(size: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + size) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Recorder(StorageWatch):
    """A StorageWatch that raises if more than `size` bytes are held beyond those held as it was entered."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.held = size, 0

    def tag(self, values: Any, kind: str) -> None:
        """Note storages that are met for the first time: they were there before, and take nothing from the budget."""
        for value in tree_leaves(values):
            for storage in storages_of(value):
                if storage._cdata not in self.alive:
                    self.size += storage.nbytes()
                    self.born(storage)

    def change(self, number: int, size: int) -> None:
        more = size - self.sizes[number]
        super().change(number, size)
        self.held += more
        if more > 0 and self.held > self.size:
            raise MemoryError(f"tried to allocate {more} bytes")
