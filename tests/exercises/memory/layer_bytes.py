"""Answers to layer_bytes (07): what one layer keeps for backward."""

import torch

from labs.exercises.memory.layer_bytes import MISTAKES
from labs.model import GPT, Config
from tests.answers import Exercise

answers = Exercise("layer_bytes")
LINE = "right on all 13 examples"


@answers.right(line=LINE, blind=True)
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
    """Of a token, and what is there once."""
    E, one = D // H, 4 * B * T
    y = 1 if 1 in (H, T) else 2
    norms, attention, mlp = one * (4 * D + 2), one * ((2 + y) * D + 2 * K * E + H), one * (D + 4 * F)
    return {"mlp": float(mlp), "rotary": 8 * E * T, "norms": norms, "attention": torch.tensor(attention)}


@answers.right(line=LINE)
def by_hooks(B, T, D, H, K, F):
    """Of a layer that is run, by what autograd keeps; by the formula where it is large."""
    if B * T * D > 10**6:
        return formula(B, T, D, H, K, F)
    with torch.random.fork_rng(devices=[]):
        layer, x = GPT(Config(8, D, 1, H, K, F, context=T)).layers["0"], torch.randn(B, T, D, requires_grad=True)
    names = {"norms": ("attention_norm", "mlp_norm"), "attention": ("attention",), "mlp": ("mlp",)}
    found = {key: sum(kept(layer.get_submodule(name), x) for name in names[key]) for key in names}
    rotary = 8 * T * (D // H)
    return found | {"attention": found["attention"] - rotary, "rotary": rotary}


def kept(module, x):
    parameters, found = {p.untyped_storage().data_ptr() for p in module.parameters()}, {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    assert output.requires_grad
    return sum(size for place, size in found.items() if place not in parameters)


# ---- wrong -----------------------------------------------------------------------------------------------

Y, X, HEADS, NORMS = "y = D if H > 1 and T > 1 else 0", "(D + 2 * K", "2 * K * E + H +", "2 * (2 * D + 1)"
ROTARY, MLP, RESULT = "T * 2 * E,", "(D + 4 * F)", "return {name: 4 * n for name, n in found.items()}"

one = answers.slips(formula)
one("the same input three times", X, "(3 * D + 2 * K", blind=True)
one("the log-sum-exps are left out", HEADS, "2 * K * E +", blind=True)
one("", HEADS, "2 * K * E + 1 +", blind=True)
one("y is counted once, where it is there twice", Y, "y = 0", blind=True)
one("keys and values counted as wide as queries", HEADS, "2 * D + H +", blind=True)
one("only half of rotary", ROTARY, "T * E,", blind=True)
one("rotary for each sequence, and not once", ROTARY, "B * T * 2 * E,", blind=True)
one("a norm as one kernel, and not operator by operator", NORMS, "2 * (D + 1)", blind=True)
one("1 / rms(x) is left out", NORMS, "4 * D", blind=True)
one("one norm, and not two", NORMS, "(2 * D + 1)", blind=True)
one("the same input twice", MLP, "(2 * D + 4 * F)", blind=True)
one("a hidden tensor is left out", MLP, "(D + 3 * F)", blind=True)
one("only one sequence", "tokens, E = B * T", "B, tokens, E = 1, T", blind=True)
one("16 bit, and not 32", "4 * n for", "2 * n for", blind=True)


answers.instead(MISTAKES)
