"""root_stays: parameters that stay gathered for a backward that never comes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn
from labs.kit.record import span

ENCODERS, SIZE = 4, 2**17  # frozen encoders, each the root of its own model; their parameters, 1 MiB in all


class Unit:
    """The parameters of a model that is sharded as a whole: gathered for its forward, and freed again."""

    def __init__(self, seed: int, number: int, is_root: bool = True) -> None:
        self.is_root = is_root
        self.shard = drawn((SIZE,), seed, number).chunk(RANKS)[dist.get_rank()].clone()
        self.whole: Tensor | None = None

    def gather(self) -> Tensor:
        if self.whole is None:
            self.whole = torch.empty(SIZE, dtype=torch.float64)
            dist.all_gather(list(self.whole.chunk(RANKS)), self.shard)
        return self.whole

    def free(self) -> None:
        self.whole = None


def faulty(unit: Unit) -> None:
    if unit.is_root:
        return  # its backward comes next, and needs them
    unit.free()


def right(unit: Unit) -> None:
    if unit.is_root and torch.is_grad_enabled():
        return
    unit.free()


def job(fn: Callable[[Unit], None], seed: int) -> dict[str, Tensor]:
    encoders, trained = [Unit(seed, number) for number in range(ENCODERS)], Unit(seed, ENCODERS)
    block = Unit(seed, ENCODERS + 1, is_root=False)
    x = torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        for number, unit in enumerate(encoders):
            with span(f"enc. {number}"):
                x = (unit.gather() * x).sin().mean()
                fn(unit)
    with span("block"):
        block.gather()
        fn(block)
    x.requires_grad_()
    with span("root"):
        (trained.gather() * x).sin().mean().backward()
        fn(trained)
        trained.gather()  # the backward of layers before needs them
    roots = sum(unit.is_root for unit in (*encoders, trained))
    return {"gradient of x": x.grad, "x": x} | counts(int(block.whole is not None), roots)


def counts(whole: int, roots: int) -> dict[str, Tensor]:
    named = {"the number of whole units that are no root": whole, "the number of roots": roots}
    return {name: torch.tensor(number) for name, number in named.items()}


def alone(seed: int) -> list[dict[str, Tensor]]:
    x = torch.ones((), dtype=torch.float64)
    for number in range(ENCODERS):
        x = (drawn((SIZE,), seed, number) * x).sin().mean()
    w = drawn((SIZE,), seed, ENCODERS)
    return RANKS * [{"gradient of x": (w * (w * x).cos()).mean(), "x": x} | counts(0, ENCODERS + 1)]


# fmt: off
root_stays = clinic(
    "d", faulty, right, job, alone, number=4, tells={"held", "dry"},
    asks="`fn(unit)`, which is called after each forward, and frees what no backward needs; unit: a Unit",
    threads=("pytorch/pytorch/issues/149029 closed 2025-03-12", "pytorch/pytorch/issues/154655 closed 2025-05-29",
             "pytorch/pytorch/pull/154704 closed 2025-05-30"),
    mistake="a root stays whole, and no backward comes",
    question="For which forward does a backward come, and how does this function know?",
)
# fmt: on
