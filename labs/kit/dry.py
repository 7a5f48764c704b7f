"""Dry runs: the real code of some ranks of a large job runs on this machine, and shows what they would send and hold.

    dry                 run a function as one or some of the ranks of a large job
    Dry                 the results of `dry`, with recordings of these ranks
    neighbours          stand in for a rank's neighbours in a pipeline, ours or PyTorch's, in a dry run
    our_neighbours      stand in for the neighbours in a pipeline of labs.pp, without importing PyTorch's pipelines
    NeedsNumbers        the error for a function that reads a number, which no tensor of a dry run has
    TooLarge            the error for a tensor that no device can hold
    would_hang          a verdict on a recording, dry or not: would the job hang on NCCL?
    on_pretended_ranks  run a function as rank 0 of a job of any size, with ordinary tensors, for spmd_types
    accepted_layers     the course's split layers under spmd_types
    spmd_types_missing  the reason why spmd_types cannot be used, or ""

    results = dry(train, config, ranks=1024, rank=17)              # or rank=(0, 1023): the first stage and the last
    results.memory                                                 # draws itself, like a recording of a job
    results.communication.sent(rank=17, step=1)                    # bytes
    results.communication.across(rank=17, step=1)                  # the bytes sent to other nodes
    results.reads[17]                                              # the lines at which rank 17 would wait for its GPU

Each rank of a dry run is a process of its own with a simulated device (simulated/).  Tensors on this device have no
numbers, so the function must not read any.  No time passes on the simulated device, so the time axis of a drawing shows
the time of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labs.kit.extras.types_of_layers import accepted_layers, on_pretended_ranks, spmd_types_missing
from labs.kit.nccl.would_hang import would_hang
from labs.kit.ranks.run import MOST_RANKS, run
from labs.kit.record import Recording, TimePass, join_some
from labs.kit.simulated.as_rank import as_rank
from labs.kit.simulated.device import TooLarge
from labs.kit.simulated.host import NeedsNumbers, Read
from labs.kit.simulated.without_other_ranks import neighbours, our_neighbours
from labs.kit.watch.communication import CommunicationWatch
from labs.kit.watch.early_touches import Touches
from labs.kit.watch.memory import StorageWatch

__all__ = ["Dry", "NeedsNumbers", "TooLarge", "dry", "neighbours", "our_neighbours", "would_hang"]
__all__ += ["accepted_layers", "on_pretended_ranks", "spmd_types_missing"]

MOST = 2**20  # the most ranks of a job in a dry run; each process group has a list of all its ranks


class Dry(list):
    """The values that a dry run's function returned on the requested ranks, in order, with recordings of these ranks.

    reads: {rank: the lines at which the rank would have waited for its GPU}.
    """

    communication: Recording
    memory: Recording
    reads: Mapping[int, list[Read]]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a dry run, each with `size` consecutive ranks."""

    size: int

    def across(self, rank: int, to: Mapping[int, int], ranks: int) -> int:
        """Return the bytes that `rank` sent to ranks on other nodes; to: `{rank: bytes sent to it}`."""
        return sum(size for other, size in to.items() if other // self.size != rank // self.size)


class DryPass(TimePass):
    """A pass that records communication, order and memory at once: in a dry run, no recorder disturbs another one."""

    def __enter__(self) -> DryPass:
        self.sent, self.held = CommunicationWatch().__enter__(), StorageWatch().__enter__()
        self.touches = Touches(self.sent).__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for watch in (self.touches, self.held, self.sent):
            watch.__exit__(*failure)

    def tapes(self) -> dict[str, dict[str, Any]]:
        return {
            "communication": self.tape | {"watched": self.sent.tape},
            "memory": self.tape | {"watched": self.held.tape},
        }


def dry(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    rank: int | Sequence[int] = 0,
    node: int = 8,
    timeout: float = 300.0,
    tell: str | None = None,
    **kwargs: Any,
) -> Dry:
    """Call `fn(*args, **kwargs)` as some ranks of a large job, and return what they would send and hold.

    ranks: the number of ranks in the job.
    rank: the rank or ranks to run.
    node: the number of ranks on each node.
    timeout: the seconds after which the dry run is stopped.
    tell: the text of a line of progress, which is printed if the dry run takes long.

    Raises ValueError for a rank that is not in the job and under PyTorch 2.10, NeedsNumbers if `fn` reads a number,
    TooLarge if `fn` creates a tensor that no device can hold, and RankError as `run` does.
    """
    if torch.__version__.startswith("2.10."):
        raise ValueError(f"a dry run needs PyTorch 2.11 or newer, and this is {torch.__version__}: use `labs.cost`")
    asked = require_ranks(ranks, (rank,) if isinstance(rank, int) else tuple(rank))
    found = run(as_one, fn, args, kwargs, asked, ranks, ranks=len(asked), device="cpu", timeout=timeout, tell=tell)
    for each in found:
        if isinstance(each, (NeedsNumbers, TooLarge)):
            raise each
    results = Dry(value for value, _, _ in found)
    results.reads = {rank: reads for rank, (_, _, reads) in zip(asked, found, strict=True)}
    for kind in ("communication", "memory"):
        tapes = {rank: tapes[kind] for rank, (_, tapes, _) in zip(asked, found, strict=True)}
        setattr(results, kind, join_some(kind, tapes, ranks, Nodes(node)))
    return results


def as_one(fn: Callable[..., Any], args: Any, kwargs: Any, asked: Sequence[int], ranks: int) -> Any:
    """Run `fn` as one of the requested ranks of a dry run; return its value, its recordings and its reads.

    A NeedsNumbers or TooLarge is returned, so that the caller can raise the same error.
    """
    me = asked[dist.get_rank()]
    dist.barrier()  # a rank that left now would break the connection to one that still begins
    dist.destroy_process_group()
    watch = DryPass()
    try:
        with as_rank(me, ranks) as pretend, watch:
            value = fn(*args, **kwargs)
    except (NeedsNumbers, TooLarge) as error:
        return error
    except Exception as error:
        error.add_note(f"in a dry run, as rank {me} of {ranks:,}")
        raise
    return value, watch.tapes(), pretend.reads


def require_ranks(ranks: int, asked: tuple[int, ...]) -> tuple[int, ...]:
    if not 1 <= ranks <= MOST:
        raise ValueError(f"ranks={ranks}: even in a dry run, each group has a list of its ranks: give 1 to {MOST:,}")
    if not asked or len(asked) > MOST_RANKS or len({*asked}) < len(asked):
        raise ValueError(f"rank={asked}: each rank is a process here, so give 1 to {MOST_RANKS} ranks, each once")
    for rank in asked:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not in the job: its {ranks:,} ranks are 0 to {ranks - 1:,}")
    return asked
