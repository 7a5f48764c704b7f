"""Answers to layer_bytes (07): what one layer keeps for backward."""

import torch

from labs.exercises.memory.layer_bytes import MISTAKES
from tests.answers import Exercise

answers = Exercise("layer_bytes")
LINE = "right on all 13 examples"


@answers.right(line=LINE)
def formula(B, T, D, H, K, F):
    tokens, E = B * T, D // H
    y = D if H > 1 and T > 1 else 0
    found = {
        "norms": tokens * 2 * (2 * D + 1),
        "attention": tokens * (D + 2 * K * E + H + 2 * D + y),
        "rotary": T * 2 * E,
        "mlp": tokens * (D + 4 * F),
    }
    return {name: 4 * n for name, n in found.items()}


@answers.right(line=LINE)
def by_token(B, T, D, H, K, F):
    """Return the bytes by kind: a token's times the number of tokens, and those that exist once."""
    E, one = D // H, 4 * B * T
    y = 1 if 1 in (H, T) else 2
    norms, attention, mlp = one * (4 * D + 2), one * ((2 + y) * D + 2 * K * E + H), one * (D + 4 * F)
    return {"mlp": float(mlp), "rotary": 8 * E * T, "norms": norms, "attention": torch.tensor(attention)}


# ---- wrong -----------------------------------------------------------------------------------------------


one = answers.slips(formula)


answers.instead(MISTAKES)
