"""checkpoint and place_checkpoints: activations take less memory, and the training is still the same.

    checkpoint           fn(layer, x) replaces every layer: each is computed once more, and holds its input until then
    place_checkpoints    fn(model) changes a GPT: its memory and its recomputation both have a limit

Losses and gradients are compared with the untouched model's, with a first layer whose input needs no gradient, with
several forwards before the first backward, and with dropout.  Both budgets hold for the large model.  The budget of
recomputation holds for the other models, too, and is compared there when all else is right.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, first, instead, refuse, show
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_one_rank
from labs.exercises.engine.on_ranks import F32, F64, Draw
from labs.exercises.engine.scripts import Look
from labs.exercises.engine.value import close
from labs.exercises.memory._trained_twice import WITHOUT_GRAPH, Model, Twice, parameters

TOLERANCE = {F64: 5e-10, F32: 5e-5}  # relative to the element, and to the largest element


def many_layers(draw: Draw, **budget: Any) -> dict[int, list[Model]]:
    """Return the worlds whose model has several layers."""
    model, pick = partial(draw.world, Model, 1, **budget), draw.random.randint
    return {
        1: [
            model(depth=draw.random.choice((3, 5)), again=True),  # an odd number of layers, which cannot be halved
            model(depth=pick(2, 3), tied=True, waiting=2),
            model(depth=pick(2, 4), frozen=True, dropout=True),
            model(depth=8, sequences=8, tokens=64, measured=True, dtype=F32),
        ]
    }


def one_layer(draw: Draw, **budget: Any) -> dict[int, list[Model]]:
    """Return the world whose model has a single layer."""
    return {1: [draw.world(Model, 1, depth=1, only="right only with more than one layer", **budget)]}


def script(world: Model, fn: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    random, twice = torch.get_rng_state(), Twice(world, fn)
    facts = first_wrong(CHANGED, [("", twice)]) or first_wrong(NUMBERS, twice.steps()) or twice.costs
    torch.set_rng_state(random)
    yield Look(facts=facts)


def same(found: Tensor, expected: Tensor) -> bool:
    return close(found, expected, TOLERANCE[expected.dtype])


def other_parameters(one: Twice, renamed: bool = False) -> str | None:
    """Return a sentence if the parameters' names differ; with `renamed`, only if some are lost and some are added."""
    before, after = list(parameters(one.plain)), list(parameters(one.received))
    gone, new = [name for name in before if name not in after], [name for name in after if name not in before]
    if before == after or (renamed and not (gone and new)):
        return None
    return f"{f'{gone[0]!r} is gone' if gone else 'all are there'}{f', {new[0]!r} is new' if new else ''}"


def changed(matches: Callable[[Tensor, Tensor], bool], template: str) -> Callable[[Twice], str | None]:
    """Return a row's test, which fills the template for the first parameter with `matches(before, after)`."""

    def row(one: Twice) -> str | None:
        pairs = zip(parameters(one.plain).items(), parameters(one.received).values(), strict=True)
        return first(template.format(name, show(x), show(y)) for (name, x), y in pairs if matches(x, y))

    return row


def other_loss(one: Twice) -> str | None:
    pairs = zip(one.now.losses, one.expected.losses, strict=True)
    return first(f"the loss is {instead(*pair)}" for pair in pairs if not same(*pair))


def missing(one: Twice) -> str | None:
    expected = [name for name, gradient in one.expected.gradients.items() if gradient is not None]
    gone = [name for name in expected if one.now.gradients[name] is None]
    return f"{len(gone)} of {len(expected)} gradients are missing, first that of {gone[0]!r}" if gone else None


def other_gradients(one: Twice) -> str | None:
    expected = {name: gradient for name, gradient in one.expected.gradients.items() if gradient is not None}
    wrong = [name for name in expected if not same(one.now.gradients[name], expected[name])]
    if not wrong:
        return None
    found, right = one.now.gradients[wrong[0]], expected[wrong[0]]
    at = tuple(int(i) for i in torch.unravel_index((found - right).abs().argmax(), right.shape))
    return (
        f"{len(wrong)} of {len(expected)} gradients differ, first that of {wrong[0]!r} at {list(at)}: "
        f"it is {instead(found[at], right[at])}"
    )


# fmt: off
BY_NAME = "Who finds parameters by their names, after a checkpoint has been saved?"
OUTPUT = "What should a forward with checkpoints compute, if not the same as without?"
CHANGED = (
    Mistake("parameters are renamed", BY_NAME, partial(other_parameters, renamed=True)),
    Mistake("other parameters", BY_NAME, other_parameters),
    Mistake("no longer in training mode", "What does dropout do there?",
            lambda one: first(f"{name or 'the model'} is in evaluation mode"
                              for name, module in one.received.named_modules() if not module.training)),
    Mistake("requires_grad has changed", "Who decides what is trained?",
            changed(lambda before, after: before.requires_grad != after.requires_grad,
                    "requires_grad of {!r} has changed")),
    Mistake("the parameters have changed", "What, besides activations, may the function change?",
            changed(lambda before, after: before.dtype != after.dtype or not torch.equal(before, after),
                    "the parameter {!r} was {}, and is {}, with different numbers")),
)
NUMBERS = (
    Mistake("different outputs under no_grad", OUTPUT, lambda one: one.under_no_grad and other_loss(one)),
    Mistake("different outputs", OUTPUT, other_loss),
    Mistake("no gradient where the input needs none",
            "The input of the first layer needs no gradient. Do its parameters?",
            lambda one: one.world.frozen and missing(one)),
    Mistake("gradients are missing", "Which graph does backward follow from the layer's output?", missing),
    Mistake("the random numbers are not kept", "Which units has the second run dropped?",
            lambda one: one.world.dropout and other_gradients(one)),
    Mistake("different gradients", "What does the second run see that the first one did not?", other_gradients),
    Mistake("the second run disturbs the random numbers",
            "Which numbers would the rest of the program have drawn, had nothing been computed twice?",
            lambda one: not torch.equal(one.now.random, one.expected.random)
            and "after a step, torch's random numbers go on from a different place than without recomputation"),
)
# These rows look at the text of what was raised.
RAISED = (
    Mistake("the second run builds no graph", "In which grad mode does autograd call what unpacks a tensor?",
            lambda text: WITHOUT_GRAPH in text),
)
# fmt: on


def dear(one: SimpleNamespace) -> str | None:
    return again(one) if one.again > one.world.dear + 0.005 else None


def again(one: SimpleNamespace) -> str:
    """Return a sentence about the recomputation and its budget."""
    return f"{one.again:.2f} × the layers' forward is computed again; the budget is {one.world.dear:.2f} ×"


def both(matches: Callable[[SimpleNamespace], Any]) -> Callable[[SimpleNamespace], str | None]:
    """Return a row's test, which states the budgets of memory and recomputation, and the measurements, if `matches`."""
    words = "the step holds {:.2f} × as much as before ({:.2f} × when backward begins); the budget is {:.2f} ×\n"
    return lambda one: words.format(one.held, one.left, one.world.most) + again(one) if matches(one) else None


def over(matches: Callable[[SimpleNamespace], Any]) -> Callable[[SimpleNamespace], str | None]:
    """Return a row's test, which states both budgets if too much is held and `matches`."""
    return both(lambda one: one.held > one.world.most and matches(one))


def in_vain(one: SimpleNamespace) -> str | None:
    told = both(lambda one: one.again < 0.01 and one.held > 0.95)(one)
    returned = f"\nThe function returned {one.returned}; what counts is the model that it was given."
    return told and told + returned * bool(one.returned)


def runs_once(one: SimpleNamespace) -> str | None:
    told = "layer {!r} runs {:.3g} × for each forward of the model; {} × is due"
    return first(told.format(*ran, one.world.runs) for ran in one.runs.items() if ran[1] < one.world.runs)


# fmt: off
DEPTH = "With 8 layers it keeps to the budget. Which of this model's layers does it choose?"
COSTS = (
    Mistake("nothing is recomputed", "What has changed in the model itself? Print it before and after.", in_vain),
    Mistake("computed more than twice", "How often does each layer run its forward in a step?",
            both(lambda one: one.again > 1.05)),
    Mistake("kept out of torch's sight", "Whose memory is that, if not yours?",
            lambda one: one.elsewhere > 0.1 * one.before
            and f"Python and numpy hold {one.elsewhere:,} bytes more than before"),
    Mistake("too much is kept", "What is kept from forward to backward, and what of it could be computed again?",
            over(lambda one: one.left > one.world.most)),
    Mistake("not freed after use", "Who still holds a layer's activations when its backward is over?",
            over(lambda one: one.come > 0.6)),
    Mistake("too much at once in backward", "At what moment of backward is everything there again?",
            over(lambda one: True)),
    Mistake("too much is computed again",
            "Which operations are expensive to compute, and which only expensive to keep?", both(dear)),
)
AT_ANOTHER_DEPTH = (
    Mistake("too much is computed again at another depth", DEPTH, dear),
    Mistake("nothing is recomputed where the input needs no gradient",
            "If the input needs no gradient, which parameters' gradients need the kept tensors?",
            lambda one: one.world.frozen and runs_once(one)),
    Mistake("nothing is recomputed", "Where does backward find what the first run has made?", runs_once),
)
TABLES = ((on_one_rank, as_found((*CHANGED, *NUMBERS))),)
# fmt: on


def budgeted(fn: Callable[..., Any], seed: int, **budget: Any) -> str:
    """Return the text of the ✓ line for a function that keeps to both budgets, or raise Wrong."""
    found = []
    for worlds in (many_layers, one_layer):
        passed = checked(Play(partial(worlds, **budget), script, TABLES, OUTPUT, raised=RAISED), (fn,), seed)
        ones = [SimpleNamespace(world=seen.world, **seen.done[0].facts) for seen in passed.seen]
        for one in sorted(ones, key=lambda one: not one.world.measured):  # rows about budgets come first
            table, where = (COSTS, "") if one.world.measured else (AT_ANOTHER_DEPTH, f"{one.world}: ")
            refuse(table, one, where)
        found += ones
    [one] = (one for one in found if one.world.measured)
    return (
        f"{one.held:.2f} × the memory (budget {one.world.most:.2f}); "
        f"{one.again:.2f} × the layers' forward is computed again (budget {one.world.dear:.2f})"
    )
