"""What each rank does in a check of tensor parallelism, and notes.

play     calls, forward and backward, a step each
hold     two of them in a row, for the bytes held
"""

from __future__ import annotations

import gc
import time
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit.checks.answer import show
from labs.kit.checks.case import SETTLED, Outcome
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.tensor.cases import Functions, Split, floating
from labs.kit.checks.wire import Late
from labs.kit.record import mark

UNSEEN = "an autograd kernel was not registered"  # what torch says where a backward passes a collective by


@dataclass
class Called(Outcome):
    """`returned`: the result.  changed: what should be as it was, and is not.  unseen: torch has warned."""

    gradients: dict[str, Any] = field(default_factory=dict)
    changed: str = ""
    unseen: bool = False


def play(functions: Functions, cases: list[Split]) -> list[Called]:
    played = [play_one(functions, case) for case in cases]
    for called, result in played:
        if isinstance(result, Tensor) and not called.changed and not torch.equal(result, called.returned):
            called.changed = "its result, after later calls,"
    return [called for called, _ in played]


def play_one(functions: Functions, case: Split) -> tuple[Called, Any]:
    """And what was returned, itself."""
    rank, called, setting = dist.get_rank(), Called(), case.setting()
    brought = {name: case.laid(x, rank) for name, x in case.brings(rank).items()}
    leaves = {name: x.clone().requires_grad_(case.graded) for name, x in brought.items() if floating(x)}
    given = deepcopy(brought) | {name: x * 1 for name, x in leaves.items()}  # to a leaf nobody can write
    with (
        torch.set_grad_enabled(case.graded),
        Late(rank, case.seed),
        Aftermath() as aftermath,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        functions = noted(case, case.prepare, functions, given, **setting)
        mark("step")
        result = noted(case, case.call, functions, given, **setting)
        called.returned = result.detach().clone() if isinstance(result, Tensor) else show(result)
        mark("step")
        if isinstance(result, Tensor) and result.requires_grad and result.shape == case.shape:
            go_back(case, called, result)
        mark("end")
    aftermath.tell(called)
    called.gradients = {name: leaves.get(name, x).grad for name, x in given.items() if floating(x)}
    called.unseen = any(UNSEEN in str(each.message) for each in told)
    spoiled = [name for name, x in brought.items() if isinstance(x, Tensor) and not torch.equal(given[name], x)]
    called.changed = called.changed or (f"{spoiled[0]!r}, which it was given," if spoiled else "")
    return called, result


def go_back(case: Split, called: Called, result: Tensor) -> None:
    gradient = case.comes_back(dist.get_rank()).to(result.dtype)
    memory = torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # behind an expanded one, too
    before = memory.clone()
    noted(case, torch.autograd.backward, [result], [gradient])
    called.changed = "" if torch.equal(memory, before) else "the gradient that came in"


def hold(functions: Functions, cases: list[Split]) -> None:
    """Two calls of each; of each: a step forward, a step backward, and one in which nothing happens."""
    for case in cases:
        leaves = {name: x.requires_grad_() if floating(x) else x for name, x in case.brings(dist.get_rank()).items()}
        gradient = case.comes_back(dist.get_rank())
        for _ in range(2):
            mark("step")
            given = {name: x * 1 if floating(x) else x for name, x in leaves.items()}
            end = (case.call(functions, given) * gradient).sum()  # which does not need the result again
            del given
            time.sleep(SETTLED)
            mark("step")
            end.backward()
            del end
            for x in filter(floating, leaves.values()):
                x.grad = None
            gc.collect()  # a class that is made in each call goes only then
            time.sleep(SETTLED)
            mark("step")
            mark("end")
