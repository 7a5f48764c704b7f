"""What runs on each rank in a check of a collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.kit.checks.answer import show
from labs.kit.checks.case import SETTLED, Outcome
from labs.kit.checks.collectives.cases import KINDS, LARGE, Case, Kind
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.wire import SlowWire
from labs.kit.record import mark


def one_rank(name: str, fn: Callable[..., Any], cases: list[Case]) -> list[Outcome | None]:
    """Every case on one rank, one step each; None where it is not a member."""
    kind, rank = KINDS[name], dist.get_rank()
    groups = {case.group: dist.new_group(list(case.group)) for case in cases if case.group}
    return [one_case(kind, fn, case, rank, groups.get(case.group)) for case in cases]


def one_case(
    kind: Kind, fn: Callable[..., Any], case: Case, rank: int, group: dist.ProcessGroup | None
) -> Outcome | None:
    if rank not in case.members:
        mark("step")
        return None
    x = case.laid_out(kind.brings(case, case.members.index(rank)))
    with SlowWire(rank, case.seed) as wire, Aftermath(trace=case.size == LARGE) as aftermath:
        mark("step")
        returned, refused = call(kind, fn, x, case, group)
        mark("end")
    outcome = Outcome([x.flatten()], snapshot(returned), wire.touched, refused=refused)
    aftermath.tell(outcome)
    return outcome


def call(
    kind: Kind, fn: Callable[..., Any], x: Tensor, case: Case, group: dist.ProcessGroup | None
) -> tuple[Any, bool]:
    """What it returned, and whether it refused."""
    root = (case.root,) if case.root and kind.rooted else ()
    within = {} if group is None else {"group": group}
    try:
        return noted(case, fn, x, *root, **within), False
    except Exception:  # what is not contiguous may be refused; anything else is raised again
        if not case.strided:
            raise
        return None, True


def snapshot(returned: Any) -> Any:
    """A returned tensor as it is now; of anything else, what it is."""
    return returned.detach().clone() if isinstance(returned, Tensor) else show(returned)


def hold(name: str, fn: Callable[..., Any], case: Case) -> None:
    """Two calls in a row, and after each of them a step in which nothing happens."""
    kind = KINDS[name]
    x = kind.brings(case, dist.get_rank())
    for _ in range(2):
        mark("step")
        call(kind, fn, x, case, None)
        mark("end")
        time.sleep(SETTLED)
        mark("step")
        mark("end")
