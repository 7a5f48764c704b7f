"""bytes_by_kind: the bytes of P, G and S, for models in float32 and in mixed precision, some with frozen tensors."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, as_if, on_paper

Parameters = Sequence[tuple[tuple[int, ...], bool]]  # (shape, whether it is trained), for each tensor
FULL, LOW = (4, 4, 8, 4), (2, 2, 12, 0)  # bytes of P, G and S per number, and further bytes of S per tensor


@answered
def bytes_by_kind(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(parameters, mixed) -> {"P": bytes, "G": bytes, "S": bytes}`: the bytes held when backward is over."""
    draw = random.Random(seed)
    models: list[list[tuple[tuple[int, ...], bool]]] = [
        [((3, 5), True)],
        [((256, 64), True), ((64,), True), ((160, 64), True)],
        [((7, 2), False), ((2,), True)],
        [((), True), ((4,), True)],
        [((4, 4), False)],
        [((0, 3), True), ((2, 3, 4), True)],
        [],
        [(tuple(draw.randrange(1, 50) for _ in range(draw.randrange(1, 4))), draw.random() < 0.6) for _ in range(12)],
    ]
    sheets = [
        Sheet((model, mixed), by_kind(model, mixed), f"{'mixed precision' if mixed else 'float32'}, {model}")
        for model in models
        for mixed in (False, True)
    ]
    return on_paper(fn, sheets, MISTAKES, "Which numbers belong to this kind, and how many bytes does each take?")


def by_kind(
    parameters: Parameters,
    mixed: bool,
    full: Sequence[int] = FULL,
    low: Sequence[int] = LOW,
    elements: Callable[[tuple[int, ...]], int] = math.prod,
    of_frozen: str = "P",
) -> dict[str, int]:
    """Return the right answer; or a wrong one, by other arguments than the defaults.

    full, low: the bytes of each kind, in float32 and in mixed precision.
    elements: `elements(shape)` counts the numbers in a tensor.
    of_frozen: the kinds that a frozen tensor has.
    """
    p, g, s, per_tensor = low if mixed else full
    held = {"P": 0, "G": 0, "S": 0}
    for shape, trained in parameters:
        n = elements(shape)
        each = {"P": p * n, "G": g * n, "S": s * n + per_tensor}
        for kind in "PGS" if trained else of_frozen:
            held[kind] += each[kind]
    return held


# fmt: off
MISTAKES = (
    Mistake("the steps are not counted", "adamw is told t. Where does PyTorch's AdamW keep it, for each tensor?",
            as_if(by_kind, full=(4, 4, 8, 0))),
    Mistake("a number of steps in mixed precision, where none is kept", "Which three tensors does remember return?",
            as_if(by_kind, low=(2, 2, 12, 4))),
    Mistake("no masters", "What does the optimizer change, if the model's own copy is bfloat16?",
            as_if(by_kind, low=(2, 2, 8, 0))),
    Mistake("gradients in float32", "What type is a gradient, if its parameter is bfloat16?",
            as_if(by_kind, low=(2, 4, 12, 0))),
    Mistake("a gradient, though it is frozen", "Who asks for the gradient of a frozen parameter?",
            as_if(by_kind, of_frozen="PG")),
    Mistake("the parameters that are frozen are left out", "Does forward need it?", as_if(by_kind, of_frozen="")),
    Mistake("no number in a tensor without dims", "How many numbers are in a tensor of shape ()?",
            as_if(by_kind, elements=lambda shape: math.prod(shape) if shape else 0)),
)
# fmt: on

bytes_by_kind.expected = by_kind  # the notebook goes on with this function, if the learner's is not right yet
