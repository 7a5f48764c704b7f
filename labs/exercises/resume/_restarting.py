"""A training that is lost in a crash, and one that goes on from the state that was remembered.

Each rank trains a model of its own, with batches and dropout of its own, so no rank's state fits another rank.
After each step, all numbers of the resumed training must equal, bit for bit, those of a training on the same rank that
never crashed.

Not every saved state is resumed from, and a training takes some more steps after its save before it is lost.  The next
training is built from another seed; its optimizer is given the parameters in another order, all of one shape.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from labs.exercises.engine.around_a_call import Aftermath
from labs.exercises.engine.learner_job import noted
from labs.exercises.engine.on_paper import plain
from labs.exercises.engine.scripts import World, copied
from labs.kit.ranks.payload import dumps

BATCH, DIM = 4, 32
LOST = 2  # steps after the save, which are lost


class Kind(StrEnum):
    """The kinds of numbers that a training has, in words."""

    PARAMETER, FROZEN, BUFFER = "the parameter", "the frozen parameter", "the buffer"
    MEAN, SQUARE, COUNT = "exp_avg of", "exp_avg_sq of", "step of"
    RATE, SCHEDULE, PLACE = "optimizer.param_groups[0]['lr']", "schedule.last_epoch", "loader.step"
    RANDOM, MODE = "torch.get_rng_state()", "model.training"


Key = tuple[str, str]  # the kind, and the name of the parameter or buffer
Numbers = dict[Key, Any]


@dataclass(frozen=True)
class ResumedTraining(World):
    """A training that is lost and resumed.

    saves: for each restart, the number of steps after which the state was saved that the next training goes on from.
    """

    saves: tuple[int, ...] = ()
    frozen: bool = False

    @property
    def last(self) -> int:
        return self.saves[-1] + LOST

    def __str__(self) -> str:
        after = " and ".join(map(str, self.saves))
        frozen = ", the first layer frozen" * self.frozen
        return f"{self.who}, resumed after {after} of {self.last} steps{frozen}"


class Model(nn.Module):
    """A model of three layers, with a running mean of its inputs, as in a batch norm."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.first.requires_grad_(not frozen)
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.mean.lerp_(x_BD.mean(0), 0.1)
        x_BD = x_BD - self.mean
        for layer in (self.first, self.second, self.third):
            x_BD = dropout(layer(x_BD).tanh(), 0.3, self.training)
        return x_BD


class Loader:
    """An iterator over batches.

    step: the number of batches read so far, which alone determines the next one.
    """

    def __init__(self, world: ResumedTraining, rank: int) -> None:
        self.world, self.rank, self.step = world, rank, 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Tensor:
        generator = self.world.generator(self.rank, operator.index(self.step))
        self.step += 1
        return torch.randn(2, BATCH, DIM, generator=generator)


def slower(step: int) -> float:
    return 1 / (1 + step)


class Trainer:
    """A training on one rank.

    number: the number of restarts before it.
    history: the training's numbers when it was built, and after each step.
    """

    def __init__(self, world: ResumedTraining, rank: int, number: int = 0) -> None:
        torch.manual_seed(world.seed + 2 * number)
        self.model = Model(world.frozen)
        params = list(self.model.parameters())
        params = params[number:] + params[:number]  # rotated: another order, which is not the reverse
        self.optimizer = torch.optim.AdamW(params, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, slower)
        self.loader = Loader(world, rank)
        torch.manual_seed(world.seed + 2 * number + rank)
        self.parts = self.model, self.optimizer, self.schedule, self.loader
        self.history = [self.numbers()]

    def take(self, steps: int) -> list[Numbers]:
        """Take some steps; return the history."""
        for _ in range(steps):
            x_BD, y_BD = next(self.loader)
            self.optimizer.zero_grad()
            mse_loss(self.model(x_BD), y_BD).backward()
            self.optimizer.step()
            self.schedule.step()
            self.history.append(self.numbers())
        return self.history

    def numbers(self) -> Numbers:
        """Return a copy of all numbers that the training has, by kind and name."""
        found: Numbers = {}
        for name, p in self.model.named_parameters():
            found[Kind.PARAMETER if p.requires_grad else Kind.FROZEN, name] = p
            found |= {(f"{kept} of", name): x for kept, x in self.optimizer.state.get(p, {}).items()}
        found |= {(Kind.BUFFER, name): x for name, x in self.model.named_buffers()}
        found[Kind.RATE, ""] = plain(self.optimizer.param_groups[0]["lr"])
        found[Kind.SCHEDULE, ""], found[Kind.PLACE, ""] = plain(self.schedule.last_epoch), plain(self.loader.step)
        found[Kind.RANDOM, ""], found[Kind.MODE, ""] = torch.get_rng_state(), self.model.training
        return copied(found)

    @property
    def strange(self) -> int:
        """Return how many of the optimizer's parameters are not parameters of the model."""
        own = {id(p) for p in self.model.parameters()}
        return sum(id(p) not in own for p in self.optimizer.param_groups[0]["params"])


@dataclass
class RestartMoment:
    """A moment at which a training's state was remembered, or at which another training has gone on from that state.

    t: the number of steps taken.
    state: the state that the learner's `remember` returned.
    received: the numbers after the learner's function was called.
    expected: the numbers of the undisturbed training, by step.
    other: the numbers of the undisturbed training on the other rank, by step.
    left: what the function has changed in the process.
    broke: the error that followed, from saving the state or from a step; "" if there was none.
    new: the numbers with which the other training was built; None if nothing was resumed.
    went: the other training's numbers after each step since the restart.
    strange: how many parameters of the other training's optimizer are not its model's.
    """

    t: int
    state: Any
    received: Numbers
    expected: list[Numbers]
    other: list[Numbers]
    left: str = ""
    broke: str = ""
    new: Numbers | None = None
    went: Sequence[Numbers] = ()
    strange: int = 0

    @cached_property
    def wrong(self) -> list[Key]:
        return differing(self.received, self.expected[self.t])

    @cached_property
    def lost(self) -> bool:
        """Return whether the other training has not gone on as if nothing had happened."""
        pairs = zip(self.went, self.expected[self.t + 1 :], strict=False)
        return bool(self.new and (self.broke or any(differing(*pair) for pair in pairs)))

    @property
    def begun_anew(self) -> bool:
        return bool(self.new and self.new.keys() == self.received.keys() and not differing(self.received, self.new))


def differing(found: Numbers, expected: Numbers) -> list[Key]:
    """Return the keys whose numbers are not the expected ones; numbers under other keys do no harm."""
    return [key for key in expected if not same(found.get(key), expected[key])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return isinstance(one, Tensor) == isinstance(other, Tensor) and one == other


class Story:
    """A training on this rank that crashes and is resumed, several times.

    sizes: for each restart, the bytes that were remembered and the bytes that were needed.
    """

    def __init__(self, world: ResumedTraining, *functions: Callable[..., Any]) -> None:
        self.world, self.rank, self.functions = world, world.index(), dumps(functions)
        self.other, self.expected = (Trainer(world, rank).take(world.last) for rank in (1 - self.rank, self.rank))
        self.sizes: list[tuple[int, int]] = []

    def moments(self) -> Iterator[tuple[str, RestartMoment]]:
        """Yield each moment at which a function was called, with words for where."""
        trainer, (remember, _) = Trainer(self.world, self.rank), pickle.loads(self.functions)
        for t in range(self.world.saves[0]):
            yield f"at step {t} ", self.saved(trainer, remember, t)
            trainer.take(1)
        for number, (t, end) in enumerate(pairwise((*self.world.saves, self.world.last)), 1):
            one = self.saved(trainer, remember, t)
            yield f"at step {t} ", one
            self.sizes.append((nbytes(one.state), nbytes(self.expected[t])))
            trainer.take(LOST)
            remember(*trainer.parts)
            saved = dumps(one.state)

            remember, resume = pickle.loads(self.functions)  # a new process knows nothing of the old variables
            trainer = Trainer(self.world, self.rank, number)
            with Aftermath() as after:
                noted(f"resume called with what there was after {t} steps", resume, pickle.loads(saved), *trainer.parts)
            found, strange = trainer.numbers(), trainer.strange
            broke, (new, *went) = raised(trainer.take, end - t), trainer.history
            one = RestartMoment(t, one.state, found, self.expected, self.other, after.left, broke, new, went, strange)
            yield f"at step {t}, after resume, ", one

    def saved(self, trainer: Trainer, remember: Callable[..., Any], t: int) -> RestartMoment:
        """Call the learner's `remember` after t steps; return the RestartMoment."""
        with Aftermath() as after:
            state = noted(f"remember called after {t} steps", remember, *trainer.parts)
        return RestartMoment(t, state, trainer.numbers(), self.expected, self.other, after.left, raised(dumps, state))


def raised(call: Callable[..., Any], *args: Any) -> str:
    """Return the error that a call raises, in words, or "" if it raises none."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def nbytes(value: Any) -> int:
    """Return the bytes of the tensors, bytes and strings in a value; anything else counts as 8."""
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(nbytes, value))
    if isinstance(value, Tensor):
        return value.nbytes
    return len(value) if isinstance(value, bytes | str) else 8
