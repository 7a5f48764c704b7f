"""Is this mixed precision: AdamW on float32 masters, and parameters that follow them, rounded?

    one rank    the idea; many small steps; numbers far below 1; no dimension, no element, not contiguous; three
                parameters in turn; a step without a gradient, or with one of zeros; float16.  The learning rate
                differs from step to step
    one rank    bytes held by a large parameter, at rest and at the peak

The reference is torch's own AdamW on float32 copies, with the same gradients.  Where a master goes another way, the
usual mistakes are tried, each as a reference of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labs.kit.checks import case as shared
from labs.kit.checks.answer import Mistake, Wrong, answered, instead, refuse, show
from labs.kit.checks.case import Outcome
from labs.kit.checks.late_wire import Late
from labs.kit.checks.launching import job, noted
from labs.kit.checks.left import AFTERMATH, Aftermath
from labs.kit.record import Recording, mark

NAMES = ("master", "mean", "square")
LARGE = 1 << 16  # elements of the parameter whose bytes are measured
WORK = 40  # bytes per element at work, besides the 16 at rest: the gradient in float32, all three anew, and six more


@dataclass(frozen=True)
class Case(shared.Case):
    shapes: tuple[tuple[int, ...], ...]
    steps: int = 3
    lr: float = 3e-3
    scale: float = 1.0  # of the parameters,
    slope: float = 1.0  # of the gradients,
    second: float | None = 1.0  # and, besides, of the first parameter's in the second step; None: it has none
    turned: bool = False  # not contiguous

    def settings(self, step: int) -> dict[str, Any]:
        return {"lr": self.lr / (1 + step % 2), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def parameters(self) -> list[nn.Parameter]:
        generator = self.generator()
        drawn = (self.scale * torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes)
        return [nn.Parameter(x.t() if self.turned else x) for x in drawn]

    def gradients(self, step: int) -> list[Tensor | None]:
        """Not much alike from step to step."""
        generator = self.generator(step=step)
        slope = self.slope * (1 + step % 3)
        drawn = [slope * torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]
        first, *others = [x.t() if self.turned else x for x in drawn]
        if step == 2:
            first = None if self.second is None else self.second * first
        return [first, *others]

    def masters(
        self, t: Callable[[int], int] = lambda t: t, sign: int = 1, quicker: float = 1.0, **other: Any
    ) -> list[list[Tensor]]:
        """By step, what torch's own AdamW makes of them, with number t(step) for the step; `other` settings."""
        masters = [nn.Parameter(p.detach().float()) for p in self.parameters()]
        optimizer, found = torch.optim.AdamW(masters, **self.settings(0) | other), []
        for p in masters:
            optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(p.shape)}
            optimizer.state[p]["exp_avg_sq"] = torch.zeros(p.shape)
        for step in range(1, self.steps + 1):
            optimizer.param_groups[0]["lr"] = quicker * self.settings(step)["lr"]
            for p, gradient in zip(masters, self.gradients(step), strict=True):
                p.grad = None if gradient is None else sign * gradient.float()
                optimizer.state[p]["step"].fill_(t(step) - 1)
            optimizer.step()
            found.append([p.detach().clone() for p in masters])
        return found

    def __str__(self) -> str:
        what = f"{len(self.shapes)} parameters" if len(self.shapes) > 1 else f"a parameter of shape {self.shapes[0]}"
        small = f", numbers of {self.scale:.0e} and gradients of {self.slope:.0e}" if self.slope < 1 else ""
        return f"{what} in {self.dtype_name}{small}{', not contiguous' * self.turned}"


@dataclass
class Step(Outcome):
    """After a step, by parameter: `after` are the parameters; the masters, and what is wrong besides."""

    masters: list[Tensor] = field(default_factory=list)
    complaint: tuple[int, str, str] | None = None  # parameter, mistake, sentence


@answered
def mixed_precision(remember: Callable[..., Any], step: Callable[..., Any], seed: int) -> str:
    """`remember(p)`: {"master", "mean", "square"} in float32; `step(p, kept, t, **settings)`: p follows its master."""
    cases = drawn(seed)
    for case, steps in zip(cases, play_all(remember, step, cases), strict=True):
        try:
            judge(case, steps)
        except Wrong as wrong:
            raise wrong.also(case.only) from None
        refuse(AFTERMATH, steps[-1], f"{case}: ")
    large = Case(seed, 1, dtype=torch.bfloat16, shapes=((LARGE,),))
    bytes_held = job(hold, remember, step, large, ranks=1, record="memory").recording
    return f"{at_rest(bytes_held):.2f} bytes per parameter at rest; the least possible is 16"


def play_all(remember: Callable[..., Any], step: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    """All cases in one job.  Where that fails as a whole, each in one of its own, to see which it was."""
    try:
        return job(all_cases, remember, step, cases, ranks=1)[0]
    except Wrong as wrong:
        for case in cases if wrong.raised else ():
            try:
                job(all_cases, remember, step, [case], ranks=1)
            except Wrong as alone:
                raise alone.also(case.only) from None
        raise


def drawn(seed: int) -> list[Case]:
    draw = random.Random(seed)

    def case(*shapes: tuple[int, ...], only: str = "", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
        return Case(draw.randrange(2**40), 1, dtype=dtype, only=only, shapes=shapes, **options)

    odd, some = draw.randrange(3, 8), "right only for some shapes"
    small, fp16 = "right only for numbers near 1", "right only in bfloat16"
    return [
        case((odd, 3)),
        case((odd, 3), lr=1e-4, steps=20),
        case((odd, 3), only=small, scale=2**-20, slope=2**-20),
        *(case(shape, only=some) for shape in ((), (1,), (0,), (2, 3, 2))),
        case((odd,), (3, odd), (odd,), only="right only for one parameter"),
        case((odd, 4), only="right only for contiguous parameters", turned=True),
        case((odd,), (odd,), only="right only where every parameter has a gradient", second=None),
        case((odd, 3), only="right only where no gradient is zero", second=0.0),
        *(case((odd, 3), only=fp16, dtype=torch.float16, scale=x, slope=x) for x in (1.0, 2**-10)),
    ]


# ---- on the rank -----------------------------------------------------------------------------------------


def all_cases(remember: Callable[..., Any], step: Callable[..., Any], cases: list[Case]) -> list[list[Step]]:
    return [one_case(remember, step, case) for case in cases]


def one_case(remember: Callable[..., Any], step: Callable[..., Any], case: Case) -> list[Step]:
    params, steps = case.parameters(), []
    with Late(0, case.seed), Aftermath() as aftermath:
        mark("step")
        kept = [noted(case, remember, p) for p in params]
        found = Step(complaint=first_of(unfit(p, each) for p, each in zip(params, kept, strict=True)))
        for t in range(1, case.steps + 1) if not found.complaint else ():
            found = one_step(step, case, params, kept, t)
            steps.append(found)
            if found.complaint:
                break
        mark("end")
    aftermath.tell(found)
    return steps or [found]


def one_step(step: Callable[..., Any], case: Case, params: list, kept: list, t: int) -> Step:
    places, before = [p.data_ptr() for p in params], [p.detach().clone() for p in params]
    gradients = case.gradients(t)
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = None if gradient is None else gradient.clone()
    for p, each in zip(params, kept, strict=True):
        noted(case, step, p, each, t, **case.settings(t))
    wrong = (
        displaced(p, case, place) or regraded(p, gradient) or unfit(p, each, begun=True)
        for p, place, gradient, each in zip(params, places, gradients, kept, strict=True)
    )
    found = Step([p.detach().clone() for p in params], complaint=first_of(wrong))
    if not found.complaint:
        found.masters = [each["master"].detach().clone() for each in kept]
    found.returned = before
    return found


def first_of(complaints: Any) -> tuple[int, str, str] | None:
    return next(((number, *told) for number, told in enumerate(complaints) if told), None)


def unfit(p: Tensor, kept: Any, begun: bool = False) -> tuple[str, str] | None:
    """What is kept for p: (mistake, sentence)."""
    if not (isinstance(kept, dict) and all(isinstance(kept.get(name), Tensor) for name in NAMES)):
        names = f"a dict of {', '.join(map(repr, kept))}" if isinstance(kept, dict) else show(kept)
        return "not these three tensors", f"what is kept for it is {names}"
    for name in NAMES:
        x = kept[name]
        if x.dtype is not torch.float32:
            return f"the {name} is not float32", f"kept[{name!r}] is {show(x)}"
        if x.requires_grad:
            return "part of a graph", f"kept[{name!r}] requires a gradient"
        if x.shape != p.shape:
            return "a different shape", f"kept[{name!r}] is {show(x)}, the parameter {show(p)}"
        due = p.detach().float() if name == "master" else torch.zeros(p.shape)
        if not begun and not torch.equal(x, due):
            return f"the {name} begins with other numbers", f"at the start, kept[{name!r}] has {some(x)}"
    if len({kept[name].data_ptr() for name in NAMES}) < len(NAMES) and p.numel():
        return "two of them share their memory", "two of the three tensors have the same memory"
    return None


def some(x: Tensor) -> str:
    return f"{x.flatten()[0].item():.4g} in its first place" if x.numel() else "nothing"


def displaced(p: Tensor, case: Case, place: int) -> tuple[str, str] | None:
    if p.dtype is not case.dtype:
        return "the parameter's dtype has changed", f"it is {show(p)}"
    if p.data_ptr() != place:
        return "the parameter has other memory", "its numbers are in a different place than before the step"
    if not p.requires_grad:
        return "the parameter needs no gradient any more", "its requires_grad is False"
    return None


def regraded(p: Tensor, gradient: Tensor | None) -> tuple[str, str] | None:
    if gradient is None:
        return (
            ("None is not None any more", f"it had no gradient, and has {show(p.grad)}") if p.grad is not None else None
        )
    if p.grad is None or p.grad.dtype is not gradient.dtype or not torch.equal(p.grad, gradient):
        return "the gradient has changed", f"its gradient is {show(p.grad)}, and not what backward left"
    return None


def hold(remember: Callable[..., Any], step: Callable[..., Any], case: Case) -> None:
    """Two steps, and after each of them a step in which nothing happens."""
    (p,) = case.parameters()
    kept = remember(p)
    for t in (1, 2):
        p.grad = case.gradients(t)[0]
        mark("step")
        step(p, kept, t, **case.settings(t))
        mark("end")
        mark("step")
        mark("end")


# ---- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """One parameter in one step."""

    case: Case
    step: int  # from 1
    number: int
    found: Tensor
    before: Tensor
    master: Tensor
    start: Tensor  # the parameter, before the first step
    due: Tensor  # its master

    def follows(self, master: Tensor) -> bool:
        """Whether the master has gone this way, except for float32's rounding, of the way itself and at each step."""
        if not master.numel():
            return True
        farthest = (master - self.start).abs().max()
        rounding = 4 * self.step * torch.finfo(torch.float32).eps * torch.maximum(self.start.abs(), master.abs())
        return bool(((self.master - master).abs() <= 1e-4 * farthest + rounding).all())

    def instead_of(self, **other: Any) -> bool:
        return self.follows(self.case.masters(**other)[self.step - 1][self.number])


def judge(case: Case, steps: list[Step]) -> None:
    starts = [p.detach().float() for p in case.parameters()]
    masters = case.masters()
    for t, step in enumerate(steps, 1):
        where = f"{case}, step {t}: " if step.after else f"{case}: "
        if step.complaint:
            number, mistake, sentence = step.complaint
            raise Wrong(f"{where}parameter {number}: {sentence}", QUESTIONS.get(mistake, WHO), mistake)
        for number, start in enumerate(starts):
            seen = Seen(
                case, t, number, step.after[number], step.returned[number], step.masters[number], start,
                masters[t - 1][number],
            )  # fmt: skip
            refuse(VALUES, seen, f"{where}parameter {number}: ")


def at_rest(recording: Recording) -> float:
    """Bytes per element."""
    peak, first, _, second = (recording.held(0, step)["peak"] / LARGE for step in range(4))
    refuse(HELD, (peak, first, second), "")
    return second


# ---- the mistakes ----------------------------------------------------------------------------------------

WHO = "Who else refers to this tensor, and what do they expect of it?"
TYPES = "Between 1 and the next number of bfloat16 there is a gap. What is added up here, and how small is it?"
QUESTIONS = {
    "not these three tensors": "What does AdamW have to remember, besides the parameter itself in float32?",
    "the master is not float32": TYPES,
    "the mean is not float32": TYPES,
    "the square is not float32": TYPES,
    "part of a graph": "Does the optimizer's copy take part in the forward?",
    "the master begins with other numbers": "What numbers does the parameter have, before the first step?",
    "the mean begins with other numbers": "What is the mean of no gradients?",
    "the square begins with other numbers": "What is the mean of no squares?",
    "the parameter's dtype has changed": "In which dtype does the model compute in the next forward?",
    "the parameter has other memory": "A tied weight is in two modules: which of them sees the new numbers?",
    "the gradient has changed": "Who clears the gradient, and who else may look at it?",
    "None is not None any more": "What does AdamW do with a gradient of zeros, and what with none?",
    "two of them share their memory": "What happens to the mean when the square is written?",
}


def other_way(seen: Seen) -> str:
    if not seen.master.numel():
        return ""
    at = int((seen.master - seen.due).abs().flatten().argmax())
    return f"element {at} of the master is {instead(seen.master.flatten()[at], seen.due.flatten()[at])}"


def goes(fits: Callable[[Seen], bool]) -> Callable[[Seen], str | None]:
    """Of a master that has not gone the way that it should."""
    return lambda seen: other_way(seen) if not seen.follows(seen.due) and fits(seen) else None


def rounded(seen: Seen) -> bool:
    return torch.equal(seen.master.to(seen.case.dtype).float(), seen.master)


def apart(seen: Seen) -> str | None:
    due = seen.master.to(seen.case.dtype)
    if torch.equal(seen.found, due):
        return None
    at = int((seen.found != due).flatten().nonzero()[0])
    return f"its element {at} is {instead(seen.found.flatten()[at], due.flatten()[at])}, its master, rounded"


# fmt: off
VALUES = (
    Mistake("not a number", "What do you divide by, and can that be 0?",
            lambda seen: not seen.master.isfinite().all() and "its master is not finite"),
    Mistake("the master stands still", "Which line changes the master?",
            goes(lambda seen: torch.equal(seen.master, seen.start))),
    Mistake("small steps are lost", TYPES,
            goes(lambda seen: rounded(seen)),
            shows="in bfloat16 the loss goes down more slowly, or stands still, without an error"),
    Mistake("the gradient is followed uphill", "In which direction does the loss grow?",
            goes(lambda seen: seen.instead_of(sign=-1))),
    Mistake("every step counts as the first", "What is the number of this step?",
            goes(lambda seen: seen.instead_of(t=lambda t: 1)),
            shows="too quick at first: the correction of the means never ends"),
    Mistake("the steps are counted from a different number", "What is the number of the first step?",
            goes(lambda seen: seen.instead_of(t=lambda t: t + 1))),
    Mistake("no weight decay", "Which of the settings reach adamw?",
            goes(lambda seen: seen.instead_of(weight_decay=0.0))),
    Mistake("a different learning rate", "How often is a step taken, and with which settings?",
            goes(lambda seen: any(seen.instead_of(quicker=factor) for factor in (0.5, 2.0)))),
    Mistake("the master goes another way", "Which gradient, and which settings, does adamw see?",
            goes(lambda seen: True)),
    Mistake("the parameter does not follow", "With which numbers does the next forward compute?",
            lambda seen: torch.equal(seen.found, seen.before) and apart(seen),
            shows="the loss stands still, though the optimizer is at work"),
    Mistake("the parameter is not its master, rounded", "What is the parameter made from?", apart),
)
# (peak, at rest after one step, after two), bytes per element
HELD = (
    Mistake("something is kept from every step", "Which name still refers to it when you have returned?",
            lambda seen: seen[2] > seen[1] + 0.1
            and f"{seen[1]:.2f} bytes per parameter after one step, {seen[2]:.2f} after two"),
    Mistake("more than 16 bytes per parameter", "2 + 2 + 12: what else is there when the step is over?",
            lambda seen: seen[2] > 16.1 and f"{seen[2]:.2f} bytes per parameter are held when the step is over",
            shows="18 or 20 bytes per parameter, where 16 were expected"),
    Mistake("too much during a step", "Which of these copies is needed at the same time as the others?",
            lambda seen: seen[0] > 16 + WORK and f"{seen[0]:.2f} bytes per parameter are held during a step"),
)
# fmt: on
