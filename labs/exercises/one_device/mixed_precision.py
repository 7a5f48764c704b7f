"""mixed_precision: AdamW on float32 masters, and parameters that follow them, rounded.

The reference is AdamW in float64, with the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from labs.exercises.engine.answer import Mistake, answered, instead, show
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_one_rank
from labs.exercises.engine.on_ranks import BF16, F32, Draw
from labs.exercises.engine.scripts import Done, Look, World
from labs.kit.watch.memory import StorageWatch, timeline

NAMES = ("master", "mean", "square")
LARGE = 1 << 16  # elements of the parameter whose bytes are measured
WORK = 40  # bytes per element during a step, beyond 16: the gradient in float32, new copies of all three, and six more


@dataclass(frozen=True)
class Parameters(World):
    """Parameters that are updated `updates` times, each time with other settings and larger or smaller gradients.

    scale: the factor of all numbers.
    second: a further factor of the first parameter's gradient in the second update; None if it has no gradient there.
    turned: whether the parameters are not contiguous.
    weighed: whether the bytes are looked at, and not the numbers.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    updates: int = 3
    lr: float = 3e-3
    scale: float = 1.0
    second: float | None = 1.0
    turned: bool = False
    weighed: bool = False

    def settings(self, t: int) -> dict[str, Any]:
        odd = t % 2
        betas = (0.9, 0.95) if odd else (0.8, 0.9)
        return {"lr": self.lr / (1 + odd), "betas": betas, "eps": 1e-8 / (1 + odd), "weight_decay": 0.2 / (1 + odd)}

    def draw(self, t: int, times: int = 1) -> list[Tensor]:
        """Return random tensors of the parameters' shapes, `times` larger than the world's scale."""
        generator, scale = self.generator(step=t), self.scale * times
        tensors = [scale * torch.randn(shape, generator=generator, dtype=F32).to(self.dtype) for shape in self.shapes]
        return [x.t() if self.turned else x for x in tensors]

    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(x) for x in self.draw(0)]

    def gradients(self, t: int) -> list[Tensor | None]:
        """Return the gradients of update t, which counts from 1; None for all parameters if t is 0."""
        first, *others = self.draw(t, 1 + t % 3) if t else [None] * len(self.shapes)
        if t == 2:
            first = None if self.second is None else self.second * first
        return [first, *others]

    def __str__(self) -> str:
        what = f"{len(self.shapes)} parameters" if len(self.shapes) > 1 else f"a parameter of shape {self.shapes[0]}"
        small = f", numbers of {self.scale:.0e}" if self.scale < 1 else ""
        return f"{what} in {self.dtype_name}{small}{', not contiguous' * self.turned}"


def worlds(draw: Draw) -> dict[int, list[Parameters]]:
    odd, some = draw.random.randrange(3, 8), "right only for some shapes"

    def case(*shapes: tuple[int, ...], only: str = "", dtype: torch.dtype = BF16, **options: Any) -> Parameters:
        return draw.world(Parameters, 1, shapes=shapes, only=only, dtype=dtype, **options)

    fp16 = {"only": "right only in bfloat16", "dtype": torch.float16}
    return {
        1: [
            case((odd, 3)),
            case((odd, 3), lr=1e-4, updates=20),
            case((odd, 3), only="right only for numbers near 1", scale=2**-20),
            *(case(shape, only=some) for shape in ((), (1,), (0,), (2, 3, 2))),
            case((odd,), (3, odd), (odd,), only="right only for one parameter"),
            case((odd, 4), only="right only for contiguous parameters", turned=True),
            case((odd,), (odd,), only="right only where every parameter has a gradient", second=None),
            case((odd, 3), only="right only where no gradient is zero", second=0.0),
            *(case((odd, 3), scale=scale, **fp16) for scale in (1.0, 2**-10)),
            case((LARGE,), weighed=True),
        ]
    }


def script(world: Parameters, remember: Callable[..., Any], step: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    if world.weighed:
        yield Look(facts={"bytes": weighed(world, remember, step)})
    else:
        yield Look(facts=first_wrong(UPDATED, updated(world, remember, step)))


def updated(world: Parameters, *functions: Callable[..., Any]) -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter, with words that name it, before the first update and after each."""
    params = [Parameter(world, number, p) for number, p in enumerate(world.parameters())]
    for t in range(world.updates + 1):
        for one in params:
            one.update(t, *functions)
        yield from ((f"{f'step {t}, ' * bool(t)}parameter {one.number}: ", one) for one in params)


class Parameter:
    """A parameter, with the optimizer state that the learner's functions keep for it."""

    def __init__(self, world: Parameters, number: int, p: nn.Parameter) -> None:
        self.world, self.number, self.p, self.start = world, number, p, p.detach().float()

    def update(self, t: int, remember: Callable[..., Any], step: Callable[..., Any]) -> None:
        self.t, self.given = t, self.world.gradients(t)[self.number]
        self.before, self.place = self.p.detach().clone(), self.p.data_ptr()
        self.p.grad = None if self.given is None else self.given.clone()
        if t:
            step(self.p, self.kept, t, **self.world.settings(t))
        else:
            self.kept = remember(self.p)
        self.expected = self.by_adamw()

    @property
    def master(self) -> Tensor:
        return self.kept["master"].detach()

    def by_adamw(self, number: Callable[[int], int] = lambda t: t) -> Tensor:
        """Return the master as AdamW computes it in float64, if update t has the number `number(t)`."""
        master = self.start.double()
        mean, square = torch.zeros_like(master), torch.zeros_like(master)
        for t in range(1, self.t + 1):
            settings, gradient = self.world.settings(t), self.world.gradients(t)[self.number]
            (one, two), lr = settings["betas"], settings["lr"]
            if gradient is not None:
                mean.lerp_(gradient.double(), 1 - one)
                square.lerp_(gradient.double() ** 2, 1 - two)
                scale = (square / (1 - two ** number(t))).sqrt() + settings["eps"]
                master.mul_(1 - lr * settings["weight_decay"]).sub_(lr * mean / (1 - one ** number(t)) / scale)
        return master

    def follows(self, expected: Tensor) -> bool:
        """Return whether the master has the expected numbers, within float32's rounding of them in each step."""
        if not expected.numel():
            return True
        farthest = (expected - self.start).abs().max()
        rounding = 4 * self.t * torch.finfo(F32).eps * torch.maximum(self.start.abs(), expected.abs())
        return bool(((self.master - expected).abs() <= 1e-4 * farthest + rounding).all())


def weighed(world: Parameters, remember: Callable[..., Any], step: Callable[..., Any]) -> list[float]:
    """Return bytes held per element: the most in two updates, and those after each of them."""
    ends = []
    with StorageWatch() as watch:
        [p] = world.parameters()
        kept = remember(p)
        for t in (1, 2):
            [p.grad] = world.gradients(t)
            step(p, kept, t, **world.settings(t))
            ends.append(len(watch.changes) - 1)
        sizes = [sum(held.values()) / LARGE for _, held in timeline(watch.tape)]
    return [max(sizes), *(sizes[end] for end in ends)]


def farthest(found: Tensor, expected: Tensor, what: str) -> str:
    """Return a phrase about the element that differs most."""
    at = int((found - expected).abs().flatten().argmax())
    return f"element {at} of {what} is {instead(found.flatten()[at], expected.flatten()[at])}"


def kept(matches: Callable[[Tensor, Parameter], bool], phrase: str, *names: str) -> Callable[[Parameter], str | None]:
    """Return a function that describes the first kept tensor, or the first of these names, that `matches`."""

    def row(one: Parameter) -> str | None:
        for name in names or NAMES:
            if matches(x := one.kept[name], one):
                return f"kept[{name!r}] {phrase.format(show(x), show(one.p), x.flatten()[:1].tolist())}"
        return None

    return row


def goes(matches: Callable[[Parameter], bool]) -> Callable[[Parameter], str | None]:
    """Return a function that describes a master with wrong numbers, if `matches(parameter)`."""
    return lambda one: (
        None if one.follows(one.expected) or not matches(one) else farthest(one.master, one.expected, "the master")
    )


def counted(number: Callable[[int], int]) -> Callable[[Parameter], str | None]:
    """Return a function that describes a master that follows `by_adamw(number)` instead."""
    return goes(lambda one: one.follows(one.by_adamw(number)))


def apart(one: Parameter) -> str | None:
    """Return a phrase about a parameter that is not its master, rounded; else None."""
    expected = one.master.to(one.p.dtype)
    return (
        None if torch.equal(one.p, expected) else f"{farthest(one.p, expected, 'the parameter')}, its master, rounded"
    )


def not_three(one: Parameter) -> str | None:
    """Return a sentence about what is kept, if it is not a dict with the three tensors; else None."""
    if isinstance(one.kept, dict) and all(isinstance(one.kept.get(name), Tensor) for name in NAMES):
        return None
    names = f"a dict of {', '.join(map(repr, one.kept))}" if isinstance(one.kept, dict) else show(one.kept)
    return f"what is kept for it is {names}"


def regraded(one: Parameter) -> bool:
    """Return whether the gradient is not the one that backward left."""
    found, expected = one.p.grad, one.given
    return expected is not None and (
        found is None or found.dtype is not expected.dtype or not torch.equal(found, expected)
    )


def held(matches: Callable[[float, float, float], str | bool]) -> Callable[[Done], str | bool]:
    """Return a function that calls `matches(peak, after one step, after two steps)` with bytes held per element."""
    return lambda done: "bytes" in done.facts and matches(*done.facts["bytes"])


WHO = "Who else refers to this tensor, and what do they expect of it?"
TYPES = "Between 1 and the next number of bfloat16 there is a gap. What is added up here, and how small is it?"
BEGINS = "begins with {2}"
# fmt: off
UPDATED = (
    Mistake("the parameter's dtype has changed", "In which dtype does the model compute in the next forward?",
            lambda one: one.p.dtype is not one.world.dtype and f"it is {show(one.p)}"),
    Mistake("the parameter has other memory", "A tied weight is in two modules: which of them sees the new numbers?",
            lambda one: one.p.data_ptr() != one.place
            and "its numbers are in a different place than before the step"),
    Mistake("the parameter needs no gradient any more", WHO,
            lambda one: not one.p.requires_grad and "its requires_grad is False"),
    Mistake("None is not None any more", "What does AdamW do with a gradient of zeros, and what with none?",
            lambda one: one.given is None and one.p.grad is not None
            and f"it had no gradient, and has {show(one.p.grad)}"),
    Mistake("the gradient has changed", "Who clears the gradient, and who else may look at it?",
            lambda one: regraded(one) and f"its gradient is {show(one.p.grad)}, and not what backward left"),
    Mistake("not these three tensors", "What does AdamW have to remember, besides the parameter itself in float32?",
            not_three),
    *(Mistake(f"the {name} is not float32", TYPES, kept(lambda x, one: x.dtype is not F32, "is {}", name))
      for name in NAMES),
    Mistake("part of a graph", "Does the optimizer's copy take part in the forward?",
            kept(lambda x, one: x.requires_grad, "requires a gradient")),
    Mistake("a different shape", WHO, kept(lambda x, one: x.shape != one.p.shape, "is {}, the parameter {}")),
    Mistake("the master begins with other numbers", "What numbers does the parameter have, before the first step?",
            kept(lambda x, one: one.t == 0 and not torch.equal(x, one.start), BEGINS, "master")),
    Mistake("two of them share their memory", "What happens to the mean when the square is written?",
            lambda one: len({one.kept[name].data_ptr() for name in NAMES}) < len(NAMES) and bool(one.p.numel())
            and "two of the three tensors have the same memory"),
    Mistake("the master stands still", "Which line changes the master?",
            goes(lambda one: torch.equal(one.master, one.start))),
    Mistake("small steps are lost", TYPES, goes(lambda one: torch.equal(one.master.to(one.p.dtype), one.master)),
            symptom="in bfloat16 the loss goes down more slowly, or stands still, without an error"),
    Mistake("every step counts as the first", "What is the number of this step?", counted(lambda t: 1),
            symptom="too quick at first: the correction of the means never ends"),
    Mistake("the steps are counted from a different number", "What is the number of the first step?",
            counted(lambda t: t + 1)),
    Mistake("the master goes another way", "Which gradient, and which settings, does adamw see?",
            goes(lambda one: True)),
    Mistake("the parameter does not follow", "With which numbers does the next forward compute?",
            lambda one: torch.equal(one.p, one.before) and apart(one),
            symptom="the loss stands still, though the optimizer is at work"),
    Mistake("the parameter is not its master, rounded", "What is the parameter made from?", apart),
)
HELD = (
    Mistake("more than 16 bytes per parameter", "2 + 2 + 12: what else is there when the step is over?",
            held(lambda most, one, two: two > 16.1 and f"{two:.2f} bytes per parameter are held when the step is over"),
            symptom="18 or 20 bytes per parameter, where 16 were expected"),
    Mistake("too much during a step", "Which of these copies is needed at the same time as the others?",
            held(lambda most, one, two: most > 16 + WORK
                 and f"{most:.2f} bytes per parameter are held during a step")),
)
PLAY = Play(worlds, script, ((on_one_rank, (*as_found(UPDATED), *HELD)),), question=WHO)
# fmt: on


@answered
def mixed_precision(remember: Callable[..., Any], step: Callable[..., Any], seed: int) -> str:
    """Check `remember(p)` and `step(p, kept, t, **settings)`.

    remember returns {"master", "mean", "square"} in float32; step updates them by AdamW, and p follows its master.
    """
    rest = checked(PLAY, (remember, step), seed).seen[-1].done[0].facts["bytes"][-1]
    return f"{rest:.2f} bytes per parameter at rest; the least possible is 16"


# ---- the course's own, with which the notebook goes on ---------------------------------------------------


def remember(p: Tensor) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter."""
    return {"master": p.detach().float()} | {name: torch.zeros(p.shape) for name in ("mean", "square")}


@torch.no_grad()
def mixed_step(p: Tensor, kept: dict[str, Tensor], t: int, betas: tuple[float, float], **settings: float) -> None:
    """Take step t by PyTorch's own AdamW, and round the master to the parameter."""
    if p.grad is not None:
        state = ([kept["master"]], [p.grad.float()], [kept["mean"]], [kept["square"]], [], [torch.tensor(t - 1.0)])
        adamw(*state, amsgrad=False, maximize=False, beta1=betas[0], beta2=betas[1], **settings)
        p.copy_(kept["master"])


mixed_precision.remember, mixed_precision.mixed_step = remember, mixed_step
