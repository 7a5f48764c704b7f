"""layer_bytes: the bytes of activations that a layer of the course's GPT holds for its backward.

The check asks about shapes with one head and with many, with a single token, and with odd widths.
"""

import random
from collections.abc import Callable
from typing import Any

from labs.cost import Job
from labs.cost.saved_activations import layer_terms
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import AsIf, Sheet, as_if, on_paper, part_as_if
from labs.model import Config

FLOAT = 4  # bytes


@answered
def layer_bytes(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(B, T, D, H, K, F) -> {"norms", "attention", "rotary", "mlp"}`, bytes in float32; return the ✓ line.

    The letters are those of labs.model.
    """
    draw = random.Random(seed)
    shapes = [
        (2, 6, 16, 4, 2, 20),
        (3, 7, 24, 6, 6, 11),
        (5, 3, 20, 5, 1, 64),
        (1, 9, 32, 4, 4, 33),
        (1, 8192, 4096, 32, 8, 14_336),
        *(draw_shape(draw) for _ in range(4)),
        (2, 5, 6, 1, 1, 9),
        (1, 4, 8, 1, 1, 3),
        (4, 1, 12, 3, 1, 7),
        (1, 1, 10, 1, 1, 5),
    ]
    sheets = [sheet(shape) for shape in shapes]
    return on_paper(fn, sheets, MISTAKES, "Which tensors are in this operator's derivative, and who else keeps them?")


def sheet(shape: tuple[int, ...]) -> Sheet:
    B, T, D, H, K, F = shape
    words = ", ".join(f"{name} = {n:,}" for name, n in zip("BTDHKF", shape, strict=True))
    expected = layer_terms(Job(Config(32, D, 1, H, K, F, context=T), B), "none")
    return Sheet(shape, {name: expected[name] for name in TERMS}, words)


def draw_shape(draw: random.Random) -> tuple[int, ...]:
    K, share, E = draw.randint(1, 4), draw.randint(2, 4), 2 * draw.randint(2, 9)
    return draw.randint(2, 9), draw.randint(2, 99), K * share * E, K * share, K, draw.randint(1, 999)


# ---- the same formula term by term, so that a mistake can replace one term -------------------------------

TERMS: dict[str, Callable[..., int]] = {
    "norms": lambda B, T, D, H, K, F: B * T * 2 * (2 * D + 1),
    "attention": lambda B, T, D, H, K, F: B * T * (attended(D, H, K) + beside(T, D, H)),
    "rotary": lambda B, T, D, H, K, F: T * 2 * (D // H),
    "mlp": lambda B, T, D, H, K, F: B * T * (D + 4 * F),
}


def attended(D: int, H: int, K: int) -> int:
    """Return the numbers per token that attention holds: its input, q, k and v, y, and one for each head."""
    return D + D + 2 * K * (D // H) + D + H


def beside(T: int, D: int, H: int) -> int:
    """Return the numbers per token of the copy of y with its heads side by side.

    There is no copy with one head, or of one token: it is y itself.
    """
    return D if H > 1 and T > 1 else 0


def term(name: str, other: Callable[..., int]) -> AsIf:
    return part_as_if(name, lambda *shape: FLOAT * other(*shape))


def numbers(*shape: int) -> dict[str, int]:
    return {name: term(*shape) for name, term in TERMS.items()}


# fmt: off
MISTAKES = (
    Mistake("16 bit, and not 32", "How many bytes does a number in float32 take?",
            as_if(lambda *shape: {name: 2 * n for name, n in numbers(*shape).items()})),
    Mistake("only one sequence", "How many tokens are in a batch of B sequences?",
            as_if(lambda B, *shape: {name: FLOAT * n for name, n in numbers(1, *shape).items()}),
            symptom="a formula that holds for one sequence, and is a B-th of the truth for more"),
    Mistake("one norm, and not two", "How many norms does a layer have?",
            term("norms", lambda B, T, D, H, K, F: B * T * (2 * D + 1))),
    Mistake("a norm as one kernel, and not operator by operator",
            "Which three tensors are in the derivative of x / rms(x) × weight, where these are operators of their own?",
            term("norms", lambda B, T, D, H, K, F: B * T * 2 * (D + 1))),
    Mistake("1 / rms(x) is left out", "How many numbers of rms(x) are there for a token?",
            term("norms", lambda B, T, D, H, K, F: B * T * 4 * D)),
    Mistake("the same input three times", "q, k and v are made of one tensor. How often is it in memory?",
            term("attention", lambda B, T, D, H, K, F: B * T * (2 * D + attended(D, H, K) + beside(T, D, H))),
            symptom="activations are predicted too large, by 2D numbers per token and layer"),
    Mistake("keys and values counted as wide as queries", "How many heads of keys are there?",
            term("attention", lambda B, T, D, H, K, F: B * T * (attended(D, H, H) + beside(T, D, H)))),
    Mistake("the log-sum-exps are left out",
            "What does the backward of a fused attention need, to compute the table again?",
            term("attention", lambda B, T, D, H, K, F: B * T * (attended(D, H, K) - H + beside(T, D, H)))),
    Mistake("the whole table is counted as kept", "Which kernel computes attention here, and what does it never store?",
            term("attention", lambda B, T, D, H, K, F: B * T * (attended(D, H, K) + H * T + beside(T, D, H))),
            symptom="activations that are predicted to grow with the square of the context"),
    Mistake("y is counted once, where it is there twice",
            "What does the matrix product o keep, and in which order do the numbers of y lie in memory?",
            term("attention", lambda B, T, D, H, K, F: B * T * attended(D, H, K))),
    Mistake("rotary for each sequence, and not once", "Does the angle of a position depend on the sequence?",
            term("rotary", lambda B, T, D, H, K, F: B * T * 2 * (D // H))),
    Mistake("only half of rotary", "How many numbers are the cosines and the sines of a position?",
            term("rotary", lambda B, T, D, H, K, F: T * (D // H))),
    Mistake("the same input twice", "gate and up are made of one tensor. How often is it in memory?",
            term("mlp", lambda B, T, D, H, K, F: B * T * (2 * D + 4 * F))),
    Mistake("a hidden tensor is left out", "gate, silu(gate), up, their product: in whose derivative is each?",
            term("mlp", lambda B, T, D, H, K, F: B * T * (D + 3 * F))),
)
