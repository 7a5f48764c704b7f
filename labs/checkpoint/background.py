"""Save in the background: training waits for a copy in host memory alone, and a thread writes that.

                training                               thread
    save(3)     copy what this rank holds
                go on: forward, backward, step         describe, write, flush, commit: labs.checkpoint.save, of the copy
                ...
    save(6)     wait until 3 is there
                copy, into the same memory
                go on                                  ...
    wait()      wait until 6 is there

    with Saver(folder) as saver:
        for step in range(steps):
            ...
            saver.save(step, held)

The copy has to be one: where the thread is given the tensors themselves, as torch's `async_save` once was on the CPU
(github.com/pytorch/pytorch/issues/144657), a file has half of this step and half of the next, and nobody is told.

The thread's collectives go over a process group of their own.  In training's, they would meet the collectives that
training has gone on to.

Source: Mohan et al. 2021, "CheckFreq", USENIX FAST '21, section 4.2: snapshot, then persist.
"""

import atexit
from concurrent import futures
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.agree import on_all_ranks
from labs.checkpoint.index import to_json
from labs.checkpoint.parts import Groups, Held, Part, Parts
from labs.checkpoint.saving import save


class Saver:
    """Saves to folder/step-<step>, one after the other.  Made by all ranks, at the same point.

    group: of the ranks that save, and used by nothing else; by default a new one of all ranks, made here.

    What goes wrong while the thread writes is raised by the next `save` or `wait`, on all ranks; then it can go on.
    Let a job end with `wait`, or use `with`: what was copied is written then, although training may have failed; and
    its copies and its group are given back.
    """

    def __init__(self, folder: str | Path, group: ProcessGroup | None = None):
        self.folder, self.copy = Path(folder), Copied()
        self.own_group = dist.new_group(backend="gloo", group_desc="saver") if group is None else None
        self.group = group or self.own_group
        self.writing: futures.Future[Path] | None = None
        self.last: Path | None = None
        self.closed = False
        atexit.register(self.wait)  # a program that never asked is told what went wrong

    def save(self, step: int, held: Held, values: Any = None, own: Any = None) -> None:
        """As `labs.checkpoint.save`, and go on as soon as all ranks have their copies.

        Raises what `wait` raises; and, on all ranks, ValueError for values that JSON cannot have, and after its `with`.
        """
        if self.closed:
            raise ValueError("this Saver has ended, with its `with`: save inside that, or make another one")
        self.wait()

        def take() -> None:
            to_json("values", values), to_json("own", own)
            self.copy.take(held)

        on_all_ranks(take, self.group)
        thread = futures.ThreadPoolExecutor(1)
        self.writing = thread.submit(save, self.folder, step, self.copy, deepcopy(values), deepcopy(own), self.group)
        thread.shutdown(wait=False)  # it ends when this is written, and a program that ends waits for it

    def wait(self) -> Path | None:
        """The last checkpoint that it saved, when that is there; None before the first.  Raises what `save` raises."""
        if self.writing is not None:
            futures.wait([self.writing])
            written, self.writing = self.writing, None
            self.last = written.result()
        return self.last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.writing is not None:
            futures.wait([self.writing])
        self.close()
        if kind is None:  # else what the thread raised would hide the error that counts
            self.wait()

    def close(self) -> None:
        self.closed, self.copy = True, Copied()
        atexit.unregister(self.wait)
        if self.own_group is not None:
            dist.destroy_process_group(self.own_group)
            self.group = self.own_group = None


class Copied(Held):
    """Of what a rank held at one moment, a copy in host memory; the next one takes the same memory again."""

    def __init__(self) -> None:
        self.copies: Parts = {}
        self.options: Groups = []

    def parts(self, kept: Any = None) -> Parts:
        return self.copies

    def groups(self) -> Groups:
        return self.options

    def take(self, held: Held) -> None:
        before, parts = self.copies, held.parts()
        self.copies, self.options = {}, deepcopy(held.groups())
        of: dict[int, Part] = {}  # what has several names is copied once
        rooms = {id(part): part.blocks for part in before.values()}  # each for one copy: what was tied may be no longer
        for key, part in parts.items():
            if id(part) not in of:
                room = rooms.pop(id(before[key]), {}) if key in before else {}
                blocks = {at: copied(x, room.get(at)) for at, x in part.blocks.items()}
                of[id(part)] = replace(part, blocks=blocks)
            self.copies[key] = of[id(part)]
        for gpu in {x.device for part in parts.values() for x in part.blocks.values() if x.is_cuda}:
            torch.cuda.current_stream(gpu).synchronize()


def copied(x: Tensor, room: Tensor | None) -> Tensor:
    """Where that has to come from a GPU, it is on its way."""
    if room is None or room.dtype != x.dtype:
        room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return room.copy_(x, non_blocking=True)
