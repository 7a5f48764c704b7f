"""The context of a dry run: in it, this process runs the code of one rank among many, without the other ranks.

with as_rank(17, ranks=1024) as pretend:
    model = fully_shard(GPT(config))
    ...
pretend.reads           # the lines at which the host would have waited for the device
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from labs.kit.simulated.device import pretended
from labs.kit.simulated.host import Pretend
from labs.kit.simulated.without_other_ranks import alone


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[Pretend]:
    with alone(rank, ranks), pretended(), Pretend().on_this_host() as pretend:
        yield pretend
