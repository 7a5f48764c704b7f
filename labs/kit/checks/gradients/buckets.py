"""One all-reduce for each bucket, by the wrapper's own group and all-reduce?

    buckets(wrap)    wrap(model, **options) -> a module as data_parallel has it, whose buckets of 128 KiB `labs.ddp`
                     cuts, and whose options are those of `labs.ddp.DataParallel`

Numbers and bytes are those of data_parallel.  Then only some of the ranks are the group, and the all-reduce that the
wrapper is given counts its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from labs.ddp import in_buckets
from labs.kit.checks.answer import Mistake, Wrong, answered, refuse
from labs.kit.checks.gradients.body import EXERCISES, Seen, train_one
from labs.kit.checks.gradients.cases import Case, Draw
from labs.kit.checks.gradients.judge import bytes_held, every_job, judge
from labs.kit.checks.job import job

BUCKET_BYTES = 128 * 1024  # of the exercise
GROUPS = ((0, 2, 3), (1,))


@answered
def buckets(wrap: Callable[..., Any], seed: int) -> str:
    """`wrap(model, **options)` -> a module as `labs.ddp.DataParallel`; so are the options.  Buckets are of 128 KiB."""
    draw = Draw(seed)
    line = every_job("data_parallel", wrap, draw.buckets(), exact=True)
    own_group(wrap, draw, BUCKET_BYTES)
    bytes_held("data_parallel", wrap, draw)
    return line.format(" and step")


def own_group(wrap: Callable[..., Any], draw: Draw, bucket_bytes: int) -> None:
    """Some ranks are the group, and the all-reduce is one that counts; right among all ranks, it may be wrong here."""
    case, (group, _) = draw.own_group(), GROUPS
    when = f"4 ranks, of which {', '.join(map(str, group))} are the group"
    parameters = (p for p in case.model().parameters() if p.requires_grad)
    due = case.steps * len(in_buckets(parameters, bucket_bytes))
    try:
        results = job(train_in_a_group, wrap, case, ranks=4, when=when)
        for number in range(case.steps):
            judge(case, [results[rank][0][number] for rank in group], 0, f"{when}, step {number}: ")
    except Wrong as wrong:
        raise wrong.also("wrong in a group of only some ranks") from None
    for rank in group:
        steps, calls = results[rank]
        refuse(OWN, (sum(step.begun for step in steps), due, calls), f"{when}, {case.steps} steps: on rank {rank} ")


# ---- on a rank -------------------------------------------------------------------------------------------


def train_in_a_group(wrap: Callable[..., Any], case: Case) -> tuple[list[Seen], int]:
    """On 4 ranks, each in a group of its own; and the number of calls of the all-reduce that the wrapper was given."""
    groups, calls = {ranks: dist.new_group(ranks) for ranks in GROUPS}, []
    [mine] = [group for ranks, group in groups.items() if dist.get_rank() in ranks]

    def all_reduce(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return dist.all_reduce(*args, **options)

    wrap = partial(wrap, group=mine, all_reduce=all_reduce)
    return list(train_one(EXERCISES["data_parallel"], wrap, case, dist.get_rank())), len(calls)


# ---- what is judged --------------------------------------------------------------------------------------

ONE_EACH = Mistake(
    "not one all-reduce for each bucket",
    "How many gradients does a bucket wait for, and which of them is the last?",
    lambda counts: counts[0] != counts[1] and "{} collectives were begun for {} buckets".format(*counts),
)
OWN = (
    ONE_EACH,
    Mistake(
        "not with its own all-reduce",
        "Which all-reduce was the wrapper given, and under which name does it keep it?",
        lambda counts: counts[0] > counts[2] and f"{counts[0]} collectives were begun, {counts[2]} by self.all_reduce",
    ),
)
