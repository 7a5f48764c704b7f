"""Messages between the ranks of a pipeline, and their order.

The output of an F goes to the next stage, and the gradient that a B or I computes goes to the stage before.  If that
stage is on another rank, the output or gradient is sent as a message.  `plan` puts the messages between the
instructions, and `Mail` sends and receives them:

    rank 0   0F0  0F0→1  0F1  0F1→1  1B0←1  0B0  0F0 sent  ...
    rank 1   0F0←0  1F0  0F1←0  1B0  1B0→0  1F1  ...

**Ranks never wait for each other in a circle.**  A backend tells the messages between two ranks apart by their order
alone, and may keep a message until its receiver asks for it.  So all messages have one order, that of `in_order`, and
every rank sends and receives its own messages in this order.  Look at the first message in this order that has not
arrived yet: neither its sender nor its receiver waits for a later message, so both come to it.

**A send buffer is freed as early as the lists allow.**  A send must be complete once its sender has received a tensor
that the receiver computed after it used the message.  To find this moment, `plan` counts how many instructions of each
rank have run before each result (vector clocks: Mattern 1989, "Virtual Time and Global States of Distributed Systems").
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from labs.pp.checker import Place, in_order, places_of, ranks_of, stages_of
from labs.pp.instructions import F, Instruction, Lists, makes, needs, reader

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
MOST_DIMS = 8


@dataclass(frozen=True, repr=False)
class Send:
    message: Instruction
    to: int

    def __repr__(self) -> str:
        return f"{self.message!r}→{self.to}"


@dataclass(frozen=True, repr=False)
class Receive:
    message: Instruction
    source: int

    def __repr__(self) -> str:
        return f"{self.message!r}←{self.source}"


@dataclass(frozen=True, repr=False)
class Sent:
    """The step of a plan at which it is certain that a message was received."""

    message: Instruction

    def __repr__(self) -> str:
        return f"{self.message!r} sent"


Step = Instruction | Send | Receive | Sent


def plan(lists: Lists) -> list[list[Step]]:
    """Return, for each rank, its instructions, with its sends and receives between them."""
    places, ranks, stages = places_of(lists), ranks_of(lists), stages_of(lists)
    plans: list[list[Step]] = [[] for _ in lists]
    under_way: list[dict[Instruction, Place]] = [{} for _ in lists]  # by sender: {message in flight: place of its use}
    knows = [[0] * len(lists) for _ in lists]  # [rank][other]: instructions of `other` that `rank` knows to be done
    known = {}  # the row of `knows` at the time of each result
    for rank, x in in_order(lists):
        for need in needs(x, stages):
            knows[rank] = [*map(max, knows[rank], known[need])]
        knows[rank][rank] += 1
        known[makes(x)] = [*knows[rank]]
        plans[rank].append(x)
        if (use := reader(x, stages)) and (to := ranks[use.stage]) != rank:
            under_way[rank][makes(x)] = places[use]
            plans[rank].append(Send(makes(x), to))
            plans[to].append(Receive(makes(x), rank))
        for message, (to, place) in [*under_way[rank].items()]:
            if place < knows[rank][to]:
                del under_way[rank][message]
                plans[rank].append(Sent(message))
    return plans


class Mail:
    """The messages of one rank: tensors that its stages have put for others, and tensors that arrive for them.

    A receiver must know the dtype and the shape of a message.  So the first message over a cut is preceded by its dtype
    and shape, which all later messages over this cut have, too, in every step and in both directions.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device):
        self.group, self.device = group, device
        self.made: dict[Instruction, Tensor] = {}
        self.leaving: dict[Instruction, tuple[dist.Work, Tensor]] = {}
        self.arriving: dict[Instruction, tuple[int, dist.Work, Tensor]] = {}
        self.agreed: dict[int, tuple[torch.dtype, torch.Size]] = {}  # by cut: the number of the stage before it

    def put(self, message: Instruction, x: Tensor) -> None:
        require_one_tensor(message, x)
        self.made[message] = x.detach()

    def take(self, message: Instruction) -> Tensor:
        """Return the tensor of a message; wait for the message if another rank sends it."""
        if message in self.made:
            return self.made.pop(message)
        source, work, x = self.arriving.pop(message)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"rank {source} is gone, and this rank waits for its {message!r}: {error}") from error
        return x

    def send(self, step: Send) -> None:
        x = self.made.pop(step.message).contiguous()
        cut = cut_of(step.message)
        if cut not in self.agreed:
            self.agreed[cut] = x.dtype, x.shape
            dist.send(described(x), group=self.group, group_dst=step.to)
        elif self.agreed[cut] != (x.dtype, x.shape):
            dtype, shape = self.agreed[cut]
            raise ValueError(
                f"{step.message!r} has made {x.dtype} of shape {tuple(x.shape)}, and earlier messages over this cut "
                f"were {dtype} of shape {tuple(shape)}: micro-batches must be alike; make another Pipeline for others"
            )
        self.leaving[step.message] = dist.isend(x, group=self.group, group_dst=step.to), x

    def receive(self, step: Receive) -> None:
        cut = cut_of(step.message)
        if cut not in self.agreed:
            description = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=self.device)
            dist.recv(description, group=self.group, group_src=step.source)
            dtype, dims, *shape = description.tolist()
            self.agreed[cut] = DTYPES[dtype], torch.Size(shape[:dims])
        dtype, shape = self.agreed[cut]
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.arriving[step.message] = step.source, dist.irecv(x, group=self.group, group_src=step.source), x

    def sent(self, step: Sent) -> None:
        work, _ = self.leaving.pop(step.message)
        work.wait()

    def end(self) -> None:
        """Wait, at the end of a step, for the last sends, after which this rank has received no message."""
        for work, _ in self.leaving.values():
            work.wait()
        self.leaving.clear()


def cut_of(message: Instruction) -> int:
    return message.stage if isinstance(message, F) else message.stage - 1


def described(x: Tensor) -> Tensor:
    return torch.tensor([DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (MOST_DIMS - x.ndim)], device=x.device)


def require_one_tensor(message: Instruction, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        many = f" of {len(x)}" if isinstance(x, (tuple, list, dict)) else ""
        raise TypeError(
            f"{message!r} has made a {type(x).__name__}{many}: one tensor crosses a cut, so stack or concatenate them, "
            "or cut the model where there is one"
        )
    if x.dtype not in DTYPES or x.ndim > MOST_DIMS:
        raise TypeError(
            f"{message!r} has made {x.dtype} with {x.ndim} dims: what crosses a cut has a gradient, so it is one of "
            f"{', '.join(map(str, DTYPES))}, with {MOST_DIMS} dims at most"
        )
