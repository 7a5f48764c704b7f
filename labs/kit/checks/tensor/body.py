"""What each rank does in a check of tensor parallelism, and notes.

play     calls, forward and backward, a step each
hold     two of them in a row, for the bytes held
deal     an answer for each rank of each deal
obey     attention, split as the answer says
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labs.kit.checks.answer import show
from labs.kit.checks.case import Outcome
from labs.kit.checks.job import noted
from labs.kit.checks.left import Aftermath
from labs.kit.checks.tensor.cases import Deal, Functions, Split, floating
from labs.kit.checks.wire import Late
from labs.kit.record import mark

SETTLED = 0.005  # s in which a backend's thread lets go of what it sent
UNSEEN = "an autograd kernel was not registered"  # what torch says where a backward passes a collective by


@dataclass
class Called(Outcome):
    """`returned`: the result.  changed: what should be as it was, and is not.  unseen: torch has warned."""

    gradients: dict[str, Any] = field(default_factory=dict)
    changed: str = ""
    differentiable: bool = True
    unseen: bool = False


def play(functions: Functions, cases: list[Split]) -> list[Called]:
    return [play_one(functions, case) for case in cases]


def play_one(functions: Functions, case: Split) -> Called:
    rank, called, setting = dist.get_rank(), Called(), case.setting()
    brought = case.brings(rank)
    leaves = {name: x.clone().requires_grad_() for name, x in brought.items() if floating(x)}
    given = brought | {name: x * 1 for name, x in leaves.items()}  # to a leaf nobody can write
    with Late(rank, case.seed), Aftermath() as aftermath, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        functions = noted(case, case.prepare, functions, given, **setting)
        mark("step")
        with nullcontext() if case.graded else torch.no_grad():
            result = noted(case, case.call, functions, given, **setting)
        called.returned = result.detach().clone() if isinstance(result, Tensor) else show(result)
        mark("step")
        if case.graded and isinstance(result, Tensor):
            go_back(case, called, result)
        mark("end")
    aftermath.tell(called)
    called.gradients = {name: leaves.get(name, x).grad for name, x in given.items() if floating(x)}
    called.unseen = any(UNSEEN in str(each.message) for each in told)
    spoiled = [name for name in leaves if not torch.equal(given[name], brought[name])]
    called.changed = called.changed or (f"{spoiled[0]!r}, which it was given," if spoiled else "")
    return called


def go_back(case: Split, called: Called, result: Tensor) -> None:
    called.differentiable = result.requires_grad
    if not called.differentiable or result.shape != case.shape_of_result(dist.get_rank()):
        return
    gradient = case.comes_back(dist.get_rank()).to(result.dtype)
    memory = torch.empty(0, dtype=gradient.dtype).set_(gradient.untyped_storage())  # behind an expanded one, too
    before = memory.clone()
    noted(case, torch.autograd.backward, [result], [gradient])
    called.changed = "" if torch.equal(memory, before) else "the gradient that came in"


def hold(functions: Functions, cases: list[Split]) -> None:
    for case in cases:
        hold_one(functions, case)


def hold_one(functions: Functions, case: Split) -> None:
    """Two calls; of each: a step forward, a step backward, and one in which nothing happens."""
    leaves = {name: x.requires_grad_() if floating(x) else x for name, x in case.brings(dist.get_rank()).items()}
    gradient = case.comes_back(dist.get_rank())
    for _ in range(2):
        mark("step")
        result = case.call(functions, {name: x * 1 if floating(x) else x for name, x in leaves.items()})
        time.sleep(SETTLED)
        mark("step")
        result.backward(gradient)
        del result
        for x in filter(floating, leaves.values()):
            x.grad = None
        gc.collect()  # a class that is made in each call goes only then
        time.sleep(SETTLED)
        mark("step")
        mark("end")


# ---- heads -----------------------------------------------------------------------------------------------


def deal(fn: Callable[..., Any], deals: list[Deal]) -> Outcome:
    """`returned`: by deal and rank of it, three lists of whole numbers, or what was returned in a few words."""
    mark("step")
    with Aftermath() as aftermath:
        found = Outcome(
            returned=[[lists(noted(each, fn, *each, rank)) for rank in range(each.ranks)] for each in deals]
        )
    mark("end")
    aftermath.tell(found)
    return found


def lists(returned: Any) -> tuple[list[int], ...] | str:
    try:
        queries, keys, sharers = ([int(number) for number in numbers] for numbers in returned)
    except (TypeError, ValueError):
        return show(returned)
    return queries, keys, sharers


def obey(fn: Callable[..., Any], each: Deal, seed: int) -> list[Tensor]:
    """Of this rank's heads what attention gives, the gradient of k and of v; and then each of one process."""
    generator, together = torch.Generator().manual_seed(seed), each.heads // each.kv_heads
    q, k, v, gradient = (
        torch.randn(2, heads, 5, 4, generator=generator, dtype=torch.float64)
        for heads in (each.heads, each.kv_heads, each.kv_heads, each.heads)
    )
    dealt = [lists(fn(*each, rank)) for rank in range(each.ranks)]
    groups = {tuple(sharers): dist.new_group(sharers) for _, _, sharers in dealt}
    queries, keys, sharers = dealt[dist.get_rank()]

    def attention(heads: list[int], pair: list[Tensor], kv_heads: list[int]) -> Tensor:
        places = [kv_heads.index(head // together) for head in heads]
        y = F.scaled_dot_product_attention(q[:, heads], *(x[:, places] for x in pair))
        y.backward(gradient[:, heads])
        return y.detach()

    whole, mine = ([x.clone().requires_grad_() for x in pair] for pair in ((k, v), (k[:, keys], v[:, keys])))
    y = attention(list(range(each.heads)), whole, list(range(each.kv_heads)))
    own = attention(queries, mine, keys)
    for x in mine:
        dist.all_reduce(x.grad, group=groups[tuple(sharers)])
    return [own, *(x.grad for x in mine), y[:, queries], *(x.grad[:, keys] for x in whole)]
