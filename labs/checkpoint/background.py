"""Save in the background: training waits for a copy in host memory alone, and a thread does the rest.

                training                               thread
    save(3)     copy what this rank holds
                go on: forward, backward, step         agree with the other ranks, write, flush, commit, of the copy
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

Of what several ranks hold, each has a copy, and the threads compare them: to look at it all before training goes on
would take longer than the copy does.

The thread's collectives go over a process group of their own.  In training's, they would meet the collectives that
training has gone on to.

Source: Mohan et al. 2021, "CheckFreq", USENIX FAST '21, section 4.2: snapshot, then persist.
"""

import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.checkpoint.agreement import Share, bring
from labs.checkpoint.extents import Piece
from labs.checkpoint.parts import Savable
from labs.checkpoint.saving import finish


class Saver:
    """Saves to folder/step-<step>, one after the other.  Made by all ranks, at the same point.

    group: of the ranks that save, and used by nothing else; by default a new one of all ranks, made here.

    What goes wrong is raised by the next `save` or `wait`, on all ranks; then it can go on.  Let a job end with `wait`,
    or use `with`: what was copied is written then, although training may have failed; and its copies, its thread and
    its group are given back.
    """

    def __init__(self, folder: str | Path, group: ProcessGroup | None = None):
        self.folder = Path(folder).expanduser()
        self.own_group = dist.new_group(backend="gloo", group_desc="saver") if group is None else None
        self.group = group or self.own_group
        self.thread = ThreadPoolExecutor(1, "saver")
        self.copies: dict[Piece, Tensor] = {}
        self.writing: Future[Path] | None = None
        self.last: Path | None = None
        self.closed = False

    def save(self, step: int, held: Savable, values: Any = None, own: Any = None) -> None:
        """As `labs.checkpoint.save`, and go on as soon as this rank has its copy.

        Raises what `wait` raises, and ValueError after its `with`.
        """
        if self.closed:
            raise ValueError("this Saver has ended, with its `with`: save inside that, or make another one")
        self.wait()
        taken: Future[Share] = Future()
        try:
            taken.set_result(self.take(step, held, values, own))
        except Exception as error:  # the thread tells it to the other ranks
            taken.set_exception(error)
        self.writing = self.thread.submit(finish, taken.result, self.group)
        self.unasked = weakref.finalize(self, self.writing.add_done_callback, tell)  # at the end of the program, too

    def take(self, *arguments: Any) -> Share:
        brought, tensors = bring(self.folder, *arguments)
        self.copies = copied(tensors, self.copies)
        return brought, self.copies

    def wait(self) -> Path | None:
        """The last checkpoint that it saved, when that is there; None before the first.  Raises what `save` raises."""
        if self.writing is not None:
            wait([self.writing])
            written, self.writing = self.writing, None
            self.unasked.detach()
            self.last = written.result()
        return self.last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.writing is not None:
            wait([self.writing])
        self.close()
        if kind is None:  # else what the thread raised would hide the error that counts
            self.wait()

    def close(self) -> None:
        self.closed, self.copies = True, {}
        self.thread.shutdown()
        if self.own_group is not None:
            dist.destroy_process_group(self.own_group)
            self.group = self.own_group = None


def tell(writing: Future[Path]) -> None:
    """Where nobody has asked what went wrong."""
    if (error := writing.exception()) is not None:
        raise RuntimeError("a checkpoint was not saved: end with Saver.wait(), or use a Saver in a with") from error


def copied(tensors: Mapping[Piece, Tensor], rooms: Mapping[Piece, Tensor]) -> dict[Piece, Tensor]:
    """In host memory, that of the copies before where there are some."""
    found = {}
    for piece, x in tensors.items():
        room = rooms.get(piece)
        if room is None or room.dtype != x.dtype:
            room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        found[piece] = room.copy_(x, non_blocking=True)
    for gpu in {x.device for x in tensors.values() if x.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()
    return found
