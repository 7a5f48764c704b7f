"""The mistakes in gradients, in the order in which they are tried.

WRAPPED     all ranks before the first step: is it the model that was handed over?
STEP        a rank in a step: what has changed that must not?
KIND        a parameter on a rank: is its gradient there, and of its shape and dtype?
VALUES      a parameter whose gradient is not the mean: what is it made of (mixture.py)?
BITS        a parameter on all ranks
TRAFFIC     a step: more sent than needed, or less than possible?
LEFT        a rank after a step: what is different from before?
HELD        a rank's steps with their bytes held
GRAPHS      activations held with 1 micro-batch, and with 4
REPLICAS    what became of replicas that started unequal
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, first_fit, show
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.mixture import COEFFICIENTS, NOTHING, ONE_RANK, TIED

if TYPE_CHECKING:
    from labs.kit.checks.gradients.body import Seen
    from labs.kit.checks.gradients.judge import OfParameter, Traffic

BUFFERS = 2.5  # × the gradients: two copies of them at the same time are plenty

# ---- what has changed ------------------------------------------------------------------------------------


def moved(seen: Seen) -> str | None:
    names = [name for name, before in seen.before.items() if not torch.equal(before, seen.after[name])]
    return f"the parameter {names[0]!r} itself has changed, before optimizer.step()" if names else None


def another_loss(seen: Seen) -> str | None:
    for found, expected in seen.losses:
        if abs(found - expected) > 1e-4 * abs(expected):
            return f"the loss is {found:.6g}; the model itself gives {expected:.6g}"
    return None


def given(ranks: list[Seen], name: str) -> Tensor:
    return torch.stack([step.given[name].double() for step in ranks])


def from_elsewhere(ranks: list[Seen]) -> str | None:
    """Replicas may be made equal in any way, from one of them or by their mean: no element leaves what they span."""
    for name, (rank, step) in product(ranks[0].given, enumerate(ranks)):
        replicas, value = given(ranks, name), step.before[name]
        slack = 4 * torch.finfo(value.dtype).eps * replicas.abs()
        low, high = (replicas - slack).amin(0), (replicas + slack).amax(0)
        if not ((low <= value) & (value <= high)).all():
            return f"on rank {rank} {name!r} has other numbers after wrap(model) than before it on any rank"
    return None


WRAPPED = (
    Mistake(
        "other parameters than the model had",
        "From which numbers would one process train this model?",
        from_elsewhere,
        shows="replicas agree, but the loss is different from the first step on",
    ),
)

WHOSE = "What must be equal on all ranks before optimizer.step(): the parameters, or their gradients?"
STEP = (
    Mistake(
        "not a wrapper", "What does a training loop call on the wrapper, besides forward?", lambda seen: seen.lacks
    ),
    AVERAGED := Mistake(
        "parameters averaged instead of gradients",
        WHOSE,
        lambda seen: seen.parameters_sent and moved(seen),
        shows="replicas differ after the first step",
    ),
    Mistake("the parameters have changed", WHOSE, moved),
    Mistake(
        "requires_grad has changed",
        "Who decides which parameters are trained?",
        lambda seen: seen.thawed and f"the requires_grad of {seen.thawed!r} has changed",
    ),
    Mistake(
        "no longer in training mode",
        "What does dropout do there?",
        lambda seen: seen.idle and "the model is in evaluation mode",
    ),
    Mistake("a different loss", "What should forward do besides calling the model?", another_loss),
)

# ---- which gradients there are ---------------------------------------------------------------------------


def unlike(seen: OfParameter, what: str) -> str | bool:
    differs = seen.due and getattr(seen.found, what) != getattr(seen.value, what)
    return differs and f"the gradient of {seen.name!r} is {show(seen.found)}; the parameter is {show(seen.value)}"


def unasked(seen: OfParameter, why: str) -> str | bool:
    return not seen.due and seen.found is not None and f"{seen.name!r} {why}, but has a gradient"


ZEROS = "What would AdamW with momentum and weight decay do with a gradient of zeros, and what with None?"
KIND = (
    Mistake(
        "a gradient is gone",
        "Who took it away?",
        lambda seen: seen.due and seen.found is None and f"{seen.name!r} has no gradient any more",
    ),
    Mistake(
        "a frozen parameter has a gradient",
        ZEROS,
        lambda seen: seen.name.startswith("frozen") and unasked(seen, "is frozen (requires_grad is False)"),
    ),
    Mistake("zeros where nobody has a gradient", ZEROS, lambda seen: unasked(seen, "is used by nobody")),
    Mistake("the dtype changed", "What does the optimizer expect?", lambda seen: unlike(seen, "dtype")),
    Mistake("the shape changed", "What does the optimizer expect?", lambda seen: unlike(seen, "shape")),
)

# ---- wrong values ----------------------------------------------------------------------------------------


def right_elsewhere(seen: OfParameter) -> str | None:
    names = [name for part in seen.names for name in part]
    right = [r for r in range(len(seen.ranks)) if all(seen.right(name, r) for name in names)]
    return f"Right on rank{'s' * (len(right) > 1)} {', '.join(map(str, right))}." if right else None


def right_but_for_digits(seen: OfParameter) -> str | None:
    names = [name for part in seen.names for name in part]
    mean = seen.flat({name: seen.mean(name) for name in names}, names)
    near = torch.allclose(seen.flat(seen.outcome.found, names), mean, rtol=1e-2, atol=1e-2 * float(mean.abs().max()))
    return "It is right but for its last digits." if near else None


def called(seen: OfParameter) -> str | None:
    """What its coefficients are called; None where there are none."""
    return first_fit(COEFFICIENTS, seen.made)[0].name if seen.made else None


def nothing_of_others(seen: OfParameter) -> str | bool:
    return called(seen) == NOTHING.name and seen.made.told


def left_out(seen: OfParameter) -> str | bool:
    """What is wrong is this rank's own, and that is too little to tell, or others are right."""
    right, wrong = seen.names
    if seen.made is None:
        return all(seen.right(name, ranks=[seen.outcome]) for name in wrong)
    return right and nothing_of_others(seen)


def equal_everywhere(seen: OfParameter) -> str | bool:
    name = seen.names[1][0]
    return all(torch.equal(seen.ranks[0].found[name], step.found[name]) for step in seen.ranks)


def on_made(row: Mistake) -> Mistake:
    return replace(row, fits=lambda seen: seen.made and row.fits(seen.made))


PARTLY = "right on some ranks only"
VALUES = (
    Mistake(PARTLY, "How do the other ranks learn the mean?", right_elsewhere),
    Mistake("rounded on the way", "In which dtype do the gradients travel?", right_but_for_digits),
    replace(TIED, fits=lambda seen: seen.made and seen.names[0] and seen.names[1] == ["embed.weight"]),
    replace(ONE_RANK, fits=lambda seen: equal_everywhere(seen) and nothing_of_others(seen)),
    Mistake("some parameters are left out", "What is special about those that are wrong?", left_out),
    replace(
        AVERAGED,
        question="A post-accumulate hook is given p. What is p.grad?",
        fits=lambda seen: seen.outcome.parameters_sent and called(seen) in (None, "", NOTHING.name),
        shows="",
    ),
    Mistake(
        "the mean does not reach .grad",
        "Into which tensor does the result go?",
        lambda seen: seen.sent and nothing_of_others(seen),
    ),
    *map(on_made, COEFFICIENTS),
    Mistake("", "Which gradients went into this one, and how often?", lambda seen: True),
)
BITS = (
    Mistake(
        "not the same bits on every rank",
        "Does every rank add up in the same order? Replicas that differ by a bit drift apart.",
        lambda seen: (
            any(not torch.equal(seen.found, step.found[seen.name]) for step in seen.ranks)
            and f"the gradient of {seen.name!r} differs between ranks in its last bits"
        ),
    ),
)

# ---- what travelled --------------------------------------------------------------------------------------


def too_much(traffic: Traffic) -> str | bool:
    text = f"the ranks sent {traffic.sent:,} bytes in one step; a ring sends {traffic.least:,}"
    return traffic.sent > traffic.enough and text


def one_for_all(traffic: Traffic) -> str | bool:
    """But for buffers, which rank 0 tells the others."""
    most, ranks = max(traffic.by_rank), len(traffic.by_rank)
    text = f"rank {traffic.by_rank.index(most)} sent {most:,} bytes in one step, of {traffic.sent:,} by all together"
    return not too_much(traffic) and most > traffic.enough / ranks + traffic.buffers + 16 * len(traffic.sizes) and text


def more_by(traffic: Traffic, size: int) -> str | bool:
    """By an all-reduce of `size` bytes; of mixed dtypes, some of which may travel as the largest, it tells nothing."""
    extra = (traffic.sent - traffic.least) / max(2 * (traffic.case.ranks - 1), 1)
    return extra == size and not traffic.case.mixed and too_much(traffic)


TRAFFIC = (
    Mistake("one rank does the work for all", "How long do the others wait for this rank?", one_for_all),
    Mistake(
        "synchronised at every micro-batch",
        "When do the other ranks need your gradients, if the optimizer steps once?",
        lambda t: t.case.micro_batches > 1 and t.times > t.case.micro_batches - 0.1 and too_much(t),
        shows="the right gradients, but the bytes grow with the number of micro-batches",
    ),
    Mistake(
        "forward outside of no_sync()",
        "What does the wrapper's forward send, if the model has buffers?",
        lambda t: t.case.micro_batches > 1 and t.case.buffers and too_much(t),
    ),
    replace(TIED, fits=lambda t: more_by(t, t.sizes["embed.weight"]), shows=""),
    Mistake("frozen parameters are sent", "Which parameters never have a gradient?", lambda t: more_by(t, t.frozen)),
    Mistake("buffers are sent", "Which of a model's tensors have a gradient?", lambda t: more_by(t, t.buffers)),
    Mistake("too many bytes", "What does each rank send to whom, and how often does the same number travel?", too_much),
    Mistake(
        "less than the least possible",
        "How else did the gradients get there?",
        lambda t: t.sent < t.least and f"the ranks sent {t.sent:,} bytes; {t.least:,} is the least possible",
    ),
)

# ---- what is left, and held ------------------------------------------------------------------------------

KEPT = Mistake(
    "something is kept from every step",
    "Which of your variables still refers to what was there a step ago?",
    lambda seen: (
        seen.kept > 0 and f"the wrapper's lists have {seen.kept} element{'s' * (seen.kept > 1)} more than a step before"
    ),
    shows="memory that grows from step to step",
)
LEFT = (
    *AFTERMATH,
    KEPT,
    Mistake(
        "hooks are left behind",
        "How many hooks are there after a thousand steps?",
        lambda seen: seen.hooks and f"there are {seen.hooks} more hooks than before the step",
        shows="right, but every step takes longer than the one before",
    ),
    Mistake(
        "not in place",
        "Who else may hold the tensor that was .grad, and what stands there now?",
        lambda seen: seen.replaced and f"the gradient of {seen.replaced!r} is right, but in another tensor than before",
    ),
    Mistake(
        "the caller's list has changed",
        "What does the caller's next step find in it?",
        lambda seen: seen.taken and "the list of micro-batches is not what it was before the call",
    ),
    Mistake(
        "the last backward is within no_sync()",
        "How does a wrapper that sends during backward know which one is the last?",
        lambda seen: seen.asleep and "no all-reduce had begun when sync() was called",
        shows="right, but as slow as without overlap",
    ),
)
HELD = (
    replace(
        KEPT,
        fits=lambda held: held.left > 0.3 and f"holds {held.left:.2f} × the gradients more after a step than before",
        shows="",
    ),
    replace(
        KEPT,
        fits=lambda held: held.grown > 0.3 and f"holds {held.grown:.2f} × the gradients more than a step ago",
        shows="",
    ),
    Mistake(
        "full copies are kept",
        "Whose gradients do you keep after you have added them up?",
        lambda held: held.peak > BUFFERS and f"held {held.peak:.2f} × the gradients in buffers",
    ),
)
GRAPHS = (
    Mistake(
        "the graphs of all micro-batches are kept",
        "What is freed by backward, and when do you call it?",
        lambda held: held[1] > 1.5 * held[0] and f"{held[0]:,} bytes with 1 micro-batch, {held[1]:,} with 4",
        shows="many micro-batches take as much memory as one large batch",
    ),
)


def still_unequal(ranks: list[Seen]) -> str | None:
    for name, (rank, step) in product(ranks[0].after, enumerate(ranks)):
        if not torch.equal(ranks[0].after[name], step.after[name]):
            return f"{name!r} still differs between rank 0 and rank {rank}, and nobody was told"
    return None


REPLICAS = (
    Mistake(
        "a replica that started from another seed",
        "Equal gradients keep equal replicas equal. Who makes sure that they start equal?",
        still_unequal,
        shows="wrong from step 0, though each rank by itself looks fine",
    ),
)
