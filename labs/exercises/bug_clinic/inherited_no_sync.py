"""inherited_no_sync: a context that should say "not the last micro-batch", and does nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.bug_clinic._case import RANKS, clinic, drawn, mean_of
from labs.kit.launch import run

SIZE, EACH, ROWS = 12, 3, 4
Context = Callable[["Engine"], AbstractContextManager[None]]
INSIDE, AFTER = "engine.last, in or after an inner context,", "engine.last, after an error in the context,"


class Engine:
    """An engine that adds up gradients in buffers of its own, and averages them after the last micro-batch.

    last: whether this backward is the step's last; fresh: whether a buffer begins anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self.main = {p: torch.zeros_like(p) for p in model.parameters()}
        self.fresh, self.last = dict.fromkeys(self.main, True), True
        for p in self.main:
            p.register_post_accumulate_grad_hook(self.add)

    def add(self, p: nn.Parameter) -> None:
        if self.fresh[p]:
            self.main[p].zero_()
        self.main[p] += p.grad
        p.grad, self.fresh[p] = None, self.last
        if self.last:
            dist.all_reduce(self.main[p])
            self.main[p] /= dist.get_world_size()


@contextmanager
def faulty(engine: Engine) -> Iterator[None]:
    yield


@contextmanager
def right(engine: Engine) -> Iterator[None]:
    before = engine.last
    engine.last = False
    try:
        yield
    finally:
        engine.last = before


def model_of(seed: int) -> nn.Linear:
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    model.weight.data = drawn((SIZE, SIZE), seed)
    return model


def accumulated(fn: Context, seed: int, each: int = EACH) -> tuple[Engine, Tensor]:
    """Take a step of `each` micro-batches; return the engine, and its gradient."""
    model, rank = model_of(seed), dist.get_rank()
    engine = Engine(model)
    for k in range(each):
        with fn(engine) if k < each - 1 else nullcontext():
            (model(drawn((ROWS, SIZE), seed, rank, k)).tanh().square().sum() / each).backward()
    return engine, engine.main[model.weight]


def job(fn: Context, seed: int) -> dict[str, Tensor]:
    engine, gradient = accumulated(fn, seed)
    with fn(engine):
        with fn(engine):
            inside = engine.last
        inside |= engine.last
    with suppress(ArithmeticError), fn(engine):
        raise ArithmeticError
    return {"gradient": gradient} | flags(inside, engine.last)


def flags(inside: bool, after: bool) -> dict[str, Tensor]:
    return {INSIDE: torch.tensor(inside), AFTER: torch.tensor(after)}


def parts(seed: int, rank: int) -> list[list[Tensor]]:
    return [[gradient(seed, r, k) for k in range(EACH)] for r in range(RANKS)]


def gradient(seed: int, rank: int, k: int) -> Tensor:
    model = model_of(seed)
    model(drawn((ROWS, SIZE), seed, rank, k)).tanh().square().sum().backward()
    return model.weight.grad


def norms(fn: Context, seed: int = 0) -> list[dict[str, float]]:
    """Return a row for each number of micro-batches: the length of the gradient on rank 0, and in one process."""
    found, rows = run(lengths, fn, seed, ranks=RANKS, device="cpu")[0], []
    for each, length in enumerate(found, 1):
        whole = mean_of([own[:each] for own in parts(seed, 0)])
        rows.append({"micro-batches": each, "four ranks": length, "one process": float(whole.norm())})
    return rows


def lengths(fn: Context, seed: int) -> list[float]:
    return [float(accumulated(fn, seed, each)[1].norm()) for each in range(1, EACH + 1)]


def alone(seed: int) -> list[dict[str, Tensor]]:
    return RANKS * [{"gradient": mean_of(parts(seed, 0))} | flags(False, True)]


# fmt: off
inherited_no_sync = clinic(
    "b", faulty, right, job, alone, number=2, parts=parts, tells={"numbers", "gradients", "sent", "dry"},
    asks="`fn(engine)`, a context manager around each micro-batch but the last; engine: an Engine of this file",
    threads=("NVIDIA/Megatron-LM/pull/7186 merged 2026-09-09",),
    mistake="every backward is the step's last",
    question="Which backward does the engine take for the step's last, and what does it do before the next one?",
)
# fmt: on
inherited_no_sync.Engine, inherited_no_sync.norms = Engine, norms
