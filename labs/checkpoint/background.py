"""Saving in the background: training waits only for a copy of its state in host memory, which a thread saves.

                training                               thread
    save(3)     copy the tensors that this rank holds
                go on: forward, backward, step         agree with the other ranks; write, flush and commit the copy
                ...
    save(6)     wait until step 3 is saved
                copy, into the same memory
                go on                                  ...
    wait()      wait until step 6 is saved

    with Saver(folder) as saver:
        for step in range(steps):
            ...
            saver.save(step, held)

The copy is necessary.  If the thread is given the tensors themselves, as in an older `async_save` of torch on the CPU
(github.com/pytorch/pytorch/issues/144657), one half of a file may be of this step and the other half of the next step,
without an error.

If several ranks hold the same piece, each of them copies it, and the threads compare the copies: comparing the copies
    before training goes on would take longer than the copying itself.

The thread's collectives use a process group of their own.  In training's group, the thread's collectives would be mixed
up with those of training.

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

from labs.checkpoint.agreement import Share, contribute
from labs.checkpoint.parts import Savable
from labs.checkpoint.saving import finish
from labs.checkpoint.tensor_blocks import Piece


class Saver:
    """A background saver, which writes one checkpoint after the other to folder/step-<step>.

    All ranks must make their savers at the same point of the program.

    group: the ranks that save, in a group that nothing else uses; by default a new group of all ranks

    An error of a save is raised by the next `save` or `wait`, on all ranks; after that, the saver can be used again.
    End a job with `wait`, or use the saver in a `with`.  At the end of the `with`, the last copy is written, even if
    training has failed, and the saver's memory, thread and group are freed.
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
        """Save as `labs.checkpoint.save` does, but return as soon as this rank has copied its tensors.

        Raises the errors of the save before, as `wait` does, and ValueError after the end of the `with`.
        """
        if self.closed:
            raise ValueError("this Saver has ended, with its `with`: save inside the `with`, or make another Saver")
        self.wait()
        taken: Future[Share] = Future()
        try:
            taken.set_result(self.take(step, held, values, own))
        except Exception as error:  # the thread raises it on all ranks
            taken.set_exception(error)
        self.writing = self.thread.submit(finish, taken.result, self.group)
        # This runs once nobody refers to the saver, at the latest at the end of the program.
        self.unasked = weakref.finalize(self, self.writing.add_done_callback, raise_error)

    def take(self, *arguments: Any) -> Share:
        contribution, tensors = contribute(self.folder, *arguments)
        self.copies = copied(tensors, self.copies)
        return contribution, self.copies

    def wait(self) -> Path | None:
        """Wait for the last save, and return its checkpoint, or None before the first save.

        Raises the errors that `labs.checkpoint.save` raises.
        """
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
        if kind is None:  # otherwise an error of the thread would hide the error inside the `with`
            self.wait()

    def close(self) -> None:
        self.closed, self.copies = True, {}
        self.thread.shutdown()
        if self.own_group is not None:
            dist.destroy_process_group(self.own_group)
            self.group = self.own_group = None


def raise_error(writing: Future[Path]) -> None:
    """Raise a failed save's error, if nobody waited for that save."""
    if (error := writing.exception()) is not None:
        raise RuntimeError("a checkpoint was not saved: end with Saver.wait(), or use a Saver in a with") from error


def copied(tensors: Mapping[Piece, Tensor], rooms: Mapping[Piece, Tensor]) -> dict[Piece, Tensor]:
    """Copy tensors to host memory; the memory of the last save's copies, `rooms`, is used again where it fits."""
    found = {}
    for piece, x in tensors.items():
        room = rooms.get(piece)
        if room is None or room.dtype != x.dtype:
            room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        found[piece] = room.copy_(x, non_blocking=True)
    for gpu in {x.device for x in tensors.values() if x.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()
    return found
