"""A slow network: a function that is right only by luck on a fast network goes wrong on this one.

    a send        leaves a moment late, by a different delay on every rank; its tensor must not change before wait()
    a receive     its buffer holds nonsense until the message is there

Both are what `torch.distributed` promises and no more: between `isend` or `irecv` and `wait()` the tensor is not yours.
If nobody keeps the work of a message, the message may get lost, and its receiver waits for ever; here it arrives, so
that a judge can tell that nobody waited.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from labs.kit.watch import tap

SLOWEST = 0.002  # s
POSTED: dict[tap.Call, dist.Work] = {}  # the messages that nobody has waited for yet


class SlowWire(tap.Listener):
    """A slow network while it is entered; `touched` lists the peers whose message changed while it was being sent."""

    def __init__(self, rank: int, seed: int) -> None:
        self.delays = random.Random(1000 * seed + rank)
        self.touched: list[int] = []

    def issued(self, call: tap.Call) -> None:
        if call.op == "send":
            time.sleep(self.delays.random() * SLOWEST)
            call.notes[self] = call.inputs[0], call.inputs[0].detach().clone()
        elif call.op == "recv":
            nonsense(call.outputs[0])

    def returned(self, call: tap.Call, work: dist.Work | None) -> None:
        if call.op in ("send", "recv"):
            POSTED[call] = work

    def waited(self, call: tap.Call) -> None:
        POSTED.pop(call, None)
        if self in call.notes and not same_bits(*call.notes[self]):
            self.touched.append(call.peer)


class Late(SlowWire):
    """A slow network for collectives, too: each leaves a moment late, and its outputs hold nonsense until then,
    unless they are inputs as well.

    All memory that nobody has written yet holds nonsense as well: tensors of torch.empty, and a storage that has grown.
    """

    def __enter__(self) -> Late:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills the tensors of torch.empty
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_fill(storage: torch.UntypedStorage, size: int) -> None:
            more = size > storage.nbytes()
            resize(storage, size)
            if more:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN in every floating-point dtype

        torch.UntypedStorage.resize_ = resize_and_fill
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        torch.UntypedStorage.resize_ = self.resize
        torch.use_deterministic_algorithms(False)

    def issued(self, call: tap.Call) -> None:
        super().issued(call)
        if call.op not in ("send", "recv"):
            time.sleep(self.delays.random() * SLOWEST / 4)
            given = {x.untyped_storage().data_ptr() for x in call.inputs}
            for x in call.outputs:
                if x.untyped_storage().data_ptr() not in given:
                    nonsense(x)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(x.detach().flatten().contiguous().view(torch.uint8) for x in (one, other)))


def nonsense(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with an integer that no case uses; return it."""
    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 113)  # autograd does not see .data
    return tensor
