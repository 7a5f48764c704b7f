"""The surroundings of a call on a rank: a slow network during it, and what the call leaves behind in its process.

On the slow network (`Late`) a function goes wrong that is right only by luck on a fast one:

    a send        leaves a moment late, by a different delay on every rank; its tensor must not change before wait()
    a receive     its buffer holds nonsense until the message is there

`torch.distributed` promises no more: between `isend` or `irecv` and `wait()`, the caller may not touch the tensor.
If nobody keeps the work of a message, the message may get lost, and its receiver waits for ever; here it arrives, so
that a judge can tell that nobody waited.

`Aftermath` notes modes, defaults, random numbers and process groups that a call has changed, its time and its memory.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from labs.exercises.engine.answer import Mistake
from labs.kit.watch import c10d_tap


@dataclass
class Outcome:
    """A rank's state after a call."""

    touched: list[int] = field(default_factory=list)  # peers whose message changed while it was being sent
    refused: bool = False  # whether the function raised an error, in a case in which it may
    left: str = ""  # the first thing that is not as it was before the call (Aftermath)
    seconds: float = 0.0  # processor time of the call
    python_bytes: int = 0  # the most bytes that Python and NumPy held during the call


# ---- what a call leaves behind --------------------------------------------------------------------------

SECONDS = 10.0  # processor time that is enough for one call on some thousand elements, even on a slow, busy machine


class Aftermath:
    """A context around a call on a rank; `write_to(outcome)` notes what the call changed, its time and its memory."""

    def __init__(self, trace: bool = False) -> None:
        self.trace = trace  # whether the bytes that Python and NumPy hold are measured, too

    def __enter__(self) -> Aftermath:
        self.before, self.python_bytes = surroundings(), 0
        if self.trace:
            tracemalloc.start()
        self.start = time.process_time()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds = time.process_time() - self.start
        if self.trace:
            self.python_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        after = surroundings()
        changed = [name for name, value in self.before.items() if value != after[name]]
        self.left = changed[0] if changed else ""

    def write_to(self, found: Outcome) -> None:
        found.left, found.seconds, found.python_bytes = self.left, self.seconds, self.python_bytes


def surroundings() -> dict[str, Any]:
    """Return the modes, defaults and other state of the process that a call must not change, as `{name: value}`."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "the state of Python's random numbers": random.getstate(),
        "the number of process groups": len(dist.distributed_c10d._world.pg_map),
    }


# fmt: off
AFTERMATH = (
    Mistake("something is left behind", "What was it before your function was called, and who relies on it?",
            lambda seen: seen.left and f"after the call, {seen.left} is not what it was",
            symptom="right, but the next cell behaves strangely: a different dtype, no gradients, different random "
            "numbers"),
    Mistake("far too slow", "Which line runs once for every element?",
            lambda seen: seen.seconds > SECONDS and f"one call took {seen.seconds:.1f} s of processor time"),
)


# ---- a slow network -------------------------------------------------------------------------------------

SLOWEST = 0.002  # s
POSTED: dict[c10d_tap.IssuedCall, dist.Work] = {}  # the messages that nobody has waited for yet


class SlowWire(c10d_tap.Listener):
    """A slow network while it is entered; `touched` lists the peers whose message changed while it was being sent."""

    def __init__(self, rank: int, seed: int) -> None:
        self.delays = random.Random(1000 * seed + rank)
        self.touched: list[int] = []

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        if call.op == "send":
            time.sleep(self.delays.random() * SLOWEST)
            call.notes[self] = call.inputs[0], call.inputs[0].detach().clone()
        elif call.op == "recv":
            nonsense(call.outputs[0])

    def returned(self, call: c10d_tap.IssuedCall, work: dist.Work | None) -> None:
        if call.op in ("send", "recv"):
            POSTED[call] = work

    def waited(self, call: c10d_tap.IssuedCall) -> None:
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

    def issued(self, call: c10d_tap.IssuedCall) -> None:
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
