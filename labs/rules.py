"""The table of rules: an operation, its letters, and what it is linear in (labs.algebra); `print(RULES)` shows it.

An operation in place has the rule of the one that is not: "add_" that of "add".  Where letters depend on shapes, a
function gives them; where blocks need something else than the operation itself, the rule says what.
"""

from collections.abc import Sequence
from math import prod
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor

from labs.algebra import Doing, Rule
from labs.placement import Spec

# ---- letters that depend on shapes; x: a Spec ------------------------------------------------------------

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def broadcast(out: Sequence[int], *args: Any) -> str:
    """Every dim of the output has a letter; an input lacks it where it has no such dim, or one of size 1."""
    letters = ALPHABET[: len(out)]
    inputs = []
    for x in (x for x in args if isinstance(x, Spec)):
        start = len(out) - len(x.shape)
        dims = zip(letters[start:], out[start:], x.shape, strict=True)
        inputs.append("".join(letter if full == size else "." for letter, full, size in dims))
    return f"{','.join(inputs)}->{letters}"


def alike(out: Sequence[int], x: Spec, *args: Any) -> str:
    if tuple(out) != x.shape:
        raise NotImplementedError(
            f"a new tensor of shape {tuple(out)} out of one of {x.shape}: make it on the mesh itself"
        )
    return broadcast(out, x)


def reduced(out: Sequence[int], x: Spec, dim: Any = None, keepdim: bool = False) -> str:
    letters = ALPHABET[: len(x.shape)]
    dims = (
        range(len(letters))
        if dim in (None, [])
        else [d % len(letters) for d in ([dim] if isinstance(dim, int) else dim)]
    )
    kept = (("." if keepdim else "") if d in dims else letter for d, letter in enumerate(letters))
    return f"{letters}->{''.join(kept)}"


def transposed(out: Sequence[int], x: Spec, a: int = 0, b: int = -1) -> str:
    letters = list(ALPHABET[: len(x.shape)])
    before = "".join(letters)
    if letters:
        letters[a], letters[b] = letters[b], letters[a]
    return f"{before}->{''.join(letters)}"


def permuted(out: Sequence[int], x: Spec, dims: Sequence[int]) -> str:
    letters = ALPHABET[: len(x.shape)]
    return f"{letters}->{''.join(letters[d] for d in dims)}"


def whole_along(out: Sequence[int], x: Spec, *args: Any) -> str:
    """One dim of all tensors stays whole: the first argument that is a number."""
    dim = next(a for a in args if isinstance(a, int)) % max(1, len(out))
    letters = "".join("." if d == dim else letter for d, letter in enumerate(ALPHABET[: len(out)]))
    return f"{','.join([letters] * (1 + sum(isinstance(a, Spec) for a in args)))}->{letters}"


def looked_up(out: Sequence[int], weight: Spec, indices: Spec, *args: Any) -> str:
    letters = ALPHABET[: len(indices.shape)]
    return f"vw,{letters}->{letters}w"


def looked_up_backward(
    out: Sequence[int], gradient: Spec, indices: Spec, rows: int, padding: int, by_frequency: bool
) -> str:
    """Frequencies are those of all indices: to divide by them, they stay whole."""
    letters = "." * len(indices.shape) if by_frequency else ALPHABET[: len(indices.shape)]
    return f"{letters}w,{letters}->.w"


def reshaped(out: Sequence[int], x: Spec, *args: Any) -> str:
    """Of dims that are merged or split, a cut of the first may stay, where its pieces are pieces of the result's."""
    before, after = ["."] * len(x.shape), ["."] * len(out)
    for letter, (i, j, alone) in zip(ALPHABET, leading_dims(x.shape, out), strict=False):
        if alone or x.shape[i] % x.pieces(i) == out[j] % x.pieces(i) == 0:
            before[i] = after[j] = letter if alone else letter.upper()
    return f"{''.join(before)}->{''.join(after)}"


def leading_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, bool]]:
    """(dim of one, dim of the other, whether that is all) for each group of dims with as many elements in both."""
    groups, i, j = [], 0, 0
    while prod(before) and i < len(before) and j < len(after):
        if before[i] == 1 or after[j] == 1:  # dims of size 1 come and go
            i, j = i + (before[i] == 1), j + (before[i] != 1)
            continue
        first, n, m = (i, j), before[i], after[j]
        i, j = i + 1, j + 1
        while n != m:
            if n < m:
                n, i = n * before[i], i + 1
            else:
                m, j = m * after[j], j + 1
        groups.append((*first, (i, j) == (first[0] + 1, first[1] + 1)))
    return groups


# ---- what a rank does with its blocks, where that is something else --------------------------------------


def to_block(doing: Doing, x: Tensor, *args: Any) -> Tensor:
    return x.reshape(doing.output.block(doing.coordinate).shape)


def expand_to_block(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.expand(doing.output.block(doing.coordinate).shape)


def empty_alike(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(x)


def share_of_mean(doing: Doing, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum of this rank's elements, divided by the number of all."""
    return x.sum(dim=dim, keepdim=keepdim, dtype=dtype) / (
        prod(doing.inputs[0].shape) / max(1, prod(doing.output.shape))
    )


def own_rows(doing: Doing, weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    """Rows that another rank holds are zero here."""
    rows, block = doing.inputs[0].shape[0], doing.inputs[0].block(doing.coordinate)
    outside = (indices < 0) | (indices >= rows)
    if outside.any():
        raise IndexError(f"an embedding of {rows} rows has no row {indices[outside][0].item()}")
    start, size = block.offset[0], block.shape[0]
    mine = (indices >= start) & (indices < start + size)
    if not size:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    return doing.op(weight, (indices - start) * mine, *args) * mine.unsqueeze(-1)


# ---- the table -------------------------------------------------------------------------------------------


class Rules(dict[str, Rule]):
    def __repr__(self) -> str:
        by_rule: dict[Rule, list[str]] = {}
        for name, rule in self.items():
            by_rule.setdefault(rule, []).append(name)
        lines = [f"{'letters':14} {'linear in':10} operations"]
        for rule, names in by_rule.items():
            first, *others = wrap(", ".join(names), 90)
            letters = rule.letters if isinstance(rule.letters, str) else EXAMPLES[rule.letters]
            lines += [f"{letters:14} {rule.linear or '-':10} {first}", *(" " * 26 + other for other in others)]
        return "\n".join(lines)


EXAMPLES = {  # of letters that depend on shapes, as the table prints them
    broadcast: "ab,.b->ab",
    alike: "ab->ab",
    reduced: "ab->a",
    transposed: "ab->ba",
    permuted: "abc->cab",
    whole_along: "a.->a.",
    looked_up: "vw,ab->abw",
    looked_up_backward: "abw,ab->.w",
    reshaped: "A.c->Ac",
}
NOT_LINEAR = (
    *("abs", "sign", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "sin", "cos", "relu", "gelu", "silu"),
    *("tanh", "sigmoid", "maximum", "minimum", "clamp", "clamp_min", "where", "masked_fill", "fill"),
    *("eq", "ne", "gt", "ge", "lt", "le", "isnan", "isfinite", "addcmul", "addcdiv"),
)
RULES = Rules(
    {
        "mm": Rule("ik,kj->ij", "each"),
        "bmm": Rule("bik,bkj->bij", "each"),
        "mv": Rule("ik,k->i", "each"),
        "dot": Rule("k,k->", "each"),
        "sum": Rule(reduced, "together"),
        "mean": Rule(reduced, "together", share_of_mean),
        "embedding": Rule(looked_up, "first", own_rows),
        "embedding_dense_backward": Rule(looked_up_backward, "first"),
        "t": Rule(transposed, "together"),
        "transpose": Rule(transposed, "together"),
        "permute": Rule(permuted, "together"),
        **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "squeeze"), Rule(reshaped, "together", to_block)),
        "expand": Rule(broadcast, "together", expand_to_block),
        **dict.fromkeys(("_softmax", "_log_softmax"), Rule(whole_along)),
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), Rule(whole_along, "first")),
        **dict.fromkeys(("add", "sub", "lerp", "copy"), Rule(broadcast, "together", tensors=2)),
        **dict.fromkeys(("neg", "clone", "detach", "alias", "_to_copy", "zero"), Rule(broadcast, "together")),
        **dict.fromkeys(("zeros_like", "empty_like"), Rule(broadcast, "together")),
        **dict.fromkeys(("ones_like", "full_like"), Rule(broadcast, "shape")),
        "new_empty_strided": Rule(alike, "together", empty_alike),
        "mul": Rule(broadcast, "each"),
        **dict.fromkeys(
            ("div", "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"),
            Rule(broadcast, "first"),
        ),
        **dict.fromkeys(NOT_LINEAR, Rule(broadcast)),
    }
)
