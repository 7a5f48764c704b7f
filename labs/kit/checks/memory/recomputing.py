"""Do activations take less memory, and is it still the same training?  What recomputation must get right.

    checkpoint           fn(layer, x) in the place of every layer: each is computed once more, and keeps its input
    place_checkpoints    fn(model) changes a GPT: at most so much memory, and at most so much computed again

Numbers are compared with those of the same model untouched, in float64, with the same random numbers: where the
input of the first layer needs no gradient, with several forwards before the first backward, with dropout.  Bytes are
all but parameters and gradients, at every moment of the step; what Python and numpy hold besides is counted, too.
What is computed again is counted in multiplications (of matrices, and in attention), as a share of the layers' forward;
at other depths, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from labs.kit.checks.answer import Wrong, answered, instead
from labs.kit.checks.case import close
from labs.kit.checks.launching import job
from labs.kit.checks.twice import WITHOUT_GRAPH, Case, Function, Outcome, Step, bytes_held, numbers
from labs.kit.record import KINDS, Recording

TOLERANCE = 5e-10  # of the element and of the largest one


@dataclass(frozen=True)
class Budget:
    """The most that may be held, × what was held before; the most that may be computed again, × the layers' forward."""

    held: float
    again: float
    runs: int | None = None  # of each layer's forward, exactly


ONE_LAYER = Budget(held=0.30, again=1.0, runs=2)
PLACED = Budget(held=0.40, again=0.5)  # the other half of the layers would be 0.44


# ---- the checks ------------------------------------------------------------------------------------------


@answered
def checkpoint(fn: Function, seed: int) -> str:
    """`fn(layer, x)`: what `layer(x)` is, and its gradients, with nothing kept but x until backward."""
    return judge(partial(around_each_layer, fn), seed, ONE_LAYER)


@answered
def place_checkpoints(fn: Function, seed: int) -> str:
    """`fn(model)` changes a GPT (`model.layers`: a ModuleDict), in place, so that it keeps to the budget."""
    return judge(fn, seed, PLACED)


def around_each_layer(fn: Function, model: nn.Module) -> None:
    for layer in model.layers.values():
        layer.forward = partial(fn, layer.forward)


def judge(fn: Function, seed: int, budget: Budget) -> str:
    draw = random.Random(seed)
    small = [
        Case(draw.randrange(2**40), 1, draw.choice((3, 5)), again=True),  # of which nobody has half
        Case(draw.randrange(2**40), 1, draw.randint(2, 3), tied=True, waiting=2),
        Case(draw.randrange(2**40), 1, draw.randint(2, 4), frozen=True, dropout=0.3),
    ]
    measured = Case(draw.randrange(2**40), 1, depth=8, sequences=8, tokens=64, measured=True)
    single = Case(draw.randrange(2**40), 1, depth=1, only="right only with more than one layer")
    found = numbers_of_all(fn, small)
    [large] = numbers_of_all(fn, [measured])  # which takes as long as the others together
    recording = job(bytes_held, fn, measured, ranks=1, record="memory", when="on one rank").recording
    line = within(budget, measured.parameter_bytes(), recording, large)
    for case, outcome in zip(small, found, strict=True):
        again_at_any_depth(budget, case, outcome)
    again_at_any_depth(budget, single, *numbers_of_all(fn, [single]))
    return line


def numbers_of_all(fn: Function, cases: list[Case]) -> list[Outcome]:
    try:
        [outcomes] = job(numbers, fn, cases, ranks=1, record=None, when="on one rank")
        for case, outcome in zip(cases, outcomes, strict=True):
            right_numbers(case, outcome)
    except Wrong as wrong:
        if WITHOUT_GRAPH in wrong.answer.text:
            question = "In which grad mode does autograd call what unpacks a tensor?"
            raise Wrong(wrong.answer.text, question, "the second run builds no graph") from None
        raise wrong.also(cases[0].only) from None
    return outcomes


# ---- numbers ---------------------------------------------------------------------------------------------


def right_numbers(case: Case, outcome: Outcome) -> None:
    """Raise Wrong for the first thing that differs from the model as it was."""
    if outcome.names[0] != outcome.names[1]:
        gone = [name for name in outcome.names[0] if name not in outcome.names[1]]
        new = [name for name in outcome.names[1] if name not in outcome.names[0]]
        text = f"{gone[0]!r} is gone" if gone else "all are there"
        raise Wrong(
            f"{case}: {text}{f', {new[0]!r} is new' if new else ''}",
            "Who finds parameters by their names, after a checkpoint has been saved?",
            "parameters are renamed" if gone and new else "other parameters",
        )
    if outcome.complaint:
        text, question, mistake = outcome.complaint
        raise Wrong(f"{case}: {text}", question, mistake)
    for number, (plain, found) in enumerate(zip(outcome.plain, outcome.found, strict=True)):
        right_outputs(case, number, plain, found)
        right_gradients(case, plain, found)
        if not torch.equal(plain.random, found.random):
            raise Wrong(
                f"{case}: after a step, torch's random numbers go on from a different place than without recomputation",
                "Which numbers would the rest of the program have drawn, had nothing been computed twice?",
                "the second run disturbs the random numbers",
            )
    if case.again:
        right_output(f"{case}: under no_grad", *outcome.without_grad, "different outputs under no_grad")


def right_outputs(case: Case, number: int, plain: Step, found: Step) -> None:
    late = "" if number == 0 else ", in the second step"
    for one, other in zip(found.losses, plain.losses, strict=True):
        right_output(f"{case}{late}", one, other, "different outputs")


def right_output(when: str, found: Tensor, plain: Tensor, mistake: str) -> None:
    if not same(found, plain):
        raise Wrong(
            f"{when}: the loss is {instead(found, plain)}",
            "What should a forward with checkpoints compute, if not the same as without?",
            mistake,
        )


def right_gradients(case: Case, plain: Step, found: Step) -> None:
    due = [name for name, gradient in plain.gradients.items() if gradient is not None]
    if missing := [name for name in due if found.gradients[name] is None]:
        text = f"{case}: {len(missing)} of {len(due)} gradients are missing, first that of {missing[0]!r}"
        if case.frozen:
            raise Wrong(
                text,
                "The input of the first layer needs no gradient. Do its parameters?",
                "no gradient where the input needs none",
            )
        raise Wrong(text, "Which graph does backward follow from the layer's output?", "gradients are missing")
    wrong = [name for name in due if not same(found.gradients[name], plain.gradients[name])]
    if not wrong:
        return
    one, other = found.gradients[wrong[0]], plain.gradients[wrong[0]]
    at = tuple(int(i) for i in torch.unravel_index((one - other).abs().argmax(), other.shape))
    text = (
        f"{case}: {len(wrong)} of {len(due)} gradients differ, first that of {wrong[0]!r} at "
        f"[{', '.join(map(str, at))}]: it is {instead(one[at], other[at])}"
    )
    mistake, question = "different gradients", "What does the second run see that the first one did not?"
    if case.dropout:
        mistake, question = "the random numbers are not kept", "Which units has the second run dropped?"
    elif case.waiting > 1:
        mistake, question = (
            "one forward overwrites another's state",
            "Between the two runs of one call, where does what belongs to it live?",
        )
    raise Wrong(text, question, mistake)


def same(found: Tensor, plain: Tensor) -> bool:
    return close(found, plain, tolerance(plain))


def tolerance(x: Tensor) -> float:
    return TOLERANCE if x.dtype is torch.float64 else 5e-5


# ---- budgets ---------------------------------------------------------------------------------------------


def within(budget: Budget, parameters: int, recording: Recording, outcome: Outcome) -> str:
    """The line of success; raises Wrong where either budget is exceeded."""
    plain, found = (Held.of(recording, step, parameters) for step in (0, 1))
    held, left, again = found.most / plain.most, found.left / plain.most, outcome.again
    text = (
        f"the step holds {held:.2f} × as much as before ({left:.2f} × when backward begins); the budget is "
        f"{budget.held:.2f} ×\n{again:.2f} × the layers' forward is computed again; the budget is {budget.again:.2f} ×"
    )
    if again < 0.01 and held > 0.95:
        if outcome.returned:
            text += f"\nThe function returned {outcome.returned}; what counts is the model that it was given."
        raise Wrong(text, "What has changed in the model itself? Print it before and after.", "nothing is recomputed")
    if again > 1.05:
        raise Wrong(text, "How often does each layer run its forward in a step?", "computed more than twice")
    if outcome.elsewhere > 0.1 * plain.most:
        raise Wrong(
            f"Python and numpy hold {outcome.elsewhere:,} bytes more than before",
            "Whose memory is that, if not yours?",
            "kept out of torch's sight",
        )
    if held > budget.held:
        raise Wrong(text, *too_much(left, found, budget))
    if again > budget.again + 0.005:
        raise Wrong(text, DEAR, "too much is computed again")
    return (
        f"{held:.2f} × the memory (budget {budget.held:.2f}); "
        f"{again:.2f} × the layers' forward is computed again (budget {budget.again:.2f})"
    )


DEAR = "Which operations are expensive to compute, and which only expensive to keep?"


def again_at_any_depth(budget: Budget, case: Case, outcome: Outcome) -> None:
    if outcome.again > budget.again + 0.005:
        text = (
            f"{case}: {outcome.again:.2f} × the layers' forward is computed again; the budget is {budget.again:.2f} ×"
        )
        question = "With 8 layers it keeps to the budget. Which of this model's layers does it choose?"
        raise Wrong(text, question, case.only or "too much is computed again at another depth")
    for name, runs in outcome.runs.items() if budget.runs else ():
        if runs < budget.runs:
            text = f"{case}: layer {name!r} runs {runs:.3g} × for each forward of the model; {budget.runs} × is due"
            question = "If the input needs no gradient, which parameters' gradients need the kept tensors?"
            if case.frozen:
                raise Wrong(text, question, "nothing is recomputed where the input needs no gradient")
            raise Wrong(text, "Where does backward find what the first run has made?", "nothing is recomputed")


def too_much(left: float, found: Held, budget: Budget) -> tuple[str, str]:
    """(question, mistake) where the step holds too much."""
    if left > budget.held:
        return "What is kept from forward to backward, and what of it could be computed again?", "too much is kept"
    if found.forward:
        return "The highest moment of all is what counts. When is a layer's memory given back?", "freed too late"
    if found.come > 0.6:
        return "Who still holds a layer's activations when its backward is over?", "not freed after use"
    return "At what moment of backward is everything there again?", "too much at once in backward"


@dataclass(frozen=True)
class Held:
    """Bytes besides parameters and gradients."""

    most: int  # in a step
    left: int  # as backward begins
    forward: bool  # whether the most is before that
    come: float  # the share of the gradients that are there when it is

    @staticmethod
    def of(recording: Recording, step: int, parameters: int) -> Held:
        backward = [span.start for span in recording.spans if span.name == "backward"][step]
        moments = recording.during(0, step, [kind for kind in KINDS if kind != "G"])
        besides = [size - parameters for _, size in moments]
        before = sum(moment < backward for moment, _ in moments)
        most = besides.index(max(besides))
        gradients = [size for _, size in recording.during(0, step, ("G",))]
        return Held(besides[most], besides[before - 1], most < before, gradients[most] / max(gradients))
